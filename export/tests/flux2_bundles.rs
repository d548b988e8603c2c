//! The graphs of exported FLUX.2 bundles: valid to others, free of what a device cannot run, complete, and with every
//! weight stored as the recipe says.

mod onnx_support;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use onnx_support::assert_others_accept_all;
use tempfile::TempDir;
use viaduct_export::{
    bundle::{Bundle, ExportRequest, export},
    onnx::{DType, Graph, Model, ValueType, read_model},
    weights::Checkpoint,
};
use viaduct_procedural::write_checkpoint;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn klein_emoji() -> PathBuf {
    root().join("bundles/klein-emoji/source")
}

/// An exported bundle with its graphs by stage name.
struct Exported {
    bundle: Bundle,
    models: BTreeMap<String, Model>,
    _folder: TempDir,
}

fn exported(source: &Path, profile: &str, recipe: Option<&str>, set: &[(&str, &str)]) -> Exported {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("bundle");
    let set: Vec<(String, String)> =
        set.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let request = ExportRequest {
        source,
        arrivals: None,
        out: &out,
        recipe,
        profile,
        calibration: None,
        target_bytes: None,
        set: &set,
        force: false,
        fault: None,
    };
    export(&request, &mut |_| ()).unwrap();
    let bundle = Bundle::open(&out).unwrap();
    let stages = bundle.manifest.stages.iter();
    let models =
        stages.map(|s| (s.name.clone(), read_model(&bundle.path(&s.graph).unwrap()).unwrap())).collect();
    Exported { bundle, models, _folder: folder }
}

/// Calls `check` with a checkpoint's folder, a profile, and the recipe values to set, the taps first.
fn with_checkpoints(check: impl Fn(&Path, &str, &[(&str, &str)])) {
    for profile in ["f32", "f16", "q8", "q4"] {
        check(&klein_emoji(), profile, &[("text_encoder.taps", "2,4,6"), ("vae_decoder.cuts", "1,2,3")]);
    }
    for (fixture, taps, length) in [("flux2-a", "1,3,4", "40"), ("flux2-b", "2,3", "24")] {
        let folder = tempfile::tempdir().unwrap();
        let spec = root().join("tests/fixtures").join(fixture).join("checkpoint.json");
        write_checkpoint(&spec, folder.path()).unwrap();
        let set = [("text_encoder.taps", taps), ("text_encoder.length", length)];
        check(folder.path(), "f32", &set);
    }
}

/// Operators that branch or that make shapes depend on values: no device runs them well.
const UNFIT: [&str; 5] = ["Shape", "If", "Loop", "Scan", "NonZero"];

#[test]
fn graphs_are_valid_and_static() {
    with_checkpoints(|source, profile, set| {
        let Exported { bundle, models, _folder } = &exported(source, profile, None, set);
        let paths = bundle.manifest.stages.iter().map(|stage| bundle.path(&stage.graph).unwrap());
        let paths: Vec<PathBuf> = paths.collect();
        assert_others_accept_all(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        for (stage, model) in models {
            for (_, node) in model.graph.nodes() {
                assert!(!UNFIT.contains(&node.op_type.as_str()), "{profile} {stage}: {}", node.op_type);
            }
        }
    });
}

/// The checkpoint's name of a constant that holds a weight or, quantised, its codes.
fn weight_name(constant: &str) -> Option<&str> {
    let (name, rest) = whole(constant.strip_suffix(".codes").unwrap_or(constant));
    let is_weight = name.ends_with(".weight") || name.ends_with(".bias");
    (is_weight && (rest.is_empty() || rest.ends_with(']'))).then_some(name)
}

/// The weight of which a constant holds some columns, and which those are: `to_out.weight[:,0:3072]`.
fn whole(constant: &str) -> (&str, &str) {
    constant.split_at(constant.find('[').unwrap_or(constant.len()))
}

/// Every tensor of the checkpoint that the pipeline needs is in exactly one place, with all its values.
#[test]
fn weights_add_up() {
    with_checkpoints(|source, profile, set| {
        let models = exported(source, profile, None, set).models;
        let mut stored: BTreeMap<String, usize> = BTreeMap::new();
        for model in models.values() {
            let quantised = quantised(&model.graph);
            for (_, value) in model.graph.values() {
                let (Some(constant), Some(name)) = (&value.constant, weight_name(&value.name)) else {
                    continue;
                };
                let part = value.name.strip_suffix(".codes").unwrap_or(&value.name);
                let elements = quantised.get(part).map_or(constant.elements(), |q| q.elements);
                let before = stored.entry(name.to_owned()).or_default();
                assert!(*before == 0 || part != name, "{profile}: {name} twice");
                *before += elements;
            }
        }
        let taps = set[0].1.split(',').map(|tap| tap.parse::<usize>().unwrap());
        assert_eq!(stored, needed(source, taps.max().unwrap()), "{profile}");
    });
}

/// Tensors that a picture needs, with their sizes: not the text encoder's layers after the last tap, nor the table of
/// embeddings and the statistics of the latents, which are stored apart.
fn needed(source: &Path, layers: usize) -> BTreeMap<String, usize> {
    let mut needed = BTreeMap::new();
    for component in ["text_encoder", "transformer", "vae"] {
        let checkpoint = Checkpoint::open(&source.join(component)).unwrap();
        for name in checkpoint.names() {
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
            let wanted = match component {
                "text_encoder" => layer.is_some_and(|layer| layer.parse::<usize>().unwrap() < layers),
                "vae" => name.starts_with("decoder.") || name.starts_with("post_quant_conv."),
                _ => true,
            };
            if wanted {
                let shape = checkpoint.find(name).unwrap().shape;
                needed.insert(name.to_owned(), shape.iter().product());
            }
        }
    }
    needed
}

#[derive(Debug, PartialEq)]
struct Quantised {
    bits: i64,
    block: i64,
    zero_points: bool,
    accuracy_level: i64,
    /// Of the weight that the codes stand for.
    elements: usize,
}

/// The layers that are MatMulNBits, by the name of their weight.
fn quantised(graph: &Graph) -> BTreeMap<String, Quantised> {
    let nodes = graph.nodes().filter(|(_, node)| node.op_type == "MatMulNBits");
    nodes
        .map(|(_, node)| {
            let codes = &graph[node.inputs[1].unwrap()].name;
            let int = |name| node.int(name).unwrap();
            let layer = Quantised {
                bits: int("bits"),
                block: int("block_size"),
                zero_points: node.inputs.get(3).is_some_and(Option::is_some),
                accuracy_level: int("accuracy_level"),
                elements: (int("K") * int("N")) as usize,
            };
            (codes.strip_suffix(".codes").unwrap().to_owned(), layer)
        })
        .collect()
}

fn names(quantised: &BTreeMap<String, Quantised>) -> BTreeSet<&str> {
    quantised.keys().map(|name| whole(name).0).collect()
}

/// Matrices of the component's blocks, by the start of their names.
fn matrices(component: &str, prefixes: &[&str]) -> BTreeSet<String> {
    let checkpoint = Checkpoint::open(&klein_emoji().join(component)).unwrap();
    let wanted = |name: &&str| {
        let matrix = checkpoint.find(name).unwrap().shape.len() == 2;
        matrix && prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    checkpoint.names().filter(wanted).map(str::to_owned).collect()
}

#[test]
fn every_linear_of_a_block_is_quantised() {
    for (profile, bits, zero_points) in [("q8", 8, false), ("q4", 4, true)] {
        let models = exported(&klein_emoji(), profile, None, &[]).models;
        let blocks = quantised(&models["transformer"].graph);
        // The output projections of single blocks are in two parts.
        assert_eq!(blocks.len(), 2 * 12 + 6 * 3);
        let matrices_of_blocks =
            matrices("transformer", &["transformer_blocks.", "single_transformer_blocks."]);
        assert!(names(&blocks).into_iter().eq(matrices_of_blocks.iter()), "{profile}: {blocks:?}");
        let text = quantised(&models["text_encoder"].graph);
        assert_eq!(text.len(), 6 * 7);
        for (level, layers) in [(4, &blocks), (0, &text)] {
            for (name, layer) in layers {
                let Quantised { elements, .. } = *layer;
                let expected = Quantised { bits, block: 32, zero_points, accuracy_level: level, elements };
                assert_eq!(*layer, expected, "{profile} {name}");
            }
        }
        // Modulation is stored wider: it decides over every token.
        let modulation = quantised(&models["modulation"].graph);
        match profile {
            "q8" => assert!(modulation.is_empty()),
            _ => assert!(modulation.len() == 6 && modulation.values().all(|layer| layer.bits == 8)),
        }
        let decoder = models.iter().filter(|(name, _)| name.starts_with("vae"));
        decoder.for_each(|(name, model)| assert!(quantised(&model.graph).is_empty(), "{name}"));
    }
}

/// Attention in f32 takes casts of its operands, and gives back what the graph computes in.
#[test]
fn attention_may_be_f32() {
    let set = [("profiles.q8.attention", "f32")];
    for (set, math) in [(&[][..], DType::F16), (&set[..], DType::F32)] {
        let graph = exported(&klein_emoji(), "q8", None, set).models.remove("transformer").unwrap().graph;
        let attentions: Vec<_> =
            graph.nodes().filter(|(_, node)| node.op_type == "MultiHeadAttention").collect();
        assert_eq!(attentions.len(), 2 + 6);
        for (_, node) in attentions {
            for operand in node.inputs.iter().flatten() {
                let Some(ValueType::Tensor { dtype, .. }) = &graph[*operand].ty else { panic!("no type") };
                assert_eq!(*dtype, math);
            }
        }
    }
}

/// A rule for one layer changes that layer; the first that matches counts.
#[test]
fn rules_for_single_layers_are_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("mixed.toml");
    let text = r#"
        base = "flux2-klein"
        [text_encoder]
        taps = [2, 4, 6]
        length = 64
        [profiles.mixed]
        compute = "f16"
        weights = "q4"
        block = 64
        rules = [
            { match = '^transformer_blocks\.0\.attn\.to_q', weights = "f32" },
            { match = '^transformer_blocks\.0\.', weights = "q8" },
            { match = 'single_transformer_blocks\.[0-4]\.attn\.to_out', weights = "f16" },
        ]
        [profiles.mixed.components.text_encoder]
        weights = "f16"
        rules = []
    "#;
    fs::write(&recipe, text).unwrap();
    let models = exported(&klein_emoji(), "mixed", recipe.to_str(), &[]).models;
    let blocks = quantised(&models["transformer"].graph);
    for name in matrices("transformer", &["transformer_blocks.", "single_transformer_blocks."]) {
        let expected = match name.as_str() {
            "transformer_blocks.0.attn.to_q.weight" => None,
            n if n.starts_with("transformer_blocks.0.") => Some(8),
            n if n.ends_with(".attn.to_out.weight") && !n.contains(".5.") => None,
            _ => Some(4),
        };
        let parts = blocks.iter().filter(|(part, _)| whole(part).0 == name);
        let bits: BTreeSet<i64> = parts.map(|(_, layer)| layer.bits).collect();
        assert_eq!(bits, expected.into_iter().collect(), "{name}");
    }
    assert!(blocks.values().all(|layer| layer.block == 64 && !layer.zero_points));
    assert!(quantised(&models["text_encoder"].graph).is_empty());
}
