//! Scratch memory of the CPU provider's kernels, as measured. All compute in f32.

use crate::onnx::Node;

/// Bytes of an element.
const F32: u64 = 4;

/// Shapes of a node's inputs; `None` where one is absent or unknown.
type Inputs<'a> = &'a [Option<Vec<usize>>];

fn shape<'a>(inputs: Inputs<'a>, index: usize) -> Option<&'a [usize]> {
    inputs.get(index)?.as_deref()
}

fn product(dims: impl IntoIterator<Item = usize>) -> u64 {
    dims.into_iter().fold(1, |product, dim| product.saturating_mul(dim as u64))
}

/// Attention: the scores of all heads, and a mask of their form where it is causal.
pub(super) fn scores(node: &Node, inputs: Inputs<'_>) -> u64 {
    let (Some(q), Some(k)) = (shape(inputs, 0), shape(inputs, 1)) else { return 0 };
    let heads = || node.int("q_num_heads").and_then(|heads| usize::try_from(heads).ok());
    let (batch, heads, rows, keys) = match (q, k) {
        ([batch, heads, rows, _], [_, _, keys, _]) => (*batch, *heads, *rows, *keys),
        ([batch, rows, _], [_, keys, _]) => (*batch, heads().unwrap_or(1), *rows, *keys),
        _ => return 0,
    };
    let past = shape(inputs, 4).and_then(|past| past.get(2)).copied().unwrap_or(0);
    let keys = keys.saturating_add(past);
    let mask = if node.int("is_causal") == Some(1) { product([rows, keys]) } else { 0 };
    product([batch, heads, rows, keys]).saturating_add(mask).saturating_mul(F32)
}

/// ConvTranspose: columns of one group, before they are added up to the output.
pub(super) fn columns(_: &Node, inputs: Inputs<'_>) -> u64 {
    let (Some([_, _, positions @ ..]), Some([_, kernel @ ..])) = (shape(inputs, 0), shape(inputs, 1)) else {
        return 0;
    };
    product(kernel.iter().chain(positions).copied()).saturating_mul(F32)
}

/// LSTM, GRU and RNN: the input's part of every gate, for all steps.
pub(super) fn gates(_: &Node, inputs: Inputs<'_>) -> u64 {
    let (Some([steps, batch, _]), Some([directions, gates, _])) = (shape(inputs, 0), shape(inputs, 1)) else {
        return 0;
    };
    product([*steps, *batch, *directions, *gates]).saturating_mul(F32)
}

/// Einsum: its operands are multiplied one after the other, both laid out anew. An index stays in a product while a later
/// operand or the output has it. An equation with an ellipsis counts as if every index stayed.
pub(super) fn products(node: &Node, inputs: Inputs<'_>) -> u64 {
    let Some(equation) = node.text("equation") else { return 0 };
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (operands, output) = equation.split_once("->").unwrap_or((&equation, ""));
    let terms: Vec<&str> = operands.split(',').collect();
    let indices = |text: &str| text.chars().filter(|c| c.is_alphabetic()).collect::<Vec<char>>();
    let mut sizes = std::collections::BTreeMap::new();
    let mut dots = 1;
    for (term, dims) in terms.iter().zip(inputs) {
        let Some(dims) = dims else { return 0 };
        let named = indices(term);
        // The dots stand for axes between the named ones.
        let before = term.find("...").unwrap_or(named.len()).min(dims.len());
        let after = dims.len().saturating_sub(named.len() - before.min(named.len())).max(before);
        dots = product(dims[before..after].iter().copied()).max(dots);
        for (index, size) in named.iter().zip(dims[..before].iter().chain(&dims[after..])) {
            let known = sizes.entry(*index).or_insert(1);
            *known = (*known).max(*size);
        }
    }
    let bytes = |indices: &[char]| {
        let elements = product(indices.iter().map(|index| sizes.get(index).copied().unwrap_or(1)));
        elements.saturating_mul(dots).saturating_mul(F32)
    };
    let stays = |index: &char, at: usize| {
        !equation.contains("->")
            || output.contains(*index)
            || terms[at + 1..].iter().any(|term| term.contains(*index))
    };
    let mut left = indices(terms[0]);
    let mut most = bytes(&left);
    for (at, term) in terms.iter().enumerate().skip(1) {
        let right = indices(term);
        let operands = bytes(&left).saturating_add(bytes(&right));
        left.extend(right);
        left.sort_unstable();
        left.dedup();
        left.retain(|index| stays(index, at));
        most = most.max(operands.saturating_add(bytes(&left)));
    }
    most
}
