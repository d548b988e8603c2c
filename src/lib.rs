//! Runs Viaduct bundles: one ONNX Runtime session at a time, on any Vulkan GPU.

pub mod atomic_file;
pub mod bench;
pub mod bisect;
pub mod calibrate;
pub mod cli;
pub mod hub;
pub mod npy;
pub mod pipeline;
pub mod plan;
pub mod plot;
pub mod printable;
pub mod report;
pub mod runtime;
mod split_mix;
pub mod tensor;
pub mod tune;
pub mod user_cache;
pub mod verify;
