//! Keeps what `verify` found in the manifest. All else of the file stays as it is, byte for byte, fields that this version does
//! not know included.

use std::{
    ffi::OsStr,
    fmt,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use super::{Bundle, MANIFEST, Manifest, read::MAX_MANIFEST_BYTES};
use crate::{files::read_limited, locked_file};

const FIELD: &str = "verified";
/// How the name of a manifest begins and ends that is being written.
const UNFINISHED: [&str; 2] = [".bundle.json-", ".partial"];

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{}: a bundle in this layout has no {MANIFEST}", path.display())]
    NoManifest { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: it is no longer the bundle that was verified: another was exported in its place", path.display())]
    Replaced { path: PathBuf },
    #[error("{}: it would be larger than {MAX_MANIFEST_BYTES} bytes, which no manifest may be", path.display())]
    TooLarge { path: PathBuf },
}

impl Bundle {
    /// Adds a result to the manifest on disk, which is replaced at once or not at all; results that `is_outdated` go.
    pub fn store_verified(
        &self,
        result: Value,
        is_outdated: impl Fn(&Value) -> bool,
    ) -> Result<(), StoreError> {
        let path = self.folder.join(MANIFEST);
        if !self.states_hashes() {
            return Err(StoreError::NoManifest { path: self.folder.clone() });
        }
        let io = |source| StoreError::Io { path: path.clone(), source };
        let json = |source| StoreError::Json { path: path.clone(), source };
        // Of two processes neither loses the other's result. Where folders cannot be locked, the last one to write wins.
        let lock = File::open(&self.folder).map_err(io)?;
        let _ = lock.lock();
        let text = read_limited(&path, MAX_MANIFEST_BYTES).map_err(io)?;
        let mut manifest: Fields = serde_json::from_slice(&text).map_err(json)?;
        let on_disk: Manifest = serde_json::from_slice(&text).map_err(json)?;
        if identity(&on_disk).map_err(json)? != identity(&self.manifest).map_err(json)? {
            return Err(StoreError::Replaced { path });
        }
        let mut results = on_disk.verified;
        results.retain(|result| !is_outdated(result));
        results.push(result);
        let results = serde_json::to_string_pretty(&results).map_err(json)?.replace('\n', "\n  ");
        manifest.set(FIELD, RawValue::from_string(results).map_err(json)?);
        let text = manifest.to_string();
        if text.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(StoreError::TooLarge { path });
        }
        replace(&self.folder, text.as_bytes()).map_err(io)
    }
}

/// What a bundle is, without what was found of it.
fn identity(manifest: &Manifest) -> serde_json::Result<Value> {
    serde_json::to_value(Manifest { verified: Vec::new(), ..manifest.clone() })
}

/// Whether a file is a manifest that a killed process left unfinished.
pub(super) fn is_unfinished(folder: &Path, file: &Path) -> bool {
    file.parent() == Some(folder) && file.file_name().is_some_and(is_unfinished_name)
}

fn is_unfinished_name(name: &OsStr) -> bool {
    let ([begin, end], name) = (UNFINISHED, name.as_encoded_bytes());
    name.starts_with(begin.as_bytes()) && name.ends_with(end.as_bytes())
}

fn replace(folder: &Path, text: &[u8]) -> io::Result<()> {
    locked_file::remove_abandoned(folder, is_unfinished_name)?;
    let mut file = locked_file::create_in(folder, UNFINISHED[0], UNFINISHED[1])?;
    file.write_all(text)?;
    file.as_file().sync_all()?;
    file.persist(folder.join(MANIFEST))?;
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// The fields of a JSON object in their order, each with its text.
struct Fields(Vec<(String, Box<RawValue>)>);

impl Fields {
    fn set(&mut self, name: &str, value: Box<RawValue>) {
        self.0.retain(|field| field.0 != name);
        self.0.push((name.to_owned(), value));
    }
}

/// As the export lays a manifest out.
impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Vec<String> = self
            .0
            .iter()
            .map(|(name, value)| format!("  {}: {}", Value::from(name.as_str()), value.get()))
            .collect();
        writeln!(f, "{{\n{}\n}}", fields.join(",\n"))
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}
