//! `TensorProto` to [`Tensor`]: every storage form of ONNX becomes little-endian packed bytes, or is refused.

use std::io;

use bytes::Bytes as SharedBytes;
use prost::Message;

use super::{
    external::{Folder, Reference, check_location},
    proto::{TensorProto, tensor_proto::DataLocation},
    read::TensorProblem,
    tensor::{Bytes, DType, Tensor},
};

/// Converts a tensor. External data is looked up in `folder`; without one it is refused.
pub(super) fn decode(proto: &TensorProto, folder: Option<&mut Folder>) -> Result<Tensor, TensorProblem> {
    if proto.segment.is_some() {
        return Err(TensorProblem::Segment);
    }
    let dtype = DType::from_onnx(proto.data_type.unwrap_or_default());
    let shape = shape(&proto.dims)?;
    let bytes = match proto.data_location {
        None | Some(0) => inline(proto, dtype, &shape)?,
        Some(place) if place == DataLocation::External as i32 => external(proto, dtype, &shape, folder)?,
        Some(number) => return Err(TensorProblem::DataLocation { number }),
    };
    Ok(Tensor { dtype, shape, bytes })
}

/// What a [`Tensor`] does not hold: name, doc string, metadata.
pub(super) fn shell(proto: TensorProto) -> TensorProto {
    TensorProto {
        name: proto.name,
        doc_string: proto.doc_string,
        metadata_props: proto.metadata_props,
        ..TensorProto::default()
    }
}

fn shape(dims: &[i64]) -> Result<Vec<usize>, TensorProblem> {
    let axis = |(axis, dim): (usize, &i64)| {
        usize::try_from(*dim).map_err(|_| TensorProblem::BadDim { axis, dim: *dim })
    };
    dims.iter().enumerate().map(axis).collect()
}

/// The bytes that type and shape ask for.
fn expected_len(dtype: DType, shape: &[usize]) -> Result<usize, TensorProblem> {
    if dtype.bits().is_none() {
        return Err(TensorProblem::UnknownType { number: dtype.to_onnx() });
    }
    dtype.byte_len(shape).ok_or_else(|| TensorProblem::TooLarge { shape: shape.to_vec() })
}

fn external(
    proto: &TensorProto,
    dtype: DType,
    shape: &[usize],
    folder: Option<&mut Folder>,
) -> Result<Bytes, TensorProblem> {
    if !fields(proto).is_empty() {
        return Err(TensorProblem::SeveralFields { fields: format!("external data and {}", list(proto)) });
    }
    let expected = expected_len(dtype, shape)?;
    let reference = Reference::parse(&proto.external_data)?;
    let location = &reference.location;
    let relative = check_location(location)
        .map_err(|reason| TensorProblem::Location { location: location.clone(), reason })?;
    if let Some(length) = reference.length.filter(|length| *length != expected as u64) {
        return Err(TensorProblem::Length { field: "external data", expected, actual: length });
    }
    let folder = folder.ok_or_else(|| TensorProblem::NoFolder { location: location.clone() })?;
    let path = folder.path.join(&relative);
    let file = match folder.map(relative) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.may_lack_files => {
            return Ok(Bytes::Absent { file: path.into(), len: expected });
        }
        Err(source) => return Err(TensorProblem::Open { path, source }),
    };
    let file_len = file.mapped().map_or(0, <[u8]>::len);
    let start = usize::try_from(reference.offset).ok();
    let range = start.and_then(|start| Some(start..start.checked_add(expected)?));
    match range {
        Some(range) if range.end <= file_len => Ok(Bytes::Mapped { file, range }),
        _ => Err(TensorProblem::BeyondFile {
            path: file.path.clone(),
            offset: reference.offset,
            length: expected,
            file_len,
        }),
    }
}

/// The storage fields that hold something.
fn fields(proto: &TensorProto) -> Vec<&'static str> {
    let all = [
        ("raw_data", proto.raw_data.is_some()),
        ("float_data", !proto.float_data.is_empty()),
        ("int32_data", !proto.int32_data.is_empty()),
        ("string_data", !proto.string_data.is_empty()),
        ("int64_data", !proto.int64_data.is_empty()),
        ("double_data", !proto.double_data.is_empty()),
        ("uint64_data", !proto.uint64_data.is_empty()),
    ];
    all.into_iter().filter(|f| f.1).map(|f| f.0).collect()
}

fn list(proto: &TensorProto) -> String {
    fields(proto).join(" and ")
}

/// The field that holds a type's values when they are not raw.
fn typed_field(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 | DType::Other(14) => "float_data",
        DType::F64 | DType::Other(15) => "double_data",
        DType::I64 => "int64_data",
        DType::U32 | DType::U64 => "uint64_data",
        DType::STRING => "string_data",
        _ => "int32_data",
    }
}

fn inline(proto: &TensorProto, dtype: DType, shape: &[usize]) -> Result<Bytes, TensorProblem> {
    let mut fields = fields(proto);
    // Some writers leave an empty raw_data next to typed values.
    if proto.raw_data.as_ref().is_some_and(|raw| raw.is_empty()) && fields.len() > 1 {
        fields.retain(|field| *field != "raw_data");
    }
    if fields.len() > 1 {
        return Err(TensorProblem::SeveralFields { fields: list(proto) });
    }
    let typed = typed_field(dtype);
    let field = fields.first().copied().unwrap_or(typed);
    if field != typed && (field != "raw_data" || dtype == DType::STRING) {
        return Err(TensorProblem::WrongField { field, number: dtype.to_onnx() });
    }
    if dtype == DType::STRING {
        return strings(proto, shape);
    }
    let expected = expected_len(dtype, shape)?;
    let bytes = match (field, &proto.raw_data) {
        ("raw_data", Some(raw)) => raw.clone(),
        _ => typed_bytes(proto, dtype, field)?,
    };
    if bytes.len() != expected {
        return Err(TensorProblem::Length { field, expected, actual: bytes.len() as u64 });
    }
    Ok(Bytes::Inline(bytes))
}

fn typed_bytes(proto: &TensorProto, dtype: DType, field: &'static str) -> Result<SharedBytes, TensorProblem> {
    let bytes: Vec<u8> = match field {
        "float_data" => proto.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "double_data" => proto.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "int64_data" => proto.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "uint64_data" if dtype == DType::U32 => {
            narrow(&proto.uint64_data, field, |v| u32::try_from(v).ok().map(u32::to_le_bytes))?
        }
        "uint64_data" => proto.uint64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        // Signed and unsigned types, and the bits of small floats, all lie in int32_data. Writers differ in whether
        // they extend the sign, so either reading of the value may fit.
        _ => match dtype.bits() {
            Some(32) => proto.int32_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Some(16) => narrow(&proto.int32_data, field, |v| {
                u16::try_from(v)
                    .ok()
                    .or_else(|| i16::try_from(v).ok().map(|v| v as u16))
                    .map(u16::to_le_bytes)
            })?,
            // One byte each; types below a byte are packed into bytes first.
            _ => narrow(&proto.int32_data, field, |v| {
                u8::try_from(v).ok().or_else(|| i8::try_from(v).ok().map(|v| v as u8)).map(u8::to_le_bytes)
            })?,
        },
    };
    Ok(bytes.into())
}

fn narrow<T: Copy + Into<i128>, const N: usize>(
    values: &[T],
    field: &'static str,
    convert: impl Fn(T) -> Option<[u8; N]>,
) -> Result<Vec<u8>, TensorProblem> {
    let mut bytes = Vec::with_capacity(values.len() * N);
    for (index, value) in values.iter().enumerate() {
        let narrowed = convert(*value);
        bytes.extend(narrowed.ok_or_else(|| TensorProblem::Value {
            field,
            index,
            value: (*value).into(),
        })?);
    }
    Ok(bytes)
}

fn strings(proto: &TensorProto, shape: &[usize]) -> Result<Bytes, TensorProblem> {
    let expected = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
    let expected = expected.ok_or_else(|| TensorProblem::TooLarge { shape: shape.to_vec() })?;
    let actual = proto.string_data.len();
    if actual != expected {
        return Err(TensorProblem::Length { field: "string_data", expected, actual: actual as u64 });
    }
    let strings = TensorProto { string_data: proto.string_data.clone(), ..TensorProto::default() };
    Ok(Bytes::Inline(strings.encode_to_vec().into()))
}
