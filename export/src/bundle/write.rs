//! Export: checkpoint folder in, bundle folder out, whole or not at all.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{Bundle, BundleError, FORMAT, FileEntry, MANIFEST, Manifest, Origin, Stage};
use crate::{
    arch::{ARCHITECTURES, ArchError, Architecture, Authored, Authoring, RawFile, Source},
    files::{hex, read_limited},
    onnx::{Bytes, Tensor, WriteError, WriteOptions, write_model_with},
    quant,
    recipe::{Chosen, Recipe, RecipeError},
};

/// What a folder that is being filled is called, behind the bundle's name; random letters follow.
const PARTIAL: &str = ".partial-";
/// What the name of a bundle that is being replaced ends with.
const REPLACED: &str = ".replaced";

/// Copied files (tokenizer, templates) are read whole.
const MAX_COPIED_FILE: u64 = 256 << 20;

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
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Arch(#[from] ArchError),
    #[error("stage '{stage}': {source}")]
    Write { stage: String, source: WriteError },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {bytes} bytes; a copied file may have {MAX_COPIED_FILE}", path.display())]
    CopiedTooLarge { path: PathBuf, bytes: u64 },
    #[error("{}: {problem}", path.display())]
    Tensor { path: PathBuf, problem: String },
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
    pub out: &'a Path,
    pub recipe: Option<&'a str>,
    pub profile: &'a str,
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

/// Exports a checkpoint. The bundle appears under its name only when every file is complete and synced.
pub fn export(
    request: &ExportRequest<'_>,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<ExportSummary, ExportError> {
    let architecture = detect(request.source)?;
    let Chosen { recipe, origin } =
        Recipe::choose(request.recipe, request.source, architecture.default_recipe, request.set)?;
    progress(ExportEvent::Recipe { name: recipe.name.clone(), origin });
    check_family(&recipe, architecture)?;
    let profile = recipe.profile(request.profile)?;
    check_target(request)?;
    let authoring = Authoring {
        source: Source::Checkpoint(request.source),
        recipe: &recipe,
        profile,
        fault: request.fault,
    };
    let authored = (architecture.author)(&authoring)?;
    progress(ExportEvent::Total { bytes: authored_bytes(&authored) });

    let staging = staging_folder(request.out)?;
    let folder = staging.folder.path();
    progress(ExportEvent::Staging(folder.to_owned()));
    let mut writer = FolderWriter { folder, files: Vec::new(), progress };
    let stages = writer.stages(&authored)?;
    for raw in &authored.raw_files {
        writer.raw(raw)?;
    }
    for folder in &authored.copied_folders {
        writer.copy_folder(request.source, folder)?;
    }
    let manifest = Manifest {
        format: FORMAT,
        family: architecture.family.to_owned(),
        name: recipe.name.clone(),
        writer: concat!("viaduct ", env!("CARGO_PKG_VERSION")).to_owned(),
        source: origin_of(request.source, &recipe),
        profile: request.profile.to_owned(),
        parameters: authored.parameters,
        stages,
        files: writer.files,
        recipe,
    };
    write_manifest(folder, &manifest)?;
    // Whoever is told of success must be able to open the result.
    Bundle::open(folder)?;
    publish(staging.folder, request)?;
    let bytes = manifest.files.iter().map(|file| file.bytes).sum();
    Ok(ExportSummary { manifest, bytes })
}

pub(super) fn detect(source: &Path) -> Result<&'static Architecture, ExportError> {
    if !source.is_dir() {
        return Err(ExportError::NotAFolder { path: source.to_owned() });
    }
    ARCHITECTURES.iter().find(|a| (a.detects)(source)).ok_or_else(|| ExportError::UnknownFamily {
        path: source.to_owned(),
        families: ARCHITECTURES.iter().map(|a| a.family).collect::<Vec<_>>().join(", "),
    })
}

pub(super) fn check_family(recipe: &Recipe, architecture: &Architecture) -> Result<(), ExportError> {
    if recipe.family == architecture.family {
        return Ok(());
    }
    Err(ExportError::FamilyMismatch {
        recipe: recipe.name.clone(),
        family: recipe.family.clone(),
        found: architecture.family.to_owned(),
    })
}

fn check_target(request: &ExportRequest<'_>) -> Result<(), ExportError> {
    let path = request.out.to_owned();
    if request.out.file_name().is_none() {
        return Err(ExportError::NoName { path });
    }
    match fs::symlink_metadata(request.out) {
        Err(_) => Ok(()),
        Ok(_) if !request.force => Err(ExportError::Exists { path }),
        Ok(_) => replaceable(request, path),
    }
}

/// `--force` removes a folder, so the folder must be a bundle with nothing of the user's in it.
fn replaceable(request: &ExportRequest<'_>, path: PathBuf) -> Result<(), ExportError> {
    let io = |source| ExportError::Io { path: path.clone(), source };
    let Some(manifest) = manifest_of(&path) else { return Err(ExportError::NotReplaceable { path }) };
    let (source, out) = (request.source.canonicalize().map_err(io)?, path.canonicalize().map_err(io)?);
    if source.starts_with(&out) {
        return Err(ExportError::SourceInside { path });
    }
    let known: BTreeSet<PathBuf> =
        manifest.files.iter().map(|f| out.join(&f.path)).chain([out.join(MANIFEST)]).collect();
    match files_below(&out).map_err(io)?.into_iter().find(|file| !known.contains(file)) {
        Some(file) => Err(ExportError::Foreign { path, file }),
        None => Ok(()),
    }
}

fn manifest_of(folder: &Path) -> Option<Manifest> {
    serde_json::from_slice(&read_limited(&folder.join(MANIFEST), MAX_COPIED_FILE).ok()?).ok()
}

/// Everything below a folder that is not itself a folder.
fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => files.extend(files_below(&entry.path())?),
            false => files.push(entry.path()),
        }
    }
    Ok(files)
}

/// A folder that is being filled; it goes when it is dropped.
struct Staging {
    folder: tempfile::TempDir,
    /// On the folder, so that nobody takes it for abandoned.
    _lock: File,
}

/// A folder beside the target, so that the final rename stays on one file system.
fn staging_folder(out: &Path) -> Result<Staging, ExportError> {
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let io = |source| ExportError::Io { path: parent.to_owned(), source };
    if parent.exists() && !parent.is_dir() {
        return Err(io(io::ErrorKind::NotADirectory.into()));
    }
    fs::create_dir_all(parent).map_err(io)?;
    let name = out.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let prefix = format!(".{name}{PARTIAL}");
    remove_abandoned(parent, &prefix, out.exists()).map_err(io)?;
    let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent).map_err(io)?;
    let lock = File::open(folder.path()).map_err(io)?;
    lock.try_lock().map_err(|e| io(e.into()))?;
    Ok(Staging { folder, _lock: lock })
}

/// Removes what exports of that name left that were killed. A living one holds a lock on its folder, which the system
/// takes back when the process ends, however it ends. A bundle that was being replaced goes only if there is a new one.
fn remove_abandoned(parent: &Path, prefix: &str, replaced: bool) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let name = entry.file_name();
        let left = |name: &str| name.starts_with(prefix) && (replaced || !name.ends_with(REPLACED));
        let abandoned = || io::Result::Ok(File::open(entry.path())?.try_lock().is_ok());
        if name.to_str().is_some_and(left) && entry.file_type()?.is_dir() && abandoned()? {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Moves the finished folder to its name; an old bundle under that name goes only now.
fn publish(staging: tempfile::TempDir, request: &ExportRequest<'_>) -> Result<(), ExportError> {
    let io = |source| ExportError::Io { path: request.out.to_owned(), source };
    make_readable(staging.path()).map_err(io)?;
    if request.force && request.out.exists() {
        // Named after the staging folder, whose name nobody else has.
        let mut old = staging.path().as_os_str().to_owned();
        old.push(REPLACED);
        let old = PathBuf::from(old);
        fs::rename(request.out, &old).map_err(io)?;
        if let Err(e) = fs::rename(staging.path(), request.out) {
            // The old bundle goes back: better the old one than none.
            let _ = fs::rename(&old, request.out);
            return Err(io(e));
        }
        let _ = staging.keep();
        return fs::remove_dir_all(&old).map_err(io);
    }
    fs::rename(staging.path(), request.out).map_err(io)?;
    let _ = staging.keep();
    Ok(())
}

/// Temporary folders are private; a bundle is as readable as any new folder.
#[cfg(unix)]
fn make_readable(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_readable(_folder: &Path) -> io::Result<()> {
    Ok(())
}

fn origin_of(source: &Path, recipe: &Recipe) -> Origin {
    let name =
        fs::canonicalize(source).ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    Origin {
        checkpoint: name.unwrap_or_default(),
        repo: recipe.source.repo.clone(),
        revision: recipe.source.revision.clone(),
        license: recipe.source.license.clone(),
    }
}

fn authored_bytes(authored: &Authored) -> u64 {
    let raw = |raw: &RawFile| (raw.tensor.elements() * raw.dtype.size().unwrap_or(0)) as u64;
    let weights: u64 = authored.stages.iter().map(|stage| stage.model.constant_bytes()).sum();
    weights + authored.raw_files.iter().map(raw).sum::<u64>()
}

fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), ExportError> {
    let path = folder.join(MANIFEST);
    let io = |source| ExportError::Io { path: path.clone(), source };
    let mut text = serde_json::to_vec_pretty(manifest).map_err(|e| io(io::Error::other(e)))?;
    text.push(b'\n');
    let mut file = File::create(&path).map_err(io)?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(io)
}

/// A mapped matrix as matrices of a few megabytes; any other tensor as it is.
fn row_chunks(tensor: &Tensor) -> Vec<Tensor> {
    const CHUNK: usize = 16 << 20;
    let (Bytes::Mapped { file, range }, [rows, width]) = (&tensor.bytes, &tensor.shape[..]) else {
        return vec![tensor.clone()];
    };
    let row_bytes = range.len() / (*rows).max(1);
    let rows_per_chunk = (CHUNK / row_bytes.max(1)).max(1);
    let starts = (0..*rows).step_by(rows_per_chunk);
    starts
        .map(|start| {
            let count = rows_per_chunk.min(rows - start);
            let begin = range.start + start * row_bytes;
            let range = begin..begin + count * row_bytes;
            let bytes = Bytes::Mapped { file: file.clone(), range };
            Tensor { dtype: tensor.dtype, shape: vec![count, *width], bytes }
        })
        .collect()
}

/// Fills the staging folder and notes every file's size and hash.
struct FolderWriter<'a> {
    folder: &'a Path,
    files: Vec<FileEntry>,
    progress: &'a mut dyn FnMut(ExportEvent),
}

impl FolderWriter<'_> {
    fn stages(&mut self, authored: &Authored) -> Result<Vec<Stage>, ExportError> {
        let mut stages = Vec::new();
        for stage in &authored.stages {
            (self.progress)(ExportEvent::Stage { name: stage.name.clone() });
            let file = format!("{}.onnx", stage.name);
            let mut bytes = |n| (self.progress)(ExportEvent::Bytes(n));
            let summary = write_model_with(
                &stage.model,
                &self.folder.join(&file),
                &WriteOptions::default(),
                &mut bytes,
            )
            .map_err(|source| ExportError::Write { stage: stage.name.clone(), source })?;
            self.files.extend(summary.files.into_iter().map(|f| FileEntry {
                path: f.name,
                bytes: f.bytes,
                sha256: f.sha256,
            }));
            stages.push(Stage::describe(&stage.name, stage.component, &stage.model.graph, &file));
        }
        Ok(stages)
    }

    /// Converts and writes a matrix some rows at a time, so that a table of any size passes through little memory.
    fn raw(&mut self, raw: &RawFile) -> Result<(), ExportError> {
        (self.progress)(ExportEvent::Stage { name: raw.path.clone() });
        let path = self.folder.join(&raw.path);
        let io = |source| ExportError::Io { path: path.clone(), source };
        let problem =
            |e: &dyn std::fmt::Display| ExportError::Tensor { path: path.clone(), problem: e.to_string() };
        let mut file = File::create(&path).map_err(io)?;
        let mut hash = Sha256::new();
        let mut written = 0;
        for part in row_chunks(&raw.tensor) {
            let part = quant::cast(part, raw.dtype).map_err(|e| problem(&e))?;
            let bytes = part.bytes.read().map_err(|e| problem(&e))?;
            file.write_all(&bytes).map_err(io)?;
            hash.update(&bytes);
            written += bytes.len() as u64;
            (self.progress)(ExportEvent::Bytes(bytes.len() as u64));
            part.bytes.release();
        }
        file.sync_all().map_err(io)?;
        self.files.push(FileEntry { path: raw.path.clone(), bytes: written, sha256: hex(&hash.finalize()) });
        Ok(())
    }

    /// Copies the plain files of one folder of the checkpoint, in name order.
    fn copy_folder(&mut self, source: &Path, folder: &str) -> Result<(), ExportError> {
        let from = source.join(folder);
        let io = |source| ExportError::Io { path: from.clone(), source };
        let mut entries = fs::read_dir(&from).map_err(io)?.collect::<io::Result<Vec<_>>>().map_err(io)?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let path = entry.path();
            let io = |source| ExportError::Io { path: path.clone(), source };
            let metadata = fs::metadata(&path).map_err(io)?;
            let name = entry.file_name();
            // Streams beside a file, as some downloads have them, are no part of a tokenizer.
            if !metadata.is_file() || name.to_str().is_none_or(|name| name.contains(['\\', ':'])) {
                continue;
            }
            if metadata.len() > MAX_COPIED_FILE {
                return Err(ExportError::CopiedTooLarge { bytes: metadata.len(), path });
            }
            let content = fs::read(&path).map_err(io)?;
            self.write(&format!("{folder}/{}", name.to_string_lossy()), &content)?;
        }
        Ok(())
    }

    fn write(&mut self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        let path = self.folder.join(name);
        let io = |source| ExportError::Io { path: path.clone(), source };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io)?;
        }
        let mut file = File::create(&path).map_err(io)?;
        file.write_all(content).and_then(|()| file.sync_all()).map_err(io)?;
        let sha256 = hex(&Sha256::digest(content));
        self.files.push(FileEntry { path: name.to_owned(), bytes: content.len() as u64, sha256 });
        Ok(())
    }
}
