//! Which weight files of a checkpoint a model is made of.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{ExportError, write::resolved};
use crate::{
    arch::{Authored, Authoring, Source},
    onnx::MappedFile,
    recipe::{Chosen, Precision},
    weights::Arrivals,
};

/// The weight files that an export of a checkpoint's folder reads, in the order in which it first reads them, whether they are
/// there or on their way. No profile needs others. Reads config files and the headers of weight files.
pub fn needed_files(
    source: &Path,
    arrivals: Option<&Arc<dyn Arrivals>>,
    recipe: Option<&str>,
    set: &[(String, String)],
) -> Result<Vec<PathBuf>, ExportError> {
    let (architecture, Chosen { recipe, .. }) = resolved(source, recipe, set)?;
    let authored = (architecture.author)(&Authoring {
        source: Source::Checkpoint(source),
        arrivals,
        recipe: &recipe,
        profile: &Precision::exact(),
        calibration: None,
        fault: None,
    })?;
    Ok(weight_files(&authored).into_iter().map(|file| file.path.clone()).collect())
}

/// The files that stages and raw files are read from, each once, in the order in which they are written.
pub(super) fn weight_files(authored: &Authored) -> Vec<&MappedFile> {
    let of_stages = authored.stages.iter().flat_map(|stage| stage.model.mapped_files());
    let of_raw_files = authored.raw_files.iter().flat_map(|raw| raw.tensor.bytes.files());
    let mut seen = HashSet::new();
    of_stages.chain(of_raw_files).filter(|file| seen.insert(&file.path)).collect()
}
