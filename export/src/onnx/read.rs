//! Reads `.onnx` files: mapped, without copying weights, and refusing whatever is not as it should be.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes as SharedBytes;
use prost::Message;
use thiserror::Error;

use super::{
    decode::Decoder, external::Folder, graph::Model, mapped_file::MappedFile, proto::ModelProto,
    validate::GraphError,
};

/// Protocol buffers end at 2 GiB (exactly: at the largest 32-bit signed number), whoever writes them.
pub(super) const PROTOBUF_LIMIT: u64 = i32::MAX as u64;

/// Why a model could not be read.
#[derive(Debug, Error)]
pub enum ReadError {
    #[error("cannot read {}: {source}", file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error("{} has {bytes} bytes; a protobuf file may have {PROTOBUF_LIMIT} (the weights belong into external data)", file.display())]
    FileTooLarge { file: PathBuf, bytes: u64 },
    #[error("{} is not an ONNX model, or is cut short: {source}", file.display())]
    Protobuf { file: PathBuf, source: prost::DecodeError },
    #[error("{} holds no graph", file.display())]
    NoGraph { file: PathBuf },
    #[error("{}: {tensor}: {problem}", file.display())]
    Tensor { file: PathBuf, tensor: String, problem: TensorProblem },
    #[error("{}: {source}", file.display())]
    Graph { file: PathBuf, source: GraphError },
}

/// What is wrong with one tensor.
#[derive(Debug, Error)]
pub enum TensorProblem {
    #[error("dimension {axis} is {dim}")]
    BadDim { axis: usize, dim: i64 },
    #[error("the size of shape {shape:?} does not fit into 64 bits")]
    TooLarge { shape: Vec<usize> },
    #[error("element type {number} is unknown")]
    UnknownType { number: i32 },
    #[error("{field} has {actual} bytes or elements where type and shape ask for {expected}")]
    Length { field: &'static str, expected: usize, actual: u64 },
    #[error("element {index} of {field} is {value}, which the element type cannot hold")]
    Value { field: &'static str, index: usize, value: i128 },
    #[error("its values are stored twice: {fields}")]
    SeveralFields { fields: String },
    #[error("{field} cannot hold element type {number}")]
    WrongField { field: &'static str, number: i32 },
    #[error("it is one segment of a tensor; segments are not supported")]
    Segment,
    #[error("data_location is {number}, neither DEFAULT nor EXTERNAL")]
    DataLocation { number: i32 },
    #[error("external data without a location")]
    NoLocation,
    #[error("external data has two entries '{key}'")]
    KeyTwice { key: &'static str },
    #[error("external data: {key} '{text}' is not a non-negative 64-bit number")]
    NotANumber { key: &'static str, text: String },
    #[error("external location {location:?} is refused: {reason}")]
    Location { location: String, reason: &'static str },
    #[error("its data is in {location:?}, but the model was read without a folder")]
    NoFolder { location: String },
    #[error("cannot read its data file {}: {source}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("its data, {length} bytes at offset {offset}, reaches beyond the end of {} ({file_len} bytes)", path.display())]
    BeyondFile { path: PathBuf, offset: u64, length: usize, file_len: usize },
    #[error("external data is not supported in sparse tensors, functions and training info")]
    ExternalInCarried,
}

/// Reads a model and maps its external data, which must lie in or below the model's folder.
///
/// Neither the model file nor its data files may be truncated while the model is in use.
pub fn read_model(path: &Path) -> Result<Model, ReadError> {
    read_file(path, Folder::new)
}

/// Reads a model like [`read_model`], but lets it name data files that do not exist: the tensors in them have type,
/// shape and length, and their bytes are [`super::Bytes::Absent`]. Everything else about them is checked as ever.
///
/// For questions that the graph alone answers, such as the shapes of its values.
pub fn read_graph(path: &Path) -> Result<Model, ReadError> {
    read_file(path, Folder::of_graph)
}

fn read_file(path: &Path, data: impl Fn(&Path) -> Folder) -> Result<Model, ReadError> {
    let io_error = |source| ReadError::Io { file: path.to_owned(), source };
    let name = path.file_name().ok_or_else(|| io_error(io::ErrorKind::InvalidInput.into()))?;
    // The folder of the path as given, not of what it links to: see `external::check_location`.
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let whole = Arc::new(MappedFile::open(&folder.join(name)).map_err(io_error)?);
    let bytes = SharedBytes::from_owner(Owner(Arc::clone(&whole)));
    read(bytes, Decoder { file: path, whole: Some(whole), folder: Some(data(folder)) })
}

/// Reads a model from memory. Without a folder, external data is refused.
pub fn read_model_bytes(bytes: SharedBytes, folder: Option<&Path>) -> Result<Model, ReadError> {
    read(bytes, Decoder { file: Path::new("model in memory"), whole: None, folder: folder.map(Folder::new) })
}

/// Lets slices of the message share the map with the tensors that refer to it by range.
struct Owner(Arc<MappedFile>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.mapped().unwrap_or_default()
    }
}

fn read(bytes: SharedBytes, decoder: Decoder) -> Result<Model, ReadError> {
    let file = decoder.file;
    if bytes.len() as u64 > PROTOBUF_LIMIT {
        return Err(ReadError::FileTooLarge { file: file.to_owned(), bytes: bytes.len() as u64 });
    }
    // The protobuf decoder checks every length against what is left and refuses more than 100 nested messages.
    let proto =
        ModelProto::decode(bytes).map_err(|source| ReadError::Protobuf { file: file.to_owned(), source })?;
    let model = decoder.model(proto)?;
    model.graph.validate().map_err(|source| ReadError::Graph { file: file.to_owned(), source })?;
    Ok(model)
}
