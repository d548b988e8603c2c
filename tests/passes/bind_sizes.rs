use viaduct_export::{
    onnx::{DType, Dim},
    passes::{PassError, Settings, apply, pass},
};

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, passes},
};

fn net() -> Net {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned()), Dim::Fixed(3)]);
    net.node("Neg", &["x"], "y", &[]);
    net
}

#[test]
fn a_named_dimension_becomes_a_number() {
    let settings = Settings { sizes: [("rows".to_owned(), 2)].into(), ..Settings::default() };
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 3], &noise(1, 6)))];
    let after = passes(&net().model(&["y"]), &[pass("bind_sizes").unwrap()], &settings, &feeds, Bar::Exact);
    assert_eq!(after.applied(), 1);
}

#[test]
fn a_name_that_no_input_has_is_an_error_that_names_those_there_are() {
    let settings = Settings { sizes: [("row".to_owned(), 2)].into(), ..Settings::default() };
    let error = apply(&mut net().model(&["y"]), &[pass("bind_sizes").unwrap()], &settings);
    let Err(PassError::UnknownSize { name, known }) = error else { panic!("{error:?}") };
    assert_eq!((name.as_str(), known.as_str()), ("row", "rows"));
}
