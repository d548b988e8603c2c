//! Every pass: the same output before and after on the CPU provider, what is refused and why, and that a second run
//! changes nothing. One module per pass.

#[path = "../runtime_support/mod.rs"]
mod runtime_support;
mod same;

mod bind_sizes;
mod drop_dead;
mod fuse_group_norm;
mod fuse_layer_norm;
mod fuse_rms_norm;
mod fuse_rope;
mod fuse_silu;
mod fuse_swiglu;
mod gather_all;
mod keep_rope_f32;
mod merge_slices;
