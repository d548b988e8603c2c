//! Statistics of the inputs of a checkpoint's linear layers, as `viaduct calibrate` writes them: a safetensors file with a tensor
//! for each input, whose name is those of the weights that it is multiplied with, a space between them, and for each weight
//! its sensitivity: the squared error of the model's result for that of the layer's output, each as a share.

use std::{collections::BTreeMap, path::Path};

use super::{Checkpoint, WeightsError};
use crate::{
    onnx::{DType, tensor::widen},
    quant::{Gram, QuantError, WINDOW},
};

#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    #[error(transparent)]
    Read(#[from] WeightsError),
    #[error("{file}: {weight}: {source}; it is no file that `viaduct calibrate` wrote")]
    Statistics { file: String, weight: String, source: QuantError },
    #[error("{file}: {weight}: {found} is no sensitivity; it is no file that `viaduct calibrate` wrote")]
    Sensitivity { file: String, weight: String, found: f32 },
    #[error(
        "{file} has no statistics of {weight}: it is of another checkpoint; make one of this with `viaduct calibrate F32_BUNDLE -o FILE`"
    )]
    Missing { file: String, weight: String },
    #[error(
        "{file} has statistics of {found} inputs of {weight}, which has {expected}: it is of another checkpoint; make one of this with `viaduct calibrate F32_BUNDLE -o FILE`"
    )]
    OtherShape { file: String, weight: String, found: usize, expected: usize },
    #[error("{file}: {weight} is named twice; it is no file that `viaduct calibrate` wrote")]
    Twice { file: String, weight: String },
}

/// Separates the weights in the name of a tensor.
const SEPARATOR: char = ' ';
/// Ends the name of the tensor of a weight's sensitivity, F32 [1].
const SENSITIVITY: &str = ".sensitivity";

/// An open file of statistics; the statistics themselves stay untouched.
#[derive(Debug)]
pub struct Calibration {
    file: Checkpoint,
    /// The tensor of each weight.
    tensors: BTreeMap<String, String>,
}

impl Calibration {
    pub fn open(path: &Path) -> Result<Calibration, CalibrationError> {
        let file = Checkpoint::open(path)?;
        let mut tensors = BTreeMap::new();
        for tensor in file.names().filter(|name| !name.ends_with(SENSITIVITY)) {
            for weight in tensor.split(SEPARATOR) {
                if tensors.insert(weight.to_owned(), tensor.to_owned()).is_some() {
                    let (file, weight) = (path.display().to_string(), weight.to_owned());
                    return Err(CalibrationError::Twice { file, weight });
                }
            }
        }
        Ok(Calibration { file, tensors })
    }

    /// The name of the tensor of an input that these weights are multiplied with.
    pub fn tensor_name<'a>(weights: impl IntoIterator<Item = &'a str>) -> String {
        weights.into_iter().collect::<Vec<_>>().join(&SEPARATOR.to_string())
    }

    /// The statistics of the inputs of a weight [outputs, inputs].
    pub fn inputs_of(&self, weight: &str, inputs: usize) -> Result<Gram, CalibrationError> {
        let (file, weight) = (self.file.path().display().to_string(), weight.to_owned());
        let Some(name) = self.tensors.get(&weight) else {
            return Err(CalibrationError::Missing { file, weight });
        };
        let shape = self.file.find(name).map(|found| found.shape.to_vec()).unwrap_or_default();
        match Gram::new(self.file.tensor(name, &shape)?) {
            Ok(gram) if gram.inputs() == inputs => Ok(gram),
            Ok(gram) => {
                let (found, expected) = (gram.inputs(), inputs);
                Err(CalibrationError::OtherShape { file, weight, found, expected })
            }
            Err(source) => Err(CalibrationError::Statistics { file, weight, source }),
        }
    }

    /// The sensitivity of a weight.
    pub fn sensitivity_of(&self, weight: &str) -> Result<f64, CalibrationError> {
        let tensor = self.file.tensor(&format!("{weight}{SENSITIVITY}"), &[1])?;
        let bytes = tensor.bytes.read().map_err(|source| CalibrationError::Statistics {
            file: self.file.path().display().to_string(),
            weight: weight.to_owned(),
            source: QuantError::Source(source),
        })?;
        let found =
            widen(tensor.dtype, &bytes).and_then(|values| values.first().copied()).unwrap_or(f32::NAN);
        if found.is_finite() && found >= 0.0 {
            return Ok(f64::from(found));
        }
        let (file, weight) = (self.file.path().display().to_string(), weight.to_owned());
        Err(CalibrationError::Sensitivity { file, weight, found })
    }
}

/// Header of a file of statistics in safetensors: the tensors' names, which [`Calibration::tensor_name`] makes, and their
/// numbers of inputs. The values follow it, in this order: those of each, and then the sensitivity of each weight.
pub fn header(inputs: &[(String, usize)]) -> Vec<u8> {
    let sums = inputs.iter().map(|(name, k)| (name.clone(), vec![*k, (*k).min(WINDOW)]));
    let weights = inputs.iter().flat_map(|(name, _)| name.split(SEPARATOR));
    let sensitivities = weights.map(|weight| (format!("{weight}{SENSITIVITY}"), vec![1]));
    let mut entries = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in sums.chain(sensitivities) {
        let begin = end;
        end += DType::F32.byte_len(&shape).unwrap_or(0);
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, end] });
        entries.insert(name, entry);
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    // The values are aligned.
    json.resize(json.len().next_multiple_of(8), b' ');
    let length = json.len() as u64;
    [length.to_le_bytes().to_vec(), json].concat()
}
