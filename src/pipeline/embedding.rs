//! Rows of an embedding table, gathered on the host from a mapped file: the table never reaches the device.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use half::f16;
use memmap2::Mmap;
use viaduct_export::arch::parameters::{Embedding, EmbeddingType};

use crate::tensor::{HostTensor, Values};

#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {found} bytes, but a table of {rows} x {width} has {expected:?}", path.display())]
    Size { path: PathBuf, rows: usize, width: usize, expected: Option<usize>, found: usize },
    #[error(
        "token id {id} is not in the embedding table of {rows} rows; tokenizer and weights do not belong together"
    )]
    Id { id: i64, rows: usize },
    #[error("token ids must be i64")]
    IdType,
}

/// The rows of `ids` [1, L] as f32 [1, L, width].
pub fn gather_rows(path: &Path, table: &Embedding, ids: &HostTensor) -> Result<HostTensor, EmbeddingError> {
    let read = |source| EmbeddingError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    // SAFETY: bundle files are not changed while they are in use; a change would give wrong numbers.
    let map = unsafe { Mmap::map(&file) }.map_err(read)?;
    let size = match table.dtype {
        EmbeddingType::F32 => 4,
        EmbeddingType::F16 => 2,
    };
    let row_bytes = table.width.checked_mul(size);
    let expected = row_bytes.and_then(|bytes| bytes.checked_mul(table.rows));
    let (Some(row_bytes), true) = (row_bytes, expected == Some(map.len())) else {
        let (rows, width, found) = (table.rows, table.width, map.len());
        return Err(EmbeddingError::Size { path: path.to_owned(), rows, width, expected, found });
    };
    let Values::I64(ids) = &ids.values else { return Err(EmbeddingError::IdType) };
    let mut values = Vec::with_capacity(ids.len() * table.width);
    for id in ids.iter() {
        let row = usize::try_from(*id).ok().filter(|row| *row < table.rows);
        let row = row.ok_or(EmbeddingError::Id { id: *id, rows: table.rows })?;
        let bytes = &map[row * row_bytes..][..row_bytes];
        match table.dtype {
            EmbeddingType::F32 => {
                values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            EmbeddingType::F16 => {
                values.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()));
            }
        }
    }
    Ok(HostTensor::f32(&[1, ids.len(), table.width], values))
}
