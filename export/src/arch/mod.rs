//! Model architectures: each authors its graphs from a checkpoint's config files and weights.
//!
//! A new architecture is a folder here, a line in [`ARCHITECTURES`] and a recipe. This module knows no session.

pub mod author;
pub mod blocks;
pub mod flux2;

use std::path::Path;

use crate::{
    onnx::{DType, Model, Tensor},
    recipe::{Precision, Recipe},
};

/// What an architecture authors from.
pub struct Authoring<'a> {
    /// The checkpoint's folder.
    pub source: &'a Path,
    pub recipe: &'a Recipe,
    pub profile: &'a Precision,
    /// A planted fault, for tests of `verify`.
    pub fault: Option<&'a str>,
}

/// One graph of a bundle.
pub struct StageGraph {
    pub name: String,
    pub model: Model,
}

impl StageGraph {
    pub fn new(name: &str, model: Model) -> StageGraph {
        StageGraph { name: name.to_owned(), model }
    }
}

/// A matrix [rows, width] that is stored as a file of its own, in another type than the checkpoint's if need be.
pub struct RawFile {
    pub path: String,
    pub tensor: Tensor,
    pub dtype: DType,
}

/// What an architecture authored.
pub struct Authored {
    /// In the order in which they run.
    pub stages: Vec<StageGraph>,
    pub raw_files: Vec<RawFile>,
    /// Folders of the checkpoint that the runner needs as they are.
    pub copied_folders: Vec<String>,
    /// The family's parameters for the runner, stored in `bundle.json`.
    pub parameters: serde_json::Value,
}

/// Why a checkpoint could not be authored, by family.
#[derive(Debug, thiserror::Error)]
pub enum ArchError {
    #[error(transparent)]
    Flux2(#[from] flux2::Flux2Error),
}

/// One supported model family.
pub struct Architecture {
    pub family: &'static str,
    pub default_recipe: &'static str,
    /// Whether a checkpoint folder holds this family.
    pub detects: fn(&Path) -> bool,
    pub author: fn(&Authoring<'_>) -> Result<Authored, ArchError>,
}

pub const ARCHITECTURES: &[Architecture] = &[Architecture {
    family: "flux2",
    default_recipe: "flux2-klein",
    detects: flux2::detects,
    author: |request| Ok(flux2::author(request)?),
}];
