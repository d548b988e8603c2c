//! ONNX Runtime: the only module that names the `ort` crate.
