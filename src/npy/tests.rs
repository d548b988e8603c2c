use proptest::prelude::*;

use super::*;

/// A file of version `major` with this header text and this data.
fn file(major: u8, text: &str, data: &[u8]) -> Vec<u8> {
    let length = match major {
        1 => (text.len() as u16).to_le_bytes().to_vec(),
        _ => (text.len() as u32).to_le_bytes().to_vec(),
    };
    [b"\x93NUMPY", &[major, 0][..], &length, text.as_bytes(), data].concat()
}

fn header(descr: &str, fortran: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n")
}

fn parse(descr: &str, shape: &str, data: &[u8]) -> Result<HostTensor, FormatError> {
    from_bytes(&file(1, &header(descr, "False", shape), data))
}

#[test]
fn bytes_are_as_numpy_writes_them() {
    for (shape, dims) in [(&[2, 3][..], "(2, 3)"), (&[6], "(6,)"), (&[], "()")] {
        let count = shape.iter().product();
        let bytes = to_bytes(&HostTensor::f32(shape, vec![1.0; count]));
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {dims}, }}");
        let expected = format!("{text:117}\n");
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(bytes[10..128], *expected.as_bytes());
        assert_eq!(bytes[128..], [0, 0, 128, 63].repeat(count));
    }
    let long = to_bytes(&HostTensor::f32(&[1; 60], vec![1.0]));
    assert_eq!((long.len() - 4) % 64, 0);
}

#[test]
fn every_dtype() {
    let f32s = |v: &[f32]| Ok(HostTensor::f32(&[v.len()], v.to_vec()));
    assert_eq!(parse("<f4", "(1,)", &1.5f32.to_le_bytes()), f32s(&[1.5]));
    assert_eq!(parse("<f8", "(1,)", &0.1f64.to_le_bytes()), f32s(&[0.1]));
    let half = Values::F16(vec![f16::from_f32(-2.0)].into());
    assert_eq!(parse("<f2", "(1,)", &[0, 0xc0]), Ok(HostTensor::new(&[1], half)));
    assert_eq!(parse("<i8", "()", &(-3i64).to_le_bytes()), Ok(HostTensor::i64(&[], vec![-3])));
    assert_eq!(parse("<i4", "(1, 1)", &(-3i32).to_le_bytes()), Ok(HostTensor::i64(&[1, 1], vec![-3])));
    assert_eq!(parse("|u1", "(2,)", &[0, 255]), Ok(HostTensor::new(&[2], Values::U8(vec![0, 255].into()))));
    assert_eq!(parse("|b1", "(2,)", &[0, 1]), Ok(HostTensor::new(&[2], Values::U8(vec![0, 1].into()))));
    assert_eq!(parse("|b1", "(2,)", &[0, 2]), Err(FormatError::Boolean(2)));
    for descr in [">f4", "<c8", "<U3", "|O", "f4", "<i2", ""] {
        assert_eq!(parse(descr, "(1,)", &[0; 4]), Err(FormatError::Dtype(descr.to_string())));
    }
}

#[test]
fn fortran_order_becomes_row_major() {
    let tensor = from_bytes(&file(1, &header("|u1", "True", "(2, 3)"), &[0, 3, 1, 4, 2, 5]));
    assert_eq!(tensor, Ok(HostTensor::new(&[2, 3], Values::U8(vec![0, 1, 2, 3, 4, 5].into()))));
    let empty = from_bytes(&file(1, &header("|u1", "True", "(2, 0, 3)"), &[]));
    assert_eq!(empty, Ok(HostTensor::new(&[2, 0, 3], Values::U8(vec![].into()))));
    let scalar = from_bytes(&file(1, &header("|u1", "True", "()"), &[7]));
    assert_eq!(scalar, Ok(HostTensor::new(&[], Values::U8(vec![7].into()))));
}

#[test]
fn later_versions_and_other_spellings() {
    let expected = Ok(HostTensor::new(&[2], Values::U8(vec![1, 2].into())));
    for version in [1, 2, 3] {
        assert_eq!(from_bytes(&file(version, &header("|u1", "False", "(2,)"), &[1, 2])), expected);
    }
    let other = "{ \"shape\":( 2, ),\"fortran_order\" : False,'descr':\"|u1\"}";
    assert_eq!(from_bytes(&file(1, other, &[1, 2])), expected);
}

#[test]
fn malformed_headers_are_refused() {
    for text in [
        "",
        "{",
        "{}",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (+1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,",
        "{'descr': '<f4",
    ] {
        let error = from_bytes(&file(1, text, &[0; 4]));
        assert!(matches!(error, Err(FormatError::Header(_))), "{text}: {error:?}");
    }
}

#[test]
fn sizes_are_checked_before_memory_is_taken() {
    assert!(matches!(parse("<f4", "(3,)", &[0; 8]), Err(FormatError::Size { expected: 12, found: 8, .. })));
    assert!(matches!(parse("<f4", "(1,)", &[0; 8]), Err(FormatError::Size { expected: 4, found: 8, .. })));
    assert!(matches!(parse("<f4", "(4611686018427387904, 4)", &[]), Err(FormatError::Overflow(_))));
    assert!(matches!(parse("<f8", "(2305843009213693952,)", &[]), Err(FormatError::Overflow(_))));
    assert!(matches!(parse("<f4", "(1000000000000,)", &[0; 4]), Err(FormatError::Size { .. })));

    let good = to_bytes(&HostTensor::f32(&[2], vec![1.0, 2.0]));
    for end in 0..good.len() {
        assert!(from_bytes(&good[..end]).is_err(), "cut at {end}");
    }
    let mut long_header = file(2, &header("<f4", "False", "(1,)"), &[0; 4]);
    long_header[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(from_bytes(&long_header), Err(FormatError::HeaderLength { .. })));
    assert_eq!(from_bytes(b"PK\x03\x04"), Err(FormatError::Magic));
    assert_eq!(from_bytes(b"\x93NUMPY\x04\x00\x00\x00"), Err(FormatError::Version(4, 0)));
}

#[test]
fn files_larger_than_a_header_and_errors_with_their_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.npy");
    let tensor = HostTensor::f32(&[100, 500], (0..50_000).map(|x| x as f32).collect());
    write(&path, Existing::Keep, &tensor).unwrap();
    assert_eq!(read(&path).unwrap(), tensor);
    assert_eq!(read_shape(&path).unwrap(), tensor.shape);
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 9, 70_000, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = read(&path).unwrap_err();
        assert_eq!(read_shape(&path).unwrap_err().to_string(), error.to_string());
        assert!(matches!(error, NpyError::Format { .. }) && error.to_string().contains("x.npy"), "{error}");
    }
    assert!(matches!(read(&directory.path().join("none.npy")), Err(NpyError::Io { .. })));
    assert!(matches!(read(directory.path()), Err(NpyError::Io { .. })));
}

fn tensors() -> impl Strategy<Value = HostTensor> {
    let shapes = prop::collection::vec(0usize..5, 0..4);
    (shapes, 0..4, any::<u64>()).prop_map(|(shape, kind, seed)| {
        let count = shape.iter().product::<usize>() as u64;
        let numbers = (0..count).map(|i| seed.wrapping_mul(i + 1) >> 32);
        let values = match kind {
            0 => Values::F32(numbers.map(|n| n as f32 - 1e9).collect()),
            1 => Values::F16(numbers.map(|n| f16::from_f32((n % 999) as f32)).collect()),
            2 => Values::I64(numbers.map(|n| n as i64 - (1 << 31)).collect()),
            _ => Values::U8(numbers.map(|n| n as u8).collect()),
        };
        HostTensor::new(&shape, values)
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(tensor in tensors()) {
        prop_assert_eq!(from_bytes(&to_bytes(&tensor)), Ok(tensor));
    }

    #[test]
    fn fortran_order_is_the_reversed_transpose(dims in prop::collection::vec(1usize..5, 1..4)) {
        let count: usize = dims.iter().product();
        let shape = format!("({},)", dims.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", "));
        let data: Vec<u8> = (0..count).map(|x| x as u8).collect();
        let tensor = from_bytes(&file(1, &header("|u1", "True", &shape), &data)).unwrap();
        let Values::U8(values) = tensor.values else { panic!("u1 stays u8") };
        for (position, value) in values.iter().enumerate() {
            // The first index runs fastest in the file, the last one in the tensor.
            let (mut rest, mut offset, mut stride) = (position, 0, count);
            for dim in dims.iter().rev() {
                stride /= dim;
                offset += rest % dim * stride;
                rest /= dim;
            }
            prop_assert_eq!(usize::from(*value), offset);
        }
    }

    #[test]
    fn no_bytes_make_it_panic(tensor in tensors(), at in 0usize..160, byte in any::<u8>()) {
        let mut bytes = to_bytes(&tensor);
        if let Some(b) = bytes.get_mut(at) {
            *b = byte;
        }
        let _ = from_bytes(&bytes);
    }
}
