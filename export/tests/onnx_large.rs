//! Models of more than 2 GiB are rewritten in constant memory. Writes gigabytes, so it runs on demand, alone in its
//! process because it looks at the peak memory of the whole process:
//!
//!     cargo test --release -p viaduct-export --test onnx_large -- --ignored
#![cfg(target_os = "linux")]

mod onnx_support;

use std::{fs, sync::Arc};

use onnx_support::*;
use prost::Message;
use viaduct_export::onnx::{
    Bytes, Compute, ComputeError, DType, Tensor, WriteOptions, proto::TensorProto, read_model, write_model,
};

struct Mebibyte;

impl Compute for Mebibyte {
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        Ok(vec![vec![0; 1 << 20]])
    }
}

/// Peak resident memory, pages of mapped files included.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// <https://github.com/onnx/onnx/issues/3275> <https://github.com/onnx/onnx/issues/6556>
#[test]
#[ignore = "writes 7 GiB, one model after the other"]
fn large_models_are_rewritten_in_constant_memory() {
    const EXTERNAL: u64 = 2_252 << 20;
    let sources = tempfile::tempdir().unwrap();
    let inline = sources.path().join("inline.onnx");
    sparse_inline_model(&inline, (1 << 31) - 1000);
    let external_path = sources.path().join("external.onnx");
    fs::File::create(sources.path().join("w.data")).unwrap().set_len(EXTERNAL).unwrap();
    let tensor = TensorProto { dims: vec![EXTERNAL as i64 / 4], ..external(&[("location", "w.data")]) };
    fs::write(&external_path, tensor_model(tensor).encode_to_vec()).unwrap();

    let computed = model(|graph| {
        for i in 0..3000 {
            let bytes = Bytes::Computed { source: Arc::new(Mebibyte), part: 0, len: 1 << 20 };
            graph.add_constant(&format!("w{i}"), Tensor { dtype: DType::U8, shape: vec![1 << 20], bytes });
        }
    });
    let cases = [
        ("computed", computed, 3),
        ("inline", read_model(&inline).unwrap(), 2),
        ("external", read_model(&external_path).unwrap(), 2),
    ];
    for (name, model, files) in cases {
        let target = tempfile::tempdir().unwrap();
        let path = target.path().join("m.onnx");
        let summary = write_model(&model, &path, &WriteOptions::default()).unwrap();
        assert_eq!(summary.files.len(), files, "{name}");
        assert!(summary.files.iter().map(|file| file.bytes).sum::<u64>() > model.constant_bytes());
        assert!(summary.files.last().unwrap().bytes < 1 << 20, "{name}: the graph file is small");
        assert_eq!(read_model(&path).unwrap().constant_bytes(), model.constant_bytes());
        assert_others_accept(&path);
        assert!(peak_mib() < 64, "{name}: {} MiB", peak_mib());
    }
}
