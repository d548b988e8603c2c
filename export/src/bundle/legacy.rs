//! Bundles in flux2-vulkan-bridge's layout: `flux2-config.json`, graphs under names of its own, and a list of data files
//! beside each graph whose weights are outside it.
//!
//! The published config file was not available when this was written; the keys are those that the bundle's own engine reads.
//! A key that is absent has that engine's default, one that is not known is ignored. The files are anyone's: names must
//! not lead out of the folder, numbers are bounded, and each graph must keep its contract.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::{FORMAT, FileEntry, Manifest, Origin, Stage, import::profile_of, read::relative};
use crate::{
    arch::flux2::{
        imported::{
            Settings,
            contract::{ATTENDED, ContractError, MIDDLE, PICTURE, Role, adapt},
            describe,
        },
        tokenizer::{added_token, pad_id},
    },
    files::{open_regular, read_limited},
    onnx::{Bytes, Dim, Graph, Model, ReadError, ValueType, read_model},
    recipe::{Recipe, RecipeError},
};

/// The layout's config file.
pub const CONFIG: &str = "flux2-config.json";
/// Larger than any config or list of data files.
const MAX_JSON_BYTES: u64 = 1 << 20;
/// More stages has no decoder.
const MAX_STAGES: usize = 64;
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
    Contract { path: PathBuf, source: ContractError },
    #[error("{}: the graphs do not make a model: {source}", path.display())]
    Incomplete { path: PathBuf, source: ContractError },
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
    pub names: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Config {
    text_seq_len: Option<usize>,
    context_dim: Option<usize>,
    latent_channels: Option<usize>,
    latent_downsample: Option<usize>,
    num_steps: Option<usize>,
    default_width: Option<usize>,
    default_height: Option<usize>,
    context_clip: Option<f32>,
    zero_padded_context: Option<bool>,
    model_name: Option<String>,
    model_variant: Option<String>,
    #[serde(default)]
    vae_decoder_post_stage_keys: Vec<String>,
    models: BTreeMap<String, Entry>,
}

/// One graph.
#[derive(Deserialize)]
struct Entry {
    file: String,
    manifest: Option<String>,
    #[serde(default)]
    inputs: Value,
    #[serde(default)]
    outputs: Value,
    chunk_size: Option<usize>,
    head_dim: Option<usize>,
    residual_input: Option<String>,
    attn_input: Option<String>,
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
        let names = names(role, &key, entry, &config, &model.graph, &path)?;
        adapt(&mut model, role, &names)
            .map_err(|source| LegacyError::Contract { path: folder.join(&graph), source })?;
        adapters.insert(role.stage(), Adapter { role, names });
        graphs.push((role, model, graph));
    }
    reader.tokenizer()?;
    let settings = settings(&config, folder, &path)?;
    let described: Vec<_> = graphs.iter().map(|(role, model, _)| (*role, model)).collect();
    let parameters = describe(&described, &settings)
        .map_err(|source| LegacyError::Incomplete { path: path.clone(), source })?;
    check_dimensions(&config, &graphs, &path)?;
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
        parameters: serde_json::to_value(&parameters).unwrap_or_default(),
        stages: graphs.iter().map(stage).collect(),
        files: reader.files.into_iter().map(|(path, bytes)| FileEntry::without_hash(path, bytes)).collect(),
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

/// Keys of the graphs in the order in which they run. A decoder in stages is taken before one that is whole.
fn parts(config: &Config, path: &Path) -> Result<Vec<(String, Role)>, LegacyError> {
    let mut parts: Vec<(String, Role)> =
        [("text_encoder", Role::TextEncoder), ("transformer", Role::Transformer)]
            .map(|(key, role)| (key.to_owned(), role))
            .into();
    if config.models.contains_key("vae_decoder_pre") {
        parts.push(("vae_decoder_pre".to_owned(), Role::DecoderStart));
        parts.push(("vae_decoder_attn_chunk".to_owned(), Role::Attention));
        let keys = match config.vae_decoder_post_stage_keys.is_empty() {
            true => vec!["vae_decoder_post".to_owned()],
            false => config.vae_decoder_post_stage_keys.clone(),
        };
        if keys.len() > MAX_STAGES {
            let problem = format!("{} stages; at most {MAX_STAGES} are read", keys.len());
            return Err(value(path, "vae_decoder_post_stage_keys", problem));
        }
        let count = keys.len();
        let role = |index| Role::DecoderEnd { index, last: index + 1 == count };
        parts.extend(keys.into_iter().enumerate().map(|(index, key)| (key, role(index))));
    } else {
        parts.push(("vae_decoder".to_owned(), Role::Decoder));
    }
    match parts.iter().find(|(key, _)| !config.models.contains_key(key)) {
        Some((key, _)) => Err(value(path, &format!("models.{key}"), "there is no such entry")),
        None => Ok(parts),
    }
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

/// Names of inputs or outputs as the config has them: a list of names or of objects with a `name`, or an object by name.
fn listed(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(items) => {
            items.iter().filter_map(|item| item.as_str().or_else(|| item.get("name")?.as_str())).collect()
        }
        // An object has no order of its own, but names are all that is asked for then.
        Value::Object(entries) => entries.keys().map(String::as_str).collect(),
        _ => Vec::new(),
    }
}

/// The graph's own names of what no table of aliases knows, by this program's.
fn names(
    role: Role,
    key: &str,
    entry: &Entry,
    config: &Config,
    graph: &Graph,
    path: &Path,
) -> Result<Vec<(String, String)>, LegacyError> {
    let pair = |ours: &str, theirs: &str| (ours.to_owned(), theirs.to_owned());
    let input_names: Vec<&str> = graph
        .inputs
        .iter()
        .filter(|id| graph[**id].constant.is_none())
        .map(|id| graph[*id].name.as_str())
        .collect();
    let output_names: Vec<&str> = graph.outputs.iter().map(|id| graph[*id].name.as_str()).collect();
    match role {
        Role::TextEncoder | Role::Transformer | Role::Decoder => Ok(Vec::new()),
        Role::DecoderStart => start_names(key, entry, config, graph, path),
        Role::Attention => {
            let ours = ["q_chunk", "kt", "v"];
            if ours.iter().all(|name| input_names.contains(name)) {
                return Ok(Vec::new());
            }
            Ok(ours.iter().zip(listed(&entry.inputs)).map(|(ours, theirs)| pair(ours, theirs)).collect())
        }
        Role::DecoderEnd { index, last } => {
            let key = |name: &str| format!("models.{key}.{name}");
            let [output] = output_names[..] else {
                return Err(value(
                    path,
                    &key("outputs"),
                    format!("the graph has {} outputs, not one", output_names.len()),
                ));
            };
            let output_name = if last { PICTURE.to_owned() } else { role.stage() };
            let mut names = vec![(output_name, output.to_owned())];
            if index > 0 {
                let [input] = input_names[..] else {
                    return Err(value(
                        path,
                        &key("inputs"),
                        format!("the graph has {} inputs, not one", input_names.len()),
                    ));
                };
                names.push((Role::DecoderEnd { index: index - 1, last: false }.stage(), input.to_owned()));
                return Ok(names);
            }
            let residual = residual_input(entry, &input_names).ok_or_else(|| {
                value(path, &key("residual_input"), "it does not follow from the graph's inputs")
            })?;
            let attended = entry
                .attn_input
                .as_deref()
                .or_else(|| input_names.iter().copied().find(|name| *name != residual));
            let attended =
                attended.ok_or_else(|| value(path, &key("attn_input"), "the graph has one input alone"))?;
            names.push(pair(MIDDLE, residual));
            names.push(pair(ATTENDED, attended));
            Ok(names)
        }
    }
}

/// The input of the first stage after the attention that takes the state: what the config says, else the one that is not
/// the attention's.
fn residual_input<'a>(entry: &'a Entry, inputs: &[&'a str]) -> Option<&'a str> {
    if let Some(name) = &entry.residual_input {
        return Some(name);
    }
    let attended = entry.attn_input.as_deref();
    match inputs.iter().filter(|name| Some(**name) != attended).collect::<Vec<_>>()[..] {
        [only] => Some(only),
        // The exporter's order: the state first.
        [first, _] if attended.is_none() => Some(first),
        _ => None,
    }
}

/// Outputs of the first stage: the state by the name that the next stage takes it under, then q, kt and v in the order in
/// which they are listed; kt shows by its shape.
fn start_names(
    key: &str,
    entry: &Entry,
    config: &Config,
    graph: &Graph,
    path: &Path,
) -> Result<Vec<(String, String)>, LegacyError> {
    let key = format!("models.{key}.outputs");
    let own: Vec<&str> = graph.outputs.iter().map(|id| graph[*id].name.as_str()).collect();
    let named = listed(&entry.outputs);
    let order: Vec<&str> =
        if named.len() == own.len() && entry.outputs.is_array() { named } else { own.clone() };
    if order.len() != 4 || order.iter().any(|name| !own.contains(name)) {
        let problem = format!("expected state, q, kt and v, but the graph has {}", own.join(", "));
        return Err(value(path, &key, problem));
    }
    let post = config.vae_decoder_post_stage_keys.first().map_or("vae_decoder_post", String::as_str);
    let wanted = config.models.get(post).and_then(|post| post.residual_input.as_deref());
    let state = wanted.filter(|name| order.contains(name)).unwrap_or(order[0]);
    let rest: Vec<&str> = order.iter().copied().filter(|name| *name != state).collect();
    let chunk = config.models.get("vae_decoder_attn_chunk");
    let d = chunk.and_then(|chunk| chunk.head_dim);
    let columns: Vec<usize> = (0..rest.len()).filter(|i| is_columns(graph, rest[*i], d)).collect();
    let kt = match columns[..] {
        [only] => only,
        [] => 1,
        _ => return Err(value(path, &key, format!("which of {} is kt does not show", rest.join(", ")))),
    };
    let others: Vec<&str> = (0..rest.len()).filter(|i| *i != kt).map(|i| rest[i]).collect();
    let pairs = [(MIDDLE, state), ("q", others[0]), ("kt", rest[kt]), ("v", others[1])];
    Ok(pairs.map(|(ours, theirs)| (ours.to_owned(), theirs.to_owned())).into())
}

/// Whether a value is [.., d, rows] and not [.., rows, d], as far as its recorded shape tells.
fn is_columns(graph: &Graph, name: &str, d: Option<usize>) -> bool {
    let ty = graph.find(name).and_then(|id| graph[id].ty.as_ref());
    let Some(ValueType::Tensor { shape: Some(shape), .. }) = ty else { return false };
    let [.., a, b] = &shape[..] else { return false };
    let fixed = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size),
        _ => None,
    };
    match (fixed(a), fixed(b), d) {
        (Some(a), b, Some(d)) => a == d && b != Some(d),
        (Some(_), None, None) => true,
        _ => false,
    }
}

fn settings(config: &Config, folder: &Path, path: &Path) -> Result<Settings, LegacyError> {
    let chunk = config.models.get("vae_decoder_attn_chunk").and_then(|chunk| chunk.chunk_size);
    let settings = Settings {
        text_length: config.text_seq_len.unwrap_or(512),
        pad_id: padding(&folder.join("tokenizer"))?,
        clip: config.context_clip.unwrap_or(0.0),
        zero_padding: config.zero_padded_context.unwrap_or(false),
        attention_rows: chunk.unwrap_or(1024),
        default_size: [config.default_width.unwrap_or(256), config.default_height.unwrap_or(256)],
        pixels_per_token: config.latent_downsample.unwrap_or(16),
        steps: config.num_steps.unwrap_or(4),
    };
    let [width, height] = settings.default_size;
    for (key, number, most) in [
        ("text_seq_len", settings.text_length, 1 << 13),
        ("models.vae_decoder_attn_chunk.chunk_size", settings.attention_rows, 1 << 24),
        ("default_width", width, 1 << 14),
        ("default_height", height, 1 << 14),
        ("latent_downsample", settings.pixels_per_token, 1 << 10),
        ("num_steps", settings.steps, 1000),
    ] {
        if number == 0 || number > most {
            return Err(value(path, key, format!("{number}; expected 1 to {most}")));
        }
    }
    if !settings.clip.is_finite() || settings.clip < 0.0 {
        return Err(value(path, "context_clip", format!("{}; expected a number from 0", settings.clip)));
    }
    Ok(settings)
}

/// What the config says of the graphs must be so.
fn check_dimensions(
    config: &Config,
    graphs: &[(Role, Model, String)],
    path: &Path,
) -> Result<(), LegacyError> {
    use crate::arch::flux2::imported::contract::fixed_size;
    let of = |role: Role, name: &str, axis| {
        let (_, model, _) = graphs.iter().find(|(of, ..)| *of == role)?;
        fixed_size(&model.graph, name, axis)
    };
    let chunk = config.models.get("vae_decoder_attn_chunk").and_then(|chunk| chunk.chunk_size);
    let rank = |name: &str| {
        let (_, model, _) = graphs.iter().find(|(of, ..)| *of == Role::Attention)?;
        match &model.graph[model.graph.find(name)?].ty {
            Some(ValueType::Tensor { shape: Some(shape), .. }) => shape.len().checked_sub(2),
            _ => None,
        }
    };
    let rows = rank("q_chunk").and_then(|axis| of(Role::Attention, "q_chunk", axis));
    for (key, stated, found) in [
        ("text_seq_len", config.text_seq_len, of(Role::TextEncoder, "input_ids", 1)),
        ("context_dim", config.context_dim, of(Role::Transformer, "prompt_embeds", 2)),
        ("latent_channels", config.latent_channels, of(Role::Transformer, "latents", 2)),
        ("models.vae_decoder_attn_chunk.chunk_size", chunk, rows),
    ] {
        if let (Some(stated), Some(found)) = (stated, found)
            && stated != found
        {
            return Err(value(path, key, format!("{stated}, but the graph has {found}")));
        }
    }
    Ok(())
}

fn padding(tokenizer: &Path) -> Result<i64, LegacyError> {
    let stated = pad_id(tokenizer);
    let found = stated.or_else(|e| added_token(tokenizer, PAD_TOKEN)?.ok_or(e));
    found.map_err(|e| LegacyError::Tokenizer { path: tokenizer.to_owned(), problem: e.to_string() })
}

/// `name variant`, as far as the config has them; else the folder's name.
fn model_name(config: &Config, folder: &Path) -> String {
    const LONGEST: usize = 100;
    let parts: Vec<&str> =
        [&config.model_name, &config.model_variant].into_iter().flatten().map(String::as_str).collect();
    let name: String = parts.join(" ").chars().filter(|c| !c.is_control()).take(LONGEST).collect();
    match name.trim() {
        "" => folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        name => name.to_owned(),
    }
}
