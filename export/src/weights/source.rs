use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    Arrivals, Calibration, CalibrationError, WeightsError, described,
    index::{Index, Layout, locate},
    safetensors::{Entry, Shard},
};
use crate::{
    onnx::{Bytes, DType, Tensor},
    quant::Gram,
};

/// The tensors of one model component, mapped from one or several safetensors files.
///
/// Opening checks every header, and the index against the headers; the weights themselves stay untouched.
pub struct Checkpoint {
    path: PathBuf,
    pub(super) shards: Vec<Shard>,
    /// Tensor name to its place in `shards`.
    pub(super) places: BTreeMap<String, usize>,
    described: bool,
    calibration: Option<Arc<Calibration>>,
}

/// What a checkpoint says about a tensor, known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    /// `DType::Other(0)` for types without an ONNX counterpart.
    pub dtype: DType,
    pub shape: &'a [usize],
    /// The file that holds the tensor.
    pub file: &'a Path,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a `*.safetensors.index.json` with its shards, or a component directory
    /// (`transformer/`, `text_encoder/`, ...). In a directory an index comes first, then `model.safetensors` or
    /// `diffusion_pytorch_model.safetensors`, then the only weight file there is; other files are left alone, and
    /// several weight files without an index are an error.
    pub fn open(path: &Path) -> Result<Checkpoint, WeightsError> {
        Checkpoint::open_with(path, None)
    }

    /// [`Checkpoint::open`] of a component directory whose weight files may still be on their way: they count as if they were
    /// there. Reading a tensor waits for its file, and fails if another has come than the one that was announced.
    pub fn open_with(path: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Checkpoint, WeightsError> {
        let shards = match locate(path, arrivals)? {
            Layout::Single(file) => vec![Shard::open(&file, arrivals)?],
            Layout::Sharded(index) => open_shards(&index, arrivals)?,
        };
        let mut places = BTreeMap::new();
        for (place, shard) in shards.iter().enumerate() {
            places.extend(shard.tensors.keys().map(|name| (name.clone(), place)));
        }
        Ok(Checkpoint { path: path.to_owned(), shards, places, described: false, calibration: None })
    }

    /// A checkpoint of which nothing is there: every tensor that is asked for exists in bf16 with the shape that is
    /// asked for, and has no values. What is made of it can be planned with and cannot be written.
    pub fn described() -> Checkpoint {
        Checkpoint {
            path: PathBuf::new(),
            shards: Vec::new(),
            places: BTreeMap::new(),
            described: true,
            calibration: None,
        }
    }

    /// Whether this is [`Checkpoint::described`], whose tensors have no values.
    pub fn is_described(&self) -> bool {
        self.described
    }

    /// With what is known of the inputs of its layers.
    pub fn calibrated(self, calibration: Option<Arc<Calibration>>) -> Checkpoint {
        Checkpoint { calibration, ..self }
    }

    /// Statistics of what a weight [outputs, inputs] is multiplied with, where there is a calibration.
    pub fn inputs_of(&self, weight: &str, inputs: usize) -> Result<Option<Gram>, CalibrationError> {
        self.calibration.as_ref().map(|calibration| calibration.inputs_of(weight, inputs)).transpose()
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensor names, sorted; none of a described checkpoint.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Type, shape and file of a tensor, without reading it; `None` if the checkpoint has no such tensor, or is
    /// only described.
    pub fn find(&self, name: &str) -> Option<Found<'_>> {
        let (shard, entry) = self.entry(name)?;
        Some(Found { dtype: entry.dtype, shape: &entry.shape, file: &shard.file.path })
    }

    /// The f32, f16 or bf16 tensor `name`, mapped; its shape must be exactly `shape`.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, WeightsError> {
        if self.described {
            return described::tensor(name, shape);
        }
        let (shard, entry) = self.entry(name).ok_or_else(|| WeightsError::NoSuchTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            nearest: nearest(name, self.names()).map(str::to_owned),
        })?;
        let path = || shard.file.path.clone();
        if !matches!(entry.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(WeightsError::WrongDType {
                path: path(),
                tensor: name.to_owned(),
                dtype: entry.dtype,
                name: entry.dtype_name.clone(),
            });
        }
        if entry.shape != shape {
            return Err(WeightsError::WrongShape {
                path: path(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                found: entry.shape.clone(),
            });
        }
        let bytes = Bytes::Mapped { file: shard.file.clone(), range: entry.range.clone() };
        Ok(Tensor { dtype: entry.dtype, shape: shape.to_vec(), bytes })
    }

    /// The tensor of that name as it lies in its file, of whatever type and shape, mapped; `None` if there is none.
    pub fn raw(&self, name: &str) -> Option<Tensor> {
        let (shard, entry) = self.entry(name)?;
        let bytes = Bytes::Mapped { file: shard.file.clone(), range: entry.range.clone() };
        Some(Tensor { dtype: entry.dtype, shape: entry.shape.clone(), bytes })
    }

    fn entry(&self, name: &str) -> Option<(&Shard, &Entry)> {
        let shard = &self.shards[*self.places.get(name)?];
        Some((shard, shard.tensors.get(name)?))
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Checkpoint({}, {} tensors in {} files)",
            self.path.display(),
            self.places.len(),
            self.shards.len()
        )
    }
}

/// Opens the shards of an index; the index and the headers must agree in both directions.
fn open_shards(index: &Index, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Vec<Shard>, WeightsError> {
    let dir = index.path.parent().unwrap_or(Path::new(""));
    let open = |(name, listed): (&String, &Vec<String>)| {
        let path = dir.join(name);
        let shard = Shard::open(&path, arrivals).map_err(|error| match error {
            WeightsError::Io { source, path } if source.kind() == io::ErrorKind::NotFound => {
                WeightsError::ShardMissing {
                    index: index.path.clone(),
                    shard: path,
                    tensor: listed.first().cloned().unwrap_or_default(),
                    others: listed.len().saturating_sub(1),
                }
            }
            other => other,
        })?;
        let listed: BTreeSet<_> = listed.iter().collect();
        if let Some(tensor) = listed.iter().find(|name| !shard.tensors.contains_key(**name)) {
            let (index, tensor) = (index.path.clone(), tensor.to_string());
            return Err(WeightsError::ListedButAbsent { index, shard: path, tensor });
        }
        if let Some(tensor) = shard.tensors.keys().find(|name| !listed.contains(name)) {
            let (index, tensor) = (index.path.clone(), tensor.clone());
            return Err(WeightsError::PresentButUnlisted { index, shard: path, tensor });
        }
        Ok(shard)
    };
    index.shards.iter().map(open).collect()
}

/// The name most like `wanted`: one that only adds or lacks a dotted prefix, else the one with the fewest edits.
fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let prefixed = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|p| p.ends_with('.'));
    let same_end = |name: &str| prefixed(name, wanted) || prefixed(wanted, name);
    names.min_by_key(|name| (!same_end(name), edits(wanted.as_bytes(), name.as_bytes())))
}

/// Levenshtein distance.
fn edits(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
