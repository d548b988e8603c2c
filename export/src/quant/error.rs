use std::path::PathBuf;

use crate::onnx::{DType, tensor::ComputeError};

/// Why weights cannot be quantised, cast or laid out as asked.
#[derive(Debug, thiserror::Error)]
pub enum QuantError {
    #[error("{0}-bit codes: only 2, 4 and 8 bits exist")]
    Bits(u8),

    #[error("blocks of {0} values: only 16, 32, 64, 128 and 256 exist")]
    Block(usize),

    #[error("scales of type {0:?}: only F32 and F16 exist")]
    ScaleType(DType),

    #[error("shape {found:?}: {expected} expected")]
    Shape { found: Vec<usize>, expected: &'static str },

    #[error("{0:?} weights: only F32, F16 and BF16 can be converted")]
    SourceType(DType),

    #[error("cast to {0:?}: only F32 and F16 are possible")]
    TargetType(DType),

    #[error("{found} bytes of weights, {expected} expected")]
    Length { expected: usize, found: usize },

    #[error("weight [{row}, {column}] is {value}; the checkpoint is damaged")]
    NotFinite { row: usize, column: usize, value: f32 },

    #[error("scale {scale:e} of block {block} in row {row} does not fit {dtype:?}")]
    ScaleOverflow { row: usize, block: usize, scale: f32, dtype: DType },

    #[error("element {index} is {value:e}, which f16 cannot hold (largest 65504)")]
    CastOverflow { index: usize, value: f32 },

    #[error("statistics of its inputs{}: {problem}", in_file(file))]
    Statistics { file: Option<PathBuf>, problem: &'static str },

    #[error("statistics of {found} inputs; the layer has {expected}")]
    Inputs { expected: usize, found: usize },

    #[error("source weights: {0}")]
    Source(#[source] ComputeError),
}

fn in_file(file: &Option<PathBuf>) -> String {
    file.as_ref().map_or(String::new(), |file| format!(" in {}", file.display()))
}
