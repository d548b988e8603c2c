//! Checkpoints in, ONNX bundles out: authoring, rewriting, quantising and packing.
//!
//! This package never links ONNX Runtime, an async runtime or a command-line crate.

pub mod arch;
pub mod bundle;
pub mod bytes;
pub mod device;
pub mod files;
pub mod flops;
pub mod gates;
pub mod locked_file;
pub mod locked_folder;
pub mod memory;
pub mod onnx;
pub mod passes;
pub mod picture;
pub mod quant;
pub mod recipe;
pub mod shapes;
pub mod staged_folder;
pub mod tuning;
pub mod weights;
