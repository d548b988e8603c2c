//! Any bytes through reader, validation, shape inference and writer.
#![no_main]

use std::collections::BTreeMap;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use viaduct_export::{
    onnx::{model_bytes, read_model_bytes},
    shapes::infer,
};

fuzz_target!(|data: &[u8]| {
    let Ok(model) = read_model_bytes(Bytes::copy_from_slice(data), None) else { return };
    model.graph.validate().expect("the reader gives valid graphs only");
    infer(&model, &BTreeMap::new(), &BTreeMap::new());
    let written = model_bytes(&model).expect("what was read can be written");
    read_model_bytes(Bytes::from(written), None).expect("what was written can be read");
});
