//! Bugs that users of other tools have met, as small cases; each links to its report.

mod onnx_support;

use std::{fs, sync::Arc};

use onnx_support::*;
use prost::Message;
use viaduct_export::onnx::{
    Bytes, Compute, ComputeError, DType, Tensor, WriteOptions, model_bytes, proto::TensorProto, read_model,
    read_model_bytes, write_model,
};

/// Models of more than 2 GiB could not be serialised, checked or rewritten.
/// <https://github.com/onnx/onnx/issues/3275> <https://github.com/onnx/onnx/issues/5949>
/// The data is a hole in a sparse file and takes no room on the disk.
#[test]
fn more_than_two_gib_of_external_data() {
    const BYTES: u64 = 2_500 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let data = fs::File::create(folder.path().join("w.data")).unwrap();
    data.set_len(BYTES + 4096).unwrap();
    let length = BYTES.to_string();
    let tensor = external(&[("location", "w.data"), ("offset", "4096"), ("length", &length)]);
    let tensor = TensorProto { dims: vec![BYTES as i64 / 4], ..tensor };
    fs::write(&path, tensor_model(tensor).encode_to_vec()).unwrap();
    let model = read_model(&path).unwrap();
    assert_eq!(model.constant_bytes(), BYTES);
    let message = model_bytes(&model).unwrap();
    assert!(message.len() < 1000);
    assert_others_accept(&path);
}

/// The limit of protobuf is 2 GiB, not 2·10⁹ bytes, and beyond it the file is not an ONNX model at all.
/// <https://github.com/onnx/onnx/issues/6556>
#[test]
fn graph_files_beyond_the_protobuf_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    fs::File::create(&path).unwrap().set_len(1 << 31).unwrap();
    let complaint = read_model(&path).unwrap_err().to_string();
    assert!(complaint.contains("2147483648 bytes; a protobuf file may have 2147483647"), "{complaint}");
}

/// A model of nearly 2 GiB without external data is opened without copying its weights.
/// <https://github.com/onnx/onnx/issues/6556>
#[test]
fn nearly_two_gib_of_inline_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let len = (1 << 31) - 1000;
    sparse_inline_model(&path, len);
    let model = read_model(&path).unwrap();
    assert_eq!(model.constant_bytes(), len);
    let message = model_bytes(&model).unwrap();
    assert!(message.len() < 1000);
    let again = read_model_bytes(message.into(), Some(folder.path())).unwrap();
    let value = &again.graph[again.graph.find("w").unwrap()];
    let Bytes::Mapped { file, range } = &value.constant.as_ref().unwrap().bytes else { panic!("not mapped") };
    assert_eq!((&file.path, range.end), (&path, file.bytes().unwrap().len()));
}

/// The in-memory message is bounded in the same way, and says so before it allocates.
#[test]
fn messages_beyond_the_protobuf_limit() {
    let chunk = bytes::Bytes::from(vec![0; 64 << 20]);
    let model = model(|graph| {
        for i in 0..32 {
            let bytes = Bytes::Inline(chunk.clone());
            let tensor = Tensor { dtype: DType::U8, shape: vec![chunk.len()], bytes };
            graph.add_constant(&format!("w{i}"), tensor);
        }
    });
    let complaint = model_bytes(&model).unwrap_err().to_string();
    assert!(complaint.contains("a protobuf message may have 2147483647"), "{complaint}");
}

/// Download caches keep `snapshots/<rev>/x` as links to `../../blobs/<sha>`; a runtime refused them as traversal.
/// <https://github.com/microsoft/onnxruntime/issues/27353>
#[cfg(unix)]
#[test]
fn models_in_a_download_cache() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (folder.path().join("blobs"), folder.path().join("snapshots/0123abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let original = model(|graph| {
        graph.add_constant("w", Tensor::from_f32(&[1000], &[0.5; 1000]));
    });
    write_model(&original, &blobs.join("m.onnx"), &WriteOptions::default()).unwrap();
    for (name, sha) in [("m.onnx", "aaaa"), ("m-00000.data", "bbbb")] {
        fs::rename(blobs.join(name), blobs.join(sha)).unwrap();
        symlink(format!("../../blobs/{sha}"), snapshot.join(name)).unwrap();
    }
    let model = read_model(&snapshot.join("m.onnx")).unwrap();
    let value = &model.graph[model.graph.find("w").unwrap()];
    assert_eq!(value.constant.as_ref().unwrap().to_f32().unwrap().unwrap(), [0.5; 1000]);
    // A session finds the data by the name it has in the snapshot.
    assert_eq!(model.folder.as_deref(), Some(snapshot.as_path()));
    let message = model_bytes(&model).unwrap();
    assert!(message.windows(12).any(|window| window == b"m-00000.data"));
}

/// A hostile location must not reach files outside the model's folder.
/// <https://github.com/onnx/onnx/issues/3991>; the whole table is in `onnx_hostile.rs`.
#[test]
fn traversal_through_external_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    fs::write(&path, tensor_model(external(&[("location", "../../etc/passwd")])).encode_to_vec()).unwrap();
    let complaint = read_model(&path).unwrap_err().to_string();
    assert!(complaint.contains("initializer 'w'") && complaint.contains("../../etc/passwd"), "{complaint}");
}

struct Zeros(usize);

impl Compute for Zeros {
    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        Ok(vec![vec![0; self.0]])
    }
}

/// A weight that two nodes share is stored once, however many initializers it comes as.
/// <https://github.com/pytorch/pytorch/issues/138195>
#[test]
fn shared_weights_are_stored_once() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first.onnx"), folder.path().join("second.onnx"));
    let source: Arc<dyn Compute> = Arc::new(Zeros(8000));
    let original = model(|graph| {
        for name in ["embed", "head"] {
            let bytes = Bytes::Computed { source: Arc::clone(&source), part: 0, len: 8000 };
            graph.add_constant(name, Tensor { dtype: DType::F16, shape: vec![40, 100], bytes });
        }
    });
    let summary = write_model(&original, &first, &WriteOptions::default()).unwrap();
    assert_eq!(summary.files[0].bytes, 8000);
    let summary = write_model(&read_model(&first).unwrap(), &second, &WriteOptions::default()).unwrap();
    assert_eq!(summary.files[0].bytes, 8000);
    assert_others_accept(&second);
}

/// Half-downloaded weights looked fine until a run gave garbage.
/// <https://github.com/huggingface/huggingface_hub/issues/4223>
#[test]
fn truncated_data_files_are_noticed_when_the_model_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let original = model(|graph| {
        graph.add_constant("w", Tensor::from_f32(&[1000], &[0.5; 1000]));
    });
    write_model(&original, &path, &WriteOptions::default()).unwrap();
    let data = fs::File::options().write(true).open(folder.path().join("m-00000.data")).unwrap();
    data.set_len(4000 * 6 / 10).unwrap();
    let complaint = read_model(&path).unwrap_err().to_string();
    assert!(complaint.contains("initializer 'w'") && complaint.contains("(2400 bytes)"), "{complaint}");
    let graph = fs::read(&path).unwrap();
    fs::write(&path, &graph[..graph.len() * 6 / 10]).unwrap();
    let complaint = read_model(&path).unwrap_err().to_string();
    assert!(complaint.contains("cut short"), "{complaint}");
}
