//! The graphs of exported Qwen-Image-2.1 bundles: valid to others, static, free of weights that no picture needs, with the
//! weights of text and picture stored once, and the same whatever form the checkpoint has.

mod onnx_support;
mod qwen_checkpoint;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use onnx_support::assert_others_accept_all;
use qwen_checkpoint::QwenCheckpoint;
use serde_json::json;
use tempfile::TempDir;
use viaduct_export::{
    arch::qwen_image::FAULTS,
    bundle::{Bundle, ExportEvent, ExportRequest, Outline, OutlineRequest, OutlineSource, Stages, export},
    onnx::{Bytes, DType, Model, read_model},
    weights::Checkpoint,
};

const PROFILES: [&str; 4] = ["f32", "f16", "q8", "q4"];

struct Exported {
    bundle: Bundle,
    notes: Vec<String>,
    _folder: TempDir,
}

impl Exported {
    fn model(&self, stage: &str) -> Model {
        let stage = self.bundle.manifest.stages.iter().find(|s| s.name == stage).unwrap();
        read_model(&self.bundle.path(&stage.graph).unwrap()).unwrap()
    }

    /// Hashes of all files.
    fn files(&self) -> BTreeMap<&str, &str> {
        self.bundle.manifest.files.iter().map(|file| (&file.path[..], &file.sha256[..])).collect()
    }

    /// Bytes of the files with the weights of the text's and the picture's part of the transformer.
    fn transformer_bytes(&self) -> u64 {
        let data = self.bundle.manifest.files.iter().filter(|file| {
            let [prefix, step] = ["prefix", "transformer"].map(|stage| file.path.starts_with(stage));
            (prefix || step) && file.path.ends_with(".data")
        });
        data.map(|file| file.bytes).sum()
    }
}

fn exported(source: &Path, profile: &str, set: &[(&str, &str)], fault: Option<&str>) -> Exported {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("bundle");
    let set: Vec<(String, String)> =
        set.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let request = ExportRequest {
        source,
        arrivals: None,
        out: &out,
        recipe: None,
        profile,
        calibration: None,
        target_bytes: None,
        set: &set,
        force: false,
        fault,
    };
    let mut notes = Vec::new();
    let noted = &mut |event| {
        if let ExportEvent::Note(note) = event {
            notes.push(note);
        }
    };
    export(&request, noted).unwrap();
    Exported { bundle: Bundle::open(&out).unwrap(), notes, _folder: folder }
}

fn tiny(profile: &str) -> Exported {
    exported(QwenCheckpoint::tiny().written().path(), profile, &[], None)
}

#[test]
fn graphs_are_valid_and_static() {
    const UNFIT: [&str; 5] = ["Shape", "If", "Loop", "Scan", "NonZero"];
    let source = QwenCheckpoint::tiny().written();
    let forms = PROFILES.map(|profile| (profile, "prefix")).into_iter().chain([("f16", "single")]);
    for (profile, graphs) in forms {
        let exported = exported(source.path(), profile, &[("transformer.graphs", graphs)], None);
        let stages = &exported.bundle.manifest.stages;
        let paths: Vec<_> = stages.iter().map(|stage| exported.bundle.path(&stage.graph).unwrap()).collect();
        assert_others_accept_all(&paths.iter().map(|path| path.as_path()).collect::<Vec<_>>());
        let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
        let prefix: &[&str] = if graphs == "prefix" { &["prefix"] } else { &[] };
        let expected = [
            &["text_encoder", "modulation"],
            prefix,
            &["transformer", "vae_pre", "vae_attention", "vae_post0", "vae_post1", "vae_post2"],
        ];
        assert_eq!(names, expected.concat());
        for stage in names {
            for (_, node) in exported.model(stage).graph.nodes() {
                assert!(!UNFIT.contains(&node.op_type.as_str()), "{profile} {stage}: {}", node.op_type);
            }
        }
    }
}

/// Every size of every stage's ports is known for a request.
#[test]
fn sizes_bind_all_symbols() {
    let exported = tiny("f32");
    let usual = exported.bundle.usual().unwrap();
    assert_eq!((usual.width, usual.height, usual.steps, usual.text.encoded), (1024, 1024, 40, 640));
    let sizes = exported.bundle.sizes(&usual).unwrap();
    for stage in &exported.bundle.manifest.stages {
        let model = exported.model(&stage.name);
        let shapes = viaduct_export::shapes::infer(&model, &sizes, &Default::default());
        assert!(
            shapes.unknown(&model.graph).is_empty(),
            "{}: {:?}",
            stage.name,
            shapes.unknown(&model.graph)
        );
        for (port, id) in stage.outputs.iter().zip(&model.graph.outputs) {
            let shape = shapes.shape(*id).unwrap();
            assert_eq!(shape.len(), port.dims.len(), "{}: {}", stage.name, port.name);
        }
    }
}

/// Weights that no picture needs may be absent or no numbers, and a checkpoint may be packed in other ways.
#[test]
fn what_is_packed_otherwise_gives_the_same_files() {
    let mut unread = QwenCheckpoint::tiny();
    unread.add_unread();
    let mut whole = QwenCheckpoint::tiny();
    whole.add_unread();
    whole.prefix("text_encoder", "model.language_model.");
    whole.prefix("transformer", "model.diffusion_model.");
    let mut fused = QwenCheckpoint::tiny();
    fused.fuse_gates();
    fused.prefix("text_encoder", "language_model.");
    fused.prefix("transformer", "transformer.");
    let mut over_time = QwenCheckpoint::tiny();
    over_time.spread_over_time(3);
    let forms = [("unread", unread), ("whole", whole), ("fused", fused), ("over time", over_time)];
    let source = QwenCheckpoint::tiny().written();
    for profile in ["f32", "q4"] {
        let plain = exported(source.path(), profile, &[], None);
        for (form, checkpoint) in &forms {
            let other = exported(checkpoint.written().path(), profile, &[], None);
            assert_eq!(other.files(), plain.files(), "{profile}, {form}");
        }
    }
}

#[test]
fn configs_are_read_in_both_spellings() {
    let mut flat = QwenCheckpoint::tiny();
    let mut text = flat.configs["text_encoder/config.json"]["text_config"].clone();
    text.as_object_mut().unwrap().remove("rope_parameters");
    text["rope_theta"] = json!(5e6);
    text["rope_scaling"] = json!({ "type": "mrope", "mrope_section": [2, 1, 1] });
    flat.configs.insert("text_encoder/config.json", text);
    let [flat, nested] =
        [flat, QwenCheckpoint::tiny()].map(|c| exported(c.written().path(), "f32", &[], None));
    assert_eq!(flat.bundle.manifest.parameters, nested.bundle.manifest.parameters);
    assert_eq!(flat.bundle.manifest.parameters["text"]["rope_theta"], json!(5e6));
    assert_eq!(flat.files(), nested.files());
}

/// Turbo has noise levels of its own, as many as it takes steps.
#[test]
fn turbo_is_told_by_its_noise_levels() {
    let mut turbo = QwenCheckpoint::tiny();
    turbo.configs.insert("model_index.json", json!({ "sample_sigmas": [1.0, 0.75, 0.5] }));
    let mut scheduler = turbo.configs["scheduler/scheduler_config.json"].clone();
    scheduler["use_dynamic_shifting"] = json!(false);
    scheduler["shift_terminal"] = json!(null);
    turbo.configs.insert("scheduler/scheduler_config.json", scheduler);
    let exported = exported(turbo.written().path(), "f32", &[], None);
    assert_eq!(exported.bundle.manifest.parameters["schedule"]["sigmas"], json!([1.0, 0.75, 0.5]));
    assert_eq!(exported.bundle.usual().unwrap().steps, 3);
    assert!(tiny("f32").bundle.manifest.parameters["schedule"].get("sigmas").is_none());
}

/// Where a graph's weights lie, by name.
fn places(model: &Model) -> BTreeMap<String, (String, usize)> {
    let values = model.graph.values().filter_map(|(_, value)| {
        let Bytes::Mapped { file, range } = &value.constant.as_ref()?.bytes else { return None };
        let file = file.path.file_name()?.to_str()?.to_owned();
        Some((value.name.clone(), (file, range.start)))
    });
    values.filter(|(_, (file, _))| file.ends_with(".data")).collect()
}

#[test]
fn text_and_picture_share_their_weights() {
    let source = QwenCheckpoint::tiny().written();
    for profile in PROFILES {
        let [two, one] = ["prefix", "single"]
            .map(|form| exported(source.path(), profile, &[("transformer.graphs", form)], None));
        let models = ["prefix", "transformer"].map(|stage| two.model(stage));
        let [prefix, step] = [&models[0], &models[1]].map(places);
        let is_block = |name: &&String| name.starts_with("transformer_blocks.");
        assert!(prefix.keys().filter(is_block).count() >= 3, "{profile}");
        for name in prefix.keys().filter(is_block) {
            assert_eq!(step.get(name), prefix.get(name), "{profile}: {name}");
        }
        // The last block of the text computes keys and values alone.
        let constants = models[0].graph.values().filter(|(_, value)| value.constant.is_some());
        let in_last = |name: &str| {
            name.strip_prefix("transformer_blocks.1.")?.split(".weight").next().map(str::to_owned)
        };
        let last: BTreeSet<String> = constants.filter_map(|(_, value)| in_last(&value.name)).collect();
        assert_eq!(last, ["attn.norm_k", "attn.to_k", "attn.to_v"].map(str::to_owned).into(), "{profile}");
        // As many bytes as in one graph, but for the padding.
        let [two, one] = [two, one].map(|exported| exported.transformer_bytes());
        assert!(two.abs_diff(one) < 4096, "{profile}: {two} and {one}");
    }
}

/// Only the blocks' linears are quantised; what the text encoder computes is f32, and so is the decoder.
#[test]
fn weights_are_stored_as_the_recipe_says() {
    for (profile, bits) in [("q8", 8), ("q4", 4)] {
        let exported = tiny(profile);
        let quantised = |stage: &str| -> Vec<i64> {
            let model = exported.model(stage);
            let nodes = model.graph.nodes().filter(|(_, node)| node.op_type == "MatMulNBits");
            nodes.map(|(_, node)| node.int("bits").unwrap()).collect()
        };
        assert_eq!(quantised("text_encoder"), vec![bits; 2 * 7]);
        assert_eq!(quantised("prefix"), vec![bits; 7 + 2]);
        assert_eq!(quantised("transformer"), vec![bits; 2 * 7]);
        for stage in ["modulation", "vae_pre", "vae_attention", "vae_post0", "vae_post1", "vae_post2"] {
            assert!(quantised(stage).is_empty(), "{stage}");
        }
    }
    let f16 = tiny("f16");
    let stored = |stage: &str| -> BTreeSet<String> {
        let model = f16.model(stage);
        let constants = model.graph.values().filter_map(|(_, value)| value.constant.as_ref());
        constants.filter(|tensor| tensor.shape.len() == 2).map(|tensor| tensor.dtype.name()).collect()
    };
    for stage in ["text_encoder", "modulation", "prefix", "transformer"] {
        assert_eq!(stored(stage), [DType::F16.name()].into(), "{stage}");
    }
    // A session must not widen them all when it is made: each cast depends on the run.
    let model = f16.model("text_encoder");
    let constants: BTreeSet<_> =
        model.graph.values().filter(|(_, v)| v.constant.is_some()).map(|(id, _)| id).collect();
    for (_, node) in model.graph.nodes().filter(|(_, node)| node.op_type == "Cast") {
        assert!(!constants.contains(&node.input(0).unwrap()), "{}", node.name);
    }
}

#[test]
fn the_tokenizer_comes_from_the_processor() {
    let mut checkpoint = QwenCheckpoint::tiny();
    checkpoint.configs.insert("processor/vocab.json", json!({ "long": "x".repeat(1 << 20) }));
    let exported = exported(checkpoint.written().path(), "f32", &[], None);
    let copied: Vec<&str> = exported.files().into_keys().filter(|path| path.contains('/')).collect();
    assert_eq!(copied, ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]);
}

#[test]
fn the_licence_is_said_and_kept() {
    let exported = tiny("f32");
    let license = exported.bundle.manifest.source.license.as_deref().unwrap();
    assert!(license.contains("non-commercial"));
    assert_eq!(exported.notes, [format!("licence of the weights: {license}")]);
}

/// Each fault changes a graph, or what the host is told.
#[test]
fn every_fault_changes_the_bundle() {
    let mut source = QwenCheckpoint::tiny();
    source.of("text_encoder").insert("norm.weight".to_owned(), (vec![32], vec![1.0; 32]));
    let source = source.written();
    let state = |fault| {
        let exported = exported(source.path(), "f32", &[], fault);
        let files: BTreeMap<String, String> =
            exported.files().into_iter().map(|(path, hash)| (path.to_owned(), hash.to_owned())).collect();
        (files, exported.bundle.manifest.parameters.clone())
    };
    let sound = state(None);
    for fault in FAULTS {
        assert_ne!(state(Some(fault)), sound, "{fault}");
    }
}

/// Values of the published checkpoints follow from the recipes alone.
#[test]
fn recipes_describe_the_published_checkpoints() {
    for recipe in ["qwen-image-2.1", "qwen-image-2.1-turbo"] {
        let request = OutlineRequest { source: OutlineSource::Recipe(recipe), profile: "f32", set: &[] };
        let outline = Outline::author(&request).unwrap();
        let mut values: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
        for stage in &outline.stages {
            let of_component = values.entry(stage.component).or_default();
            for (_, value) in stage.model.graph.values() {
                let named = [".weight", ".bias", ".gamma"].iter().any(|end| value.name.ends_with(end));
                if let (true, Some(tensor)) = (named, &value.constant) {
                    of_component.insert(&value.name, tensor.elements());
                }
            }
        }
        let sum = |component: &str| values[component].values().sum::<usize>();
        assert_eq!(sum("transformer"), 7_115_124_736);
        assert_eq!(sum("text_encoder") as u64 + outline.raw_files[0].1 / 4, 7_568_401_408);
        assert_eq!(sum("vae_decoder"), 253_070_484);
        assert_eq!(outline.usual().unwrap().steps, if recipe.ends_with("turbo") { 8 } else { 40 });
    }
}

/// Configs that this program does not draw by are refused with what is wrong.
#[test]
fn configs_that_do_not_fit_are_refused() {
    let cases = [
        ("transformer/config.json", "axes_dims_rope", json!([4, 6]), "axes_dims_rope"),
        ("transformer/config.json", "causal_condition", json!(false), "causal_condition"),
        ("transformer/config.json", "num_layers", json!(1u64 << 40), "num_layers"),
        ("transformer/config.json", "in_channels", json!(16), "out_channels"),
        ("vae/config.json", "dim_mult", json!([]), "dim_mult"),
        ("vae/config.json", "dim_mult", json!([1, 2, 4, 8, 1u64 << 40]), "65536"),
        ("vae/config.json", "dim_mult", json!([1, 2, 4, 8, 1u64 << 62]), "65536"),
        ("vae/config.json", "dim_mult", json!([1, 2, 0, 8, 8]), "65536"),
        ("vae/config.json", "decoder_base_dim", json!(0), "65536"),
        ("vae/config.json", "latents_std", json!([1.0]), "latents_std"),
        ("vae/config.json", "attn_scales", json!([1.0]), "attn_scales"),
        ("scheduler/scheduler_config.json", "use_dynamic_shifting", json!(false), "sample_sigmas"),
        ("model_index.json", "sample_sigmas", json!([0.5, 0.5]), "sample_sigmas"),
        ("transformer/config.json", "axes_dims_rope", json!([0, 0, 16]), "axes_dims_rope"),
        ("transformer/config.json", "eps", json!(0), "eps"),
        ("vae/config.json", "latents_std", json!(vec![0.0; 8]), "latents_std"),
        ("vae/config.json", "latents_std", json!(vec![1e7; 8]), "latents_std"),
        ("vae/config.json", "latents_mean", json!(vec![-1e7; 8]), "latents_mean"),
        ("scheduler/scheduler_config.json", "shift_terminal", json!(1.0), "shift_terminal"),
        ("scheduler/scheduler_config.json", "base_shift", json!(1e300), "base_shift"),
        ("scheduler/scheduler_config.json", "max_image_seq_len", json!(0), "max_image_seq_len"),
        ("scheduler/scheduler_config.json", "max_image_seq_len", json!(1), "max_image_seq_len"),
        ("scheduler/scheduler_config.json", "max_image_seq_len", json!(99999999999u64), "max_image_seq_len"),
    ];
    for (file, key, value, expected) in cases {
        let mut checkpoint = QwenCheckpoint::tiny();
        checkpoint.configs.get_mut(file).unwrap()[key] = value;
        let error = refused(checkpoint.written().path());
        assert!(error.contains(expected) && error.contains(file), "{error}");
    }
    for (key, value) in [("rope_theta", json!(0)), ("rope_theta", json!(-1e4)), ("rms_norm_eps", json!(2.0))]
    {
        let mut checkpoint = QwenCheckpoint::tiny();
        let text = &mut checkpoint.configs.get_mut("text_encoder/config.json").unwrap()["text_config"];
        text[key] = value;
        let error = refused(checkpoint.written().path());
        assert!(error.contains(key) && error.contains("text_encoder/config.json"), "{error}");
    }
}

/// Why a plan of it cannot be made.
fn refused(folder: &Path) -> String {
    let source = OutlineSource::Checkpoint { folder, recipe: None };
    Outline::author(&OutlineRequest { source, profile: "f32", set: &[] }).err().unwrap().to_string()
}

/// Without its tokenizer, or with one that cuts the template's tokens to pieces, a model draws other pictures.
#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    const TOKENS: &str = "processor/tokenizer.json";
    let failed = |prepare: &dyn Fn(&Path)| {
        let folder = QwenCheckpoint::tiny().written();
        fs::remove_file(folder.path().join(TOKENS)).unwrap();
        prepare(&folder.path().join(TOKENS));
        let out = folder.path().join("bundle");
        let request = ExportRequest {
            source: folder.path(),
            arrivals: None,
            out: &out,
            recipe: None,
            profile: "f32",
            calibration: None,
            target_bytes: None,
            set: &[],
            force: false,
            fault: None,
        };
        let error = export(&request, &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains(TOKENS) && !out.exists(), "{error}");
        error
    };
    failed(&|_| ());
    failed(&|path| fs::create_dir(path).unwrap());
    failed(&|path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    });
    let one = json!({ "added_tokens": [{ "id": 0, "content": "<|im_start|>" }] }).to_string();
    let error = failed(&|path| fs::write(path, &one).unwrap());
    assert!(error.contains("<|im_end|>"), "{error}");
}

/// Names are found under every prefix, and where there is none.
#[test]
fn prefixes_are_taken_from_names() {
    let mut checkpoint = QwenCheckpoint::tiny();
    checkpoint.prefix("transformer", "model.diffusion_model.");
    let folder = checkpoint.written();
    let open = || Checkpoint::open(&folder.path().join("transformer")).unwrap();
    let known = "img_in.weight";
    let weights = open().without_prefix(&["transformer.", "model.diffusion_model."], known);
    weights.tensor(known, &[32, 8]).unwrap();
    assert!(open().without_prefix(&["transformer."], known).find(known).is_none());
    let mut fused = weights;
    fused.with_halves("modulation.1.weight", ["first", "second"]);
    let whole = fused.tensor("modulation.1.weight", &[128, 32]).unwrap().to_f32().unwrap().unwrap();
    let halves =
        ["first", "second"].map(|name| fused.tensor(name, &[64, 32]).unwrap().to_f32().unwrap().unwrap());
    assert_eq!(halves.concat(), whole);
}
