//! Model architectures: each authors its graphs from a checkpoint's config files and weights.
//!
//! A new architecture is a folder here, a line in [`ARCHITECTURES`] and a recipe. This module knows no session.

pub mod author;
pub mod blocks;
pub mod flux2;
pub mod parameters;
pub mod qwen_image;
mod settings;
pub mod tokenizer;

use std::{path::Path, sync::Arc};

use crate::{
    onnx::{DType, Model, Tensor},
    picture::SizeError,
    recipe::{Precision, Recipe},
    shapes::Sizes,
    weights::{Arrivals, Calibration, Checkpoint, WeightsError},
};

/// Where dimensions and weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A checkpoint's folder.
    Checkpoint(&'a Path),
    /// The config files in a checkpoint's folder. Weights have shapes and no values, whether or not they are there.
    ConfigFiles(&'a Path),
    /// The configs that the recipe carries. Weights have shapes and no values.
    Recipe,
}

/// What an architecture authors from.
pub struct Authoring<'a> {
    pub source: Source<'a>,
    /// What brings the checkpoint's weight files that are not there yet.
    pub arrivals: Option<&'a Arc<dyn Arrivals>>,
    pub recipe: &'a Recipe,
    pub profile: &'a Precision,
    /// What is known of the inputs of the layers.
    pub calibration: Option<&'a Arc<Calibration>>,
    /// A planted fault, for tests of `verify`.
    pub fault: Option<&'a str>,
}

impl Authoring<'_> {
    /// The weights of a component, with what is known of their inputs.
    pub fn weights(&self, component: &str) -> Result<Checkpoint, WeightsError> {
        let weights = match self.source {
            Source::Checkpoint(root) => Checkpoint::open_with(&root.join(component), self.arrivals)?,
            Source::ConfigFiles(_) | Source::Recipe => Checkpoint::described(),
        };
        Ok(weights.calibrated(self.calibration.cloned()))
    }
}

/// One graph of a bundle.
pub struct StageGraph {
    pub name: String,
    /// The part of the model that it belongs to: what may share a process, and what `components` of a profile name.
    pub component: &'static str,
    pub model: Model,
}

impl StageGraph {
    pub fn new(name: &str, component: &'static str, model: Model) -> StageGraph {
        StageGraph { name: name.to_owned(), component, model }
    }
}

/// A matrix [rows, width] that is stored as a file of its own, in another type than the checkpoint's if need be.
pub struct RawFile {
    pub path: String,
    pub tensor: Tensor,
    pub dtype: DType,
}

/// A folder of the checkpoint of which the runner needs files as they are.
#[derive(Clone, Debug)]
pub struct CopiedFolder {
    pub from: String,
    /// Its name in the bundle.
    pub to: String,
    pub files: CopiedFiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiedFiles {
    All,
    /// `tokenizer.json`, and smaller JSON files beside it.
    Tokenizer,
}

impl CopiedFolder {
    /// All files of a folder, under its own name.
    pub fn whole(name: &str) -> CopiedFolder {
        CopiedFolder { from: name.to_owned(), to: name.to_owned(), files: CopiedFiles::All }
    }
}

impl CopiedFiles {
    /// Whether a file of that name and length is one of them.
    pub fn contain(self, name: &str, bytes: u64) -> bool {
        /// Of a setting; `vocab.json` repeats what `tokenizer.json` has.
        const SMALL: u64 = 1 << 20;
        match self {
            CopiedFiles::All => true,
            CopiedFiles::Tokenizer => name == "tokenizer.json" || name.ends_with(".json") && bytes <= SMALL,
        }
    }
}

/// What an architecture authored.
pub struct Authored {
    /// In the order in which they run.
    pub stages: Vec<StageGraph>,
    pub raw_files: Vec<RawFile>,
    pub copied_folders: Vec<CopiedFolder>,
    /// The family's parameters for the runner, stored in `bundle.json`.
    pub parameters: serde_json::Value,
}

/// Why a checkpoint could not be authored, by family.
#[derive(Debug, thiserror::Error)]
pub enum ArchError {
    #[error(transparent)]
    Flux2(#[from] flux2::Flux2Error),
    #[error(transparent)]
    QwenImage(#[from] qwen_image::QwenImageError),
}

/// What is to be drawn, as far as the sizes of a bundle's symbols depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizesRequest {
    /// Pixels.
    pub width: usize,
    pub height: usize,
    pub steps: usize,
    /// Times that the chunks of query rows are halved of an attention which the host drives: slower, with less memory.
    pub halvings: u32,
    /// Of the longest prompt.
    pub text: TextRows,
}

/// Rows that a prompt takes, in families that do not fill all prompts up to one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextRows {
    /// Of the text encoder.
    pub encoded: usize,
    /// Of them, those that the transformer reads.
    pub read: usize,
}

impl TextRows {
    /// The transformer reads all that is encoded.
    pub fn all(rows: usize) -> TextRows {
        TextRows { encoded: rows, read: rows }
    }

    /// What both fit into.
    pub fn at_least(self, other: TextRows) -> TextRows {
        TextRows { encoded: self.encoded.max(other.encoded), read: self.read.max(other.read) }
    }
}

/// Why a request has no sizes.
#[derive(Debug, thiserror::Error)]
pub enum SizesError {
    #[error("the bundle is of family '{family}', of which this program knows no sizes")]
    Family { family: String },
    #[error("parameters of family '{family}': {source}")]
    Unreadable { family: &'static str, source: serde_json::Error },
    #[error("parameters of family '{family}': {problem}")]
    Parameters { family: &'static str, problem: String },
    #[error(transparent)]
    Picture(#[from] SizeError),
    #[error("a prompt of {encoded} tokens, {read} of them read: this model takes 1 to {most}")]
    Text { encoded: usize, read: usize, most: usize },
    #[error("{steps} steps: a picture takes 1 to {MAX_STEPS}")]
    Steps { steps: usize },
}

/// The most steps of a schedule.
pub const MAX_STEPS: usize = 1000;

/// One supported model family.
pub struct Architecture {
    pub family: &'static str,
    /// The recipe of a checkpoint folder of this family that has none of its own.
    pub default_recipe: fn(&Path) -> &'static str,
    /// Whether a checkpoint folder holds this family.
    pub detects: fn(&Path) -> bool,
    pub author: fn(&Authoring<'_>) -> Result<Authored, ArchError>,
    /// The stages of the image decoder alone, cut before the given up blocks whatever the recipe says, and the parameters of
    /// a bundle that is cut so; no files. Cheap enough to compare cuts.
    pub author_decoder: fn(&Authoring<'_>, &[usize]) -> Result<Authored, ArchError>,
    /// What is drawn where nothing else is asked for, by a bundle's parameters.
    pub usual: fn(&serde_json::Value) -> Result<SizesRequest, SizesError>,
    /// Sizes of all symbols of all stages, from a bundle's parameters and what is to be drawn.
    pub sizes: fn(&serde_json::Value, &SizesRequest) -> Result<Sizes, SizesError>,
}

pub const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        family: "flux2",
        default_recipe: |_| "flux2-klein",
        detects: flux2::detects,
        author: |request| Ok(flux2::author(request)?),
        author_decoder: |request, cuts| Ok(flux2::author_decoder(request, cuts)?),
        usual: flux2::usual,
        sizes: flux2::sizes,
    },
    Architecture {
        family: "qwen-image",
        default_recipe: qwen_image::default_recipe,
        detects: qwen_image::detects,
        author: |request| Ok(qwen_image::author(request)?),
        author_decoder: |request, cuts| Ok(qwen_image::author_decoder(request, cuts)?),
        usual: qwen_image::usual,
        sizes: qwen_image::sizes,
    },
];

/// The architecture of a bundle's family, by the name in its manifest.
pub fn architecture(family: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.family == family)
}
