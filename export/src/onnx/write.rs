//! Writes models: the graph as a small protobuf file, the weights streamed into data files beside it.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    marker::PhantomData,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes as SharedBytes;
use prost::Message;
use thiserror::Error;

use super::{
    encode::{self, Store},
    external::check_location,
    graph::{Graph, Model},
    mapped_file::MappedFile,
    node::Attribute,
    proto::{StringStringEntryProto, TensorProto, tensor_proto::DataLocation},
    read::PROTOBUF_LIMIT,
    shards::{Output, Place, Shards, remove_abandoned},
    tensor::{Bytes, Compute, ComputeError, DType, Tensor},
    validate::GraphError,
};
use crate::staged_folder::folder_of;

/// How a model is laid out in files.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Initializers with fewer bytes stay in the graph file. The default, 1 KiB, keeps every shape and axis constant
    /// where shape inference can see it, and a graph of two thousand initializers below two megabytes.
    pub inline_below: usize,
    /// A data file ends before it would be larger. The default is below 2 GiB, where file systems, upload services
    /// and tools with 32-bit offsets still agree. A tensor that is larger alone gets a file of its own: runtimes
    /// read 64-bit offsets, and a split tensor could not be named.
    pub shard_bytes: u64,
}

impl Default for WriteOptions {
    fn default() -> WriteOptions {
        WriteOptions { inline_below: 1024, shard_bytes: PROTOBUF_LIMIT }
    }
}

/// One file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSummary {
    /// Name in the model's folder.
    pub name: String,
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// The files of a written model: data files in order, the graph file last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteSummary {
    pub files: Vec<FileSummary>,
}

/// Why a model could not be written. No file of it is left behind.
#[derive(Debug, Error)]
pub enum WriteError {
    #[error("cannot write {}: {source}", file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error("{} cannot name a model: {reason}", file.display())]
    BadName { file: PathBuf, reason: &'static str },
    #[error("the graph is not valid: {0}")]
    Graph(#[from] GraphError),
    #[error("{tensor} has {actual} bytes where {dtype:?} {shape:?} asks for {}", expected.map_or("an impossible number".to_owned(), |n| n.to_string()))]
    Length { tensor: String, dtype: DType, shape: Vec<usize>, expected: Option<usize>, actual: usize },
    #[error("{tensor} holds strings that are not encoded as string_data")]
    Strings { tensor: String },
    #[error("{tensor} lies at {range:?} of {}, beyond its end", file.display())]
    BeyondFile { tensor: String, file: PathBuf, range: Range<usize> },
    #[error("{tensor} cannot be read: {source}")]
    Read { tensor: String, source: ComputeError },
    #[error("the data file {} of {tensor} is absent", file.display())]
    Absent { tensor: String, file: PathBuf },
    #[error("{tensor} could not be computed: {source}")]
    Compute { tensor: String, source: ComputeError },
    #[error("{tensor} is part {part} of a computation that gave {parts} parts")]
    NoSuchPart { tensor: String, part: usize, parts: usize },
    #[error(
        "the graph takes {bytes} bytes without its external data; a protobuf message may have {PROTOBUF_LIMIT}"
    )]
    GraphTooLarge { bytes: u64 },
    #[error("{tensor} lies in {}, which is not in the model's folder {}", file.display(), folder.display())]
    OutsideFolder { tensor: String, file: PathBuf, folder: PathBuf },
}

/// Writes a model to `path`, and its larger initializers to `<stem>-00000.data`, `<stem>-00001.data`, ... beside it.
///
/// Weights are streamed: memory holds one computed group of tensors at a time, whatever the size of the model. The
/// files get their names when all are complete, the graph file last. Equal models give equal files. What killed processes
/// left in the folder of files that they were writing is removed.
pub fn write_model(model: &Model, path: &Path, options: &WriteOptions) -> Result<WriteSummary, WriteError> {
    write_model_with(model, path, options, &mut |_| ())
}

/// Like [`write_model`], and calls `progress` with the number of bytes written since the last call. Over a whole
/// model they add up to [`Model::constant_bytes`], if no two constants share their bytes.
pub fn write_model_with(
    model: &Model,
    path: &Path,
    options: &WriteOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<WriteSummary, WriteError> {
    write_model_beside(model, path, options, &mut Stored::default(), progress)
}

/// The larger initializers of models in one folder, and where they lie.
#[derive(Default)]
pub struct Stored<'m> {
    places: HashMap<Identity, StoredAt>,
    /// Identities are addresses in models that must not go while others are compared with them.
    models: PhantomData<&'m Model>,
}

/// A range of a data file.
#[derive(Clone, Debug)]
struct StoredAt {
    file: String,
    offset: u64,
}

/// Like [`write_model_with`], and refers to what models before it in the same folder have `stored` and it has, too.
pub fn write_model_beside<'m>(
    model: &'m Model,
    path: &Path,
    options: &WriteOptions,
    stored: &mut Stored<'m>,
    progress: &mut dyn FnMut(u64),
) -> Result<WriteSummary, WriteError> {
    model.graph.validate()?;
    let bad_name = |reason| WriteError::BadName { file: path.to_owned(), reason };
    let name =
        path.file_name().and_then(|name| name.to_str()).ok_or_else(|| bad_name("it is not UTF-8 text"))?;
    let stem = Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or(name);
    check_location(&Shards::name(stem, 0)).map_err(bad_name)?;
    let folder = folder_of(path);

    remove_abandoned(folder);
    let mut shards = Shards::new(folder, stem, options.shard_bytes);
    let mut placed = Placed { places: HashMap::new(), inline: HashMap::new() };
    let mut group = Group::default();
    for Job { tensor, label, initializer } in jobs(model) {
        check(tensor, &label)?;
        let external =
            initializer && tensor.bytes.len() >= options.inline_below && tensor.dtype != DType::STRING;
        if !external {
            placed.inline.insert(tensor, read(tensor, &label, &mut group)?);
            progress(tensor.bytes.len() as u64);
            continue;
        }
        let identity = identity(&tensor.bytes);
        if let Some(place) = identity.as_ref().and_then(|key| stored.places.get(key)) {
            placed.places.insert(tensor, place.clone());
            continue;
        }
        let Place { shard, offset } = shards.begin(tensor.bytes.len() as u64)?;
        stream(tensor, &label, &mut group, &mut |bytes| {
            shards.write(bytes)?;
            progress(bytes.len() as u64);
            Ok(())
        })?;
        let place = StoredAt { file: Shards::name(stem, shard), offset };
        stored.places.extend(identity.map(|key| (key, place.clone())));
        placed.places.insert(tensor, place);
    }
    let bytes = encoded(encode::model(model, &mut placed)?)?;
    let mut graph = Output::create(folder, name.to_owned())?;
    graph.write(&bytes)?;
    Ok(WriteSummary { files: shards.publish(graph)? })
}

/// The model as a protobuf message for a session in this process: tensors in mapped files stay there and are
/// referred to by offset, relative to [`Model::folder`] (which the session must be told); all others are in the
/// message, and so are mapped tensors below 1 KiB, which shape inference may want to see.
pub fn model_bytes(model: &Model) -> Result<Vec<u8>, WriteError> {
    model.graph.validate()?;
    let mut in_place = InPlace { folder: model.folder.as_deref(), group: Group::default() };
    encoded(encode::model(model, &mut in_place)?)
}

/// Bytes of all files that [`write_model_beside`] would write of models in one folder, to within the padding between two
/// tensors. Nothing is computed.
pub fn written_bytes<'m>(models: impl IntoIterator<Item = &'m Model>) -> Result<u64, WriteError> {
    let mut counted = Counted::default();
    let mut graphs = 0;
    for model in models {
        graphs += encode::model(model, &mut counted)?.encoded_len() as u64;
    }
    Ok(graphs + counted.inline + counted.data)
}

/// Bytes of all initializers and tensor attributes of models in one folder, those that have the same bytes once.
pub fn constant_bytes<'m>(models: impl IntoIterator<Item = &'m Model>) -> u64 {
    let mut seen = HashSet::new();
    let jobs = models.into_iter().flat_map(jobs);
    let new = jobs.filter(|job| identity(&job.tensor.bytes).is_none_or(|bytes| seen.insert(bytes)));
    new.map(|job| job.tensor.bytes.len() as u64).sum()
}

/// Data files beside `path` that a model written there would replace, or leave without one that refers to them.
pub fn data_files(path: &Path) -> Vec<PathBuf> {
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { return Vec::new() };
    let folder = folder_of(path);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named =
        entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| Shards::is_name(name, stem)));
    named.map(|entry| entry.path()).collect()
}

impl Model {
    /// Files that initializers and tensor attributes lie in or are computed from, in the order in which they are written.
    pub fn mapped_files(&self) -> impl Iterator<Item = &MappedFile> {
        jobs(self).into_iter().flat_map(|job| job.tensor.bytes.files())
    }

    /// Bytes of all initializers and tensor attributes, those of subgraphs included.
    pub fn constant_bytes(&self) -> u64 {
        jobs(self).iter().map(|job| job.tensor.bytes.len() as u64).sum()
    }
}

fn encoded(proto: super::proto::ModelProto) -> Result<Vec<u8>, WriteError> {
    let bytes = proto.encoded_len() as u64;
    if bytes > PROTOBUF_LIMIT {
        return Err(WriteError::GraphTooLarge { bytes });
    }
    Ok(proto.encode_to_vec())
}

/// One tensor to write.
struct Job<'a> {
    tensor: &'a Tensor,
    label: String,
    /// Tensor attributes stay in the graph file: not every runtime looks for their data elsewhere.
    initializer: bool,
}

/// All tensors in a fixed order, parts of one computation next to each other.
fn jobs(model: &Model) -> Vec<Job<'_>> {
    fn collect<'a>(graph: &'a Graph, jobs: &mut Vec<Job<'a>>) {
        jobs.extend(graph.values.iter().filter_map(|value| {
            let tensor = value.constant.as_ref()?;
            Some(Job { tensor, label: format!("initializer '{}'", value.name), initializer: true })
        }));
        for (_, node) in graph.nodes() {
            for (name, attribute) in &node.attributes {
                if let Attribute::Tensor(tensor) = attribute {
                    let label = format!("attribute '{name}' of node '{}' ({})", node.name, node.op_type);
                    jobs.push(Job { tensor, label, initializer: false });
                }
            }
            node.subgraphs().for_each(|graph| collect(graph, jobs));
        }
    }
    let mut jobs = Vec::new();
    collect(&model.graph, &mut jobs);
    let mut first = HashMap::new();
    let mut numbered: Vec<(usize, Job)> = jobs
        .into_iter()
        .enumerate()
        .map(|(i, job)| match &job.tensor.bytes {
            Bytes::Computed { source, .. } => (*first.entry(address(source)).or_insert(i), job),
            _ => (i, job),
        })
        .collect();
    numbered.sort_by_key(|job| job.0);
    numbered.into_iter().map(|job| job.1).collect()
}

fn address(source: &Arc<dyn Compute>) -> usize {
    Arc::as_ptr(source).cast::<()>() as usize
}

/// Where bytes come from, and how many.
type Identity = (usize, usize, usize);

/// Constants with the same identity have the same bytes and are written once. Weights that two nodes share often
/// come as two initializers over one range.
fn identity(bytes: &Bytes) -> Option<Identity> {
    match bytes {
        Bytes::Inline(_) | Bytes::Absent { .. } => None,
        Bytes::Mapped { file, range } => Some((Arc::as_ptr(file) as usize, range.start, range.len())),
        Bytes::Computed { source, part, len } => Some((address(source), *part, *len)),
    }
}

/// Checks before any reading: nothing is allocated for a length that is wrong or that no bytes stand behind.
fn check(tensor: &Tensor, label: &str) -> Result<(), WriteError> {
    if let Bytes::Absent { file, .. } = &tensor.bytes {
        return Err(absent(file, label));
    }
    let expected = tensor.dtype.byte_len(&tensor.shape);
    if tensor.dtype == DType::STRING || expected == Some(tensor.bytes.len()) {
        return Ok(());
    }
    Err(WriteError::Length {
        tensor: label.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        expected,
        actual: tensor.bytes.len(),
    })
}

fn absent(file: &Path, label: &str) -> WriteError {
    WriteError::Absent { tensor: label.to_owned(), file: file.to_owned() }
}

/// The results of the last computation.
#[derive(Default)]
struct Group {
    source: Option<Arc<dyn Compute>>,
    parts: Vec<Vec<u8>>,
}

impl Group {
    fn part(
        &mut self,
        source: &Arc<dyn Compute>,
        part: usize,
        tensor: &Tensor,
        label: &str,
    ) -> Result<&[u8], WriteError> {
        if self.source.as_ref().is_none_or(|last| address(last) != address(source)) {
            // The last results go before the next ones come.
            *self = Group::default();
            let computed = source.compute();
            self.parts =
                computed.map_err(|source| WriteError::Compute { tensor: label.to_owned(), source })?;
            source.release();
            self.source = Some(Arc::clone(source));
        }
        let parts = self.parts.len();
        let bytes = self.parts.get(part);
        let bytes = bytes.ok_or_else(|| WriteError::NoSuchPart { tensor: label.to_owned(), part, parts })?;
        if bytes.len() != tensor.bytes.len() {
            return Err(WriteError::Length {
                tensor: label.to_owned(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                expected: Some(tensor.bytes.len()),
                actual: bytes.len(),
            });
        }
        Ok(bytes)
    }
}

/// Hands a tensor's bytes on in pieces, and gives mapped pages back as it goes.
fn stream(
    tensor: &Tensor,
    label: &str,
    group: &mut Group,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    // Two threads meet after every piece, which on a busy machine takes its time; more would only take more memory.
    const PIECE: usize = 32 << 20;
    match &tensor.bytes {
        Bytes::Inline(bytes) => bytes.chunks(PIECE).try_for_each(sink),
        Bytes::Computed { source, part, .. } => {
            group.part(source, *part, tensor, label)?.chunks(PIECE).try_for_each(sink)
        }
        Bytes::Mapped { file, range } => {
            let whole =
                file.bytes().map_err(|source| WriteError::Read { tensor: label.to_owned(), source })?;
            let bytes = whole.get(range.clone()).ok_or_else(|| WriteError::BeyondFile {
                tensor: label.to_owned(),
                file: file.path.clone(),
                range: range.clone(),
            })?;
            let mut start = range.start;
            for piece in bytes.chunks(PIECE) {
                sink(piece)?;
                file.release(start..start + piece.len());
                start += piece.len();
            }
            Ok(())
        }
        Bytes::Absent { file, .. } => Err(absent(file, label)),
    }
}

fn read(tensor: &Tensor, label: &str, group: &mut Group) -> Result<SharedBytes, WriteError> {
    if let Bytes::Inline(bytes) = &tensor.bytes {
        return Ok(bytes.clone());
    }
    let mut all = Vec::with_capacity(tensor.bytes.len());
    stream(tensor, label, group, &mut |bytes| {
        all.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(all.into())
}

/// Stores tensors where [`write_model`] has put them.
struct Placed {
    places: HashMap<*const Tensor, StoredAt>,
    inline: HashMap<*const Tensor, SharedBytes>,
}

impl Store for Placed {
    fn store(&mut self, tensor: &Tensor, label: &str, proto: &mut TensorProto) -> Result<(), WriteError> {
        let key = std::ptr::from_ref(tensor);
        if let Some(StoredAt { file, offset }) = self.places.get(&key) {
            refer(proto, file.clone(), *offset, tensor.bytes.len());
            return Ok(());
        }
        let bytes = self.inline.remove(&key).unwrap_or_default();
        inline(proto, tensor, bytes, label)
    }
}

/// Counts what [`write_model`] would store.
#[derive(Default)]
struct Counted {
    inline: u64,
    data: u64,
    /// Of which the bytes are counted.
    seen: HashSet<Identity>,
}

impl Store for Counted {
    fn store(&mut self, tensor: &Tensor, label: &str, proto: &mut TensorProto) -> Result<(), WriteError> {
        check(tensor, label)?;
        let length = tensor.bytes.len();
        if length < WriteOptions::default().inline_below || tensor.dtype == DType::STRING {
            self.inline += length as u64;
            return Ok(());
        }
        refer(proto, Shards::name("transformer", 0), self.data, length);
        if identity(&tensor.bytes).is_none_or(|bytes| self.seen.insert(bytes)) {
            self.data = Shards::aligned(self.data, length as u64) + length as u64;
        }
        Ok(())
    }
}

/// Leaves mapped tensors where they are.
struct InPlace<'a> {
    folder: Option<&'a Path>,
    group: Group,
}

impl Store for InPlace<'_> {
    fn store(&mut self, tensor: &Tensor, label: &str, proto: &mut TensorProto) -> Result<(), WriteError> {
        check(tensor, label)?;
        match &tensor.bytes {
            Bytes::Mapped { file, range } if range.len() >= WriteOptions::default().inline_below => {
                let folder = self.folder.or(file.path.parent()).unwrap_or(Path::new(""));
                let inside = file.path.strip_prefix(folder).ok().and_then(|path| path.to_str());
                let location = inside.ok_or_else(|| WriteError::OutsideFolder {
                    tensor: label.to_owned(),
                    file: file.path.clone(),
                    folder: folder.to_owned(),
                })?;
                refer(proto, location.to_owned(), range.start as u64, range.len());
                Ok(())
            }
            _ => {
                let bytes = read(tensor, label, &mut self.group)?;
                inline(proto, tensor, bytes, label)
            }
        }
    }
}

fn inline(
    proto: &mut TensorProto,
    tensor: &Tensor,
    bytes: SharedBytes,
    label: &str,
) -> Result<(), WriteError> {
    if tensor.dtype == DType::STRING {
        let strings = TensorProto::decode(bytes);
        proto.string_data =
            strings.map_err(|_| WriteError::Strings { tensor: label.to_owned() })?.string_data;
    } else {
        proto.raw_data = Some(bytes);
    }
    Ok(())
}

fn refer(proto: &mut TensorProto, location: String, offset: u64, length: usize) {
    let entry =
        |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
    proto.external_data = vec![
        entry("location", location),
        entry("offset", offset.to_string()),
        entry("length", length.to_string()),
    ];
    proto.data_location = Some(DataLocation::External as i32);
}
