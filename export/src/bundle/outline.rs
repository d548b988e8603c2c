//! A bundle's graphs without its weights, in memory: what a planner reads when there is no bundle yet, and perhaps no
//! checkpoint.

use std::path::{Path, PathBuf};

use super::{ExportError, write::resolved};
use crate::{
    arch::{Architecture, Authored, Authoring, RawFile, Source, StageGraph, architecture},
    recipe::{Chosen, Recipe},
};

/// Where an outline's dimensions come from.
#[derive(Clone, Copy, Debug)]
pub enum OutlineSource<'a> {
    /// A shipped recipe's name or a `.toml` file, with `[configs]`. No file of a checkpoint is touched.
    Recipe(&'a str),
    /// The config files in a checkpoint's folder, whose weights need not be there, and the recipe by which the folder
    /// would be exported.
    Checkpoint { folder: &'a Path, recipe: Option<&'a str> },
}

#[derive(Clone, Copy, Debug)]
pub struct OutlineRequest<'a> {
    pub source: OutlineSource<'a>,
    pub profile: &'a str,
    /// Recipe values to change, by dotted key.
    pub set: &'a [(String, String)],
}

/// What an export with the same recipe would write, without the values of the weights: graphs with every weight's type,
/// shape and length. It takes the memory of the graphs alone, and reading a weight's bytes is an error.
pub struct Outline {
    pub family: &'static str,
    /// The recipe as resolved.
    pub recipe: Recipe,
    pub profile: String,
    /// The family's parameters, as `bundle.json` would hold them.
    pub parameters: serde_json::Value,
    /// In the order in which they run.
    pub stages: Vec<StageGraph>,
    /// Path and bytes of each file with weights outside the graphs. Copied files (the tokenizer's) are not known.
    pub raw_files: Vec<(String, u64)>,
    architecture: &'static Architecture,
    /// The checkpoint's folder, where config files are the source.
    folder: Option<PathBuf>,
}

impl Outline {
    /// Authors every stage.
    pub fn author(request: &OutlineRequest<'_>) -> Result<Outline, ExportError> {
        let (architecture, recipe, folder) = match request.source {
            OutlineSource::Recipe(name) => {
                let recipe = Recipe::with_configs(name, request.set)?;
                (family_of(&recipe)?, recipe, None)
            }
            OutlineSource::Checkpoint { folder, recipe } => {
                let (architecture, Chosen { recipe, .. }) = resolved(folder, recipe, request.set)?;
                (architecture, recipe, Some(folder.to_owned()))
            }
        };
        let authoring = authoring(&recipe, request.profile, folder.as_deref())?;
        let Authored { stages, raw_files, parameters, .. } = (architecture.author)(&authoring)?;
        let raw_files = raw_files.into_iter().map(|raw| (raw.path.clone(), raw_bytes(&raw))).collect();
        Ok(Outline {
            family: architecture.family,
            profile: request.profile.to_owned(),
            parameters,
            stages,
            raw_files,
            architecture,
            folder,
            recipe,
        })
    }

    /// The image decoder alone as it would be with other cuts (the recipe's `vae_decoder.cuts`, which stay in the recipe):
    /// its stages, and the parameters that give their symbols sizes.
    pub fn decoder(&self, cuts: &[usize]) -> Result<Outline, ExportError> {
        let authoring = authoring(&self.recipe, &self.profile, self.folder.as_deref())?;
        let Authored { stages, parameters, .. } = (self.architecture.author_decoder)(&authoring, cuts)?;
        Ok(Outline {
            family: self.family,
            recipe: self.recipe.clone(),
            profile: self.profile.clone(),
            parameters,
            stages,
            raw_files: Vec::new(),
            architecture: self.architecture,
            folder: self.folder.clone(),
        })
    }
}

fn authoring<'a>(
    recipe: &'a Recipe,
    profile: &str,
    folder: Option<&'a Path>,
) -> Result<Authoring<'a>, ExportError> {
    let source = folder.map_or(Source::Recipe, Source::ConfigFiles);
    let profile = recipe.profile(profile)?;
    Ok(Authoring { source, arrivals: None, recipe, profile, calibration: None, fault: None })
}

fn family_of(recipe: &Recipe) -> Result<&'static Architecture, ExportError> {
    let unknown = || ExportError::NoSuchFamily { recipe: recipe.name.clone(), family: recipe.family.clone() };
    architecture(&recipe.family).ok_or_else(unknown)
}

fn raw_bytes(raw: &RawFile) -> u64 {
    raw.dtype.byte_len(&raw.tensor.shape).unwrap_or(0) as u64
}
