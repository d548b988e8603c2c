//! The layout's own names of inputs and outputs, as far as no table of aliases has them.

use std::{collections::BTreeSet, path::Path};

use super::{
    LegacyError,
    config::{Config, Entry, listed, post_stage_keys},
    value,
};
use crate::{
    arch::flux2::imported::contract::{ATTENDED, MIDDLE, PICTURE, Role},
    onnx::{Dim, Graph, ValueId, ValueType},
};

/// This program's names of inputs or outputs, and the graph's own.
pub(super) type Names = Vec<(String, String)>;

/// Where a graph's names are looked for.
pub(super) struct Naming<'a> {
    pub config: &'a Config,
    /// The config's path, for messages.
    pub path: &'a Path,
    /// The graph's key, entry and contents.
    pub key: &'a str,
    pub entry: &'a Entry,
    pub graph: &'a Graph,
}

fn pair(ours: &str, theirs: &str) -> (String, String) {
    (ours.to_owned(), theirs.to_owned())
}

impl<'a> Naming<'a> {
    /// The graph's own names of what no table of aliases knows, by this program's.
    pub fn names(&self, role: Role) -> Result<Names, LegacyError> {
        match role {
            Role::TextEncoder | Role::Transformer | Role::Decoder => Ok(Vec::new()),
            Role::DecoderStart => self.of_start(),
            Role::Attention => Ok(self.of_attention()),
            Role::DecoderEnd { index: 0, .. } => self.of_first_end(role),
            Role::DecoderEnd { index, .. } => {
                let input = self.only("inputs", &self.inputs())?;
                let before = Role::DecoderEnd { index: index - 1, last: false }.stage();
                Ok(vec![pair(&before, input), self.output_of(role)?])
            }
        }
    }

    fn inputs(&self) -> Vec<&'a str> {
        let graph = self.graph;
        let given = graph.inputs.iter().filter(|id| graph[**id].constant.is_none());
        given.map(|id| graph[*id].name.as_str()).collect()
    }

    fn outputs(&self) -> Vec<&'a str> {
        let name = |id: &ValueId| self.graph[*id].name.as_str();
        self.graph.outputs.iter().map(name).collect()
    }

    fn wrong(&self, key: &str, problem: impl Into<String>) -> LegacyError {
        value(self.path, &format!("models.{}.{key}", self.key), problem)
    }

    fn only(&self, key: &str, names: &[&'a str]) -> Result<&'a str, LegacyError> {
        match names {
            [only] => Ok(only),
            several => Err(self.wrong(key, format!("the graph has {} {key}, not one", several.len()))),
        }
    }

    fn output_of(&self, role: Role) -> Result<(String, String), LegacyError> {
        let output = self.only("outputs", &self.outputs())?;
        Ok(match role {
            Role::DecoderEnd { last: true, .. } => pair(PICTURE, output),
            _ => pair(&role.stage(), output),
        })
    }

    /// By position where the graph has names of its own.
    fn of_attention(&self) -> Names {
        let (ours, inputs) = (["q_chunk", "kt", "v"], self.inputs());
        if ours.iter().all(|name| inputs.contains(name)) {
            return Vec::new();
        }
        ours.iter().zip(listed(&self.entry.inputs)).map(|(ours, theirs)| pair(ours, theirs)).collect()
    }

    fn of_first_end(&self, role: Role) -> Result<Names, LegacyError> {
        let inputs = self.inputs();
        let state = self
            .state_input(&inputs)
            .ok_or_else(|| self.wrong("residual_input", "it does not follow from the graph's inputs"))?;
        let attended = self.entry.attn_input.as_deref();
        let attended = attended.or_else(|| inputs.iter().copied().find(|name| *name != state));
        let attended = attended.ok_or_else(|| self.wrong("attn_input", "the graph has one input alone"))?;
        Ok(vec![pair(MIDDLE, state), pair(ATTENDED, attended), self.output_of(role)?])
    }

    /// The input that takes the state: what the config says, else the one that is not the attention's.
    fn state_input(&self, inputs: &[&'a str]) -> Option<&'a str> {
        if let Some(name) = &self.entry.residual_input {
            return Some(name);
        }
        let attended = self.entry.attn_input.as_deref();
        match inputs.iter().filter(|name| Some(**name) != attended).collect::<Vec<_>>()[..] {
            [only] => Some(only),
            // The exporter's order: the state first.
            [first, _] if attended.is_none() => Some(first),
            _ => None,
        }
    }

    /// Outputs of the first stage: the state by the name that the next stage takes it under, then q, kt and v in the order in
    /// which they are listed; kt shows by its shape.
    fn of_start(&self) -> Result<Names, LegacyError> {
        let (own, named) = (self.outputs(), listed(&self.entry.outputs));
        let in_order = self.entry.outputs.is_array() && named.len() == own.len();
        let order = if in_order { named } else { own.clone() };
        let unique: BTreeSet<&str> = order.iter().copied().filter(|name| own.contains(name)).collect();
        if order.len() != 4 || unique.len() != 4 {
            let problem = format!("expected state, q, kt and v, but the graph has {}", own.join(", "));
            return Err(self.wrong("outputs", problem));
        }
        let post = post_stage_keys(self.config).into_iter().next().unwrap_or_default();
        let wanted = self.config.models.get(&post).and_then(|post| post.residual_input.as_deref());
        let state = wanted.filter(|name| order.contains(name)).unwrap_or(order[0]);
        let rest: Vec<&str> = order.iter().copied().filter(|name| *name != state).collect();
        let chunk = self.config.models.get("vae_decoder_attn_chunk");
        let d = chunk.and_then(|chunk| chunk.head_dim);
        let columns: Vec<usize> = (0..3).filter(|i| is_columns(self.graph, rest[*i], d)).collect();
        let kt = match columns[..] {
            [only] => only,
            [] => 1,
            _ => {
                let problem = format!("which of {} is kt does not show", rest.join(", "));
                return Err(self.wrong("outputs", problem));
            }
        };
        let others: Vec<&str> = (0..3).filter(|i| *i != kt).map(|i| rest[i]).collect();
        Ok(vec![pair(MIDDLE, state), pair("q", others[0]), pair("kt", rest[kt]), pair("v", others[1])])
    }
}

/// Whether a value is [.., d, rows] and not [.., rows, d], as far as its recorded shape tells.
fn is_columns(graph: &Graph, name: &str, d: Option<usize>) -> bool {
    let ty = graph.find(name).and_then(|id| graph[id].ty.as_ref());
    let Some(ValueType::Tensor { shape: Some(shape), .. }) = ty else { return false };
    let [.., a, b] = &shape[..] else { return false };
    let fixed = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size),
        _ => None,
    };
    match (fixed(a), fixed(b), d) {
        (Some(a), b, Some(d)) => a == d && b != Some(d),
        (Some(_), None, None) => true,
        _ => false,
    }
}
