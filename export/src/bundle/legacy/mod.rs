//! Bundles in flux2-vulkan-bridge's layout: `flux2-config.json`, graphs under names of its own, and a list of data files
//! beside each graph whose weights are outside it.
//!
//! The published config file was not available when this was written; the keys are those that the bundle's own engine reads.
//! A key that is absent has that engine's default, one that is not known is ignored. The files are anyone's: names must
//! not lead out of the folder, numbers are bounded, and each graph must keep its contract.

mod config;
mod names;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use self::{
    config::{Config, Entry, check_dimensions, model_name, parts, settings},
    names::{Names, Naming},
};
use super::{FORMAT, FileEntry, Manifest, Origin, Stage, import::profile_of, read::relative};
use crate::{
    arch::flux2::{
        imported::{
            contract::{ContractError, Role, adapt},
            describe,
        },
        tokenizer::{added_token, pad_id},
    },
    files::{open_regular, read_limited},
    onnx::{Bytes, Model, ReadError, read_model},
    recipe::{Recipe, RecipeError},
};

/// The layout's config file.
pub const CONFIG: &str = "flux2-config.json";
/// Larger than any config or list of data files.
const MAX_JSON_BYTES: u64 = 1 << 20;
/// Where the tokenizer's config names no padding.
const PAD_TOKEN: &str = "<|endoftext|>";
const FAMILY: &str = "flux2";
const RECIPE: &str = "flux2-klein";

#[derive(Debug, thiserror::Error)]
pub enum LegacyError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: {key}: {problem}", path.display())]
    Value { path: PathBuf, key: String, problem: String },
    #[error("{} is missing, but {key} in {} names it; copy the bundle again", path.display(), config.display())]
    Missing { path: PathBuf, key: String, config: PathBuf },
    #[error("{}: {source}", path.display())]
    Contract { path: PathBuf, source: Box<ContractError> },
    #[error("{}: the graphs do not make a model: {source}", path.display())]
    Incomplete { path: PathBuf, source: Box<ContractError> },
    #[error(transparent)]
    Graph(Box<ReadError>),
    #[error("{}: {problem}", path.display())]
    Tokenizer { path: PathBuf, problem: String },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
}

/// How a stage's graph becomes one of this program's.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    pub role: Role,
    /// This program's names of inputs and outputs, and the graph's own.
    pub names: Names,
    /// The graph as it is run, once it has been asked for.
    pub rewritten: OnceLock<Model>,
}

/// A bundle of this layout, described as one of ours: its manifest, and how its graphs are adapted, by stage.
pub(super) fn open(folder: &Path) -> Result<(Manifest, BTreeMap<String, Adapter>), LegacyError> {
    let path = folder.join(CONFIG);
    let config: Config = read_json(&path)?;
    let mut reader = Reader { folder, path: &path, files: BTreeMap::new() };
    reader.list(CONFIG, "the config")?;
    let mut graphs = Vec::new();
    let mut adapters = BTreeMap::new();
    for (key, role) in parts(&config, &path)? {
        let entry = &config.models[&key];
        let (mut model, graph) = reader.graph(&key, entry)?;
        let naming = Naming { config: &config, path: &path, key: &key, entry, graph: &model.graph };
        let names = naming.names(role)?;
        adapt(&mut model, role, &names)
            .map_err(|e| LegacyError::Contract { path: folder.join(&graph), source: Box::new(e) })?;
        adapters.insert(role.stage(), Adapter { role, names, rewritten: OnceLock::new() });
        graphs.push((role, model, graph));
    }
    reader.tokenizer()?;
    let settings = settings(&config, padding(&folder.join("tokenizer"))?, &path)?;
    let described: Vec<_> = graphs.iter().map(|(role, model, _)| (*role, model)).collect();
    let parameters = describe(&described, &settings)
        .map_err(|e| LegacyError::Incomplete { path: path.clone(), source: Box::new(e) })?;
    check_dimensions(&config, &graphs, &parameters, &path)?;
    let stage = |(role, model, file): &(Role, Model, String)| {
        Stage::describe(&role.stage(), role.component(), &model.graph, file)
    };
    let name = model_name(&config, folder);
    let manifest = Manifest {
        format: FORMAT,
        family: FAMILY.to_owned(),
        name: name.clone(),
        writer: "flux2-vulkan-bridge's layout".to_owned(),
        source: Origin::default(),
        profile: profile_of(graphs.iter().map(|(_, model, _)| model)).to_owned(),
        recipe: Recipe { name, ..Recipe::named(RECIPE, &[])?.of_imported() },
        calibration: None,
        parameters: serde_json::to_value(&parameters).unwrap_or_default(),
        stages: graphs.iter().map(stage).collect(),
        files: reader.files.into_iter().map(|(path, bytes)| FileEntry::without_hash(path, bytes)).collect(),
        verified: Vec::new(),
    };
    Ok((manifest, adapters))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, LegacyError> {
    let io = |source| LegacyError::Io { path: path.to_owned(), source };
    let text = read_limited(path, MAX_JSON_BYTES).map_err(io)?;
    serde_json::from_slice(&text).map_err(|source| LegacyError::Json { path: path.to_owned(), source })
}

fn value(path: &Path, key: &str, problem: impl Into<String>) -> LegacyError {
    LegacyError::Value { path: path.to_owned(), key: key.to_owned(), problem: problem.into() }
}

/// Reads files and notes their sizes.
struct Reader<'a> {
    folder: &'a Path,
    path: &'a Path,
    /// Path in the bundle, and bytes.
    files: BTreeMap<String, u64>,
}

impl Reader<'_> {
    /// Notes a file that `key` names; it must lie in the folder and be there.
    fn list(&mut self, name: &str, key: &str) -> Result<PathBuf, LegacyError> {
        let inside = relative(name).ok_or_else(|| {
            value(self.path, key, format!("file name '{}' leaves the bundle", name.escape_debug()))
        })?;
        let path = self.folder.join(inside);
        match open_regular(&path) {
            Ok((_, bytes)) => self.files.insert(name.to_owned(), bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let (key, config) = (key.to_owned(), self.path.to_owned());
                return Err(LegacyError::Missing { path, key, config });
            }
            Err(source) => return Err(LegacyError::Io { path, source }),
        };
        Ok(path)
    }

    /// A graph, all whose data files are listed, and its file's name.
    fn graph(&mut self, key: &str, entry: &Entry) -> Result<(Model, String), LegacyError> {
        let path = self.list(&entry.file, &format!("models.{key}.file"))?;
        let mut shards = Vec::new();
        if let Some(name) = &entry.manifest {
            let manifest = self.list(name, &format!("models.{key}.manifest"))?;
            let listed: Vec<String> = read_json(&manifest)?;
            for (index, shard) in listed.iter().enumerate() {
                // The list is what names the file, not the config.
                let mut reader = Reader { folder: self.folder, path: &manifest, files: BTreeMap::new() };
                shards.push(reader.list(shard, &format!("entry {index}"))?);
                self.files.append(&mut reader.files);
            }
        }
        let model = read_model(&path).map_err(|e| LegacyError::Graph(Box::new(e)))?;
        for file in data_files(&model) {
            if file != path && entry.manifest.is_some() && !shards.contains(&file) {
                let manifest = entry.manifest.as_deref().unwrap_or_default();
                let problem = format!("'{manifest}' does not list {}, which the graph reads", file.display());
                return Err(value(self.path, &format!("models.{key}.manifest"), problem));
            }
            if let Some(name) = file.strip_prefix(self.folder).ok().and_then(Path::to_str) {
                self.list(name, &format!("models.{key}.file"))?;
            }
        }
        Ok((model, entry.file.clone()))
    }

    fn tokenizer(&mut self) -> Result<(), LegacyError> {
        let folder = self.folder.join("tokenizer");
        let entries =
            fs::read_dir(&folder).map_err(|source| LegacyError::Io { path: folder.clone(), source })?;
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            if let (Ok((_, bytes)), Some(name)) = (open_regular(&path), name.to_str()) {
                self.files.insert(format!("tokenizer/{name}"), bytes);
            }
        }
        Ok(())
    }
}

/// Files that a model's tensors lie in, the graph's own among them.
fn data_files(model: &Model) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = model
        .graph
        .values()
        .filter_map(|(_, value)| match &value.constant.as_ref()?.bytes {
            Bytes::Mapped { file, .. } => Some(file.path.clone()),
            _ => None,
        })
        .collect();
    files.sort();
    files.dedup();
    files
}

fn padding(tokenizer: &Path) -> Result<i64, LegacyError> {
    let stated = pad_id(tokenizer);
    let found = stated.or_else(|e| added_token(tokenizer, PAD_TOKEN)?.ok_or(e));
    found.map_err(|e| LegacyError::Tokenizer { path: tokenizer.to_owned(), problem: e.to_string() })
}
