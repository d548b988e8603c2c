//! Statistics of the inputs of a checkpoint's linear layers, as `viaduct calibrate` writes them: a safetensors file with a tensor
//! for each input, whose name is those of the weights that it is multiplied with, a space between them.

use std::{collections::BTreeMap, path::Path};

use super::{Checkpoint, WeightsError};
use crate::{
    onnx::DType,
    quant::{Gram, QuantError, WINDOW},
};

#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    #[error(transparent)]
    Read(#[from] WeightsError),
    #[error("{file}: {weight}: {source}; it is no file that `viaduct calibrate` wrote")]
    Statistics { file: String, weight: String, source: QuantError },
    #[error("{file}: {weight} is named twice; it is no file that `viaduct calibrate` wrote")]
    Twice { file: String, weight: String },
}

/// Separates the weights in the name of a tensor.
const SEPARATOR: char = ' ';

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
        for tensor in file.names() {
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

    /// The statistics of a weight's inputs.
    pub fn inputs_of(&self, weight: &str) -> Result<Option<Gram>, CalibrationError> {
        let Some(name) = self.tensors.get(weight) else { return Ok(None) };
        let shape = self.file.find(name).map(|found| found.shape.to_vec()).unwrap_or_default();
        let gram = self.file.tensor(name, &shape)?;
        let gram = Gram::new(gram).map_err(|source| CalibrationError::Statistics {
            file: self.file.path().display().to_string(),
            weight: weight.to_owned(),
            source,
        })?;
        Ok(Some(gram))
    }
}

/// Header of a file of statistics in safetensors: the tensors' names, which [`Calibration::tensor_name`] makes, and their
/// numbers of inputs. The values follow it, in this order.
pub fn header(inputs: &[(String, usize)]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut end = 0;
    for (name, k) in inputs {
        let shape = [*k, (*k).min(WINDOW)];
        let begin = end;
        end += DType::F32.byte_len(&shape).unwrap_or(0);
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, end] });
        entries.insert(name.clone(), entry);
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    // The values are aligned.
    json.resize(json.len().next_multiple_of(8), b' ');
    let length = json.len() as u64;
    [length.to_le_bytes().to_vec(), json].concat()
}
