//! Elements in memory or in a mapped file; either way they are shared, and a clone costs nothing.

use std::{fmt, fs, io, marker::PhantomData, ops::Deref, path::Path, path::PathBuf, sync::Arc};

use half::f16;
use memmap2::Mmap;

/// Types whose every bit pattern is a value, so that a file's bytes can be taken for them.
pub trait Element: Copy + Send + Sync + 'static {}

impl Element for f32 {}
impl Element for f16 {}
impl Element for i64 {}
impl Element for u8 {}

/// A run of elements.
#[derive(Clone)]
pub enum Buffer<T> {
    Owned(Arc<Vec<T>>),
    Mapped(Mapped<T>),
}

/// The elements of a whole mapped file.
pub struct Mapped<T> {
    file: Arc<TensorFile>,
    elements: PhantomData<T>,
}

/// A mapped file of raw elements.
pub struct TensorFile {
    path: PathBuf,
    map: Option<Mmap>,
    /// Whether the file goes with the last tensor that lies in it.
    owned: bool,
}

impl TensorFile {
    /// Maps a file that is removed when the last tensor in it is dropped. It must not be changed while it is mapped.
    pub fn adopt(path: &Path) -> io::Result<TensorFile> {
        let mut file = TensorFile::borrow(path)?;
        file.owned = true;
        Ok(file)
    }

    /// Maps a file that stays. It must not be changed while it is mapped.
    pub fn borrow(path: &Path) -> io::Result<TensorFile> {
        let file = fs::File::open(path)?;
        let map = match file.metadata()?.len() {
            // Nothing can be mapped of an empty file.
            0 => None,
            // SAFETY: the file has one writer, which has finished; see above.
            _ => Some(unsafe { Mmap::map(&file)? }),
        };
        Ok(TensorFile { path: path.to_owned(), map, owned: false })
    }

    fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl Drop for TensorFile {
    fn drop(&mut self) {
        if self.owned {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl<T: Element> Buffer<T> {
    /// The elements of a file; `None` if its length is not `count` of them.
    pub fn mapped(file: TensorFile, count: usize) -> Option<Buffer<T>> {
        // A map begins on a page and so is aligned for every element.
        (Some(file.bytes().len()) == count.checked_mul(size_of::<T>()))
            .then(|| Buffer::Mapped(Mapped { file: Arc::new(file), elements: PhantomData }))
    }

    /// The file that holds exactly these elements, if one does.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Buffer::Owned(_) => None,
            Buffer::Mapped(mapped) => Some(&mapped.file.path),
        }
    }

    /// The elements to be changed; they are copied first if they are shared or lie in a file.
    pub fn to_mut(&mut self) -> &mut Vec<T> {
        if let Buffer::Mapped(_) = self {
            *self = self.to_vec().into();
        }
        match self {
            Buffer::Owned(values) => Arc::make_mut(values),
            Buffer::Mapped(_) => unreachable!("it was copied above"),
        }
    }

    /// The elements as they lie in memory, which is how a file has them.
    pub fn as_bytes(&self) -> &[u8] {
        as_bytes(self)
    }
}

/// Elements as they lie in memory.
pub fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

impl<T: Element> Deref for Mapped<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: every bit pattern is an element; what is not aligned would be left out, and a map is aligned.
        unsafe { self.file.bytes().align_to::<T>().1 }
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Buffer::Owned(values) => values,
            Buffer::Mapped(mapped) => mapped,
        }
    }
}

impl<T> Clone for Mapped<T> {
    fn clone(&self) -> Mapped<T> {
        Mapped { file: Arc::clone(&self.file), elements: PhantomData }
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(values: Vec<T>) -> Buffer<T> {
        Buffer::Owned(Arc::new(values))
    }
}

impl<T> FromIterator<T> for Buffer<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Buffer<T> {
        values.into_iter().collect::<Vec<T>>().into()
    }
}

impl<T: Element + PartialEq> PartialEq for Buffer<T> {
    fn eq(&self, other: &Buffer<T>) -> bool {
        self[..] == other[..]
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_lives_as_long_as_its_last_buffer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0");
        fs::write(&path, as_bytes(&[1.0f32, 2.0, 3.0])).unwrap();
        let buffer = Buffer::<f32>::mapped(TensorFile::adopt(&path).unwrap(), 3).unwrap();
        assert_eq!(buffer[..], [1.0, 2.0, 3.0]);
        assert_eq!(buffer.file(), Some(&*path));
        let mut changed = buffer.clone();
        drop(buffer);
        assert!(path.exists());
        changed.to_mut()[0] = 9.0;
        assert_eq!(changed, vec![9.0, 2.0, 3.0].into());
        assert!(!path.exists() && changed.file().is_none());
    }

    #[test]
    fn a_file_of_another_length_is_refused_and_an_empty_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("0");
        for (bytes, count, fits) in [(8, 2, true), (7, 2, false), (12, 2, false), (0, 0, true)] {
            fs::write(&path, vec![0; bytes]).unwrap();
            let buffer = Buffer::<f32>::mapped(TensorFile::adopt(&path).unwrap(), count);
            assert_eq!(buffer.is_some(), fits, "{bytes} bytes for {count}");
        }
        fs::write(&path, [0]).unwrap();
        assert!(Buffer::<f32>::mapped(TensorFile::adopt(&path).unwrap(), usize::MAX).is_none());
    }
}
