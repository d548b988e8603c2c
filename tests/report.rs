//! `viaduct report` through the binary: what it says, what it draws, and what it refuses.

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::Value;
use support::{Bundle, Checkpoint, scratch, viaduct};
use viaduct_export::onnx::{Attribute, Builder, DType, Dim, Model, Tensor, model_bytes};

fn report(path: &Path, arguments: &str) -> Output {
    // A runtime that cannot be loaded: a report does without.
    let mut command = viaduct();
    command.arg("report").arg(path).args(arguments.split_whitespace()).env("VIADUCT_RUNTIME", "/nowhere");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json_of(path: &Path, arguments: &str) -> Value {
    let output = report(path, &format!("{arguments} --json"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Exit code and the error's line.
fn refusal(path: &Path, arguments: &str) -> (Option<i32>, String) {
    let output = report(path, arguments);
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
    assert!(output.contains("a binding covers at most 128.0 MiB"), "{output}");
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
fn unbound_sizes_are_told() {
    let file = File::new(&scores(tokens()));
    let report = json_of(&file.1, "--device cpu");
    assert_eq!(report["stages"][0]["unbound"], serde_json::json!(["tokens"]));
    let told = report_text(&file.1, "--device cpu");
    assert!(told.contains("tokens: bind them with --dim"), "{told}");
}

#[test]
fn over_the_budget_is_exit_4() {
    let bundle = bundle();
    let (code, told) = refusal(&bundle.path(), "--device llvmpipe --budget 1MiB");
    assert_eq!(code, Some(4), "{told}");
    for part in ["stage ", "budget of 1.0 MiB", "its largest tensor is", "device ", "host "] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(report(&bundle.path(), "--device llvmpipe --budget 16GiB").status.success());
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
        assert!(told.contains("already exists") && told.contains("--force"), "{told}");
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
        (&file.1, "--device voodoo", "no device is called \"voodoo\"; known are bc250, h200, llvmpipe, cpu"),
        (&file.1, "--device cpu --ep cpu", "cannot be used with"),
        (&file.1, "--budget lots", "is not a size"),
        (&bundle.path(), "--dim rows=4", "the graph has chunk_rows, image_seq, joint_seq"),
        (&bundle.path(), "--size 100x100", "width 100 is not a multiple of"),
        (&bundle.path(), "--width 0", "out of range"),
        (&bundle.path(), "--size big", "is not a size"),
        (&bundle.path(), "--steps 0", "--steps 0"),
        (&bundle.path(), "--stage vae", "--stage vae: the bundle has text_encoder, modulation"),
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
