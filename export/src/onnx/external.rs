//! External data: which files a model may name, and the maps of those that it does.

use std::{
    collections::HashMap,
    io,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use super::{mapped_file::MappedFile, proto::StringStringEntryProto, read::TensorProblem};

/// `external_data` of one tensor, checked for form.
pub(super) struct Reference {
    pub location: String,
    pub offset: u64,
    pub length: Option<u64>,
}

impl Reference {
    /// Keys other than these three (`checksum`, a runtime's own) are of no use here and are let pass.
    pub fn parse(entries: &[StringStringEntryProto]) -> Result<Reference, TensorProblem> {
        let number = |key| -> Result<Option<u64>, TensorProblem> {
            let Some(text) = entry(entries, key)? else { return Ok(None) };
            // `parse` alone would accept a leading plus sign.
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            let value = digits.then(|| text.parse().ok()).flatten();
            Ok(Some(value.ok_or_else(|| TensorProblem::NotANumber { key, text: text.to_owned() })?))
        };
        let location = entry(entries, "location")?.ok_or(TensorProblem::NoLocation)?;
        Ok(Reference {
            location: location.to_owned(),
            offset: number("offset")?.unwrap_or(0),
            length: number("length")?,
        })
    }
}

fn entry<'a>(
    entries: &'a [StringStringEntryProto],
    key: &'static str,
) -> Result<Option<&'a str>, TensorProblem> {
    let mut found = entries.iter().filter(|e| e.key.as_deref() == Some(key));
    let value = found.next().map(|e| e.value.as_deref().unwrap_or_default());
    match found.next() {
        Some(_) => Err(TensorProblem::KeyTwice { key }),
        None => Ok(value),
    }
}

/// The relative path that an external location names, without `.` parts; the reason if it is refused.
///
/// The check is lexical on purpose. Download caches link `snapshots/<rev>/x.onnx_data` to `../../blobs/<sha>`, so a
/// symbolic link inside the model's folder may well lead out of it, and refusing what it leads to breaks every model
/// in such a cache (<https://github.com/microsoft/onnxruntime/issues/27353>). A model file is what may be hostile
/// here, and it cannot make links; whoever can put links into the folder can put the files there too.
pub(super) fn check_location(location: &str) -> Result<PathBuf, &'static str> {
    let bytes = location.as_bytes();
    if bytes.contains(&0) {
        return Err("it contains a NUL byte");
    }
    if bytes.contains(&b'\\') {
        return Err("it contains a backslash");
    }
    // Windows reads `C:x` as a path on another drive, and `x:y` as a hidden stream of x.
    if bytes.get(1) == Some(&b':') && bytes[0].is_ascii_alphabetic() {
        return Err("it starts with a drive letter");
    }
    let mut path = PathBuf::new();
    for component in Path::new(location).components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            Component::ParentDir => return Err("it leaves the model's folder with '..'"),
            Component::RootDir | Component::Prefix(_) => return Err("it is an absolute path"),
        }
    }
    if path.as_os_str().is_empty() {
        return Err("it names no file");
    }
    Ok(path)
}

/// The folder of a model and the data files in it that are mapped so far, each once.
pub(super) struct Folder {
    pub path: PathBuf,
    /// Whether the model may name files that do not exist.
    pub may_lack_files: bool,
    files: HashMap<PathBuf, Arc<MappedFile>>,
}

impl Folder {
    pub fn new(path: &Path) -> Folder {
        Folder { path: path.to_owned(), may_lack_files: false, files: HashMap::new() }
    }

    /// A folder in which data files may be absent.
    pub fn of_graph(path: &Path) -> Folder {
        Folder { may_lack_files: true, ..Folder::new(path) }
    }

    /// The mapped file at a path that [`check_location`] returned.
    pub fn map(&mut self, relative: PathBuf) -> io::Result<Arc<MappedFile>> {
        if let Some(file) = self.files.get(&relative) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(MappedFile::open(&self.path.join(&relative))?);
        self.files.insert(relative, Arc::clone(&file));
        Ok(file)
    }
}
