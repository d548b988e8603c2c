//! Static shapes: from the sizes of a graph's named dimensions to every tensor's element type and shape.
//!
//! One file per operator family; each exports a table of rules. Small integer and boolean tensors, and small tensors of
//! floats, are computed along the way, because foreign exports compute their shapes in the graph
//! (Shape, Gather, Concat, Reshape). What is not known stays unknown and is listed; nothing is guessed.

mod fact;
mod infer;

pub use fact::{Elements, Fact, MAX_ELEMENTS};
pub use infer::{Conflict, Shapes, Sizes, infer};

use infer::Call;

/// What an operator makes of its inputs: the facts about its outputs, in order. Outputs that are not returned stay
/// unknown. `Err` says which input contradicts the operator's definition.
type Rule = fn(&Call<'_>) -> Result<Vec<Fact>, String>;

/// Domain (empty for the standard operators), operator, rule.
type Row = (&'static str, &'static str, Rule);

/// The families' tables. Adding an operator is a line in its family's table.
const FAMILIES: &[&[Row]] = &[];

fn rule(domain: &str, op_type: &str) -> Option<Rule> {
    let domain = if domain == "ai.onnx" { "" } else { domain };
    let row = FAMILIES.iter().copied().flatten().find(|row| row.0 == domain && row.1 == op_type);
    row.map(|row| row.2)
}
