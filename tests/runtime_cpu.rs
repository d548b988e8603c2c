//! The runtime on the CPU provider: binding, checking, running and dropping.

mod runtime_support;

use std::path::Path;

use runtime_support::{Net, cpu, noise};
use viaduct::{
    runtime::{DeviceKind, Provider, RuntimeError, StageModel},
    tensor::HostTensor,
};
use viaduct_export::onnx::{DType, Dim, model_bytes};

fn matmul() -> Vec<u8> {
    let mut net = Net::new(DType::F32);
    let rows = Dim::Symbol("rows".to_owned());
    net.input("a", DType::F32, &[rows.clone(), Dim::Fixed(3)]).input("bias", DType::F32, &[rows, Dim::Fixed(2)]);
    net.float("w", &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    net.node("MatMul", &["a", "w"], "y", &[]).node("Add", &["y", "bias"], "z", &[]);
    model_bytes(&net.model(&["y", "z"])).unwrap()
}

fn open(runtime: &mut viaduct::runtime::Runtime) -> viaduct::runtime::Stage<'_> {
    runtime.open(StageModel { name: "toy", bytes: matmul(), folder: Path::new(".") }).unwrap()
}

#[test]
fn the_device_is_described() {
    let runtime = cpu();
    let device = runtime.device();
    assert_eq!((device.provider, device.kind), (Provider::Cpu, DeviceKind::Cpu));
    assert_eq!(device.ort_version, "1.31.1");
    assert_eq!(device.plugin_version, None);
}

#[test]
fn a_stage_runs_with_bound_and_given_inputs() {
    let mut runtime = cpu();
    let mut stage = open(&mut runtime);
    assert_eq!(stage.inputs()[0].shape, [Dim::Symbol("rows".to_owned()), Dim::Fixed(3)]);
    assert_eq!(stage.nodes().keys().collect::<Vec<_>>(), ["CPUExecutionProvider"]);
    stage.bind("bias", &HostTensor::f32(&[1, 2], vec![10.0, 20.0])).unwrap();
    for step in 0..3 {
        let a = HostTensor::f32(&[1, 3], vec![1.0, 2.0, step as f32]);
        let outputs = stage.run(&[("a", &a)], &["z", "y"]).unwrap();
        let step = step as f32;
        assert_eq!(outputs[0], HostTensor::f32(&[1, 2], vec![11.0 + step, 22.0 + step]));
        assert_eq!(outputs[1], HostTensor::f32(&[1, 2], vec![1.0 + step, 2.0 + step]));
    }
}

#[test]
fn wrong_inputs_are_named() {
    let mut runtime = cpu();
    let mut stage = open(&mut runtime);
    let a = HostTensor::f32(&[1, 3], noise(1, 3));
    let bias = HostTensor::f32(&[1, 2], noise(2, 2));
    let message = |r: Result<Vec<HostTensor>, RuntimeError>| r.unwrap_err().to_string();
    assert_eq!(message(stage.run(&[("a", &a)], &["y"])), "stage toy: input bias was neither bound nor given");
    assert_eq!(message(stage.run(&[("b", &a)], &["y"])), "stage toy has no input b; it has: a, bias");
    assert_eq!(
        message(stage.run(&[("a", &a), ("bias", &bias)], &["q"])),
        "stage toy has no output q; it has: y, z"
    );
    let wide = HostTensor::f32(&[1, 4], noise(1, 4));
    assert_eq!(
        message(stage.run(&[("a", &wide), ("bias", &bias)], &["y"])),
        "stage toy: tensor a: expected 3 on axis 1, got [1, 4]"
    );
    let two = HostTensor::f32(&[2, 2], noise(2, 4));
    assert_eq!(
        message(stage.run(&[("a", &a), ("bias", &two)], &["y"])),
        "stage toy: tensor bias: expected rows = 1 on axis 0 as in a, got [2, 2]"
    );
    let whole = HostTensor::i64(&[1, 3], vec![1, 2, 3]);
    assert_eq!(
        message(stage.run(&[("a", &whole), ("bias", &bias)], &["y"])),
        "stage toy: tensor a: expected F32, got I64"
    );
}

#[test]
fn a_broken_model_names_its_stage() {
    let error = cpu().open(StageModel { name: "toy", bytes: vec![1, 2, 3], folder: Path::new(".") }).err().unwrap();
    assert!(error.to_string().starts_with("stage toy: the session could not be made"), "{error}");
    assert_eq!(error.exit_code(), 1);
}
