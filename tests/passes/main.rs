//! Every pass: the same output before and after on the CPU provider, what is refused and why, and that a second run
//! changes nothing. One module per pass.

#[path = "../runtime_support/mod.rs"]
mod runtime_support;
mod same;
mod staged;

mod bind_sizes;
mod dedupe_initializers;
mod drop_dead;
mod eliminate_identity;
mod flatten_conv3d;
mod fold_constants;
mod fold_shapes;
mod fp32_islands;
mod keep_rows;
mod merge_duplicates;
mod quantize_matmul;
mod split_at;
mod split_vae;
mod to_f16;
mod tree_concat;
