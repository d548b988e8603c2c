//! Graph rewriting: one pass per file, an ordered table, and named sequences of them.
//!
//! A pass looks at the main graph of a model, rewrites what it knows, and says what it left alone and why. Most passes
//! put new nodes in the place of the last node of a pattern; what nothing uses any more is dropped by the runner. Nothing
//! here keeps a weight's bytes: passes make lazy tensors, so that a model of any size is rewritten in constant memory.

mod attention;
mod bind_sizes;
mod budget;
mod constant_nodes;
mod decompose_attention;
mod dedupe_initializers;
mod drop_dead;
mod eliminate_identity;
mod expression;
mod facts;
mod finite_masks;
mod fix_attention_scale;
mod flatten_conv3d;
mod fold_constants;
mod fold_shapes;
mod fp32_islands;
mod fuse_attention;
mod fuse_group_norm;
mod fuse_layer_norm;
mod fuse_rms_norm;
mod fuse_rope;
mod fuse_silu;
mod fuse_swiglu;
mod gather_all;
mod half_table;
mod head_norm;
mod heads;
mod keep_rope_f32;
mod keep_rows;
mod merge_duplicates;
mod merge_slices;
mod normalised;
mod outcome;
mod part;
mod pieces;
mod pixel_attention;
mod quantize_matmul;
mod remove_nan_guard;
mod replacement;
mod reshape_plan;
mod run;
mod settings;
mod single_output;
mod split_at;
mod split_vae;
mod substitution;
mod to_f16;
mod tree_concat;
mod view;

pub use bind_sizes::symbols;
pub use decompose_attention::{MAX_SLICES, MultiHead, Written};
pub use drop_dead::sweep as drop_dead;
pub use facts::Facts;
pub use head_norm::HeadNorm;
pub use outcome::{Outcome, Refusal};
pub use part::Part;
pub use quantize_matmul::{LEFT_OUT, Q8 as QUANTIZE_MATMUL_Q8};
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
    &eliminate_identity::PASS,
    &dedupe_initializers::PASS,
    &merge_duplicates::PASS,
    &drop_dead::PASS,
    &keep_rows::PASS,
    &keep_rope_f32::PASS,
    &fuse_layer_norm::PASS,
    &fuse_rms_norm::PASS,
    &fuse_group_norm::PASS,
    &fuse_silu::PASS,
    &fuse_swiglu::PASS,
    &fuse_rope::PASS,
    &merge_slices::PASS,
    &gather_all::PASS,
    &fix_attention_scale::PASS,
    &finite_masks::PASS,
    &remove_nan_guard::PASS,
    &fuse_attention::PASS,
    &decompose_attention::PASS,
    &flatten_conv3d::PASS,
    &tree_concat::PASS,
    &to_f16::PASS,
    &fp32_islands::PASS,
    &quantize_matmul::Q8,
    &quantize_matmul::Q4,
];

/// The parts in the order in which they run; none if the model stays whole, for the reasons given.
pub type Parts = Result<(Vec<Part>, Outcome), PassError>;

/// One way to cut a model into parts that run one after another.
#[derive(Debug)]
pub struct Split {
    pub name: &'static str,
    /// What it makes of a graph, in a line.
    pub what: &'static str,
    /// What whole graphs lack.
    pub why: &'static str,
    pub run: fn(&Model, &Settings) -> Parts,
}

/// All splits. Adding one is a file and a line here.
pub const SPLITS: &[&Split] = &[&split_at::SPLIT, &split_vae::SPLIT];

/// Passes that are run together, in order and again until nothing changes.
#[derive(Debug)]
pub struct Sequence {
    pub name: &'static str,
    pub what: &'static str,
    /// The sequence whose passes come before these.
    pub after: Option<&'static str>,
    pub passes: &'static [&'static str],
}

pub const SEQUENCES: &[Sequence] = &[
    Sequence {
        name: "lean",
        what: "the same numbers to the bit, without what exporters leave behind",
        after: None,
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
        after: Some("lean"),
        passes: &[
            "keep_rows",
            "keep_rope_f32",
            "fuse_layer_norm",
            "fuse_rms_norm",
            "fuse_group_norm",
            "fuse_silu",
            "fuse_swiglu",
            "fuse_rope",
            "merge_slices",
            "gather_all",
            "fix_attention_scale",
            "finite_masks",
            "remove_nan_guard",
            "fuse_attention",
            "decompose_attention",
            "flatten_conv3d",
            "tree_concat",
        ],
    },
    Sequence {
        name: "f16",
        what: "webgpu, and what can be computed in f16, with norms and residual sums in f32",
        after: Some("webgpu"),
        passes: &["to_f16", "fp32_islands"],
    },
    Sequence {
        name: "q8",
        what: "webgpu, and linear layers in 8 bits; with --passes f16 before it, the rest in f16",
        after: Some("webgpu"),
        passes: &["quantize_matmul_q8"],
    },
    Sequence {
        name: "q4",
        what: "webgpu, and linear layers in 4 bits; with --passes f16 before it, the rest in f16",
        after: Some("webgpu"),
        passes: &["quantize_matmul_q4"],
    },
];

impl Sequence {
    /// All its passes, in order.
    pub fn all(&self) -> Result<Vec<&'static Pass>, PassError> {
        let mut passes = self.after.map_or(Ok(Vec::new()), sequence)?;
        for name in self.passes {
            passes.push(pass(name)?);
        }
        Ok(passes)
    }
}

/// The pass of that name.
pub fn pass(name: &str) -> Result<&'static Pass, PassError> {
    PASSES
        .iter()
        .copied()
        .find(|pass| pass.name == name)
        .ok_or_else(|| PassError::UnknownPass(name.to_owned()))
}

/// The passes of several sequences, each pass where it is first: sequences share their beginnings.
pub fn sequences(names: &[&str]) -> Result<Vec<&'static Pass>, PassError> {
    let mut passes: Vec<&'static Pass> = Vec::new();
    for name in names {
        for pass in sequence(name)? {
            if passes.iter().all(|seen| seen.name != pass.name) {
                passes.push(pass);
            }
        }
    }
    Ok(passes)
}

/// The passes of the sequence of that name.
pub fn sequence(name: &str) -> Result<Vec<&'static Pass>, PassError> {
    let found = SEQUENCES.iter().find(|sequence| sequence.name == name);
    found.ok_or_else(|| PassError::UnknownSequence(name.to_owned()))?.all()
}

/// The split of that name.
pub fn split_named(name: &str) -> Result<&'static Split, PassError> {
    SPLITS
        .iter()
        .copied()
        .find(|split| split.name == name)
        .ok_or_else(|| PassError::UnknownSplit(name.to_owned()))
}
