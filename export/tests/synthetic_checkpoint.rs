//! `tools/synth`: checkpoints of full size with random weights, and small ones of the same form.

mod checkpoint_keys;
mod onnx_support;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use checkpoint_keys::published;
use onnx_support::python;
use viaduct_export::{
    bundle::{Bundle, ExportRequest, export},
    onnx::DType,
    weights::Checkpoint,
};

/// What the tool prints; `None` without Python.
fn synth(arguments: &[&str]) -> Option<String> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/synth");
    let output = Command::new(python()?).arg(tool).args(arguments).output().expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Names and shapes of all tensors of a full-size checkpoint.
fn tensors(preset: &str, component: &str) -> Option<BTreeMap<String, Vec<usize>>> {
    let text = synth(&["--preset", preset, "--only", component, "--list"])?;
    let tensor = |line: &str| {
        let (name, shape) = line.split_once('\t').unwrap();
        (name.to_owned(), serde_json::from_str(shape).unwrap())
    };
    Some(text.lines().map(tensor).collect())
}

const COMPONENTS: [&str; 3] = ["text_encoder", "transformer", "vae"];

#[test]
fn full_sizes_are_those_of_the_published_checkpoints() {
    for preset in ["klein-4b", "klein-9b"] {
        let lists: Option<Vec<_>> = COMPONENTS.iter().map(|component| tensors(preset, component)).collect();
        let Some(lists) = lists else { return };
        for (name, shape) in published(&format!("flux2-{preset}")) {
            assert!(lists.iter().any(|list| list.get(&name) == Some(&shape)), "{preset}: {name} {shape:?}");
        }
        if preset == "klein-4b" {
            let size = |list: &BTreeMap<_, Vec<usize>>| {
                list.values().map(|shape| shape.iter().product::<usize>()).sum()
            };
            let sizes: Vec<usize> = lists.iter().map(size).collect();
            // Values of the published files, those that a picture does not need included.
            assert_eq!(sizes, [4_022_468_096, 3_875_544_576, 84_046_372]);
        }
    }
}

/// All sizes down to what a test can write, in the form of the large one.
const SMALL: &[&str] = &[
    "text_encoder.hidden_size=64",
    "text_encoder.intermediate_size=96",
    "text_encoder.num_hidden_layers=28",
    "text_encoder.num_attention_heads=2",
    "text_encoder.num_key_value_heads=1",
    "text_encoder.vocab_size=2048",
    "transformer.joint_attention_dim=192",
    "transformer.num_attention_heads=1",
    "transformer.num_layers=1",
    "transformer.num_single_layers=1",
    "vae.block_out_channels=[32,32,64,64]",
];

/// A small checkpoint in `folder` with the weights of these components; `None` without Python.
fn small(folder: &Path, components: &[&str]) -> Option<PathBuf> {
    let root = folder.join("checkpoint");
    let mut arguments = vec![root.to_str().unwrap(), "--preset", "klein-4b", "--only"];
    arguments.extend(components);
    arguments.extend(SMALL.iter().flat_map(|set| ["--set", set]));
    synth(&arguments)?;
    Some(root)
}

#[test]
fn a_small_one_is_exported_by_the_recipe_of_the_large_one() {
    let folder = tempfile::tempdir().unwrap();
    let Some(source) = small(folder.path(), &COMPONENTS) else { return };
    let out = folder.path().join("bundle");
    let request = ExportRequest {
        source: &source,
        arrivals: None,
        out: &out,
        recipe: None,
        profile: "q4",
        calibration: None,
        target_bytes: None,
        set: &[],
        force: false,
        fault: None,
    };
    export(&request, &mut |_| ()).unwrap();
    let bundle = Bundle::open(&out).unwrap();
    assert_eq!(bundle.manifest.recipe.name, "flux2-klein-4b");
    assert_eq!(bundle.manifest.recipe.source.license.as_deref(), Some("random weights"));
}

/// The scale that keeps the size of what goes through a layer, and half of it where a branch ends.
#[test]
fn weights_have_a_sane_scale() {
    let folder = tempfile::tempdir().unwrap();
    let Some(root) = small(folder.path(), &["transformer"]) else { return };
    assert!(Checkpoint::open(&root.join("vae")).is_err(), "its weights were not asked for");
    let checkpoint = Checkpoint::open(&root.join("transformer")).unwrap();
    let values = |name: &str, shape: &[usize]| -> Vec<f32> {
        let tensor = checkpoint.tensor(name, shape).unwrap();
        assert_eq!(tensor.dtype, DType::BF16);
        tensor.to_f32().unwrap().unwrap()
    };
    let deviation = |values: &[f32]| {
        let squares: f32 = values.iter().map(|value| value * value).sum();
        (squares / values.len() as f32).sqrt()
    };
    let linear = values("transformer_blocks.0.attn.to_q.weight", &[128, 128]);
    assert!((deviation(&linear) * 128f32.sqrt() - 1.0).abs() < 0.05);
    let end = values("transformer_blocks.0.ff.linear_out.weight", &[128, 384]);
    assert!((deviation(&end) * 384f32.sqrt() - 0.5).abs() < 0.05);
    let norm = values("single_transformer_blocks.0.attn.norm_q.weight", &[128]);
    assert!(norm.iter().all(|value| (value - 1.0).abs() < 0.11));
}
