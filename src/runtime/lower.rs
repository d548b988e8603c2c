//! Makes a device-neutral graph fit one device: the form of attention, and which values can be looked at.
//!
//! Bundles carry attention as com.microsoft `MultiHeadAttention` over q, k and v [1, rows, heads*d] without a mask.
//! Where that operator is wrong or slow it is written out here, in slices of the queries, so that the scores
//! [heads, rows, rows] never exceed a limit. Sizes are static; the graph never asks for a shape at run time.

use std::collections::BTreeMap;

use viaduct_export::{
    device::DeviceProfile,
    onnx::{Attribute, DType, Dim, Graph, Model, Node, NodeId, Tensor, ValueId, ValueType},
};

/// The largest score tensor, in bytes: WebGPU promises that a binding may cover this much.
pub const SCORE_LIMIT: u64 = 128 << 20;
/// Operands of one Concat. Each takes a storage buffer, and adapters have as few as ten.
const CONCAT_OPERANDS: usize = 8;
/// Slices of one attention. Each is a handful of nodes; no picture that a device can hold needs as many.
const MAX_SLICES: usize = 1 << 12;

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
) -> Result<Lowered, LowerError> {
    lower_within(model, device, dims, expose, SCORE_LIMIT)
}

/// [`lower`] with a limit of its own for the score tensor, in bytes.
pub fn lower_within(
    model: &mut Model,
    device: &DeviceProfile,
    dims: &BTreeMap<String, usize>,
    expose: &[&str],
    score_limit: u64,
) -> Result<Lowered, LowerError> {
    let mut lowered = Lowered::default();
    let limit = score_limit.min(device.max_binding);
    let plans = attentions(&model.graph, dims, device.fused_attention, limit)?;
    for plan in plans {
        lowered.attention.push(plan.outcome());
        if let Form::Written(written) = &plan.form {
            write_out(&mut model.graph, plan.node, written);
        }
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
    inputs: [ValueId; 3],
    output: ValueId,
    heads: i64,
    scale: f32,
    dtype: DType,
    /// Query rows, in all and per slice.
    rows: usize,
    slice: usize,
    score_bytes: u64,
}

impl Plan {
    fn outcome(&self) -> Attention {
        let (chunks, score_bytes) = match &self.form {
            Form::Fused => (None, 0),
            Form::Written(w) => (Some(w.rows.div_ceil(w.slice)), w.score_bytes),
        };
        Attention { node: self.name.clone(), chunks, score_bytes }
    }
}

/// Every attention of the graph and what becomes of it.
fn attentions(
    graph: &Graph,
    dims: &BTreeMap<String, usize>,
    fused: bool,
    limit: u64,
) -> Result<Vec<Plan>, LowerError> {
    let nodes =
        graph.nodes().filter(|(_, n)| n.op_type == "MultiHeadAttention" && n.domain == "com.microsoft");
    nodes
        .map(|(id, node)| {
            let form = match fused {
                true => Form::Fused,
                false => Form::Written(written(graph, node, dims, limit)?),
            };
            Ok(Plan { node: id, name: node.name.clone(), form })
        })
        .collect()
}

fn written(
    graph: &Graph,
    node: &Node,
    dims: &BTreeMap<String, usize>,
    limit: u64,
) -> Result<Written, LowerError> {
    let unsupported =
        |problem: &str| LowerError::Unsupported { node: node.name.clone(), problem: problem.to_owned() };
    let unknown = |what| LowerError::UnknownSize { node: node.name.clone(), what, dims: dims.clone() };
    let ([Some(q), Some(k), Some(v)], [Some(output)]) = (&node.inputs[..], &node.outputs[..]) else {
        return Err(unsupported("only q, k, v and one output are supported: no bias, mask or cache"));
    };
    let heads =
        node.int("num_heads").filter(|h| *h > 0).ok_or_else(|| unsupported("num_heads is missing"))?;
    let dtype = match &graph[*q].ty {
        Some(ValueType::Tensor { dtype: DType::F16, .. }) => DType::F16,
        Some(ValueType::Tensor { dtype: DType::F32, .. }) => DType::F32,
        _ => return Err(unsupported("the element type of q is not recorded as f32 or f16")),
    };
    let size = |value, axis| recorded_size(graph, value, axis, dims);
    let rows = size(*q, 1).ok_or_else(|| unknown("query rows"))?;
    let keys = size(*k, 1).ok_or_else(|| unknown("key rows"))?;
    let scale = match node.float("scale") {
        Some(scale) if scale != 0.0 => scale,
        _ => {
            let width = size(*q, 2).ok_or_else(|| unknown("columns"))?;
            1.0 / (width as f32 / heads as f32).sqrt()
        }
    };
    let element = if dtype == DType::F16 { 2 } else { 4 };
    let row_bytes = (heads as u64).saturating_mul(keys as u64).saturating_mul(element);
    // Slices of one size, up to the last: each size is a shader of its own.
    let most = usize::try_from(limit / row_bytes.max(1)).unwrap_or(usize::MAX).clamp(1, rows.max(1));
    let slice = rows.max(1).div_ceil(rows.max(1).div_ceil(most));
    if rows.div_ceil(slice) > MAX_SLICES {
        return Err(unsupported("its sizes are absurd: thousands of slices would be needed"));
    }
    let score_bytes = (slice as u64).saturating_mul(row_bytes);
    Ok(Written { inputs: [*q, *k, *v], output: *output, heads, scale, dtype, rows, slice, score_bytes })
}

/// One size of a value's recorded shape; symbols are looked up in `dims`.
fn recorded_size(
    graph: &Graph,
    value: ValueId,
    axis: usize,
    dims: &BTreeMap<String, usize>,
) -> Option<usize> {
    let Some(ValueType::Tensor { shape: Some(shape), .. }) = &graph[value].ty else { return None };
    match shape.get(axis)? {
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(name) => dims.get(name).copied(),
        Dim::Unknown => None,
    }
}

/// Replaces the node by softmax(scale * q k^T) v.
fn write_out(graph: &mut Graph, node: NodeId, w: &Written) {
    let mut out =
        Writer { prefix: graph[node].name.clone(), graph, dtype: w.dtype, nodes: Vec::new(), made: 0 };
    let scale = match w.dtype {
        DType::F16 => Tensor::from_f16(&[], &[w.scale]),
        _ => Tensor::from_f32(&[], &[w.scale]),
    };
    let scale = out.constant(scale);
    let [q, k, v] = w.inputs;
    let q = out.op("Mul", &[q, scale], &[]);
    let split = |out: &mut Writer<'_>, x, perm: [i64; 4]| {
        let shape = out.ints(&[0, 0, w.heads, -1]);
        let x = out.op("Reshape", &[x, shape], &[]);
        out.op("Transpose", &[x], &[("perm", Attribute::Ints(perm.to_vec()))])
    };
    let q = split(&mut out, q, [0, 2, 1, 3]);
    let k = split(&mut out, k, [0, 2, 3, 1]);
    let v = split(&mut out, v, [0, 2, 1, 3]);
    let mut parts = Vec::new();
    for start in (0..w.rows).step_by(w.slice) {
        let part = if w.slice < w.rows { out.rows(q, start, w.rows.min(start + w.slice)) } else { q };
        let scores = out.op("MatMul", &[part, k], &[]);
        let weights = out.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
        parts.push(out.op("MatMul", &[weights, v], &[]));
    }
    while parts.len() > 1 {
        let join = |out: &mut Writer<'_>, part: &[ValueId]| match part {
            [one] => *one,
            several => out.op("Concat", several, &[("axis", Attribute::Int(2))]),
        };
        parts = parts.chunks(CONCAT_OPERANDS).map(|part| join(&mut out, part)).collect();
    }
    let y = out.op("Transpose", &[parts[0]], &[("perm", Attribute::Ints(vec![0, 2, 1, 3]))]);
    let shape = out.ints(&[0, 0, -1]);
    out.op_into("Reshape", &[y, shape], &[], w.output);
    let nodes = out.nodes;
    graph.replace_node(node, nodes);
}

/// Nodes that will take the place of another, with names that begin with its name.
struct Writer<'g> {
    graph: &'g mut Graph,
    prefix: String,
    dtype: DType,
    nodes: Vec<Node>,
    made: usize,
}

impl Writer<'_> {
    fn name(&mut self) -> String {
        loop {
            self.made += 1;
            let name = format!("{}/{}", self.prefix, self.made);
            if self.graph.find(&name).is_none() {
                return name;
            }
        }
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = self.name();
        self.graph.add_constant(&name, tensor)
    }

    fn ints(&mut self, values: &[i64]) -> ValueId {
        self.constant(Tensor::from_i64(&[values.len()], values))
    }

    fn op(&mut self, op_type: &str, inputs: &[ValueId], attributes: &[(&str, Attribute)]) -> ValueId {
        let name = self.name();
        let output = self.graph.value(&name);
        self.graph[output].ty = Some(ValueType::Tensor { dtype: self.dtype, shape: None });
        self.op_into(op_type, inputs, attributes, output);
        output
    }

    fn op_into(
        &mut self,
        op_type: &str,
        inputs: &[ValueId],
        attributes: &[(&str, Attribute)],
        output: ValueId,
    ) {
        self.nodes.push(Node {
            op_type: op_type.to_owned(),
            name: self.graph[output].name.clone(),
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
            attributes: attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect(),
            ..Node::default()
        });
    }

    /// Rows `start..end` of a value [1, heads, rows, d].
    fn rows(&mut self, x: ValueId, start: usize, end: usize) -> ValueId {
        let operands = [x, self.ints(&[start as i64]), self.ints(&[end as i64]), self.ints(&[2])];
        self.op("Slice", &operands, &[])
    }
}
