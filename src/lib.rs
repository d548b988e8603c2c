//! Runs Viaduct bundles: one ONNX Runtime session at a time, on any Vulkan GPU.

pub mod pipeline;
pub mod runtime;
pub mod tensor;
