//! Floating-point operations of a graph: those of its products and convolutions, which are nearly all.

use viaduct_export::{
    onnx::{Model, Node, ValueId},
    shapes::Shapes,
};

/// Of one run; nodes whose sizes are unknown do not count.
pub(super) fn flops(model: &Model, shapes: &Shapes) -> u64 {
    let sizes = |id: Option<ValueId>| {
        shapes
            .known(id?)?
            .shape
            .as_ref()?
            .iter()
            .map(|size| size.map(|size| size as u64))
            .collect::<Option<Vec<_>>>()
    };
    let nodes = model.graph.nodes().filter_map(|(_, node)| of_node(node, &sizes));
    nodes.fold(0, u64::saturating_add)
}

/// Two for each multiplication that is added up.
fn of_node(node: &Node, sizes: &dyn Fn(Option<ValueId>) -> Option<Vec<u64>>) -> Option<u64> {
    let output = || sizes(node.outputs.first().copied().flatten());
    let input = |index| sizes(node.input(index));
    let inner: Vec<u64> = match (node.domain.as_str(), node.op_type.as_str()) {
        ("", "MatMul") => vec![*input(0)?.last()?],
        ("", "Gemm") => {
            let rows = input(0)?;
            vec![rows[usize::from(node.int("transA").unwrap_or(0) == 0).min(rows.len().checked_sub(1)?)]]
        }
        ("com.microsoft", "MatMulNBits") => vec![u64::try_from(node.int("K")?).ok()?],
        ("", "Conv") => input(1)?.get(1..)?.to_vec(),
        // Scores and their product with the values.
        ("com.microsoft", "MultiHeadAttention") => vec![2, *input(1)?.get(1)?],
        _ => return None,
    };
    Some(output()?.into_iter().chain(inner).chain([2]).fold(1, u64::saturating_mul))
}
