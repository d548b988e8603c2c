//! Exported bundles against the reference implementation, tensor by tensor, as `viaduct verify` reports it.
//!
//! The bars are stated here once more, so that a recipe cannot loosen them.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{Bundle, Checkpoint, oracle, tensor, tensors, webgpu::webgpu};

/// What a profile must reach.
struct Bars {
    relative: f64,
    /// Of a text row and of a velocity.
    cosine: [f64; 2],
    decoded_db: f64,
    image_db: f64,
}

impl Bars {
    /// f32 pictures may differ by 1/255 at one place; the measure of that is the PSNR at which none of a picture's
    /// values can be further off.
    fn of(profile: &str, oracle: &Path) -> Bars {
        let values = tensor(oracle, "image_01").values.len() as f64;
        let within_one_level = 10.0 * (255f64.powi(2) * values).log10();
        let (relative, cosine, decoded_db, image_db) = match profile {
            "f32" => (5e-5, [1e-9, 1e-9], 100.0, within_one_level),
            "f16" => (3e-2, [5e-5, 1e-4], 52.0, 50.0),
            "q8" => (5e-2, [5e-4, 3e-4], 52.0, 45.0),
            _ => (4e-1, [5e-2, 1e-2], 52.0, 30.0),
        };
        Bars { relative, cosine, decoded_db, image_db }
    }
}

/// Verifies a bundle against an oracle and looks at every row of the report.
fn assert_agrees(bundle: &Bundle, profile: &str, name: &str, ep: &str, more: &[&str]) -> Value {
    let oracle = oracle(name);
    let report = bundle.verify_with(&oracle, ep, more, 0);
    let bars = Bars::of(profile, &oracle);
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        let value = row["value"].as_f64().unwrap_or(f64::NAN);
        let reached = match (row["name"].as_str().unwrap(), row["measure"].as_str().unwrap()) {
            ("noise from the seed", "absolute") => value <= 2e-6,
            (_, "absolute") => value <= 1e-6,
            (_, "exact") => value == 0.0,
            ("image_01", "psnr") => value >= bars.image_db,
            ("image_01 (reference latents)", "psnr") => value >= bars.decoded_db,
            (_, "relative") => value <= bars.relative,
            (name, "cosine") if name.starts_with("prompt_embeds") => value <= bars.cosine[0],
            (name, "cosine") if name.starts_with("pred_step") => value <= bars.cosine[1],
            _ => false,
        };
        assert!(reached && row["outcome"] == "passed", "{profile} {name} {ep}: {row}");
    }
    assert_complete(&report, &oracle, name);
    let nodes = report["nodes"].as_object().unwrap();
    let provider = if ep == "webgpu" { "WebGpuExecutionProvider" } else { "CPUExecutionProvider" };
    assert_eq!(nodes.keys().collect::<Vec<_>>(), [provider], "{profile} {name}");
    assert!(nodes[provider].as_u64() > Some(500), "{profile} {name}: {nodes:?}");
    report
}

/// The same, with the recipe's controls, all of which are red but for those that its profile excepts.
fn assert_sharp(bundle: &Bundle, profile: &str, name: &str, ep: &str) {
    let report = assert_agrees(bundle, profile, name, ep, &[]);
    let controls = report["controls"].as_array().unwrap();
    assert_eq!(controls.len(), 9);
    for control in controls {
        let excepted = profile == "q4" && control["name"] == "text-axis-dropped";
        let verdict = if excepted { "not_run" } else { "red" };
        assert_eq!(control["verdict"], verdict, "{profile} {name} {ep}: {control}");
    }
}

const PLAIN: &[&str] = &["--no-controls"];

/// Every tensor of the oracle has a row; `image_u8` only repeats `image_01` in eight bits.
fn assert_complete(report: &Value, oracle: &Path, name: &str) {
    let rows: Vec<&str> =
        report["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    let compared = |tensor: &str| {
        let parts = format!("{tensor} (");
        rows.iter().any(|row| *row == tensor || row.starts_with(&parts))
    };
    let missing: Vec<String> = tensors(oracle).into_iter().filter(|tensor| !compared(tensor)).collect();
    assert_eq!(report["not_compared"], serde_json::json!(missing), "{name}");
    assert!(missing.iter().all(|tensor| tensor == "image_u8"), "{name}: {missing:?}");
    assert!(rows.contains(&"noise from the seed"), "{name}: {rows:?}");
}

const EMOJI: [&str; 2] = ["klein-emoji/0", "klein-emoji/1"];

#[test]
fn cpu_flux2_a() {
    let bundle = Checkpoint::of_fixture("flux2-a").export("f32", &[]);
    assert_sharp(&bundle, "f32", "flux2-a", "cpu");
}

#[test]
fn cpu_flux2_b() {
    let bundle = Checkpoint::of_fixture("flux2-b").export("f32", &[]);
    // Its prompt fills all rows, so that controls of the padding cannot be planted.
    assert_agrees(&bundle, "f32", "flux2-b", "cpu", PLAIN);
}

#[test]
fn cpu_klein_emoji_in_every_profile() {
    for profile in ["f32", "f16", "q8", "q4"] {
        let bundle = Checkpoint::klein_emoji().export(profile, &[]);
        assert_sharp(&bundle, profile, EMOJI[0], "cpu");
        assert_agrees(&bundle, profile, EMOJI[1], "cpu", PLAIN);
    }
}

// One test for each bundle: a software adapter takes its time.

fn webgpu_agrees(checkpoint: &Checkpoint, profile: &str, name: &str) {
    let Some(gpu) = webgpu() else { return };
    if profile != "f32" && !gpu.runtime.device().f16 {
        eprintln!("\n*** NOT TESTED: {} computes in f32 only\n", gpu.runtime.device());
        return;
    }
    assert_agrees(&checkpoint.export(profile, &[]), profile, name, "webgpu", PLAIN);
}

#[test]
fn webgpu_flux2_a() {
    webgpu_agrees(&Checkpoint::of_fixture("flux2-a"), "f32", "flux2-a");
}

#[test]
fn webgpu_flux2_b() {
    webgpu_agrees(&Checkpoint::of_fixture("flux2-b"), "f32", "flux2-b");
}

#[test]
fn webgpu_klein_emoji_f32() {
    webgpu_agrees(&Checkpoint::klein_emoji(), "f32", EMOJI[0]);
}

#[test]
fn webgpu_klein_emoji_f16() {
    webgpu_agrees(&Checkpoint::klein_emoji(), "f16", EMOJI[0]);
}

/// One bundle with controls: that they are red depends on the bars, and hardly on the device.
#[test]
fn webgpu_controls_are_red() {
    let Some(_alone) = webgpu() else { return };
    assert_sharp(&Checkpoint::of_fixture("flux2-a").export("f32", &[]), "f32", "flux2-a", "webgpu");
}

#[test]
fn webgpu_klein_emoji_q8() {
    webgpu_agrees(&Checkpoint::klein_emoji(), "q8", EMOJI[0]);
}

#[test]
fn webgpu_klein_emoji_q4() {
    webgpu_agrees(&Checkpoint::klein_emoji(), "q4", EMOJI[0]);
}
