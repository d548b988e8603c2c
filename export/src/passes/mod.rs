//! Graph rewriting: one pass per file, an ordered table, and named sequences of them.
//!
//! A pass looks at the main graph of a model, rewrites what it knows, and says what it left alone and why. Most passes
//! put new nodes in the place of the last node of a pattern; what nothing uses any more is dropped by the runner. Nothing
//! here reads a weight's bytes: passes make lazy tensors, so that a model of any size is rewritten in constant memory.

mod bind_sizes;
mod constant_nodes;
mod dedupe_initializers;
mod drop_dead;
mod eliminate_identity;
mod expression;
mod facts;
mod fold_constants;
mod fold_shapes;
mod fuse_group_norm;
mod fuse_layer_norm;
mod fuse_rms_norm;
mod fuse_rope;
mod fuse_silu;
mod fuse_swiglu;
mod gather_all;
mod half_table;
mod keep_rope_f32;
mod keep_rows;
mod merge_duplicates;
mod merge_slices;
mod normalised;
mod outcome;
mod pieces;
mod replacement;
mod reshape_plan;
mod run;
mod settings;
mod substitution;
mod view;

pub use facts::Facts;
pub use outcome::{Outcome, Refusal};
pub use replacement::Replacement;
pub use run::{PassError, Report, apply};
pub use settings::{AttentionForm, Linears, Settings};
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
    &keep_rope_f32::PASS,
    &fuse_layer_norm::PASS,
    &fuse_rms_norm::PASS,
    &fuse_group_norm::PASS,
    &fuse_silu::PASS,
    &fuse_swiglu::PASS,
    &fuse_rope::PASS,
    &merge_slices::PASS,
    &gather_all::PASS,
    &drop_dead::PASS,
];

/// Passes that are run together, in order and again until nothing changes.
#[derive(Debug)]
pub struct Sequence {
    pub name: &'static str,
    pub what: &'static str,
    pub passes: &'static [&'static str],
}

pub const SEQUENCES: &[Sequence] = &[
    Sequence {
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
    },
    Sequence {
        name: "webgpu",
        what: "lean, and the operators that are fast and right on WebGPU; f32 within 1e-5",
        passes: &[
            "bind_sizes",
            "fold_constants",
            "fold_shapes",
            "keep_rows",
            "eliminate_identity",
            "dedupe_initializers",
            "merge_duplicates",
            "keep_rope_f32",
            "fuse_layer_norm",
            "fuse_rms_norm",
            "fuse_group_norm",
            "fuse_silu",
            "fuse_swiglu",
            "fuse_rope",
            "merge_slices",
            "gather_all",
            "drop_dead",
        ],
    },
];

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
