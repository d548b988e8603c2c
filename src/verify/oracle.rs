//! Reference tensors of one run: `request.json` and `.npy` files.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use sha2::{Digest, Sha256};
use viaduct_export::files::{hex, read_limited, sha256};

use super::VerifyError;
use crate::{
    npy,
    pipeline::{noise::unpack_latents, size::Size, text_to_image::PipelineError},
    tensor::{HostTensor, Values},
};

const REQUEST: &str = "request.json";
const MAX_REQUEST_BYTES: u64 = 1 << 20;

/// What the reference run was asked for.
#[derive(Clone, Debug, Deserialize)]
pub struct OracleRequest {
    pub prompt: String,
    pub height: usize,
    pub width: usize,
    pub steps: usize,
    pub seed: Option<u64>,
    pub text_length: Option<usize>,
    pub taps: Option<Vec<usize>>,
    /// File name of the initial noise.
    pub noise: String,
}

/// A folder of reference tensors.
#[derive(Clone, Debug)]
pub struct Oracle {
    folder: PathBuf,
    pub request: OracleRequest,
    /// Names of the tensors that are there.
    pub names: BTreeSet<String>,
}

impl Oracle {
    pub fn open(folder: &Path) -> Result<Oracle, VerifyError> {
        let path = folder.join(REQUEST);
        let problem = |problem: String| VerifyError::Oracle { path: path.clone(), problem };
        let text = read_limited(&path, MAX_REQUEST_BYTES).map_err(|e| problem(e.to_string()))?;
        let request: OracleRequest = serde_json::from_slice(&text).map_err(|e| problem(e.to_string()))?;
        if request.noise.contains(['/', '\\']) {
            return Err(problem(format!("noise '{}' is not a file name", request.noise)));
        }
        let entries = fs::read_dir(folder).map_err(|e| problem(e.to_string()))?;
        let names = entries
            .filter_map(|entry| {
                entry.ok()?.file_name().into_string().ok()?.strip_suffix(".npy").map(str::to_owned)
            })
            .collect();
        Ok(Oracle { folder: folder.to_owned(), request, names })
    }

    /// The folder's last two names, by which people know it.
    pub fn name(&self) -> String {
        let folder = self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone());
        let names: Vec<_> = folder.iter().map(|name| name.to_string_lossy()).collect();
        names[names.len().saturating_sub(2)..].join("/")
    }

    /// SHA-256 of the request and of every tensor.
    pub fn sha256(&self) -> Result<String, VerifyError> {
        let tensors = self.names.iter().map(|name| format!("{name}.npy"));
        let mut all = Sha256::new();
        for file in [REQUEST.to_owned()].into_iter().chain(tensors) {
            let path = self.folder.join(&file);
            let hash = sha256(&path, &mut |_| ())
                .map_err(|e| VerifyError::Oracle { path, problem: e.to_string() })?;
            all.update(format!("{file} {hash}\n"));
        }
        Ok(hex(&all.finalize()))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A tensor, if the reference run kept it.
    pub fn tensor(&self, name: &str) -> Result<Option<HostTensor>, VerifyError> {
        if !self.names.contains(name) {
            return Ok(None);
        }
        self.read(&format!("{name}.npy")).map(Some)
    }

    /// A run that goes on with what is not finite would blame the bundle for it.
    fn read(&self, file: &str) -> Result<HostTensor, VerifyError> {
        let path = self.folder.join(file);
        let tensor = npy::read(&path)?;
        let values = match &tensor.values {
            Values::F32(_) | Values::F16(_) => tensor.to_f32(),
            Values::I64(_) | Values::U8(_) => Vec::new(),
        };
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => {
                let problem = format!("value {index} is {}; reference tensors are finite", values[index]);
                Err(VerifyError::Oracle { path, problem })
            }
            None => Ok(tensor),
        }
    }

    /// The initial latents [1,C,h,w], which the reference may have kept as tokens [1,h*w,C].
    pub fn noise(&self, size: Size) -> Result<HostTensor, VerifyError> {
        let noise = self.read(&self.request.noise)?;
        let [rows, columns] = size.grid();
        Ok(match noise.shape.len() {
            3 => unpack_latents(&noise, rows, columns).map_err(PipelineError::from)?,
            _ => noise,
        })
    }
}
