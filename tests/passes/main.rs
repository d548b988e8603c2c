//! Every pass: the same output before and after on the CPU provider, what is refused and why, and that a second run
//! changes nothing. One module per pass.

mod foreign;
#[path = "../runtime_support/mod.rs"]
mod runtime_support;
mod same;
mod staged;
mod written;

mod bind_sizes;
mod deceptive;
mod decompose_attention;
mod dedupe_initializers;
mod drop_dead;
mod eliminate_identity;
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
mod keep_rope_f32;
mod keep_rows;
mod merge_duplicates;
mod merge_slices;
mod models;
mod names;
mod quantize_matmul;
mod remove_nan_guard;
mod single_output;
mod split_at;
mod split_vae;
mod to_f16;
mod tree_concat;
