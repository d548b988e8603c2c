//! What `doctor --tune` measured, kept in the user's cache: one file per adapter, driver and runtime.

use std::{fs, path::PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use viaduct_export::tuning::Tuning;

use super::{Adapter, Device};
use crate::{
    atomic_file::{Existing, FileError, write_with},
    user_cache::{named, user_cache},
};

/// Names the folder instead.
const FOLDER: &str = "VIADUCT_TUNING";

/// What a tuning was measured on; it holds nowhere else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredOn {
    pub adapter: String,
    pub vendor_id: u32,
    pub device_id: u32,
    pub driver: String,
    pub onnxruntime: String,
    pub webgpu_plugin: Option<String>,
}

/// A tuning and where it holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    on: MeasuredOn,
    tuning: Tuning,
}

/// Why a tuning could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error("neither {FOLDER} nor XDG_CACHE_HOME nor HOME names a folder for what was measured")]
    NoFolder,
    #[error(transparent)]
    File(#[from] FileError),
    #[error("what is measured cannot be kept in {}: {source}; VIADUCT_TUNING names another folder", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
}

impl MeasuredOn {
    pub fn of(device: &Device) -> MeasuredOn {
        MeasuredOn {
            adapter: device.name.clone(),
            vendor_id: device.vendor_id,
            device_id: device.device_id,
            driver: device.driver.clone(),
            onnxruntime: device.ort_version.clone(),
            webgpu_plugin: device.plugin_version.clone(),
        }
    }

    fn is_about(&self, adapter: &Adapter) -> bool {
        let own = (&self.adapter, self.vendor_id, self.device_id, &self.driver);
        own == (&adapter.name, adapter.vendor_id, adapter.device_id, &adapter.driver)
    }

    fn file(&self) -> Option<PathBuf> {
        let digest = Sha256::digest(serde_json::to_vec(self).ok()?);
        let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Some(folder()?.join(format!("{name}.json")))
    }
}

fn folder() -> Option<PathBuf> {
    named(FOLDER).or_else(|| Some(user_cache()?.join("tuning")))
}

/// What was measured there, if anything was. A file that cannot be read or says something else counts as none.
pub(super) fn tuning_on(on: &MeasuredOn) -> Option<Tuning> {
    read(&on.file()?).filter(|kept| kept.on == *on).map(|kept| kept.tuning)
}

/// What was measured with an adapter under whatever version of the runtime, the latest first: for plans that are made
/// without one.
pub(super) fn tuning_of_adapter(adapter: &Adapter) -> Option<Tuning> {
    let files = fs::read_dir(folder()?).ok()?.filter_map(Result::ok);
    let kept = files.filter_map(|file| {
        let kept = read(&file.path()).filter(|kept| kept.on.is_about(adapter))?;
        Some((file.metadata().ok()?.modified().ok()?, kept.tuning))
    });
    kept.max_by_key(|(modified, _)| *modified).map(|(_, tuning)| tuning)
}

fn read(path: &PathBuf) -> Option<Kept> {
    /// A kept tuning has a few hundred bytes.
    const MOST: u64 = 1 << 20;
    let size = fs::metadata(path).ok().filter(fs::Metadata::is_file)?.len();
    let text = if size <= MOST { fs::read(path).ok()? } else { return None };
    serde_json::from_slice(&text).ok().filter(|kept: &Kept| kept.tuning.check().is_ok())
}

/// Whether a tuning could be kept, before it is measured; the folder is made.
pub fn check_tuning_folder() -> Result<(), KeepError> {
    let folder = folder().ok_or(KeepError::NoFolder)?;
    let writable = fs::create_dir_all(&folder).and_then(|()| tempfile::tempfile_in(&folder));
    writable.map(drop).map_err(|source| KeepError::Folder { path: folder, source })
}

/// Keeps a tuning for later runs on the device; the file. See [`check_tuning_folder`].
pub fn keep_tuning(device: &Device, tuning: &Tuning) -> Result<PathBuf, KeepError> {
    let on = MeasuredOn::of(device);
    let path = on.file().ok_or(KeepError::NoFolder)?;
    let kept = Kept { on, tuning: tuning.clone() };
    write_with(&path, Existing::Replace, |file| {
        serde_json::to_writer_pretty(&mut *file, &kept)?;
        file.write_all(b"\n")
    })?;
    Ok(path)
}
