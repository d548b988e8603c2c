//! Parts of a bundle's parameters that several families have.

use serde::{Deserialize, Serialize};

use super::RawFile;
use crate::{
    onnx::DType,
    weights::{Checkpoint, WeightsError},
};

/// What a bundle's parameters are called in messages of an export: they follow from configs and recipe.
pub const PARAMETERS: &str = "what the configs and the recipe make of the bundle's parameters";

/// A row-major table [rows, width] in a file of the bundle, read row by row on the host: it gathers the few rows that a
/// prompt needs from the mapped file, and a table of up to more than a gigabyte never reaches the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    pub file: String,
    pub dtype: EmbeddingType,
    pub rows: usize,
    pub width: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingType {
    F32,
    F16,
}

impl Embedding {
    pub fn new(dtype: EmbeddingType, rows: usize, width: usize) -> Embedding {
        Embedding { file: "embedding.bin".to_owned(), dtype, rows, width }
    }

    /// The table's file, of the weight with that name.
    pub fn table(&self, weights: &Checkpoint, key: &str) -> Result<RawFile, WeightsError> {
        let tensor = weights.tensor(key, &[self.rows, self.width])?;
        let dtype = match self.dtype {
            EmbeddingType::F32 => DType::F32,
            EmbeddingType::F16 => DType::F16,
        };
        Ok(RawFile { path: self.file.clone(), tensor, dtype })
    }
}

/// Which half of the time embedding comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeOrder {
    /// FLUX.2 (`flip_sin_to_cos`).
    CosFirst,
    SinFirst,
}

/// How the stages of the image decoder follow each other.
#[derive(Clone, Copy, Debug)]
pub struct DecoderChain {
    /// The stage that takes the latents, and its output that the next one takes.
    pub first: [&'static str; 2],
    /// The attention that the host drives, if there is one.
    pub attention: Option<ChunkedAttention>,
}

/// The decoder's middle attention, a chunk of query rows at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkedAttention {
    /// Query rows per run, where the plan does not ask for fewer.
    pub rows: usize,
    /// Whether every chunk must have that many.
    pub fixed: bool,
    /// What the host multiplies the queries with.
    pub q_factor: f32,
}
