//! Operators with one output. Passes replace them as such; a graph that gives one of them more is no ONNX.

use crate::onnx::{Graph, NodeId};

#[rustfmt::skip]
const OPERATORS: &[&str] = &[
    "Abs", "Add", "And", "Cast", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "CumSum",
    "DepthToSpace", "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements",
    "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual", "GroupNormalization", "Identity", "InstanceNormalization",
    "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pad", "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "Relu", "Reshape", "Resize", "ScatterND", "Shape", "Sigmoid", "Sin", "Size", "Slice", "Softmax", "Softplus",
    "Sqrt", "Squeeze", "Sub", "Swish", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Upsample", "Where",
];

/// The first node with more outputs than its operator has.
pub fn exceeded(graph: &Graph) -> Option<NodeId> {
    let more = |outputs: &[_]| outputs.iter().skip(1).any(Option::is_some);
    let mut nodes = graph.nodes().filter(|(_, node)| more(&node.outputs));
    nodes.find(|(_, node)| OPERATORS.iter().any(|op| node.is(op))).map(|(id, _)| id)
}
