//! Opening a bundle: everything that its manifest states is checked before a stage is read.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Component, Path, PathBuf},
};

use super::{
    FORMAT, FileEntry, MANIFEST, Manifest, Stage,
    legacy::{self, Adapter, CONFIG, LegacyError},
};
use crate::{
    arch::flux2::imported::contract::{ContractError, Role, adapt},
    files::sha256,
    onnx::{Model, ReadError, read_graph, read_model},
    passes::{self, PassError},
};

/// Larger than any manifest with thousands of files.
pub(super) const MAX_MANIFEST_BYTES: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error("{}: no {MANIFEST}, so it is no bundle; make one with `viaduct export CHECKPOINT -o BUNDLE`", path.display())]
    NotABundle { path: PathBuf },
    #[error("{}: no such folder; a repository of a hub is written owner/name", path.display())]
    NoFolder { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {bytes} bytes; no manifest is larger than {MAX_MANIFEST_BYTES}", path.display())]
    ManifestTooLarge { path: PathBuf, bytes: u64 },
    #[error("{}: not a valid manifest: {source}", path.display())]
    Manifest { path: PathBuf, source: serde_json::Error },
    #[error("{}: format {found}, but this program reads format {FORMAT}; export the checkpoint again", path.display())]
    Format { path: PathBuf, found: u64 },
    #[error("{}: file name '{name}' leaves the bundle", path.display())]
    Escapes { path: PathBuf, name: String },
    #[error("{} is missing, but {MANIFEST} lists it; export again or copy the bundle again", path.display())]
    Missing { path: PathBuf },
    #[error("{}: {found} bytes, but {MANIFEST} states {expected}; the file is damaged, copy or export it again", path.display())]
    Size { path: PathBuf, expected: u64, found: u64 },
    #[error("{}: SHA-256 is {found}, but {MANIFEST} states {expected}; the file is damaged, copy or export it again (one of a hub: `viaduct pull --check owner/name`)", path.display())]
    Hash { path: PathBuf, expected: String, found: String },
    #[error("{}: the stage '{stage}' is not in this bundle", path.display())]
    NoStage { path: PathBuf, stage: String },
    #[error(transparent)]
    Graph(#[from] Box<ReadError>),
    #[error("{}: stage '{stage}' names graph '{graph}', which {MANIFEST} does not list among its files", path.display())]
    Unlisted { path: PathBuf, stage: String, graph: String },
    #[error(transparent)]
    Legacy(Box<LegacyError>),
    #[error("{}: {source}", path.display())]
    Contract { path: PathBuf, source: Box<ContractError> },
    #[error("stage '{stage}': {source}")]
    Rewrite { stage: String, source: Box<PassError> },
    #[error("{}: a bundle in this layout states no hashes, so there is nothing to compare", path.display())]
    NoHashes { path: PathBuf },
    #[error("{}: parameters of family '{family}': {source}", path.display())]
    Parameters { path: PathBuf, family: String, source: serde_json::Error },
}

/// An opened bundle whose files are all there with the stated sizes.
#[derive(Clone, Debug)]
pub struct Bundle {
    pub folder: PathBuf,
    pub manifest: Manifest,
    /// How the graphs of another layout are adapted, by stage; empty for a bundle that this program wrote.
    adapters: BTreeMap<String, Adapter>,
    /// Whether files that are no graphs may be missing.
    graphs_only: bool,
}

impl Bundle {
    /// Opens a bundle of this program, or one in flux2-vulkan-bridge's layout.
    pub fn open(folder: &Path) -> Result<Bundle, BundleError> {
        if Bundle::is_of_another_layout(folder) {
            let (manifest, adapters) = legacy::open(folder).map_err(|e| BundleError::Legacy(Box::new(e)))?;
            return Ok(Bundle { folder: folder.to_owned(), manifest, adapters, graphs_only: false });
        }
        Bundle::open_own(folder)
    }

    /// [`Bundle::open`], but of a bundle of this program only the graphs need be there: it can be planned with and cannot be
    /// run.
    pub fn open_graphs(folder: &Path) -> Result<Bundle, BundleError> {
        if Bundle::is_of_another_layout(folder) {
            return Bundle::open(folder);
        }
        let bundle = Bundle { graphs_only: true, ..Bundle::unchecked(folder)? };
        bundle.check_files()?;
        Ok(bundle)
    }

    fn is_of_another_layout(folder: &Path) -> bool {
        folder.join(MANIFEST).symlink_metadata().is_err() && folder.join(CONFIG).is_file()
    }

    /// Whether a folder looks like a bundle.
    pub fn is_at(folder: &Path) -> bool {
        [MANIFEST, CONFIG].iter().any(|file| folder.join(file).exists())
    }

    /// Whether a file is the one that describes the bundle around it.
    pub fn is_described_by(file: &Path) -> bool {
        file.file_name().is_some_and(|name| name == MANIFEST || name == CONFIG)
    }

    /// Reads the manifest and checks every listed file's place and size; contents only in [`Bundle::verify_hashes`].
    fn open_own(folder: &Path) -> Result<Bundle, BundleError> {
        let bundle = Bundle::unchecked(folder)?;
        bundle.check_files()?;
        Ok(bundle)
    }

    fn unchecked(folder: &Path) -> Result<Bundle, BundleError> {
        let (folder, manifest) = (folder.to_owned(), Manifest::read(folder)?);
        Ok(Bundle { folder, manifest, adapters: BTreeMap::new(), graphs_only: false })
    }

    pub fn stage(&self, name: &str) -> Result<&Stage, BundleError> {
        let found = self.manifest.stages.iter().find(|stage| stage.name == name);
        found.ok_or_else(|| BundleError::NoStage { path: self.folder.clone(), stage: name.to_owned() })
    }

    /// The place of a file that the manifest names.
    pub fn path(&self, name: &str) -> Result<PathBuf, BundleError> {
        let escapes = || BundleError::Escapes { path: self.folder.join(MANIFEST), name: name.to_owned() };
        Ok(self.folder.join(relative(name).ok_or_else(escapes)?))
    }

    /// A stage's graph, fit to run: what others exported is rewritten for WebGPU, once. Weights stay in the bundle's files.
    pub fn model(&self, stage: &str) -> Result<Model, BundleError> {
        let rewrites = |adapter: &&Adapter| matches!(adapter.role, Role::TextEncoder | Role::Transformer);
        let Some(adapter) = self.adapters.get(stage).filter(rewrites) else { return self.original(stage) };
        if let Some(model) = adapter.rewritten.get() {
            return Ok(model.clone());
        }
        let failed = |source| BundleError::Rewrite { stage: stage.to_owned(), source: Box::new(source) };
        let mut model = self.original(stage)?;
        let passes = passes::sequence("webgpu").map_err(failed)?;
        passes::apply(&mut model, &passes, &Default::default()).map_err(failed)?;
        Ok(adapter.rewritten.get_or_init(|| model).clone())
    }

    /// A stage's graph as it was exported, with the names that this program gives its inputs and outputs.
    pub fn original(&self, stage: &str) -> Result<Model, BundleError> {
        let path = self.path(&self.stage(stage)?.graph)?;
        let read = if self.graphs_only { read_graph } else { read_model };
        let mut model = read(&path).map_err(Box::new)?;
        if let Some(Adapter { role, names, .. }) = self.adapters.get(stage) {
            let broken = |e| BundleError::Contract { path, source: Box::new(e) };
            adapt(&mut model, *role, names).map_err(broken)?;
        }
        Ok(model)
    }

    /// The family's parameters, as `read` finds them in the manifest.
    pub fn parameters<T>(
        &self,
        read: impl FnOnce(&serde_json::Value) -> Result<T, serde_json::Error>,
    ) -> Result<T, BundleError> {
        read(&self.manifest.parameters).map_err(|source| BundleError::Parameters {
            path: self.folder.join(MANIFEST),
            family: self.manifest.family.clone(),
            source,
        })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Reads every file and compares its hash; `progress` is told the bytes read since it was last called.
    pub fn verify_hashes(&self, progress: &mut dyn FnMut(u64)) -> Result<(), BundleError> {
        if !self.states_hashes() {
            return Err(BundleError::NoHashes { path: self.folder.join(CONFIG) });
        }
        for file in &self.manifest.files {
            self.verify_hash(file, progress)?;
        }
        Ok(())
    }

    /// Whether the bundle says what its files' hashes are. This program's do.
    pub fn states_hashes(&self) -> bool {
        self.adapters.is_empty()
    }

    fn verify_hash(&self, entry: &FileEntry, progress: &mut dyn FnMut(u64)) -> Result<(), BundleError> {
        let path = self.path(&entry.path)?;
        let io = |source| BundleError::Io { path: path.clone(), source };
        let found = sha256(&path, progress).map_err(io)?;
        if found != entry.sha256 {
            return Err(BundleError::Hash { path, expected: entry.sha256.clone(), found });
        }
        Ok(())
    }

    fn check_files(&self) -> Result<(), BundleError> {
        for entry in &self.manifest.files {
            let path = self.path(&entry.path)?;
            let found = match fs::metadata(&path) {
                Ok(metadata) => metadata.len(),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    if self.graphs_only && !self.manifest.is_graph(&entry.path) {
                        continue;
                    }
                    return Err(BundleError::Missing { path });
                }
                Err(source) => return Err(BundleError::Io { path, source }),
            };
            if found != entry.bytes {
                return Err(BundleError::Size { path, expected: entry.bytes, found });
            }
        }
        for stage in &self.manifest.stages {
            if !self.manifest.files.iter().any(|file| file.path == stage.graph) {
                return Err(BundleError::Unlisted {
                    path: self.folder.join(MANIFEST),
                    stage: stage.name.clone(),
                    graph: stage.graph.clone(),
                });
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// Whether a file is the graph of a stage.
    pub fn is_graph(&self, file: &str) -> bool {
        self.stages.iter().any(|stage| stage.graph == file)
    }

    /// The manifest of the bundle in a folder, whatever else is there.
    pub fn read(folder: &Path) -> Result<Manifest, BundleError> {
        let path = folder.join(MANIFEST);
        let io = |source| BundleError::Io { path: path.clone(), source };
        let bytes = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(_) => return Err(BundleError::NotABundle { path: folder.to_owned() }),
            Err(_) if fs::symlink_metadata(folder).is_err() => {
                return Err(BundleError::NoFolder { path: folder.to_owned() });
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(BundleError::NotABundle { path: folder.to_owned() });
            }
            Err(e) => return Err(io(e)),
        };
        if bytes > MAX_MANIFEST_BYTES {
            return Err(BundleError::ManifestTooLarge { path, bytes });
        }
        let text = fs::read(&path).map_err(io)?;
        parse(&path, &text)
    }
}

/// A file name of a bundle as a path below its folder; none if it leads elsewhere.
pub(super) fn relative(name: &str) -> Option<&Path> {
    let path = Path::new(name);
    let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
    (!name.is_empty() && plain && !name.contains(['\\', '\0', ':'])).then_some(path)
}

/// The version is read first: another version's manifest need not look like this one's.
fn parse(path: &Path, text: &[u8]) -> Result<Manifest, BundleError> {
    #[derive(serde::Deserialize)]
    struct Version {
        format: u64,
    }
    let invalid = |source| BundleError::Manifest { path: path.to_owned(), source };
    let version: Version = serde_json::from_slice(text).map_err(invalid)?;
    if version.format != u64::from(FORMAT) {
        return Err(BundleError::Format { path: path.to_owned(), found: version.format });
    }
    serde_json::from_slice(text).map_err(invalid)
}
