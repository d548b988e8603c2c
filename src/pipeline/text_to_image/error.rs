//! Why a picture cannot be drawn.

use std::path::PathBuf;

use viaduct_export::bundle::BundleError;

use crate::{
    pipeline::{
        embedding::EmbeddingError, image::ImageError, noise::LatentError, position::PositionError,
        prompt::PromptError, schedule::ScheduleError, size::Size,
    },
    runtime::RuntimeError,
    tensor::HostTensor,
};

#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Position(#[from] PositionError),
    #[error(transparent)]
    Latent(#[from] LatentError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the noise has shape {found:?}, but {size} needs {expected:?}")]
    Noise { found: Vec<usize>, expected: Vec<usize>, size: Size },
    #[error("the request is for {asked} steps; this model's noise levels are fixed, and it takes {taken}")]
    Steps { asked: usize, taken: usize },
    #[error("this model takes no negative prompt: it was distilled to follow one prompt alone")]
    Negative,
    #[error("{}: parameters: {problem}", manifest.display())]
    Parameters { manifest: PathBuf, problem: String },
    #[error("the bundle is of family '{family}', of which this program draws no pictures; it knows {known}")]
    Family { family: String, known: String },
    #[error(
        "the decoder drew {found:?} for a picture of {size}; the bundle's parameters do not fit its graphs"
    )]
    Picture { found: Vec<usize>, size: Size },
}

/// A stage's output, whose shape the host relies on: a graph need not be the one that the manifest describes.
pub fn shaped(
    stage: &str,
    name: &str,
    tensor: HostTensor,
    shape: &[usize],
) -> Result<HostTensor, PipelineError> {
    if tensor.shape == shape {
        Ok(tensor)
    } else {
        Err(misshapen(stage, name, format!("{shape:?}"), &tensor))
    }
}

pub fn misshapen(stage: &str, name: &str, expected: String, tensor: &HostTensor) -> PipelineError {
    let (stage, tensor, got) = (stage.to_owned(), name.to_owned(), format!("{:?}", tensor.shape));
    RuntimeError::BadTensor { stage, tensor, expected, got }.into()
}
