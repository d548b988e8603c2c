//! The smallest model that shows a finding: its node alone, with inputs and what should come out.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use serde::Serialize;
use viaduct_export::{
    onnx::{Model, NodeId, ValueId, WriteOptions, write_model},
    passes::drop_dead,
    staged_folder::{StagedFolder, folder_of},
};

use super::{
    BisectError, Difference,
    side::{Subject, Tensors},
    tensors::{Written, write_safetensors},
};
use crate::{
    atomic_file::{FileError, sync_directory},
    tensor::HostTensor,
};

const MODEL: &str = "node.onnx";
const INPUTS: &str = "inputs.safetensors";
const EXPECTED: &str = "expected.safetensors";

/// What is written, and what it shows.
#[derive(Clone, Debug, Serialize)]
pub struct Reproduction {
    pub folder: PathBuf,
    /// Shows the difference.
    pub command: String,
    /// Whether the nodes alone differ, too, given the inputs of the side that is compared with.
    pub shows: bool,
    /// The difference that they have then.
    pub difference: Difference,
    /// Why the folder is not there, if it could not be written.
    pub unwritten: Option<String>,
}

/// Some nodes as a model of their own.
pub struct Extract {
    pub subject: Subject,
    /// Values that they take from the rest of the graph, or that are its inputs.
    pub inputs: Vec<ValueId>,
    /// Values of theirs that are to be looked at.
    pub outputs: Vec<ValueId>,
}

impl Extract {
    /// Takes nodes out of a graph.
    pub fn of(whole: &Subject, nodes: &[NodeId], outputs: &[ValueId]) -> Extract {
        let mut model = whole.model.clone();
        let graph = &mut model.graph;
        let kept: HashSet<NodeId> = nodes.iter().copied().collect();
        let made: HashSet<ValueId> =
            nodes.iter().flat_map(|id| graph[*id].outputs.iter().flatten().copied()).collect();
        let mut inputs: Vec<ValueId> = Vec::new();
        for value in nodes.iter().flat_map(|id| graph.used_by(&graph[*id])) {
            if graph[value].constant.is_none() && !made.contains(&value) && !inputs.contains(&value) {
                inputs.push(value);
            }
        }
        let others = graph.nodes().map(|(id, _)| id).filter(|id| !kept.contains(id)).collect();
        graph.remove_nodes(&others);
        graph.inputs.clone_from(&inputs);
        graph.outputs = outputs.to_vec();
        drop_dead(&mut model);
        let name = format!("{} ({MODEL})", whole.name);
        let Subject { pending_dispatches, optimisation, .. } = *whole;
        let shapes = whole.shapes.clone();
        let subject = Subject { name, model, shapes, pending_dispatches, optimisation };
        Extract { subject, inputs, outputs: outputs.to_vec() }
    }

    /// States types and shapes of what goes in and comes out.
    pub fn state(&mut self, inputs: &Tensors, expected: &[HostTensor]) {
        let graph = &self.subject.model.graph;
        let given = self.inputs.iter().filter_map(|id| Some((*id, inputs.get(&graph[*id].name)?)));
        let all: Vec<_> = given.chain(self.outputs.iter().copied().zip(expected)).collect();
        self.subject.state(&all);
    }

    /// Writes the model, its inputs and what should come out into a folder that appears when all of it is there.
    pub fn write(
        &self,
        folder: &Path,
        replace: bool,
        inputs: &Tensors,
        expected: &[HostTensor],
    ) -> Result<(), BisectError> {
        let failed = |source| FileError::Write { path: folder.to_owned(), source };
        let graph = &self.subject.model.graph;
        let staging = StagedFolder::create(folder).map_err(failed)?;
        write_model(&self.subject.model, &staging.path().join(MODEL), &WriteOptions::default())?;
        let written = |id: &ValueId, tensor| {
            let dtype = self.subject.dtype(*id, tensor);
            Written { name: &graph[*id].name, tensor, dtype }
        };
        let given: Vec<_> =
            self.inputs.iter().filter_map(|id| Some(written(id, inputs.get(&graph[*id].name)?))).collect();
        write_safetensors(&staging.path().join(INPUTS), &given)?;
        let wanted: Vec<_> = self.outputs.iter().zip(expected).map(|(id, t)| written(id, t)).collect();
        write_safetensors(&staging.path().join(EXPECTED), &wanted)?;
        staging.publish(replace).map_err(failed)?;
        // The name must survive a power cut, too.
        sync_directory(folder_of(folder)).map_err(failed)?;
        Ok(())
    }
}

/// The command that shows what a folder holds; `flags` say where it runs.
pub fn command(folder: &Path, against_expected: bool, flags: &[String]) -> String {
    // A path that begins like a flag would be taken for one.
    let is_like_flag = folder.as_os_str().as_encoded_bytes().starts_with(b"-");
    let folder = if is_like_flag { Path::new(".").join(folder) } else { folder.to_owned() };
    let at = |file: &str| quoted(&folder.join(file).display().to_string());
    let mut command = format!("viaduct bisect {} --inputs {}", at(MODEL), at(INPUTS));
    if against_expected {
        command.push_str(&format!(" --oracle {}", at(EXPECTED)));
    }
    for flag in flags {
        command.push_str(&format!(" {flag}"));
    }
    command
}

/// As a shell takes it.
pub fn quoted(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=+:,@%".contains(&byte);
    match !text.is_empty() && text.bytes().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A folder's name for a node: what of its name a folder may be called.
pub fn folder_name(node: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' };
    let name: String = node.chars().map(plain).collect();
    let name = name.trim_matches(['_', '.']);
    let end = name.char_indices().nth(80).map_or(name.len(), |(end, _)| end);
    format!("bisect-{}", if name.is_empty() { "node" } else { &name[..end] })
}

/// Whether a graph is nothing but the nodes of a finding, so that a reproduction would say nothing new.
pub fn is_small_enough(model: &Model, nodes: &[NodeId]) -> bool {
    model.graph.nodes().count() <= nodes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_node_names_a_folder() {
        assert_eq!(folder_name("/blocks.0/attn/MatMul"), "bisect-blocks.0_attn_MatMul");
        assert_eq!(folder_name("../.."), "bisect-node");
        assert!(folder_name(&"x".repeat(500)).len() < 100);
    }

    #[test]
    fn a_shell_takes_every_path() {
        let shown = command(Path::new("it's here"), true, &["--ep cpu".to_owned()]);
        assert!(shown.starts_with(r"viaduct bisect 'it'\''s here/node.onnx' --inputs "), "{shown}");
        assert!(shown.ends_with("expected.safetensors' --ep cpu"), "{shown}");
        let shown = command(Path::new("--all"), false, &[]);
        assert_eq!(shown, "viaduct bisect ./--all/node.onnx --inputs ./--all/inputs.safetensors");
    }
}
