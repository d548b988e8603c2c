//! What ONNX Runtime 1.31.1 does wrong itself, and how it complains of graphs that contradict themselves.

use viaduct_export::onnx::{DType, Model, Node};

use crate::properties::dtype;

/// What it says of valid graphs that its optimisations have broken.
const MESSAGES: &[&str] = &[
    // Casts that the CPU provider puts around f16 and then loses.
    "'InsertedPrecisionFreeCast",
    // A value that is lost by its fusions; passes and written files are checked for undefined ones before it sees them.
    "is not a graph input, initializer, or output of a previous node",
    // The reshape by which it makes a Gemm of a MatMul and an Add: no rows become 0 in its target, which copies a size.
    "Name:'gemm_input_reshape'",
];

pub fn explains(problem: &str) -> bool {
    MESSAGES.iter().any(|message| problem.contains(message))
}

/// What it says of shapes that are not those that the graph records: when it loads the graph, or when a value does not fit
/// into the memory of another one that is recorded with the same shape. Whether that is reused depends on the other nodes.
const CONTRADICTIONS: &[&str] = &["ShapeInferenceError", "Shape mismatch attempting to re-use buffer"];

pub fn sees_contradiction(problem: &str) -> bool {
    CONTRADICTIONS.iter().any(|message| problem.contains(message))
}

/// Its CPU provider ends the process over some graphs in f16 (of a Transpose, a MatMul and an Add, for example), over a
/// Split with more outputs than it says, and over a LayerNormalization of constants whose bias has an empty name.
pub fn may_die_of(model: &Model) -> bool {
    let says_other = |node: &Node| {
        node.is("Split") && node.int("num_outputs").is_some_and(|said| said != node.outputs.len() as i64)
    };
    // A bias that is named as left out, where the other operands are constants: it is folded without one.
    let leaves_out_bias =
        |node: &Node| node.is("LayerNormalization") && node.inputs.len() == 3 && node.input(2).is_none();
    model.graph.values().any(|(_, value)| dtype(value) == Some(DType::F16))
        || model.graph.nodes().any(|(_, node)| says_other(node) || leaves_out_bias(node))
}

/// Fusing a LayerNormalization over all axes, it takes the value that is normalised for the bias. Should this fail, the
/// message above can go.
#[test]
fn a_norm_over_all_axes_loses_its_value() {
    use crate::runtime_support::{Net, cpu, int, ints, run, tensor};

    let mut net = Net::new(DType::F32);
    net.x("x", &[2]).float("two", &[], &[2.0]).float("eps", &[], &[1e-5]);
    net.float("scale", &[2], &[0.5, 0.7]).float("bias", &[2], &[0.3, 0.1]);
    let mean = [("axes", ints(&[-1])), ("keepdims", int(1))];
    net.node("ReduceMean", &["x"], "mean", &mean).node("Sub", &["x", "mean"], "centred", &[]);
    net.node("Pow", &["centred", "two"], "square", &[]).node("ReduceMean", &["square"], "variance", &mean);
    net.node("Add", &["variance", "eps"], "sum", &[]).node("Sqrt", &["sum"], "deviation", &[]);
    net.node("Div", &["centred", "deviation"], "normed", &[]).node(
        "Mul",
        &["normed", "scale"],
        "scaled",
        &[],
    );
    net.node("Add", &["bias", "scaled"], "y", &[]);
    let mut model = net.model(&["y"]);
    model.opsets = vec![(String::new(), 11)];
    model.graph.validate().unwrap();
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2], &[1.0, 2.0]))];
    let problem = run(&mut cpu(), &model, &feeds, &["y"]).unwrap_err().to_string();
    assert!(explains(&problem), "{problem}");
}

/// Should this fail, the message above can go.
#[test]
fn a_product_without_rows_is_reshaped_to_other_sizes() {
    use crate::runtime_support::{Net, cpu, run, tensor};

    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 0, 2]).float("w", &[2, 2], &[0.5; 4]).float("bias", &[2], &[0.3, 0.1]);
    net.node("MatMul", &["x", "w"], "product", &[]).node("Add", &["product", "bias"], "y", &[]);
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1, 0, 2], &[]))];
    let problem = run(&mut cpu(), &net.model(&["y"]), &feeds, &["y"]).unwrap_err().to_string();
    assert!(explains(&problem), "{problem}");
}
