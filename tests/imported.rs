//! Graphs that others exported: bundles in flux2-vulkan-bridge's layout, and bundles assembled from graphs. The graphs are
//! written by `tools/legacy_bundle.py`, which shares nothing with the program.

mod support;

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use support::{
    Bundle, Checkpoint, difference, json, oracle,
    python::{python, run_script},
    scratch, tensor, viaduct,
    webgpu::webgpu,
};
use viaduct::{pipeline::image::psnr, tensor::HostTensor};
use viaduct_export::onnx::{ValueId, model_bytes, read_model};

const FIXTURE: &str = "flux2-a";
/// One step of a picture's bytes.
const STEP: f32 = 1.0 / 255.0;

/// The fixture's checkpoint as others would have exported it; none without Python.
fn legacy(checkpoint: &Checkpoint, options: &[&str]) -> Option<Bundle> {
    let (python, bundle) = (python()?, Bundle::to_be_made());
    let (source, out) = (checkpoint.source().to_str().unwrap(), bundle.path());
    let fixed = [source, out.to_str().unwrap(), "--taps", "1,3,4", "--text-length", "40"];
    run_script(&python, "tools/legacy_bundle.py", &[&fixed, options].concat());
    Some(bundle)
}

const F32: [&str; 4] = ["--weights", "float", "--dtype", "f32"];

/// The decoder's result in 0..1 for the oracle's request.
fn picture(bundle: &Bundle, ep: &str) -> HostTensor {
    let folder = scratch();
    let mut command = bundle.generate(&folder.path().join("a.png"), " un café", ep);
    command.args(["--seed", "7", "--steps", "3", "--size", "112x80", "--dump"]).arg(folder.path());
    command.assert().success();
    tensor(folder.path(), "image_01")
}

fn inspect(bundle: &Bundle) -> Value {
    let assert = viaduct().arg("inspect").arg(bundle.path()).arg("--json").assert().success();
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

/// The one line of a failed command.
fn refusal(mut command: assert_cmd::Command, code: i32) -> String {
    let told = String::from_utf8(command.assert().code(code).get_output().stderr.clone()).unwrap();
    assert!(told.lines().count() == 1 && told.starts_with("error: ") && !told.contains("panicked"), "{told}");
    told
}

#[test]
fn a_legacy_bundle_draws_the_picture_of_ours() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let ours = picture(&checkpoint.export("f32", &[]), "cpu");
    let theirs = picture(&bundle, "cpu");
    assert!(difference(&ours, &theirs) <= STEP / 4.0, "{}", difference(&ours, &theirs));
    // Boundary by boundary against the reference, with our own export's bars.
    let report = bundle.verify(&oracle(FIXTURE), "cpu", 0);
    let names: Vec<&str> =
        report["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    for name in [
        "prompt_embeds (real rows)",
        "prompt_embeds (padding rows)",
        "pred_step2",
        "vae_mid_res0",
        "image_raw",
        "image_01",
    ] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    // The controls are as red as in graphs of ours, and there is no manifest to keep results in.
    let assert = bundle.verify_command(&oracle(FIXTURE), "cpu", &[]).assert().code(0);
    let told = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(told.contains("the results are not kept in the bundle"), "{told}");
    let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    let verdicts = report["controls"].as_array().unwrap().iter().map(|control| &control["verdict"]);
    assert!(verdicts.clone().count() > 5 && verdicts.clone().all(|verdict| verdict == "red"), "{report}");
}

#[test]
fn both_scalings_of_the_attention_and_its_absence_are_told_apart() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let reference = tensor(&oracle(FIXTURE), "image_01");
    for scale in ["chunk", "none"] {
        let Some(bundle) = legacy(&checkpoint, &[&F32[..], &["--scale", scale]].concat()) else { return };
        let off = difference(&picture(&bundle, "cpu"), &reference);
        assert!(off <= STEP, "{scale}: {off}");
        let factor = inspect(&bundle)["parameters"]["vae"]["attention"]["q_factor"].as_f64().unwrap();
        // Rows of q have 32 values.
        let expected = if scale == "none" { 32f64.powf(-0.5) } else { 1.0 };
        assert!((factor - expected).abs() < 1e-6, "{scale}: {factor}");
    }
}

#[test]
fn a_scale_that_is_there_twice_is_refused() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(split) = legacy(&checkpoint, &F32) else { return };
    let Some(chunk) = legacy(&checkpoint, &[&F32[..], &["--scale", "chunk"]].concat()) else { return };
    let name = "tiny-vae-decoder-attn-chunk-f32.onnx";
    fs::copy(chunk.path().join(name), split.path().join(name)).unwrap();
    let mut command = viaduct();
    command.arg("inspect").arg(split.path());
    let told = refusal(command, 1);
    assert!(
        told.contains("the graphs scale its scores by 0.031250; 0.176777 (1/sqrt(32)) or 1 is expected"),
        "{told}"
    );
}

#[test]
fn four_bit_weights_in_blocks_of_16_draw_the_picture_of_ours() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &["--weights", "q4", "--dtype", "f32"]) else { return };
    assert_eq!(fs::metadata(bundle.path().join("text-encoder-q4-manifest.json")).unwrap().len(), 77);
    assert_eq!(fs::metadata(bundle.path().join("transformer-q4-manifest.json")).unwrap().len(), 75);
    let recipe = scratch();
    let file = recipe.path().join("q4.toml");
    let profile = r#"
        base = "flux2-klein"
        [profiles.blocks16]
        compute = "f32"
        weights = "q4"
        block = 16
        symmetric = false
        components.transformer = { accuracy_level = 4 }
        components.vae_decoder = { weights = "f32" }
    "#;
    fs::write(&file, profile).unwrap();
    let own = Bundle::to_be_made();
    let mut command = checkpoint.export_command(&own.path(), "blocks16", &[]);
    command.arg("--recipe").arg(&file).assert().success();
    let (ours, theirs) = (picture(&own, "cpu"), picture(&bundle, "cpu"));
    let db = psnr(&ours, &theirs).unwrap();
    println!("q4, block 16: {db:.1} dB, {}", difference(&ours, &theirs));
    assert!(db >= 40.0, "{db}");
}

#[test]
fn f16_graphs_are_given_f16_but_for_the_noise_level() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &["--weights", "float"]) else { return };
    let db = psnr(&picture(&bundle, "cpu"), &tensor(&oracle(FIXTURE), "image_01")).unwrap();
    println!("f16: {db:.1} dB");
    assert!(db >= 55.0, "{db}");
}

/// Graphs of others hold nodes that no GPU runs, so that this is about a picture at all, and about what is said.
#[test]
fn a_legacy_bundle_draws_on_webgpu() {
    let Some(_alone) = webgpu() else { return };
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let off = difference(&picture(&bundle, "webgpu"), &tensor(&oracle(FIXTURE), "image_01"));
    assert!(off <= STEP, "{off}");
}

#[test]
fn what_reexport_gains_is_said() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &["--weights", "q4"]) else { return };
    let report = inspect(&bundle);
    assert_eq!(report["profile"], "q4");
    let gains = report["reexport_gains"].as_array().unwrap();
    let found = |stage: &str, what: &str| {
        let gain = gains
            .iter()
            .find(|gain| gain["stage"] == stage && gain["found"].as_str().unwrap().contains(what));
        gain.unwrap_or_else(|| panic!("{stage}: {what}: {report}"))["gain"].as_str().unwrap().to_owned()
    };
    // 2 embedders, 3 modulations, 2 of time, 2 of the output, 12 + 2 x 2 in blocks.
    let fast = found("transformer", "25 MatMulNBits nodes of 4 bits, block 16, accuracy_level 4");
    assert!(fast.contains("cooperative-matrix and DP4A kernels"), "{fast}");
    found("text_encoder", "28 MatMulNBits nodes of 4 bits, block 16, accuracy_level 0");
    found("text_encoder", "4 IsNaN nodes");
    found("transformer", "3 attentions with scores written out in f32, up to ");
    found("transformer", "Shape nodes");
    // Nobody else's bundle is told what to do.
    let own = inspect(&checkpoint.export("q4", &[]));
    assert!(own.get("reexport_gains").is_none(), "{own}");
}

/// A bundle assembled from the fixture's graphs.
fn assembled(checkpoint: &Checkpoint, options: &[&str]) -> Option<Bundle> {
    let (graphs, bundle) =
        (legacy(checkpoint, &[&F32[..], &["--whole-decoder"]].concat())?, Bundle::to_be_made());
    let mut command = viaduct();
    let names = ["tiny-vae-decoder-f32", "tiny-text-encoder-float", "tiny-transformer-float"];
    command.arg("export").args(names.map(|name| graphs.path().join(format!("{name}.onnx"))));
    command
        .arg("--tokenizer")
        .arg(graphs.path().join("tokenizer"))
        .arg("-o")
        .arg(bundle.path())
        .args(options)
        .assert()
        .success();
    Some(bundle)
}

#[test]
fn an_assembled_bundle_is_a_bundle_like_any_other() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = assembled(&checkpoint, &[]) else { return };
    bundle.verify(&oracle(FIXTURE), "cpu", 0);
    let off = difference(&picture(&bundle, "cpu"), &tensor(&oracle(FIXTURE), "image_01"));
    assert!(off <= STEP / 4.0, "{off}");

    let manifest = json(&bundle.path().join("bundle.json"));
    let stages: Vec<&str> =
        manifest["stages"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(
        stages[..5],
        ["text_encoder", "transformer", "vae_pre", "vae_attention", "vae_post0"],
        "{stages:?}"
    );
    let parameters = &manifest["parameters"];
    assert_eq!(parameters["text"]["length"], 40);
    assert_eq!(parameters["transformer"]["channels"], 16);
    assert_eq!(parameters["vae"]["pixels_per_token"], 16);
    let mut hashes = viaduct();
    hashes.arg("inspect").arg(bundle.path()).arg("--hashes").assert().success();
}

/// Sixteen bits and quantised weights change the picture; as they change that of the checkpoint's own export.
#[test]
fn assembled_graphs_are_stored_as_the_profile_says() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let reference = tensor(&oracle(FIXTURE), "image_01");
    let profiles = [("f16", "MatMul", 45.0), ("q8", "MatMulNBits", 45.0), ("q4", "MatMulNBits", 20.0)];
    for (profile, operator, bar) in profiles {
        let Some(bundle) = assembled(&checkpoint, &["--profile", profile]) else { return };
        let theirs = psnr(&picture(&bundle, "cpu"), &reference).unwrap();
        let ours = psnr(&picture(&checkpoint.export(profile, &[]), "cpu"), &reference).unwrap();
        println!("{profile}: {theirs:.1} dB, our own export {ours:.1} dB");
        assert!(theirs >= bar, "{profile}: {theirs} dB, our own export {ours} dB");
        assert_eq!(json(&bundle.path().join("bundle.json"))["profile"], profile);
        let folder = bundle.path();
        let mut command = viaduct();
        command.args(["inspect", "--json"]).arg(folder.join("transformer.onnx"));
        let told: Value = serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap();
        assert!(told["operators"][operator].as_u64() > Some(0), "{told}");
    }
}

/// Linear layers of a transformer: how many have so many bits, none for those that are not quantised.
fn bits(bundle: &Bundle) -> BTreeMap<Option<i64>, usize> {
    let model = read_model(&bundle.path().join("transformer.onnx")).unwrap();
    let constant = |id: &Option<ValueId>| id.is_some_and(|id| model.graph[id].constant.is_some());
    let mut bits = BTreeMap::new();
    for (_, node) in model.graph.nodes().filter(|(_, node)| node.inputs.get(1).is_some_and(constant)) {
        if ["MatMul", "MatMulNBits"].contains(&node.op_type.as_str()) {
            *bits.entry(node.int("bits")).or_default() += 1;
        }
    }
    bits
}

#[test]
fn rules_of_the_recipe_hold_for_assembled_graphs() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    // 4 of modulation, 2 of time; 2 embedders and the projection at the end.
    let Some(bundle) = assembled(&checkpoint, &["--profile", "q4"]) else { return };
    assert_eq!(bits(&bundle), BTreeMap::from([(None, 3), (Some(8), 6), (Some(4), 16)]));
    let Some(bundle) = assembled(&checkpoint, &["--profile", "q8"]) else { return };
    assert_eq!(bits(&bundle), BTreeMap::from([(None, 9), (Some(8), 16)]));
}

/// Graphs that were exported for one number of latent tokens, or one size, say so before anything starts.
#[test]
fn a_size_that_the_graphs_cannot_draw_is_refused_at_once() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(graphs) = legacy(&checkpoint, &[&F32[..], &["--whole-decoder"]].concat()) else { return };
    let graph = |name: &str| graphs.path().join(format!("tiny-{name}.onnx"));
    let fixed = |name: &str, dims: &[&str]| {
        let mut command = viaduct();
        let out = graph(&dims.concat());
        command.arg("rewrite").arg(graph(name)).arg("-o").arg(&out).args(["--pass", "bind_sizes"]);
        command.args(dims.iter().flat_map(|dim| ["--dim", dim])).assert().success();
        out
    };
    let decoder = fixed("vae-decoder-f32", &["latent_height=5", "latent_width=7"]);
    let export = |transformer: &Path, decoder: &Path, out: &Path| {
        let mut command = viaduct();
        command.arg("export").arg(graph("text-encoder-float")).args([transformer, decoder]);
        command.arg("--tokenizer").arg(graphs.path().join("tokenizer")).arg("-o").arg(out);
        command.args(["--progress", "none"]);
        command
    };
    let other = fixed("transformer-float", &["image_seq=34"]);
    let told = refusal(export(&other, &decoder, &graphs.path().join("never")), 1);
    assert!(told.contains("latent tokens is that of no picture which the decoder draws"), "{told}");
    let transformer = fixed("transformer-float", &["image_seq=35"]);
    for (decoder, sizes) in [
        (graph("vae-decoder-f32"), "112x80, 80x112, 560x16, 16x560 alone"),
        (decoder, "exported for 112x80 alone"),
    ] {
        let bundle = Bundle::to_be_made();
        export(&transformer, &decoder, &bundle.path()).assert().success();
        let folder = scratch();
        // The budget would be refused if it were looked at.
        let mut command = bundle.generate(&folder.path().join("a.png"), "cat", "cpu");
        command.args(["--size", "64x64", "--budget", "1MiB", "--progress", "none"]);
        let told = refusal(command, 2);
        assert!(told.contains("64x64: ") && told.contains(sizes), "{told}");
        let mut command = viaduct();
        command.arg("report").arg(bundle.path()).args(["--size", "64x64", "--device", "cpu"]);
        assert!(refusal(command, 2).contains(sizes));
        // Without a size it draws one of its own.
        let mut command = bundle.generate(&folder.path().join("a.png"), "cat", "cpu");
        let made = command.args(["--steps", "1", "--json"]).assert().success().get_output().stdout.clone();
        let made: Value = serde_json::from_slice(&made).unwrap();
        assert_eq!([&made["width"], &made["height"]], [112, 80]);
    }
}

#[test]
fn graphs_of_a_legacy_bundle_are_rewritten_once() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let opened = viaduct_export::bundle::Bundle::open(&bundle.path()).unwrap();
    let first = opened.model("transformer").unwrap();
    fs::rename(bundle.path().join("tiny-transformer-float.onnx"), bundle.path().join("elsewhere")).unwrap();
    let second = opened.model("transformer").unwrap();
    assert_eq!(model_bytes(&first).unwrap(), model_bytes(&second).unwrap());
    assert!(opened.original("transformer").is_err());
}

#[test]
fn memory_of_imported_graphs_is_planned() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let report = |arguments: &[&str]| -> Value {
        let mut command = viaduct();
        command.arg("report").arg(bundle.path()).args(["--device", "cpu", "--json"]).args(arguments);
        serde_json::from_slice(&command.assert().get_output().stdout).unwrap()
    };
    let small = report(&["--size", "112x80"]);
    assert_eq!(small["chain"]["complete"], true, "{small}");
    assert!(small["stages"].as_array().unwrap().iter().all(|stage| stage["unbound"] == json!([])), "{small}");
    let peak = |report: &Value| report["chain"]["peak"].as_u64().unwrap();
    assert!(peak(&report(&["--size", "1024x1024"])) > 4 * peak(&small));
    // A picture that does not fit is refused before the start.
    let mut command = bundle.generate(Path::new("never.png"), "cat", "cpu");
    command.args(["--size", "2048x2048", "--budget", "300MiB", "--progress", "none"]);
    let told = refusal(command, 4);
    assert!(told.contains("2048x2048 needs") && told.contains(" fits"), "{told}");
}

#[test]
fn an_interrupted_run_of_a_legacy_bundle_goes_on() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let folder = scratch();
    let arguments = ["--seed", "7", "--steps", "2", "--size", "112x80", "--json"];
    let whole = folder.path().join("whole.png");
    bundle.generate(&whole, "a cat", "cpu").args(arguments).assert().success();
    for (index, stop) in ["latents_step0", "vae_mid_res0", "vae_attention", "vae_post1"].iter().enumerate() {
        let out = folder.path().join(format!("{index}.png"));
        let mut stopped = bundle.generate(&out, "a cat", "cpu");
        stopped.args(arguments).env("VIADUCT_TEST_STOP", format!("KILL@kept:{stop}")).assert().failure();
        let assert = bundle.generate(&out, "a cat", "cpu").args(arguments).assert().success();
        let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        assert!(report["resumed_from"].is_string(), "{stop}: {report}");
        assert!(fs::read(&whole).unwrap() == fs::read(&out).unwrap(), "{stop}: another picture");
    }
}

/// A change of the config, and what is said of it.
type Harm = (&'static str, fn(&mut Value), &'static [&'static str]);

#[test]
fn hostile_configs_are_refused() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let path = bundle.path().join("flux2-config.json");
    let good = json(&path);
    let cases: &[Harm] = &[
        ("no models", |c| c["models"] = json!([]), &["flux2-config.json: ", "expected a map"]),
        (
            "no transformer",
            |c| drop(c["models"].as_object_mut().unwrap().remove("transformer")),
            &["models.transformer", "there is no such entry"],
        ),
        (
            "file outside",
            |c| c["models"]["transformer"]["file"] = json!("../../etc/passwd"),
            &["models.transformer.file", "'../../etc/passwd' leaves the bundle"],
        ),
        (
            "absolute file",
            |c| c["models"]["transformer"]["file"] = json!("/etc/passwd"),
            &["leaves the bundle"],
        ),
        (
            "manifest outside",
            |c| c["models"]["transformer"]["manifest"] = json!("..\\x"),
            &["models.transformer.manifest", "leaves the bundle"],
        ),
        (
            "missing file",
            |c| c["models"]["transformer"]["file"] = json!("no.onnx"),
            &["no.onnx is missing", "models.transformer.file"],
        ),
        (
            "a folder as file",
            |c| c["models"]["transformer"]["file"] = json!("tokenizer"),
            &["tokenizer", "folder"],
        ),
        (
            "a text as graph",
            |c| c["models"]["transformer"]["file"] = json!("flux2-config.json"),
            &["is not an ONNX model"],
        ),
        (
            "one graph as another",
            |c| c["models"]["transformer"] = c["models"]["text_encoder"].clone(),
            &[
                "transformer: no input 'latents' (or 'x', 'hidden_states'); the graph has 'input_ids', 'attention_mask'",
            ],
        ),
        ("steps", |c| c["num_steps"] = json!(1_000_000), &["num_steps: 1000000; expected 1 to 1000"]),
        ("no text", |c| c["text_seq_len"] = json!(0), &["text_seq_len: 0"]),
        ("negative text", |c| c["text_seq_len"] = json!(-5), &["flux2-config.json", "-5"]),
        (
            "another text length",
            |c| c["text_seq_len"] = json!(512),
            &["text_seq_len: 512, but the graphs have 40"],
        ),
        (
            "channels",
            |c| c["latent_channels"] = json!(128),
            &["latent_channels: 128, but the graphs have 16"],
        ),
        (
            "chunk",
            |c| c["models"]["vae_decoder_attn_chunk"]["chunk_size"] = json!(64),
            &["chunk_size: 64, but the graphs have 1024"],
        ),
        ("width", |c| c["default_width"] = json!(u64::MAX), &["default_width"]),
        ("clip", |c| c["context_clip"] = json!(-1.0), &["context_clip: -1"]),
        ("stage that is not there", |c| c["vae_decoder_post_stage_keys"][1] = json!("x"), &["models.x"]),
        ("many stages", |c| c["vae_decoder_post_stage_keys"] = json!(vec!["x"; 1000]), &["1000 stages"]),
        (
            "stages twice",
            |c| c["vae_decoder_post_stage_keys"][2] = json!("vae_decoder_post_stage1"),
            &["flux2-config.json", "graphs do not make a model"],
        ),
        (
            "residual",
            |c| c["models"]["vae_decoder_post_stage0"]["residual_input"] = json!("nothing"),
            &["'nothing'"],
        ),
        (
            "outputs",
            |c| c["models"]["vae_decoder_pre"]["outputs"] = json!(["a", "b", "c", "d"]),
            &["models.vae_decoder_pre.outputs", "expected state, q, kt and v"],
        ),
    ];
    for (name, harm, says) in cases {
        let mut config = good.clone();
        harm(&mut config);
        fs::write(&path, config.to_string()).unwrap();
        let out = scratch();
        let mut command = bundle.generate(&out.path().join("never.png"), "cat", "cpu");
        command.args(["--progress", "none"]);
        let told = refusal(command, 1);
        let missing: Vec<_> = says.iter().filter(|part| !told.contains(**part)).collect();
        assert!(missing.is_empty(), "{name}: {missing:?} not said in {told}");
        assert!(fs::read_dir(out.path()).unwrap().next().is_none(), "{name}");
    }
}

#[test]
fn hostile_lists_of_data_files_are_refused() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(bundle) = legacy(&checkpoint, &F32) else { return };
    let list = bundle.path().join("transformer-float-manifest.json");
    let good = fs::read(&list).unwrap();
    let long = format!("[{}\"x\"]", "\"x\",".repeat(300_000));
    let cases: &[(&str, &str, &[&str])] = &[
        ("no list", "{}", &["transformer-float-manifest.json", "expected a sequence"]),
        ("cut", "[\n  \"transf", &["transformer-float-manifest.json", "EOF"]),
        ("numbers", "[1, 2]", &["expected a string"]),
        ("outside", "[\"../../secret\"]", &["entry 0", "'../../secret' leaves the bundle"]),
        ("line breaks", "[\"../\\n\\u001b[2J\"]", &["entry 0", "leaves the bundle"]),
        ("missing", "[\"transformer-float-00007.onnx_data\"]", &["00007.onnx_data is missing"]),
        (
            "incomplete",
            "[\"transformer-float-00001.onnx_data\"]",
            &["does not list", "transformer-float-00002"],
        ),
        ("endless", &long, &["more than the 1048576 that are read"]),
    ];
    for (name, text, says) in cases {
        fs::write(&list, text).unwrap();
        let mut command = viaduct();
        command.arg("inspect").arg(bundle.path());
        let told = refusal(command, 1);
        assert!(says.iter().all(|part| told.contains(part)), "{name}: {told}");
    }
    fs::write(&list, good).unwrap();
    // Data that is shorter than the graph says.
    let shard = bundle.path().join("transformer-float-00002.onnx_data");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    let mut command = viaduct();
    command.arg("inspect").arg(bundle.path());
    let told = refusal(command, 1);
    assert!(told.contains("reaches beyond the end of"), "{told}");
}

#[test]
fn graphs_that_make_no_model_are_refused() {
    let checkpoint = Checkpoint::of_fixture(FIXTURE);
    let Some(graphs) = legacy(&checkpoint, &F32) else { return };
    let graph = |name: &str| graphs.path().join(format!("tiny-{name}.onnx")).to_str().unwrap().to_owned();
    let (text, transformer) = (graph("text-encoder-float"), graph("transformer-float"));
    let post = graph("vae-decoder-post-stage1-f32");
    let tokenizer = graphs.path().join("tokenizer").to_str().unwrap().to_owned();
    let with = |sources: &[&str]| -> Vec<String> {
        sources.iter().copied().chain(["--tokenizer", &tokenizer]).map(str::to_owned).collect()
    };
    let cases = [
        (with(&[&text, &transformer]), 2, "no image decoder among the graphs"),
        (with(&[&text, &text]), 2, "both are the text encoder; a model has one"),
        (with(&[&post]), 2, "are those of no text encoder, transformer or image decoder"),
        (
            with(&["--decoder", &text, &transformer]),
            1,
            "image decoder: no input 'latents' (or 'z', 'packed_latent')",
        ),
        (vec![text.clone(), transformer.clone()], 2, "name its folder with --tokenizer DIR"),
        (with(&[&text, checkpoint.source().to_str().unwrap()]), 2, "do not go together"),
        (with(&[&text, "--profile", "q5"]), 2, "profile 'q5'"),
        (with(&["nowhere.onnx"]), 1, "nowhere.onnx"),
    ];
    for (arguments, code, says) in cases {
        let folder = scratch();
        let mut command = viaduct();
        command
            .arg("export")
            .args(&arguments)
            .arg("-o")
            .arg(folder.path().join("b"))
            .args(["--progress", "none"]);
        let told = refusal(command, code);
        assert!(told.contains(says), "{arguments:?}: {told}");
        assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "{arguments:?}");
    }
}
