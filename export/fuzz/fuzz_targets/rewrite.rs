//! Any model through every pass and every sequence of passes.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use viaduct_export::{
    onnx::{Model, model_bytes, read_model_bytes},
    passes::{PASSES, Pass, PassError, SEQUENCES, Settings, apply, sequence},
};

fuzz_target!(|data: &[u8]| {
    let Ok(model) = read_model_bytes(Bytes::copy_from_slice(data), None) else { return };
    for pass in PASSES {
        rewrite(&model, &[pass]);
    }
    for found in SEQUENCES {
        rewrite(&model, &sequence(found.name).expect("a sequence of the table"));
    }
});

fn rewrite(model: &Model, passes: &[&'static Pass]) {
    let mut model = model.clone();
    match apply(&mut model, passes, &Settings::default()) {
        Err(error @ (PassError::Invalid { .. } | PassError::Unsettled { .. })) => panic!("{error}"),
        Err(_) => return,
        Ok(_) => {}
    }
    let written = model_bytes(&model).expect("a rewritten model can be written");
    read_model_bytes(Bytes::from(written), None).expect("a rewritten model can be read");
}
