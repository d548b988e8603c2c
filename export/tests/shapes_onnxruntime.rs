//! Shape inference over real exports, compared with what ONNX Runtime makes of every intermediate tensor.
//!
//! Needs the reference models, which are not part of the repository, and Python with `onnx` and `onnxruntime`:
//!
//!     VIADUCT_SHARED=DIR cargo test --release -p viaduct-export --test shapes_onnxruntime -- --ignored --nocapture

mod onnx_support;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use onnx_support::*;
use serde::Deserialize;
use viaduct_export::{
    onnx::{DType, Graph, read_model},
    shapes::{Sizes, infer},
};

/// One run of a model.
#[derive(Deserialize)]
struct Run {
    sizes: Sizes,
    /// None where the model cannot run at these sizes: exports may promise more than they keep.
    tensors: Option<BTreeMap<String, Tensor>>,
}

#[derive(Deserialize)]
struct Tensor {
    dtype: i32,
    shape: Vec<usize>,
    ints: Option<Vec<i64>>,
}

const SIZES: [&str; 2] = [
    "image_seq=24,text_seq=64,latent_height=4,latent_width=6",
    "image_seq=35,text_seq=64,latent_height=9,latent_width=2",
];

fn runs(python: &Path, models: &[PathBuf]) -> BTreeMap<PathBuf, Vec<Run>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/shapes/onnxruntime_shapes.py");
    let sizes = SIZES.iter().flat_map(|sizes| ["--sizes", sizes]);
    let output = Command::new(python).arg(script).args(models).args(sizes).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Takes out what the exporter recorded about values that nodes make, so that only what is inferred counts.
fn forget_recorded(graph: &mut Graph) {
    let made: Vec<_> = graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten().copied()).collect();
    made.into_iter().for_each(|id| graph[id].ty = None);
}

#[test]
#[ignore = "needs the reference models; see above"]
fn exports_have_the_shapes_that_onnx_runtime_computes() {
    let python = python().expect("Python with onnx and onnxruntime");
    let shared = PathBuf::from(env::var_os("VIADUCT_SHARED").expect("VIADUCT_SHARED names a folder"));
    let entries = fs::read_dir(shared.join("oracles/onnx-tiny")).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "onnx")).collect();
    models.sort();
    let mut differ = Vec::new();
    for (path, runs) in runs(&python, &models) {
        let mut model = read_model(&path).unwrap();
        forget_recorded(&mut model.graph);
        let name = path.file_name().unwrap().to_string_lossy();
        for Run { sizes, tensors } in runs {
            let shapes = infer(&model, &sizes, &BTreeMap::new());
            let Some(tensors) = tensors else {
                let found = shapes.conflicts.first();
                println!("{name}: refused with {sizes:?}; {found:?}");
                differ.extend(found.is_none().then(|| format!("{name}: no conflict with {sizes:?}")));
                continue;
            };
            let conflicts = shapes.conflicts.iter().map(|conflict| format!("{name}: {conflict:?}"));
            differ.extend(conflicts);
            let (mut equal, mut contents) = (0, 0);
            for (value, tensor) in &tensors {
                let fact = shapes.fact(model.graph.find(value).unwrap());
                let known = fact.partial_ints().unwrap_or_default();
                let wrong = |(inferred, actual): (&Option<i64>, &i64)| inferred.is_some_and(|i| i != *actual);
                if fact.dtype != Some(DType::from_onnx(tensor.dtype))
                    || fact.full_shape().as_ref() != Some(&tensor.shape)
                    || known.iter().zip(tensor.ints.iter().flatten()).any(wrong)
                {
                    let (dtype, shape, ints) = (tensor.dtype, &tensor.shape, &tensor.ints);
                    differ.push(format!("{name}: {value} is {fact:?}, not {dtype} {shape:?} {ints:?}"));
                } else {
                    equal += 1;
                    contents += known.iter().flatten().count();
                }
            }
            println!(
                "{name}: {equal} of {} tensors equal, {contents} integers known, all right",
                tensors.len()
            );
        }
    }
    assert!(differ.is_empty(), "{} differ:\n{}", differ.len(), differ.join("\n"));
}
