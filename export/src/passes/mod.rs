//! Graph rewriting: one pass per file, an ordered table, and named sequences of them.
//!
//! A pass looks at the main graph of a model, rewrites what it knows, and says what it left alone and why. Most passes
//! put new nodes in the place of the last node of a pattern; what nothing uses any more is dropped by the runner. Nothing
//! here reads a weight's bytes: passes make lazy tensors, so that a model of any size is rewritten in constant memory.

mod bind_sizes;
mod budget;
mod constant_nodes;
mod dedupe_initializers;
mod drop_dead;
mod eliminate_identity;
mod expression;
mod facts;
mod flatten_conv3d;
mod fold_constants;
mod fold_shapes;
mod fp32_islands;
mod keep_rows;
mod merge_duplicates;
mod outcome;
mod part;
mod pixel_attention;
mod quantize_matmul;
mod replacement;
mod reshape_plan;
mod run;
mod settings;
mod split_at;
mod split_vae;
mod substitution;
mod to_f16;
mod tree_concat;
mod view;

pub use facts::Facts;
pub use outcome::{Outcome, Refusal};
pub use part::Part;
pub use replacement::Replacement;
pub use run::{PassError, Report, apply, split};
pub use settings::{AttentionForm, Linears, Settings, Splitting};
pub use view::View;

use crate::onnx::Model;

/// One rewrite.
#[derive(Debug)]
pub struct Pass {
    pub name: &'static str,
    /// What it does, before -> after, in a line.
    pub what: &'static str,
    /// What is wrong with graphs without it.
    pub why: &'static str,
    pub run: fn(&mut Model, &Settings) -> Result<Outcome, PassError>,
}

/// All passes. Adding one is a file and a line here.
pub const PASSES: &[&Pass] = &[
    &bind_sizes::PASS,
    &fold_constants::PASS,
    &fold_shapes::PASS,
    &keep_rows::PASS,
    &eliminate_identity::PASS,
    &dedupe_initializers::PASS,
    &merge_duplicates::PASS,
    &drop_dead::PASS,
    &flatten_conv3d::PASS,
    &tree_concat::PASS,
    &to_f16::PASS,
    &fp32_islands::PASS,
    &quantize_matmul::Q8,
    &quantize_matmul::Q4,
];

/// One way to cut a model into parts that run one after another.
#[derive(Debug)]
pub struct Split {
    pub name: &'static str,
    /// What it makes of a graph, in a line.
    pub what: &'static str,
    /// What whole graphs lack.
    pub why: &'static str,
    /// The parts in the order in which they run; none if the model stays whole, for the reasons given.
    pub run: fn(&Model, &Settings) -> Result<(Vec<Part>, Outcome), PassError>,
}

/// All splits. Adding one is a file and a line here.
pub const SPLITS: &[&Split] = &[&split_at::SPLIT, &split_vae::SPLIT];

/// Passes that are run together, in order and again until nothing changes.
#[derive(Debug)]
pub struct Sequence {
    pub name: &'static str,
    pub what: &'static str,
    pub passes: &'static [&'static str],
}

pub const SEQUENCES: &[Sequence] = &[Sequence {
    name: "lean",
    what: "the same numbers to the bit, without what exporters leave behind; running it again changes nothing",
    passes: &[
        "bind_sizes",
        "fold_constants",
        "fold_shapes",
        "eliminate_identity",
        "dedupe_initializers",
        "merge_duplicates",
        "drop_dead",
    ],
}];

/// The pass of that name.
pub fn pass(name: &str) -> Result<&'static Pass, PassError> {
    PASSES
        .iter()
        .copied()
        .find(|pass| pass.name == name)
        .ok_or_else(|| PassError::UnknownPass(name.to_owned()))
}

/// The passes of the sequence of that name.
pub fn sequence(name: &str) -> Result<Vec<&'static Pass>, PassError> {
    let found = SEQUENCES.iter().find(|sequence| sequence.name == name);
    let found = found.ok_or_else(|| PassError::UnknownSequence(name.to_owned()))?;
    found.passes.iter().map(|name| pass(name)).collect()
}

/// The split of that name.
pub fn split_named(name: &str) -> Result<&'static Split, PassError> {
    SPLITS
        .iter()
        .copied()
        .find(|split| split.name == name)
        .ok_or_else(|| PassError::UnknownSplit(name.to_owned()))
}
