//! Generates `export/src/onnx/proto.rs` from onnx.proto without a C++ protoc.
//!
//!     pip download --no-deps onnx==1.19.1 && unzip onnx-*.whl onnx/onnx.proto
//!     cargo run --manifest-path tools/onnx_proto/Cargo.toml -- onnx/onnx.proto export/src/onnx/proto.rs

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args_os().skip(1).map(PathBuf::from);
    let (Some(proto), Some(target)) = (args.next(), args.next()) else {
        return Err("usage: onnx-proto-generator onnx.proto proto.rs".into());
    };
    let folder = proto.parent().ok_or("onnx.proto has no folder")?;
    let descriptors = protox::compile([&proto], [folder])?;
    let out = env::temp_dir().join("onnx-proto-generator");
    fs::create_dir_all(&out)?;
    prost_build::Config::new()
        // Tensor contents are slices of the mapped file instead of copies.
        .bytes([".onnx.TensorProto.raw_data"])
        // The long comments of onnx.proto are read there, not here.
        .disable_comments(["."])
        .out_dir(&out)
        .compile_fds(descriptors)?;
    let code = fs::read_to_string(out.join("onnx.rs"))?;
    fs::write(target, format!("//! Generated from onnx.proto by tools/onnx_proto. Do not edit.\n#![allow(clippy::all, missing_docs)]\n\n{code}"))?;
    Ok(())
}
