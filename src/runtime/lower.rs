//! Makes a device-neutral graph fit one device: the forms of attention and of its norms, and which values can be looked at.
//!
//! Bundles carry attention as com.microsoft `MultiHeadAttention` over q, k and v [1, rows, heads*d], with a mask or not.
//! With a mask, and wherever that operator is wrong or slow, it is written out here, in slices of the queries, so that
//! the scores [heads, rows, rows] never exceed a limit. Sizes are static; the graph never asks for a shape at run time.

use std::{cell::OnceCell, collections::BTreeMap};

use viaduct_export::{
    device::DeviceProfile,
    onnx::{DType, Dim, Model, Node, NodeId, ValueId, ValueType},
    passes::{self, HeadNorm, MAX_SLICES, MultiHead},
    shapes::{Shapes, infer},
};

use super::Settings;

/// Why a graph cannot be lowered.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    #[error("the graph has no value {0} to expose")]
    UnknownValue(String),
    #[error("the element type of {0} is not recorded, so that it cannot be exposed")]
    UntypedValue(String),
    #[error(
        "attention {node}: the number of {what} does not follow from the graph and the sizes {}",
        in_words(dims)
    )]
    UnknownSize { node: String, what: &'static str, dims: BTreeMap<String, usize> },
    #[error("attention {node}: {problem}")]
    Unsupported { node: String, problem: String },
}

/// `image_seq=64, text_seq=77`
fn in_words(dims: &BTreeMap<String, usize>) -> String {
    let dims: Vec<String> = dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
    if dims.is_empty() { "(none are bound)".to_owned() } else { dims.join(", ") }
}

/// What was done to the graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lowered {
    pub attention: Vec<Attention>,
    pub exposed: Vec<String>,
}

/// The form that one attention took.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub node: String,
    /// Slices of the queries; none for the fused operator.
    pub chunks: Option<usize>,
    /// Bytes of the largest score tensor; none for the fused operator.
    pub score_bytes: u64,
}

/// Rewrites the graph for the device. `dims` are the sizes of the graph's symbols, `expose` names inner values that
/// become outputs.
pub fn lower(
    model: &mut Model,
    device: &DeviceProfile,
    dims: &BTreeMap<String, usize>,
    expose: &[&str],
    settings: &Settings,
) -> Result<Lowered, LowerError> {
    let mut lowered = Lowered::default();
    let known = Known { model, dims, inferred: OnceCell::new() };
    let plans = attentions(&known, device, settings)?;
    let norms = settings.written_head_norms(device).map(|rows| head_norms(&known, rows));
    for plan in plans {
        lowered.attention.push(plan.outcome());
        if let Form::Written(written) = &plan.form {
            written.attention.write_out(&mut model.graph, plan.node, &written.form);
        }
    }
    for (node, norm) in norms.into_iter().flatten() {
        norm.write_out(&mut model.graph, node);
    }
    for name in expose {
        let unknown = || LowerError::UnknownValue((*name).to_owned());
        let id = model.graph.find(name).ok_or_else(unknown)?;
        let value = &model.graph[id];
        if value.ty.is_none() && value.constant.is_none() {
            return Err(LowerError::UntypedValue((*name).to_owned()));
        }
        model.graph.add_output(id);
        lowered.exposed.push((*name).to_owned());
    }
    Ok(lowered)
}

struct Plan {
    node: NodeId,
    name: String,
    form: Form,
}

enum Form {
    Fused,
    Written(Written),
}

/// An attention that is written out.
struct Written {
    attention: MultiHead,
    form: passes::Written,
    score_bytes: u64,
}

impl Plan {
    fn outcome(&self) -> Attention {
        let (chunks, score_bytes) = match &self.form {
            Form::Fused => (None, 0),
            Form::Written(w) => (Some(w.form.slices.len()), w.score_bytes),
        };
        Attention { node: self.name.clone(), chunks, score_bytes }
    }
}

/// Every attention of the graph and what becomes of it.
fn attentions(
    known: &Known<'_>,
    device: &DeviceProfile,
    settings: &Settings,
) -> Result<Vec<Plan>, LowerError> {
    let nodes = known.model.graph.nodes().filter(|(_, node)| node.is_contrib("MultiHeadAttention"));
    nodes
        .map(|(id, node)| {
            // Devices are tested with the operator without a mask only.
            let maskless = node.input(5).is_none();
            let rows = node.input(1).and_then(|keys| known.size(keys, 1)).unwrap_or(1);
            let form = match maskless && settings.fuses(device, rows) {
                true => Form::Fused,
                false => {
                    let limit = settings.score_bytes(device, rows);
                    Form::Written(written(node, known, limit)?)
                }
            };
            Ok(Plan { node: id, name: node.name.clone(), form })
        })
        .collect()
}

/// The norms of heads [1, rows, heads, d] over so many rows that can be written out.
fn head_norms(known: &Known<'_>, least_rows: usize) -> Vec<(NodeId, HeadNorm)> {
    let norm = |(id, node): (NodeId, &Node)| {
        let norm = HeadNorm::of(&known.model.graph, node, |x| known.dtype(x))?;
        let long = known.rank(norm.x) == Some(4) && known.size(norm.x, 1)? >= least_rows;
        long.then_some((id, norm))
    };
    known.model.graph.nodes().filter_map(norm).collect()
}

fn written(node: &Node, known: &Known<'_>, limit: u64) -> Result<Written, LowerError> {
    let unsupported =
        |problem: &str| LowerError::Unsupported { node: node.name.clone(), problem: problem.to_owned() };
    let unknown = |what| LowerError::UnknownSize { node: node.name.clone(), what, dims: known.dims.clone() };
    let attention = MultiHead::of(node).map_err(unsupported)?;
    let MultiHead { q, k, v, heads, .. } = attention;
    if [q, k, v].iter().any(|value| known.rank(*value).is_some_and(|rank| rank != 3)) {
        return Err(unsupported("q, k and v are not [batch, rows, columns]"));
    }
    let dtype = known.dtype(q).filter(|dtype| matches!(dtype, DType::F16 | DType::F32));
    let dtype = dtype.ok_or_else(|| unsupported("the element type of q is not known to be f32 or f16"))?;
    let rows = known.size(q, 1).ok_or_else(|| unknown("query rows"))?;
    let keys = known.size(k, 1).ok_or_else(|| unknown("key rows"))?;
    let scale = attention.scale(|| known.size(q, 2)).ok_or_else(|| unknown("columns"))?;
    let element = if dtype == DType::F16 { 2 } else { 4 };
    let row_bytes = (heads as u64).saturating_mul(keys as u64).saturating_mul(element);
    // Slices of one size, up to the last: each size is a shader of its own.
    let most = usize::try_from(limit / row_bytes.max(1)).unwrap_or(usize::MAX).clamp(1, rows.max(1));
    let slice = rows.max(1).div_ceil(rows.max(1).div_ceil(most));
    if rows.div_ceil(slice) > MAX_SLICES {
        return Err(unsupported("its sizes are absurd: thousands of slices would be needed"));
    }
    let score_bytes = (slice as u64).saturating_mul(row_bytes);
    let form = passes::Written { dtype, scale, slices: passes::Written::slices(rows, slice) };
    Ok(Written { attention, form, score_bytes })
}

/// What is known about values: what the graph records, and else what follows from its inputs.
struct Known<'a> {
    model: &'a Model,
    dims: &'a BTreeMap<String, usize>,
    /// Inferred when first asked for.
    inferred: OnceCell<Shapes>,
}

impl Known<'_> {
    fn dtype(&self, value: ValueId) -> Option<DType> {
        match &self.model.graph[value].ty {
            Some(ValueType::Tensor { dtype, .. }) => Some(*dtype),
            _ => self.inferred().fact(value).dtype,
        }
    }

    fn rank(&self, value: ValueId) -> Option<usize> {
        match self.recorded(value) {
            Some(shape) => Some(shape.len()),
            None => self.inferred().fact(value).rank(),
        }
    }

    fn size(&self, value: ValueId, axis: usize) -> Option<usize> {
        let recorded = match self.recorded(value).and_then(|shape| shape.get(axis)) {
            Some(Dim::Fixed(size)) => Some(*size),
            Some(Dim::Symbol(name)) => self.dims.get(name).copied(),
            Some(Dim::Unknown) | None => None,
        };
        recorded.or_else(|| *self.inferred().fact(value).shape.as_ref()?.get(axis)?)
    }

    fn recorded(&self, value: ValueId) -> Option<&[Dim]> {
        match &self.model.graph[value].ty {
            Some(ValueType::Tensor { shape, .. }) => shape.as_deref(),
            _ => None,
        }
    }

    fn inferred(&self) -> &Shapes {
        self.inferred.get_or_init(|| infer(self.model, self.dims, &BTreeMap::new()))
    }
}
