//! Every pass: the same output before and after on the CPU provider, what is refused and why, and that a second run
//! changes nothing. One module per pass.

mod foreign;
#[path = "../runtime_support/mod.rs"]
mod runtime_support;
mod same;
mod written;

mod bind_sizes;
mod decompose_attention;
mod drop_dead;
mod finite_masks;
mod fix_attention_scale;
mod fuse_attention;
mod models;
mod remove_nan_guard;
