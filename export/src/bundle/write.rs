//! Export: checkpoint folder in, bundle folder out, whole or not at all.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    Bundle, BundleError, FORMAT, MANIFEST, Manifest, Origin,
    allocate::allocate,
    folder::{FolderWriter, MAX_COPIED_FILE, copied_files, write_manifest},
    needed::weight_files,
    target::Target,
};
use crate::{
    arch::{
        ARCHITECTURES, ArchError, Architecture, Authored, Authoring, RawFile, Source, StageGraph,
        flux2::imported::contract::{ContractError, Role},
    },
    files::sha256,
    onnx::{ComputeError, ReadError, WriteError, constant_bytes, written_bytes},
    passes::PassError,
    quant::{Fit, QuantError},
    recipe::{Chosen, Precision, Recipe, RecipeError},
    weights::{Arrivals, Calibration, CalibrationError, ignored_files},
};

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("{}: not a folder; give a checkpoint in diffusers layout (model_index.json, transformer/, ...)", path.display())]
    NotAFolder { path: PathBuf },
    #[error("{}: no supported model found there; supported families: {families}", path.display())]
    UnknownFamily { path: PathBuf, families: String },
    #[error("recipe '{recipe}' is for family '{family}', but the checkpoint is of family '{found}'")]
    FamilyMismatch { recipe: String, family: String, found: String },
    #[error("recipe '{recipe}' is for family '{family}', which this program does not know")]
    NoSuchFamily { recipe: String, family: String },
    #[error("{} exists; choose another -o or pass --force to replace it", path.display())]
    Exists { path: PathBuf },
    #[error("{} exists and is not a bundle (no {MANIFEST}); it is not replaced even with --force", path.display())]
    NotReplaceable { path: PathBuf },
    #[error("{}: the checkpoint lies inside the bundle that --force would replace", path.display())]
    SourceInside { path: PathBuf },
    #[error("{} holds {}, which is not part of the bundle; --force does not remove it", path.display(), file.display())]
    Foreign { path: PathBuf, file: PathBuf },
    #[error("{}: name a folder to make", path.display())]
    NoName { path: PathBuf },
    #[error("the exported bundle cannot be read: {0}")]
    Unreadable(#[from] BundleError),
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    #[error(
        "--target-size: profile '{profile}' has no weights that are fitted with feedback, so none gets more bits; {}",
        instead(known)
    )]
    NothingToRaise { profile: String, known: Vec<String> },
    #[error(
        "--target-size: which weights lose most is known of a calibration; make one with `viaduct calibrate` and pass --calibration FILE"
    )]
    TargetWithoutCalibration,
    #[error(
        "--calibration: profile '{profile}' fits no weights, so it has no use for statistics; leave it out, or {}",
        instead(known)
    )]
    CalibrationUnused { profile: String, known: Vec<String> },
    #[error(
        "--target-size: {target} bytes are too few: with profile '{profile}' the bundle takes at least {:.1}MB ({least} bytes); ask for that much, or let the profile take less with larger blocks or fewer rules (--set profiles.{profile}.block=64)",
        megabytes_above(*least)
    )]
    TargetTooSmall { target: u64, least: u64, profile: String },
    #[error("{weight}: {source}")]
    Sensitivity { weight: String, source: QuantError },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Arch(#[from] ArchError),
    #[error("stage '{stage}': {source}")]
    Write { stage: String, source: WriteError },
    #[error("the size of the bundle: {0}")]
    Measure(WriteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {bytes} bytes; a copied file may have {MAX_COPIED_FILE}", path.display())]
    CopiedTooLarge { path: PathBuf, bytes: u64 },
    #[error("{}: {source}", path.display())]
    Tensor { path: PathBuf, source: ComputeError },
    #[error(transparent)]
    Graph(Box<ReadError>),
    #[error("{}: {source}", path.display())]
    Contract { path: PathBuf, source: Box<ContractError> },
    #[error("the graphs do not make a model: {0}")]
    Incomplete(Box<ContractError>),
    #[error("{role}: {source}")]
    Rewrite { role: Role, source: Box<PassError> },
    #[error(
        "{}: its inputs ({inputs}) are those of no text encoder, transformer or image decoder; say which it is, for example --transformer {}",
        path.display(), path.display()
    )]
    UnknownPart { path: PathBuf, inputs: String },
    #[error("{} and {}: both are the {role}; a model has one", first.display(), second.display())]
    PartTwice { role: Role, first: PathBuf, second: PathBuf },
    #[error("no {role} among the graphs")]
    NoPart { role: Role },
}

/// What to do with a profile that fits nothing.
fn instead(known: &[String]) -> String {
    match known {
        [] => "no profile of this recipe does: --set profiles.NAME.fit=feedback makes one".to_owned(),
        _ => format!("take one of: {}", known.join(", ")),
    }
}

/// In tenths of a megabyte, none less than the bytes.
fn megabytes_above(bytes: u64) -> f64 {
    bytes.div_ceil(100_000) as f64 / 10.0
}

/// What happens during an export, for progress display.
#[derive(Clone, Debug)]
pub enum ExportEvent {
    /// The recipe was chosen; `origin` says why that one.
    Recipe {
        name: String,
        origin: String,
    },
    /// The folder that is being filled; it becomes the bundle at the end and is removed on an error.
    Staging(PathBuf),
    /// Something that the user should know.
    Note(String),
    /// Something is not as the user may expect it.
    Warning(String),
    /// All graphs are authored: this many bytes will be written.
    Total {
        bytes: u64,
    },
    Stage {
        name: String,
    },
    /// Bytes written since the last event.
    Bytes(u64),
}

pub struct ExportRequest<'a> {
    pub source: &'a Path,
    /// What brings the source's weight files that are not there yet. Only those are waited for that the bundle needs, each when
    /// it is read.
    pub arrivals: Option<Arc<dyn Arrivals>>,
    pub out: &'a Path,
    pub recipe: Option<&'a str>,
    pub profile: &'a str,
    /// Statistics of the inputs of the layers, as `viaduct calibrate` writes them.
    pub calibration: Option<&'a Path>,
    /// Bytes that the bundle may have: single weights get more bits than the profile gives them, as far as they fit.
    /// Needs a calibration.
    pub target_bytes: Option<u64>,
    /// Recipe values to change, by dotted key.
    pub set: &'a [(String, String)],
    /// Replace an existing bundle.
    pub force: bool,
    /// Plants a fault in the export, for tests of `verify`; see the architecture's `FAULTS`.
    #[doc(hidden)]
    pub fault: Option<&'a str>,
}

/// A finished export.
#[derive(Clone, Debug)]
pub struct ExportSummary {
    pub manifest: Manifest,
    pub bytes: u64,
}

/// What manifests name as their writer.
pub(super) const WRITER: &str = concat!("viaduct ", env!("CARGO_PKG_VERSION"));

/// Exports a checkpoint. The bundle appears under its name only when every file is complete and synced.
pub fn export(
    request: &ExportRequest<'_>,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<ExportSummary, ExportError> {
    let (architecture, Chosen { mut recipe, origin }) =
        resolved(request.source, request.recipe, request.set)?;
    progress(ExportEvent::Recipe { name: recipe.name.clone(), origin });
    if let Some(license) = recipe.weights_license() {
        progress(ExportEvent::Note(format!("licence of the weights: {license}")));
    }
    let mut profile = recipe.profile(request.profile)?.clone();
    check_fit(request, &recipe, &profile)?;
    let target = Target { out: request.out, force: request.force };
    target.check(&[request.source])?;
    // Hashed before the work, so that a file that cannot be read fails at once.
    let calibration_sha256 = request.calibration.map(sha256_of).transpose()?;
    let calibration = request.calibration.map(Calibration::open).transpose()?.map(Arc::new);
    let author = |profile: &Precision| {
        (architecture.author)(&Authoring {
            source: Source::Checkpoint(request.source),
            arrivals: request.arrivals.as_ref(),
            recipe: &recipe,
            profile,
            calibration: calibration.as_ref(),
            fault: request.fault,
        })
    };
    let mut authored = author(&profile)?;
    if let Some(arrivals) = &request.arrivals {
        let awaited = weight_files(&authored).into_iter().filter(|file| file.is_awaited());
        arrivals.expect(&awaited.map(|file| file.path.clone()).collect::<Vec<PathBuf>>());
    }
    for file in ignored_weights(request.source, request.arrivals.as_ref()) {
        progress(ExportEvent::Warning(format!("{}: ignored, no part of the checkpoint", file.display())));
    }
    if let (Some(target), Some(calibration)) = (request.target_bytes, &calibration) {
        let bytes = |profile: &Precision| {
            let mut recipe = recipe.clone();
            recipe.profiles.insert(request.profile.to_owned(), profile.clone());
            bundle_bytes(&author(profile)?, request.source, &recipe)
        };
        profile = allocate((request.profile, &profile), &authored.stages, calibration, target, bytes)?;
        authored = author(&profile)?;
    }
    recipe.profiles.insert(request.profile.to_owned(), profile);
    progress(ExportEvent::Total { bytes: authored_bytes(&authored) });

    let staging = target.staging_folder()?;
    progress(ExportEvent::Staging(staging.path().to_owned()));
    let mut writer = FolderWriter { folder: staging.path(), files: Vec::new(), progress };
    let stages = writer.stages(&authored.stages)?;
    let mut underflows = underflows(&authored.stages);
    for raw in &authored.raw_files {
        underflows.insert(&raw.path, writer.raw(raw)?);
    }
    if let Some(note) = underflow_note(&underflows) {
        (writer.progress)(ExportEvent::Note(note));
    }
    for folder in &authored.copied_folders {
        writer.copy_folder(request.source, folder)?;
    }
    let manifest = Manifest {
        format: FORMAT,
        family: architecture.family.to_owned(),
        name: recipe.name.clone(),
        writer: WRITER.to_owned(),
        source: origin_of(request.source, &recipe),
        profile: request.profile.to_owned(),
        calibration: calibration_sha256,
        parameters: authored.parameters,
        stages,
        files: writer.files,
        recipe,
        verified: Vec::new(),
    };
    write_manifest(staging.path(), &manifest)?;
    // Whoever is told of success must be able to open the result.
    Bundle::open(staging.path())?;
    target.publish(staging)?;
    let bytes = manifest.files.iter().map(|file| file.bytes).sum();
    Ok(ExportSummary { manifest, bytes })
}

/// Weight files in the components' folders that are not used. What is wrong with a folder that the model needs is an error
/// before.
fn ignored_weights(source: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Vec<PathBuf> {
    let entries = fs::read_dir(source).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders.iter().filter_map(|folder| ignored_files(folder, arrivals).ok()).flatten().collect()
}

/// Refuses a target size, or statistics, that the profile has no use for.
fn check_fit(request: &ExportRequest<'_>, recipe: &Recipe, profile: &Precision) -> Result<(), ExportError> {
    let names = |fits: &dyn Fn(Fit) -> bool| {
        let known = recipe.profiles.iter().filter(|(_, profile)| profile.fits().any(fits));
        known.map(|(name, _)| name.clone()).collect::<Vec<String>>()
    };
    let (feedback, fitted) = (|fit| fit == Fit::Feedback, |fit: Fit| !fit.is_nearest());
    let profile_name = request.profile.to_owned();
    if request.target_bytes.is_some() && !profile.fits().any(feedback) {
        return Err(ExportError::NothingToRaise { profile: profile_name, known: names(&feedback) });
    }
    if request.target_bytes.is_some() && request.calibration.is_none() {
        return Err(ExportError::TargetWithoutCalibration);
    }
    if request.calibration.is_some() && !profile.fits().any(fitted) {
        return Err(ExportError::CalibrationUnused { profile: profile_name, known: names(&fitted) });
    }
    Ok(())
}

/// What a checkpoint's folder holds, and the recipe by which it is exported.
pub(super) fn resolved(
    folder: &Path,
    recipe: Option<&str>,
    set: &[(String, String)],
) -> Result<(&'static Architecture, Chosen), ExportError> {
    let architecture = detect(folder)?;
    let default = (architecture.default_recipe)(folder);
    let chosen = Recipe::choose(recipe, folder, default, set)?;
    check_family(&chosen.recipe, architecture)?;
    Ok((architecture, chosen))
}

fn detect(source: &Path) -> Result<&'static Architecture, ExportError> {
    if !source.is_dir() {
        return Err(ExportError::NotAFolder { path: source.to_owned() });
    }
    ARCHITECTURES.iter().find(|a| (a.detects)(source)).ok_or_else(|| ExportError::UnknownFamily {
        path: source.to_owned(),
        families: ARCHITECTURES.iter().map(|a| a.family).collect::<Vec<_>>().join(", "),
    })
}

fn check_family(recipe: &Recipe, architecture: &Architecture) -> Result<(), ExportError> {
    if recipe.family == architecture.family {
        return Ok(());
    }
    Err(ExportError::FamilyMismatch {
        recipe: recipe.name.clone(),
        family: recipe.family.clone(),
        found: architecture.family.to_owned(),
    })
}

fn origin_of(source: &Path, recipe: &Recipe) -> Origin {
    let name =
        fs::canonicalize(source).ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    Origin {
        checkpoint: name.unwrap_or_default(),
        repo: recipe.source.repo.clone(),
        revision: recipe.source.revision.clone(),
        license: recipe.weights_license().map(str::to_owned),
    }
}

/// By weight, how many of its values were rounded when it was written because they are too small for f16.
fn underflows(stages: &[StageGraph]) -> BTreeMap<&str, u64> {
    let values = stages.iter().flat_map(|stage| stage.model.graph.values());
    let constants = values.filter_map(|(_, value)| Some((&value.name[..], value.constant.as_ref()?)));
    // Stages may share a weight.
    constants.map(|(name, tensor)| (name, tensor.bytes.underflows())).collect()
}

fn underflow_note(underflows: &BTreeMap<&str, u64>) -> Option<String> {
    let (name, most) = underflows.iter().max_by_key(|(_, count)| **count).filter(|(_, count)| **count > 0)?;
    let all: u64 = underflows.values().sum();
    let tensors = underflows.values().filter(|count| **count > 0).count();
    Some(format!(
        "{all} weights are so tiny (below 2^-17) that f16 keeps fewer of their digits than bf16 had; this is usually harmless. They \
         are in {tensors} tensors, most ({most}) in {name}"
    ))
}

fn sha256_of(path: &Path) -> Result<String, ExportError> {
    sha256(path, &mut |_| ()).map_err(|source| ExportError::Io { path: path.to_owned(), source })
}

/// Bytes that the bundle will take, with some to spare for its manifest.
fn bundle_bytes(authored: &Authored, source: &Path, recipe: &Recipe) -> Result<u64, ExportError> {
    /// Of the manifest beside its recipe.
    const MANIFEST_BYTES: u64 = 16 << 10;
    const STAGE_BYTES: u64 = 2 << 10;
    let stages =
        written_bytes(authored.stages.iter().map(|stage| &stage.model)).map_err(ExportError::Measure)?;
    let raw: u64 = authored.raw_files.iter().map(raw_bytes).sum();
    let copied = authored.copied_folders.iter().map(|folder| {
        let files = copied_files(source, folder)?;
        Ok(files.iter().map(|file| file.bytes).sum::<u64>())
    });
    let recipe = serde_json::to_vec_pretty(&[recipe]).map_or(0, |text| text.len() as u64);
    let manifest = MANIFEST_BYTES + STAGE_BYTES * authored.stages.len() as u64 + recipe;
    Ok(stages + raw + copied.sum::<Result<u64, ExportError>>()? + manifest)
}

fn raw_bytes(raw: &RawFile) -> u64 {
    (raw.tensor.elements() * raw.dtype.size().unwrap_or(0)) as u64
}

fn authored_bytes(authored: &Authored) -> u64 {
    let weights = constant_bytes(authored.stages.iter().map(|stage| &stage.model));
    weights + authored.raw_files.iter().map(raw_bytes).sum::<u64>()
}
