use std::path::{Path, PathBuf};

use viaduct::tensor::HostTensor;
use viaduct_export::{
    onnx::{DType, Dim, Model, ValueType, read_model},
    passes::{Part, Settings, Splitting, apply, sequence},
};

use crate::{
    runtime_support::{Feeds, cpu, noise, relative_error, run, tensor},
    staged::{parts, ports, run_parts},
};

fn cuts(cuts: &[usize]) -> Settings {
    Settings { split: Splitting { cuts: cuts.to_vec(), ..Splitting::default() }, ..Settings::default() }
}

fn prepared(path: &Path, passes: &[&str]) -> Model {
    let mut model = read_model(path).unwrap();
    let passes: Vec<_> = passes.iter().flat_map(|name| sequence(name).unwrap()).collect();
    apply(&mut model, &passes, &Settings::default()).unwrap();
    model
}

/// Runs the stages as the pipeline does: attention in chunks of query rows.
fn run_stages(stages: &[Part], latents: &HostTensor, chunk: usize) -> HostTensor {
    let feeds = vec![("latents".to_owned(), latents.clone())];
    let mut values = run_parts(&stages[..1], &feeds);
    let q = values["q"].clone();
    let &[1, height, width, channels] = &q.shape[..] else { panic!("{:?}", q.shape) };
    assert_eq!(values["kt"].shape, [1, channels, height, width]);
    assert_eq!(values["v"].shape, q.shape);
    let rows = height * width;
    let (kt, v) = (values["kt"].clone(), values["v"].clone());
    let (kt, v) = (kt.reshaped(&[1, channels, rows]), v.reshaped(&[1, rows, channels]));
    let mut attended = Vec::new();
    for first in (0..rows).step_by(chunk) {
        let last = rows.min(first + chunk);
        let part = q.to_f32()[first * channels..last * channels].to_vec();
        let part = HostTensor::f32(&[1, last - first, channels], part);
        let feeds: Feeds =
            [("q_chunk", &part), ("kt", &kt), ("v", &v)].map(|(n, t)| (n.to_owned(), t.clone())).into();
        attended.extend(run(&mut cpu(), &stages[1].model, &feeds, &["attn_chunk"]).unwrap()[0].to_f32());
    }
    values.insert("attn".to_owned(), HostTensor::f32(&[1, height, width, channels], attended));
    let feeds: Feeds = values.into_iter().collect();
    run_parts(&stages[2..], &feeds)["image_raw"].clone()
}

fn check(path: &Path, passes: &[&str], levels: &[usize], bar: f32) -> Vec<Part> {
    let original = read_model(path).unwrap();
    let id = original.graph.inputs[0];
    let Some(ValueType::Tensor { dtype, shape: Some(shape) }) = &original.graph[id].ty else { panic!() };
    let Dim::Fixed(channels) = shape[1] else { panic!("{shape:?}") };
    let latents = tensor(DType::F32, &[1, channels, 3, 5], &noise(7, channels * 15));
    let fed = tensor(*dtype, &[1, channels, 3, 5], &noise(7, channels * 15));
    let name = original.graph[id].name.clone();
    let output = original.graph[original.graph.outputs[0]].name.clone();
    let whole = run(&mut cpu(), &original, &vec![(name, fed)], &[&output]).unwrap().remove(0);
    let stages = parts(&prepared(path, passes), "split_vae", &cuts(levels));
    let image = run_stages(&stages, &latents, 7);
    assert_eq!(image.shape, whole.shape);
    let error = relative_error(&image.to_f32(), &whole.to_f32());
    assert!(error <= bar, "{}: {error:e}", path.display());
    assert_contract(&stages, levels);
    stages
}

/// Names of the ports, and no size that is read at run time.
fn assert_contract(stages: &[Part], levels: &[usize]) {
    let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names[..2], ["vae_pre", "vae_attention"]);
    assert_eq!(ports(&stages[0]), (vec!["latents"], vec!["q", "kt", "v", "vae_mid_res0"]));
    assert_eq!(ports(&stages[1]), (vec!["q_chunk", "kt", "v"], vec!["attn_chunk"]));
    let ups: Vec<String> = levels.iter().map(|level| format!("vae_up{}", level - 1)).collect();
    for (index, stage) in stages[2..].iter().enumerate() {
        assert_eq!(stage.name, format!("vae_post{index}"));
        let inputs = match index {
            0 => vec!["vae_mid_res0", "attn"],
            _ => vec![ups[index - 1].as_str()],
        };
        let output = ups.get(index).map_or("image_raw", String::as_str);
        assert_eq!(ports(stage), (inputs, vec![output]));
    }
    for stage in stages {
        let shapes = stage.model.graph.nodes().filter(|(_, node)| node.is("Shape")).count();
        assert_eq!(shapes, 0, "{}", stage.name);
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign/vae").join(name)
}

#[test]
fn stages_of_a_legacy_export() {
    for passes in [&[][..], &["lean"], &["webgpu"]] {
        check(&fixture("legacy.onnx"), passes, &[], 1e-5);
        check(&fixture("legacy.onnx"), passes, &[1], 1e-5);
    }
}

#[test]
fn stages_of_a_dynamo_export_in_f16() {
    for passes in [&[][..], &["lean"], &["webgpu"]] {
        check(&fixture("dynamo_f16.onnx"), passes, &[1], 2e-2);
    }
}

/// The tiny exports that are not in the repository.
#[test]
#[ignore = "needs models that are not in the repository: set VIADUCT_SHARED"]
fn stages_of_the_shared_exports() {
    let shared = PathBuf::from(std::env::var_os("VIADUCT_SHARED").expect("VIADUCT_SHARED names a folder"));
    for name in ["vae_legacy.onnx", "vae_dynamo.onnx"] {
        for passes in [&[][..], &["lean"], &["webgpu"]] {
            let path = shared.join("oracles/onnx-tiny").join(name);
            check(&path, passes, &[1, 2], 1e-5);
        }
    }
}
