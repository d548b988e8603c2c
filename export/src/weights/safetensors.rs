//! One safetensors file, mapped at once or when it has come, with its header checked: every tensor lies inside the file,
//! its size is what its shape and type say, and the tensors cover the data without overlap or hole.

use std::{collections::BTreeMap, fmt, io, ops::Range, path::Path, sync::Arc};

use memmap2::Mmap;
use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, IntoDeserializer, MapAccess, Visitor, value},
};

use super::{Arrivals, WeightsError, arrivals::awaited};
use crate::{
    files::open_regular,
    onnx::{DType, MappedFile},
};

/// The limit of the format's reference implementation.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes of the little-endian header length at the start of the file.
const LEN_BYTES: u64 = 8;

const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A tensor as the header describes it; `range` is absolute in the file.
#[derive(Debug)]
pub struct Entry {
    pub dtype: DType,
    /// The header's spelling of the type, for messages.
    pub dtype_name: String,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

#[derive(Debug)]
pub struct Shard {
    pub file: Arc<MappedFile>,
    pub tensors: BTreeMap<String, Entry>,
}

impl Shard {
    /// Opens a file or, if it is not there and is brought, its beginning.
    pub fn open(path: &Path, arrivals: Option<&Arc<dyn Arrivals>>) -> Result<Shard, WeightsError> {
        let io = |source| WeightsError::Io { path: path.to_owned(), source };
        let (tensors, file) = match (map(path), arrivals) {
            (Ok(map), _) => (parse(path, &map, map.len() as u64)?, MappedFile::new(path, map)),
            (Err(WeightsError::Io { source, .. }), Some(arrivals))
                if source.kind() == io::ErrorKind::NotFound =>
            {
                let beginning = arrivals.beginning(path).map_err(io)?.ok_or_else(|| io(source))?;
                let tensors = parse(path, &beginning.header, beginning.bytes)?;
                (tensors, awaited(path, beginning, arrivals))
            }
            (Err(error), _) => return Err(error),
        };
        Ok(Shard { file: Arc::new(file), tensors })
    }
}

/// Maps a file that is long enough to say how long its header is.
pub fn map(path: &Path) -> Result<Mmap, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    let (file, found) = open_regular(path).map_err(io)?;
    if found < LEN_BYTES {
        return Err(WeightsError::Truncated { path: path.to_owned(), expected: LEN_BYTES, found });
    }
    // SAFETY: the map is read-only; the project treats checkpoints as immutable while they are open, as every
    // reader of mapped weights must.
    unsafe { Mmap::map(&file) }.map_err(io)
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The header object; unlike a map, it refuses duplicate keys.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// The tensors of a file of `found` bytes, of which these are the first.
fn parse(path: &Path, bytes: &[u8], found: u64) -> Result<BTreeMap<String, Entry>, WeightsError> {
    let truncated = |expected| WeightsError::Truncated { path: path.to_owned(), expected, found };
    let bad = |reason: String| WeightsError::BadHeader { path: path.to_owned(), reason };
    let too_short = |expected| match found < expected {
        true => truncated(expected),
        false => bad(format!("only {} of {expected} bytes are known of it", bytes.len())),
    };

    if bytes.starts_with(LFS_POINTER) {
        return Err(WeightsError::LfsPointer { path: path.to_owned() });
    }
    let (prefix, rest) = bytes.split_first_chunk().ok_or_else(|| too_short(LEN_BYTES))?;
    let len = u64::from_le_bytes(*prefix);
    if len > MAX_HEADER {
        return Err(WeightsError::HeaderTooLarge { path: path.to_owned(), len, max: MAX_HEADER });
    }
    let data_start = LEN_BYTES + len;
    let header = rest.get(..len as usize).ok_or_else(|| too_short(data_start))?;
    let RawHeader(mut raw) = serde_json::from_slice(header).map_err(|e| bad(e.to_string()))?;
    raw.sort_by_key(|(_, entry)| entry.data_offsets);

    let mut tensors = BTreeMap::new();
    let mut end_of_last = 0;
    for (name, raw) in raw {
        let bad =
            |reason: String| WeightsError::BadTensor { path: path.to_owned(), tensor: name.clone(), reason };
        let (begin, end) = raw.data_offsets;
        if begin != end_of_last || end < begin {
            return Err(bad(format!("bytes {begin}..{end}, but the tensor before it ends at {end_of_last}")));
        }
        end_of_last = end;
        let known = known_dtype(&raw.dtype);
        if let Some((bits, _)) = known {
            let size = byte_size(&raw.shape, bits)
                .ok_or_else(|| bad(format!("impossible size {:?} x {}", raw.shape, raw.dtype)))?;
            if size != end - begin {
                let given = end - begin;
                return Err(bad(format!("{:?} x {} is {size} bytes, not {given}", raw.shape, raw.dtype)));
            }
        }
        // Ends beyond the file are caught below, by the sum; this only keeps the arithmetic in range.
        let absolute = |offset: u64| data_start.checked_add(offset).and_then(|o| usize::try_from(o).ok());
        let (Some(start), Some(stop)) = (absolute(begin), absolute(end)) else {
            return Err(bad(format!("bytes {begin}..{end} are beyond any file")));
        };
        let entry = Entry {
            dtype: known.map_or(DType::Other(0), |(_, dtype)| dtype),
            dtype_name: raw.dtype,
            shape: raw.shape,
            range: start..stop,
        };
        if tensors.insert(name.clone(), entry).is_some() {
            return Err(bad("listed twice".into()));
        }
    }

    let expected = data_start + end_of_last;
    if found < expected {
        return Err(truncated(expected));
    }
    if found > expected {
        return Err(WeightsError::TrailingBytes { path: path.to_owned(), extra: found - expected });
    }
    Ok(tensors)
}

/// Bytes of a tensor, `None` where they overflow or are not whole.
fn byte_size(shape: &[usize], bits: u64) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim as u64))?;
    let bits = elements.checked_mul(bits)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Bits per element and the ONNX type of a dtype name; `None` for names that the format's crate does not know either.
fn known_dtype(name: &str) -> Option<(u64, DType)> {
    let deserializer: value::StrDeserializer<value::Error> = name.into_deserializer();
    let dtype = Dtype::deserialize(deserializer).ok()?;
    let onnx = match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F64 => DType::F64,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::U16 => DType::U16,
        Dtype::I16 => DType::I16,
        Dtype::U32 => DType::U32,
        Dtype::I32 => DType::I32,
        Dtype::U64 => DType::U64,
        Dtype::I64 => DType::I64,
        Dtype::BOOL => DType::Bool,
        Dtype::C64 => DType::Other(14),
        Dtype::F8_E4M3 => DType::Other(17),
        Dtype::F8_E4M3FNUZ => DType::Other(18),
        Dtype::F8_E5M2 => DType::Other(19),
        Dtype::F8_E5M2FNUZ => DType::Other(20),
        _ => DType::Other(0),
    };
    Some((dtype.bitsize() as u64, onnx))
}
