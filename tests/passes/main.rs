//! Every pass: the same output before and after on the CPU provider, what is refused and why, and that a second run
//! changes nothing. One module per pass.

#[path = "../runtime_support/mod.rs"]
mod runtime_support;
mod same;

mod bind_sizes;
mod drop_dead;
mod flatten_conv3d;
mod fp32_islands;
mod quantize_matmul;
mod to_f16;
mod tree_concat;
