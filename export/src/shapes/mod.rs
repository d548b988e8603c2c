//! Static shapes: from the sizes of a graph's named dimensions to every tensor's element type and shape.
//!
//! One file per operator family; each exports a table of rules. Small integer and boolean tensors, and small tensors of
//! floats, are computed along the way, because foreign exports compute their shapes in the graph
//! (Shape, Gather, Concat, Reshape). What is not known stays unknown and is listed; nothing is guessed.

mod attention;
mod broadcast;
mod call;
mod control;
mod conv;
mod creation;
mod elementwise;
mod fact;
mod indexing;
mod infer;
mod linear_attention;
mod ml;
mod movement;
mod norm;
mod pool;
mod products;
mod quantize;
mod recurrent;
mod reduction;
mod resize;
mod selection;
mod sequence;
mod signal;
mod training;
mod window;

use std::{collections::HashMap, sync::LazyLock};

pub use fact::{Dims, Elements, Fact, MAX_ELEMENTS};
pub use infer::{Conflict, Shapes, Sizes, infer, infer_hiding};

use call::Call;

/// What an operator makes of its inputs: the facts about its outputs, in order. Outputs that are not returned stay
/// unknown. `Err` says which input contradicts the operator's definition.
type Rule = fn(&Call<'_>) -> Result<Vec<Fact>, String>;

/// Domain (empty for the standard operators), operator, rule.
type Row = (&'static str, &'static str, Rule);

/// The families' tables. Adding an operator is a line in its family's table.
const FAMILIES: &[&[Row]] = &[
    attention::ATTENTION,
    control::CONTROL,
    conv::CONV,
    creation::CREATION,
    elementwise::ELEMENTWISE,
    indexing::INDEXING,
    linear_attention::LINEAR_ATTENTION,
    ml::ML,
    movement::MOVEMENT,
    norm::NORM,
    pool::POOL,
    products::PRODUCTS,
    quantize::QUANTIZE,
    recurrent::RECURRENT,
    reduction::REDUCTION,
    resize::RESIZE,
    selection::SELECTION,
    sequence::SEQUENCE,
    signal::SIGNAL,
    training::TRAINING,
];

static RULES: LazyLock<HashMap<(&str, &str), Rule>> =
    LazyLock::new(|| FAMILIES.iter().copied().flatten().map(|row| ((row.0, row.1), row.2)).collect());

fn rule(domain: &str, op_type: &str) -> Option<Rule> {
    RULES.get(&(standard_domain(domain), op_type)).copied()
}

/// The operators that have a rule: domain (empty for the standard one) and name.
pub fn operators() -> impl Iterator<Item = (&'static str, &'static str)> {
    FAMILIES.iter().copied().flatten().map(|row| (row.0, row.1))
}

/// The standard operator domain has two spellings.
fn standard_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}
