//! One test or more per public bug report whose subject this program touches, named `bug_N_...`: the report's own
//! reproduction, and what is right there. N counts the reports that we know; gaps are reports about what we do not have.
//!
//! Each test says or holds what would make it fail. More about the reader and writer of ONNX files is in
//! `export/tests/onnx_regression.rs`. What a report asks of a part that has no test here:
//!
//! | report | where | why |
//! |---|---|---|
//! | 15, a greedy worker | `tests/watchdog.rs` | it takes 1 GiB a second and is killed within a sampling period, without a zombie; here its pages are counted |
//! | 20, rewriting in constant memory | `export/tests/onnx_large.rs`, on demand | it writes 7 GiB; here such models are read, planned and run |
//! | 26, sizes of reference images (<https://github.com/sgl-project/sglang/issues/17302>) | none | no command takes a reference image yet |
//! | 27, residuals beyond f16 of the Qwen3-VL encoder | none | that model is not here yet; residual sums are f32 (`tests/passes/fp32_islands.rs`) |

#[path = "../support/bad.rs"]
mod bad;
mod downloads;
mod files;
mod graphs;
mod memory;
mod numerics;
#[path = "../../export/tests/onnx_support/mod.rs"]
mod onnx_support;
mod pictures;
#[path = "../support/place.rs"]
mod place;
#[path = "../runtime_support/mod.rs"]
mod runtime_support;
#[path = "../support/system.rs"]
mod system;

use std::{path::Path, process::Output};

use bad::{finish, put, text, viaduct};
use runtime_support::Feeds;
use serde_json::Value;
use viaduct::{runtime::StageModel, tensor::HostTensor};
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Dim, Model, model_bytes},
    passes::{Settings, apply, pass},
};

const DRAW: &str = "generate -b b -p cat --size 32x32 --steps 1 --seed 1 --ep cpu -o out.png";

fn run(directory: &Path, arguments: &str) -> Output {
    finish(viaduct(directory, arguments))
}

/// What a command writes to standard output and standard error; it must end with that code.
fn told(directory: &Path, arguments: &str, code: i32) -> (String, String) {
    let output = run(directory, arguments);
    let (result, told) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{arguments}: {told}");
    (result, told)
}

fn succeed(directory: &Path, arguments: &str) -> Output {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    output
}

/// What `report` tells of a model.
fn report(model: &Model, device: &str) -> Value {
    let directory = tempfile::tempdir().unwrap();
    put(&directory.path().join("m.onnx"), model_bytes(model).unwrap());
    let (report, _) = told(directory.path(), &format!("report m.onnx --device {device} --json"), 0);
    serde_json::from_str(&report).unwrap()
}

/// What `report` finds in a model: `hazards` or `limits`.
fn findings(model: &Model, device: &str, key: &str) -> Vec<Value> {
    report(model, device)["stages"][0][key].as_array().unwrap().clone()
}

fn rewritten(model: &Model, passes: &[&str]) -> Model {
    let mut model = model.clone();
    let passes: Vec<_> = passes.iter().map(|name| pass(name).unwrap()).collect();
    apply(&mut model, &passes, &Settings::default()).unwrap();
    model
}

/// How many nodes have that operator.
fn count(model: &Model, op_type: &str) -> usize {
    model.graph.nodes().filter(|(_, node)| node.op_type == op_type).count()
}

fn feed(name: &str, tensor: HostTensor) -> Feeds {
    vec![(name.to_owned(), tensor)]
}

/// A model for [`Runtime::open`](viaduct::runtime::Runtime::open).
fn toy(bytes: Vec<u8>) -> StageModel<'static> {
    StageModel { name: "toy", bytes, folder: Path::new("."), pending_dispatches: PENDING_DISPATCHES }
}

fn fixed<const N: usize>(sizes: [usize; N]) -> [Dim; N] {
    sizes.map(Dim::Fixed)
}
