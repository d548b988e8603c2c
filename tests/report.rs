//! `viaduct report` through the binary: what it says, what it draws, and what it refuses.

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::Value;
use support::{Bundle, Checkpoint, scratch, viaduct};
use viaduct_export::onnx::{
    Attribute, Builder, DType, Dim, Model, Tensor, WriteOptions, model_bytes, write_model,
};

fn report(path: &Path, arguments: &str) -> Output {
    run(&[path.to_str().unwrap()], arguments)
}

fn run(first: &[&str], arguments: &str) -> Output {
    // A runtime that cannot be loaded: a report does without.
    let mut command = viaduct();
    command.arg("report").args(first).args(arguments.split_whitespace()).env("VIADUCT_RUNTIME", "/nowhere");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json_of(path: &Path, arguments: &str) -> Value {
    json_from(report(path, &format!("{arguments} --json")))
}

/// Of a report that may be over the budget.
fn json_from(output: Output) -> Value {
    assert!(matches!(output.status.code(), Some(0 | 4)), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Exit code and the error's line.
fn refusal(path: &Path, arguments: &str) -> (Option<i32>, String) {
    refused(report(path, arguments))
}

fn refused(output: Output) -> (Option<i32>, String) {
    let told = text(&output.stderr);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with("error: "), "{told}");
    (output.status.code(), told)
}

fn bundle() -> Bundle {
    Checkpoint::klein_emoji().export("q8", &[])
}

/// A model in a folder of its own.
struct File(tempfile::TempDir, PathBuf);

impl File {
    fn new(model: &Model) -> File {
        let folder = scratch();
        let path = folder.path().join("model.onnx");
        fs::write(&path, model_bytes(model).unwrap()).unwrap();
        File(folder, path)
    }
}

/// scores = q k^T over `tokens` rows, and their softmax.
fn scores(tokens: Dim) -> Model {
    let mut b = Builder::new("scores");
    let q = b.input("q", DType::F16, &[Dim::Fixed(1), tokens.clone(), Dim::Fixed(64)]);
    let kt = b.input("kt", DType::F16, &[Dim::Fixed(1), Dim::Fixed(64), tokens.clone()]);
    let square = [Dim::Fixed(1), tokens.clone(), tokens];
    let scores = b.matmul(q, kt);
    b.record_shape(scores, &square);
    b.label(scores, "scores");
    let y = b.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
    b.output(y, "weights", &square);
    b.finish()
}

fn tokens() -> Dim {
    Dim::Symbol("tokens".to_owned())
}

#[test]
fn a_bundle_stage_by_stage() {
    let bundle = bundle();
    let output = report(&bundle.path(), "--device llvmpipe");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(
        told.starts_with("klein-emoji q8, 128x128, 4 steps, on llvmpipe (WebGPU provider)\npeak "),
        "{told}"
    );
    for stage in ["text_encoder", "transformer", "vae_post0", "one at a time", "largest tensors of"] {
        assert!(told.contains(stage), "{stage}: {told}");
    }
    let report = json_of(&bundle.path(), "--device llvmpipe --size 256x128 --steps 7");
    assert_eq!(report["picture"], serde_json::json!({ "width": 256, "height": 128, "steps": 7 }));
    assert_eq!(report["stages"][2]["sizes"], serde_json::json!({ "image_seq": 128, "joint_seq": 192 }));
    assert_eq!(report["stages"][1]["sizes"]["steps"], 7);
    assert_eq!(report["chain"]["complete"], true, "{:?}", unknown(&report));
    let stages = report["stages"].as_array().unwrap();
    for stage in stages {
        assert!(stage["peak_bytes"].as_u64() > Some(0) && stage["unbound"].as_array().unwrap().is_empty());
        assert_eq!(stage["conflicts"].as_array().unwrap().len(), 0, "{}", stage["conflicts"]);
        assert!(stage["not_lowered"].is_null(), "{}", stage["not_lowered"]);
    }
    let peaks = stages.iter().map(|stage| stage["peak_bytes"].as_u64());
    assert_eq!(report["chain"]["peak"].as_u64(), peaks.max().unwrap());
    let disk: u64 = stages.iter().filter_map(|stage| stage["weights_disk"].as_u64()).sum();
    assert_eq!(report["chain"]["weights_disk"], disk);
}

fn unknown(report: &Value) -> Vec<&Value> {
    report["stages"].as_array().unwrap().iter().map(|stage| &stage["unknown"]).collect()
}

#[test]
fn every_key_is_documented() {
    let documented =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/report.md")).unwrap();
    let file = File::new(&scores(tokens()));
    let report = json_of(&file.1, "--device llvmpipe --dim tokens=16384");
    fn keys(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(entries) => entries.iter().for_each(|(key, value)| {
                found.push(key.clone());
                keys(value, found);
            }),
            Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    keys(&report, &mut found);
    let missing: Vec<_> =
        found.iter().filter(|key| !documented.contains(&format!("`{key}`")) && *key != "tokens").collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_model_names_what_grows_and_what_is_too_large() {
    let file = File::new(&scores(tokens()));
    let report = json_of(&file.1, "--device llvmpipe --dim tokens=16384");
    let stage = &report["stages"][0];
    for (tensor, name) in stage["quadratic"].as_array().unwrap().iter().zip(["scores", "weights"]) {
        assert_eq!((tensor["name"].as_str(), tensor["bytes"].as_u64()), (Some(name), Some(512 << 20)));
        assert_eq!(tensor["symbol"], "tokens");
    }
    assert_eq!(stage["limits"].as_array().unwrap().len(), 2, "{}", stage["limits"]);
    assert_eq!(stage["limits"][0]["limit"], "binding");
    let output = report_text(&file.1, "--device llvmpipe --dim tokens=16384");
    assert!(output.contains("512 MiB  f16  [1,16384,16384]  scores, grows with tokens"), "{output}");
    assert!(output.contains("a binding covers at most 128 MiB"), "{output}");
}

fn report_text(path: &Path, arguments: &str) -> String {
    text(&report(path, arguments).stdout)
}

#[test]
fn unknown_operators_are_listed_and_not_zero() {
    let mut b = Builder::new("unknown");
    let x = b.input("x", DType::F32, &[Dim::Fixed(4)]);
    let y = b.ops("com.example", "Frobnicate", &[x], &[], 1)[0];
    let z = b.op("Neg", &[y], &[]);
    b.output(z, "z", &[Dim::Fixed(4)]);
    let file = File::new(&b.finish());
    let report = json_of(&file.1, "--device cpu");
    assert_eq!(report["stages"][0]["unknown"]["Frobnicate"], 1);
    assert_eq!(report["chain"]["complete"], false);
    let told = report_text(&file.1, "--device cpu --budget 1TiB");
    assert!(told.contains("peak at least") && told.contains("1 of Frobnicate"), "{told}");
    assert!(told.contains("perhaps met"), "{told}");
}

#[test]
fn sizes_beyond_any_number_are_over_every_budget() {
    let mut b = Builder::new("huge");
    let dims = [Dim::Symbol("n".to_owned()), Dim::Fixed(1 << 40)];
    let x = b.input("x", DType::F32, &dims);
    let y = b.op("Neg", &[x], &[]);
    b.output(y, "y", &dims);
    let file = File::new(&b.finish());
    let (code, told) = refusal(&file.1, "--device cpu --dim n=4611686018427387904 --budget 1TiB");
    assert_eq!(code, Some(4), "{told}");
    assert!(told.contains("no smaller size fits"), "{told}");
}

#[test]
fn the_nearest_size_is_one_that_the_graph_can_have() {
    let mut b = Builder::new("multiples");
    let x = b.input("x", DType::F32, &[Dim::Symbol("n".to_owned()), Dim::Fixed(8)]);
    let y = b.reshape(x, &[64, -1, 8]);
    let z = b.op("Neg", &[y], &[]);
    b.output(z, "z", &[Dim::Fixed(64), Dim::Unknown, Dim::Fixed(8)]);
    let file = File::new(&b.finish());
    let (code, told) = refusal(&file.1, "--device cpu --dim n=6400000 --budget 100MiB");
    assert_eq!(code, Some(4), "{told}");
    let fits = told.trim().rsplit("; ").next().unwrap().strip_suffix(" fits").unwrap();
    let size: usize = fits.strip_prefix("--dim n=").unwrap().parse().unwrap();
    assert!(size.is_multiple_of(64) && size > 64, "{told}");
    assert!(report(&file.1, &format!("--device cpu --budget 100MiB {fits}")).status.success());
}

#[test]
fn unbound_sizes_are_told() {
    let file = File::new(&scores(tokens()));
    let report = json_of(&file.1, "--device cpu");
    assert_eq!(report["stages"][0]["unbound"], serde_json::json!(["tokens"]));
    let told = report_text(&file.1, "--device cpu");
    assert!(told.contains("tokens: bind them with --dim"), "{told}");
    assert!(told.lines().nth(1).unwrap().contains("while nothing binds tokens"), "{told}");
}

#[test]
fn over_the_budget_is_exit_4() {
    let bundle = bundle();
    let (code, told) = refusal(&bundle.path(), "--device llvmpipe --budget 1MiB");
    assert_eq!(code, Some(4), "{told}");
    for part in ["128x128 needs ", " in ", "budget of 1 MiB", "its largest tensor is", "(device ", "host "] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(report(&bundle.path(), "--device llvmpipe --budget 16GiB").status.success());
}

fn recipe(name: &str, arguments: &str) -> Output {
    run(&["--recipe", name], &format!("--device bc250 {arguments}"))
}

#[test]
fn recipes_are_planned_without_a_checkpoint() {
    for name in ["flux2-klein-4b", "flux2-klein-9b"] {
        let planned = json_from(recipe(name, "--width 1024 --height 512 --profile q4 --json"));
        assert_eq!(planned["name"], format!("{name} q4"));
        assert_eq!(planned["picture"], serde_json::json!({ "width": 1024, "height": 512, "steps": 4 }));
        assert_eq!(planned["chain"]["complete"], true, "{:?}", unknown(&planned));
        assert!(planned["chain"]["weights_disk"].as_u64() > Some(2 << 30));
        assert_eq!(planned["chain"]["may_stay_loaded"], Value::Null);
    }
    let shorter =
        json_from(recipe("flux2-klein-4b", "--set text_encoder.length=64 --stage transformer --json"));
    assert_eq!(shorter["stages"][0]["sizes"]["joint_seq"], 4096 + 64);
    assert_eq!(shorter["stages"].as_array().unwrap().len(), 1);
}

#[test]
fn recipes_that_cannot_be_planned_are_usage_errors() {
    for (name, arguments, told) in [
        ("flux2-klein", "", "has no [configs]"),
        ("flux3", "", "unknown recipe 'flux3'"),
        ("flux2-klein-4b", "--profile q7", "unknown profile 'q7'"),
        ("flux2-klein-4b", "--set vae.cut=1", "has no such value"),
        ("flux2-klein-4b", "--steps 5000", "5000 steps: a picture takes 1 to 1000"),
    ] {
        let (code, error) = refused(recipe(name, arguments));
        assert!(code == Some(2) && error.contains(told), "{name} {arguments}: {code:?} {error}");
    }
    let (code, error) = refused(run(&[], "--device cpu"));
    assert!(code == Some(2) && error.contains("--recipe NAME"), "{error}");
}

#[test]
fn checkpoints_do_without_their_weights() {
    let folder = scratch();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("bundles/klein-emoji/source");
    let others = ["recipe.toml", "model_index.json", "tokenizer/tokenizer_config.json"].map(str::to_owned);
    let configs = ["text_encoder", "transformer", "vae"].map(|part| format!("{part}/config.json"));
    for file in others.into_iter().chain(configs) {
        let to = folder.path().join(&file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(source.join(&file), to).unwrap();
    }
    let outline = json_of(folder.path(), "--device llvmpipe --size 256x128");
    let exported = json_of(&bundle().path(), "--device llvmpipe --size 256x128");
    for key in ["chain", "picture", "name"] {
        assert_eq!(outline[key], exported[key]);
    }
    for (ours, theirs) in
        outline["stages"].as_array().unwrap().iter().zip(exported["stages"].as_array().unwrap())
    {
        assert_eq!(ours["predicted"], theirs["predicted"], "{}", ours["name"]);
    }
}

/// Peaks of the decoder by its cuts.
fn cuts_of(report: &Value) -> Vec<(Value, u64)> {
    let compared = report["decoder_cuts"].as_array().unwrap().iter();
    compared.map(|cuts| (cuts["cuts"].clone(), cuts["peak"].as_u64().unwrap())).collect()
}

#[test]
fn cuts_of_the_decoder_are_compared_before_the_export() {
    let planned = json_from(recipe("flux2-klein-4b", "--set vae_decoder.cuts=3 --json"));
    let compared = cuts_of(&planned);
    let cuts: Vec<Value> = compared.iter().map(|(cuts, _)| cuts.clone()).collect();
    assert_eq!(cuts, [serde_json::json!([]), serde_json::json!([3]), serde_json::json!([1, 2, 3])]);
    let told = text(&recipe("flux2-klein-4b", "").stdout);
    assert!(told.contains(" 1 (as planned)") && told.contains("1,2,3"), "{told}");
}

/// The largest of the decoder's stages, in bytes of a device whose memory is one.
fn decoder_peak(report: &Value) -> u64 {
    let stages = report["stages"].as_array().unwrap().iter();
    let own = stages.filter(|stage| stage["name"].as_str().unwrap().starts_with("vae_"));
    let bytes = |stage: &Value, part: &str| stage["predicted"][part].as_u64().unwrap();
    own.map(|stage| bytes(stage, "device") + bytes(stage, "host")).max().unwrap()
}

#[test]
fn compared_cuts_take_what_a_model_takes_that_is_cut_so() {
    for (name, all) in [("flux2-klein-4b", 3), ("qwen-image-2.1", 4)] {
        // The second budget asks for chunks and strips.
        for budget in ["", "--budget 10GiB"] {
            let with = |cuts: &str| {
                json_from(recipe(name, &format!("{budget} --set vae_decoder.cuts={cuts} --json")))
            };
            let compared = cuts_of(&with("2"));
            assert_eq!(
                compared.iter().map(|(cuts, _)| cuts.as_array().unwrap().len()).collect::<Vec<_>>(),
                [0, 1, all]
            );
            for (cuts, peak) in compared {
                let planned = with(cuts.to_string().trim_matches(['[', ']']));
                assert_eq!(planned["chain"]["complete"], true, "{:?}", unknown(&planned));
                assert_eq!(peak, decoder_peak(&planned), "{name} {budget} {cuts}");
            }
        }
    }
}

#[test]
fn cuts_that_fit_are_named_as_they_are_set() {
    // At this size the decoder takes more than any other stage.
    let large = "--profile q4 --size 1536x1536";
    let uncut = format!("{large} --set vae_decoder.cuts=");
    // A budget between the least that cuts of the decoder take with every setting and what it takes uncut.
    let compared = cuts_of(&json_from(recipe("flux2-klein-4b", &format!("{uncut} --budget 1GiB --json"))));
    let least = compared.iter().map(|(_, peak)| *peak).min().unwrap();
    assert!(least < compared[0].1, "{compared:?}");
    let planned = recipe("flux2-klein-4b", &format!("{uncut} --budget {least}"));
    assert_eq!(planned.status.code(), Some(4));
    let told = text(&planned.stdout);
    let line = told.lines().find(|line| line.starts_with("the decoder fits the budget")).unwrap();
    let set = line.split_once("--set ").unwrap().1;
    let again = run(
        &["--recipe", "flux2-klein-4b", "--set", set],
        &format!("--device bc250 {large} --budget {least}"),
    );
    assert!(again.status.success(), "{line}: {}", text(&again.stderr));
}

#[test]
fn the_plan_says_what_it_chose_and_why() {
    let model = File::new(&chain());
    let usual = json_of(&model.1, "--device llvmpipe");
    assert_eq!(usual["choices"], serde_json::json!([]));
    assert_eq!(
        usual["stages"][0]["settings"],
        serde_json::json!({ "pending_dispatches": 4, "halvings": 0, "fused": false })
    );
    // A byte less than the usual settings take.
    let budget = usual["chain"]["peak"].as_u64().unwrap() - 1;
    let planned = json_of(&model.1, &format!("--device llvmpipe --budget {budget}"));
    assert_eq!(
        planned["stages"][0]["settings"],
        serde_json::json!({ "pending_dispatches": 1, "halvings": 0, "fused": false })
    );
    assert!(planned["chain"]["peak"].as_u64().unwrap() <= budget);
    let told = report_text(&model.1, &format!("--device llvmpipe --budget {budget}"));
    assert!(
        told.contains("1 dispatch per submission instead of 4") && told.contains("to stay below"),
        "{told}"
    );
}

/// A tensor that grows: of each size that it had, a cache keeps buffers.
fn chain() -> Model {
    let mut b = Builder::new("chain");
    let rows = |n: usize| [Dim::Fixed(n), Dim::Fixed(1 << 16)];
    let first = b.input("x", DType::F32, &rows(8));
    let mut x = b.op("Neg", &[first], &[]);
    for _ in 0..6 {
        x = b.op("Concat", &[x, first], &[("axis", Attribute::Int(0))]);
        for _ in 0..40 {
            x = b.op("Neg", &[x], &[]);
        }
    }
    b.output(x, "y", &rows(56));
    b.finish()
}

#[test]
fn what_does_not_fit_is_told_with_the_nearest_size_that_does() {
    let bundle = bundle();
    let peak = |size: &str| {
        json_of(&bundle.path(), &format!("--device llvmpipe --size {size}"))["chain"]["peak"]
            .as_u64()
            .unwrap()
    };
    let output =
        report(&bundle.path(), &format!("--device llvmpipe --size 1024x512 --budget {}", peak("512x256")));
    assert!(text(&output.stdout).contains("over by"), "the report is printed, too");
    let (code, told) = refused(output);
    assert_eq!(code, Some(4));
    let nearest = told.trim().rsplit("; ").next().unwrap().strip_suffix(" fits").unwrap();
    let (width, height) = nearest.split_once('x').unwrap();
    let [width, height] = [width, height].map(|side| side.parse::<usize>().unwrap());
    assert!((512..1024).contains(&width) && width.abs_diff(2 * height) <= 128, "{told}");
    // A model's size is named as it is typed.
    let file = File::new(&scores(tokens()));
    let (code, told) = refusal(&file.1, "--device llvmpipe --dim tokens=16384 --budget 1GiB");
    assert!(code == Some(4) && told.contains("; --dim tokens="), "{told}");
    let fits = told.split("; ").last().unwrap().replace(" fits", "");
    assert!(report(&file.1, &format!("--device llvmpipe --budget 1GiB {fits}")).status.success());
}

#[test]
fn whether_all_sessions_may_stay_is_told() {
    let bundle = bundle();
    for (budget, may_stay) in [("64GiB", true), ("700MiB", false)] {
        let arguments = format!("--device llvmpipe --budget {budget}");
        assert_eq!(json_of(&bundle.path(), &arguments)["chain"]["may_stay_loaded"], may_stay, "{budget}");
    }
}

#[test]
fn what_is_opened_ahead_is_told_and_counted() {
    let bundle = bundle();
    let chain = |budget: &str| {
        let arguments = format!("--device llvmpipe --budget {budget}");
        let told = text(&report(&bundle.path(), &arguments).stdout);
        (json_of(&bundle.path(), &arguments)["chain"].clone(), told)
    };
    let (roomy, told) = chain("64GiB");
    let next = |stage: usize| &roomy["overlap"][stage]["next"];
    assert_eq!(
        (&roomy["overlap"][0]["stage"], next(0)[0].as_str()),
        (&"text_encoder".into(), Some("modulation"))
    );
    assert_eq!(next(1), next(2));
    assert_eq!(next(3), &serde_json::json!([]), "nothing comes after the decoder");
    assert!(roomy["overlap_peak"].as_u64() > roomy["peak"].as_u64(), "{roomy}");
    assert!(
        told.contains("opened ahead, while the component before computes: modulation, transformer, vae_pre"),
        "{told}"
    );

    let (tight, told) = chain(&roomy["peak"].to_string());
    assert_eq!(
        (&tight["overlap"], &tight["overlap_peak"]),
        (&serde_json::json!([]), &roomy["peak"]),
        "{told}"
    );
    assert!(told.contains("one session at a time"), "{told}");
    // Small stages would fit beside each other where the largest does not fit alone.
    let (refused, told) = chain(&(roomy["peak"].as_u64().unwrap() - 1).to_string());
    assert_eq!(refused["overlap"], serde_json::json!([]), "{told}");
}

#[test]
fn the_external_data_of_a_model_need_not_be_there() {
    let folder = scratch();
    let path = folder.path().join("model.onnx");
    let mut b = Builder::new("external");
    let x = b.input("x", DType::F32, &[tokens(), Dim::Fixed(4096)]);
    let w = b.constant("w", Tensor::from_f32(&[4096, 4096], &vec![0.25; 1 << 24]));
    let y = b.matmul(x, w);
    b.output(y, "y", &[tokens(), Dim::Fixed(4096)]);
    write_model(&b.finish(), &path, &WriteOptions::default()).unwrap();
    let with = json_of(&path, "--device llvmpipe --dim tokens=16");
    for entry in fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
        if entry != path {
            fs::remove_file(entry).unwrap();
        }
    }
    let without = json_of(&path, "--device llvmpipe --dim tokens=16");
    assert_eq!(with, without);
    assert_eq!(without["stages"][0]["weights_disk"], 64 << 20);
}

#[test]
fn plots_are_pictures() {
    let bundle = bundle();
    let folder = scratch();
    let [svg, png] = ["plot.svg", "plot.PNG"].map(|name| folder.path().join(name));
    for path in [&svg, &png] {
        let arguments = format!("--device llvmpipe --budget 1GiB --plot {}", path.display());
        assert!(report(&bundle.path(), &arguments).status.success());
        let (code, told) = refusal(&bundle.path(), &arguments);
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("exists;") && told.contains("--force"), "{told}");
        assert!(report(&bundle.path(), &format!("{arguments} --force")).status.success());
    }
    let bytes = fs::read(&png).unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let colours: std::collections::HashSet<&[u8]> = pixels.chunks(3).collect();
    assert!(colours.len() >= 5, "{colours:?}");
    let svg = fs::read_to_string(&svg).unwrap();
    assert_eq!(well_formed(&svg), Ok(()));
    for stage in ["text_encoder", "modulation", "transformer", "vae_pre", "vae_attention", "vae_post0"] {
        assert!(svg.contains(&format!(">{stage}<")), "{stage}");
    }
    let (code, told) = refusal(&bundle.path(), "--plot plot.pdf");
    assert!(code == Some(2) && told.contains(".svg or a .png"), "{told}");
}

/// Whether every element ends, in order, and no text holds a bare `&`.
fn well_formed(xml: &str) -> Result<(), String> {
    let mut open = Vec::new();
    for part in xml.split('<').skip(1) {
        let (tag, text) = part.split_once('>').ok_or_else(|| format!("no end: {part}"))?;
        let entities = ["amp;", "lt;", "gt;", "quot;"];
        if text.split('&').skip(1).any(|rest| !entities.iter().any(|entity| rest.starts_with(entity))) {
            return Err(format!("a bare & in {text}"));
        }
        let name = tag.split_whitespace().next().unwrap_or_default();
        match name.strip_prefix('/') {
            Some(name) if open.pop() != Some(name) => return Err(format!("{name} ends without a start")),
            None if !name.starts_with('?') && !tag.ends_with('/') => open.push(name),
            _ => {}
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("{open:?} do not end")) }
}

#[test]
fn wrong_questions_are_usage_errors() {
    let bundle = bundle();
    let file = File::new(&scores(tokens()));
    let fixed = File::new(&scores(Dim::Fixed(4)));
    for (path, arguments, told) in [
        (&file.1, "--dim rows=4", "--dim rows=4: the graph has tokens"),
        (&fixed.1, "--dim rows=4", "the graph has no sizes by name"),
        (&file.1, "--dim tokens=0", "whole number from 1"),
        (&file.1, "--dim tokens", "write name=N"),
        (&file.1, "--dim tokens=-4", "write name=N"),
        (&file.1, "--size 64x64", "--size is for bundles"),
        (&file.1, "--stage x", "--stage is for bundles"),
        (&file.1, "--profile q8", "--profile is for recipes and checkpoints"),
        (&bundle.path(), "--set vae_decoder.cuts=1", "--set is for recipes and checkpoints"),
        (&bundle.path(), "--recipe flux2-klein-4b", "cannot be used with"),
        (&file.1, "--device voodoo", "no device is called \"voodoo\"; known are bc250, h200, llvmpipe, cpu"),
        (&file.1, "--device cpu --ep cpu", "cannot be used with"),
        (&file.1, "--budget lots", "is no amount of memory"),
        (&bundle.path(), "--dim rows=4", "the graph has chunk_rows, image_seq, joint_seq"),
        (&bundle.path(), "--size 100x100", "width 100 is not a multiple of"),
        (&bundle.path(), "--width 0", "out of range"),
        (&bundle.path(), "--size big", "is not a size"),
        (&bundle.path(), "--steps 0", "0 steps"),
        (&bundle.path(), "--stage vae", "--stage vae: the model has text_encoder, modulation"),
    ] {
        let (code, error) = refusal(path, arguments);
        assert!(code == Some(2) && error.contains(told), "{arguments}: {code:?} {error}");
    }
    assert!(report(&bundle.path(), "--device cpu --stage transformer").status.success());
}

#[test]
fn profiles_come_from_files() {
    let file = File::new(&scores(Dim::Fixed(256)));
    let path = file.0.path().join("device.json");
    let arguments = format!("--device {}", path.display());
    let profile =
        serde_json::to_value(viaduct_export::device::DeviceProfile::preset("bc250").unwrap()).unwrap();
    for content in [profile.clone(), serde_json::json!({ "viaduct": "0.1.0", "profile": profile })] {
        fs::write(&path, content.to_string()).unwrap();
        assert_eq!(json_of(&file.1, &arguments)["device"], profile);
    }
    for (content, told) in
        [("{}", "missing field"), ("", "not a device profile"), ("{\"profile\": null}", "doctor")]
    {
        fs::write(&path, content).unwrap();
        let (code, error) = refusal(&file.1, &arguments);
        assert!(code == Some(1) && error.contains(told) && error.contains("device.json"), "{error}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(refusal(&file.1, &arguments).0, Some(1));
}

#[test]
fn hostile_models_end_in_an_error_or_a_report() {
    let folder = scratch();
    let path = folder.path().join("model.onnx");
    for content in [&b""[..], b"not a model", &[0xff; 64]] {
        fs::write(&path, content).unwrap();
        assert_eq!(refusal(&path, "--device cpu").0, Some(1));
    }
    assert_eq!(refusal(&folder.path().join("nowhere.onnx"), "--device cpu").0, Some(1));
    // Sizes beyond 64 bits, and names that would break terminals and XML.
    let mut b = Builder::new("hostile");
    let x = b.input("x\u{1b}[2J</text>", DType::F16, &[tokens(), tokens(), tokens()]);
    let w = b.constant("w", Tensor::from_f16(&[1], &[1.0]));
    let y = b.mul(x, w);
    b.output(y, "y&<b>\n", &[tokens(), tokens(), tokens()]);
    let file = File::new(&b.finish());
    let plot = file.0.path().join("plot.svg");
    for size in [1u64, 1 << 21, 1 << 32, u64::MAX] {
        let arguments = format!("--device llvmpipe --dim tokens={size} --plot {} --force", plot.display());
        let output = report(&file.1, &arguments);
        assert!(output.status.success(), "{size}: {}", text(&output.stderr));
        assert!(!text(&output.stdout).contains('\u{1b}'));
        assert_eq!(well_formed(&fs::read_to_string(&plot).unwrap()), Ok(()));
    }
}
