//! Qwen-Image-2.1: small checkpoints of random weights against the reference implementation, and what the program does with
//! them. The bars are stated here once more, so that a recipe cannot loosen them.

mod support;

use std::{fs, path::Path};

use serde_json::Value;
use support::{
    Bundle, Checkpoint, difference, fixture, json, oracle, scratch, tensor, viaduct, webgpu::webgpu,
};
use tempfile::TempDir;
use viaduct::{
    pipeline::image::{Colour, Picture},
    tensor::{HostTensor, Values},
};
use viaduct_export::arch::qwen_image::FAULTS;

const BASE: &str = "qwen-image";
/// Noise levels of its own, and a token with a massive activation in the text encoder.
const SINK: &str = "qwen-image-turbo-sink";
/// 32 narrow layers.
const DEEP: &str = "qwen-image-deep";

const COMPARE_ONLY: &[&str] = &["--no-controls", "--no-store"];

/// A checkpoint as f32.
fn exact(name: &str) -> Bundle {
    Checkpoint::stored(name).export("f32", &[])
}

fn missed(report: &Value) -> Vec<&str> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["outcome"] == "missed").map(|row| row["name"].as_str().unwrap()).collect()
}

/// The largest value among the rows of a report whose names begin so.
fn worst(report: &Value, name: &str, measure: &str) -> f64 {
    let rows = report["rows"].as_array().unwrap().iter();
    let own = rows.filter(|row| row["measure"] == measure && row["name"].as_str().unwrap().starts_with(name));
    own.map(|row| row["value"].as_f64().unwrap())
        .reduce(f64::max)
        .unwrap_or_else(|| panic!("no row of {name}"))
}

/// Boundary tensors of a run of the program, and its picture.
struct Drawn(TempDir);

impl Drawn {
    /// Draws what a reference's request asks for.
    fn of(bundle: &Bundle, reference: &Path, ep: &str) -> Drawn {
        let request = json(&reference.join("request.json"));
        let text = |key: &str| request[key].as_str().unwrap().to_owned();
        let number = |key: &str| request[key].to_string();
        let drawn = Drawn(scratch());
        let mut command = bundle.generate(&drawn.0.path().join("picture.png"), &text("prompt"), ep);
        command.arg("--dump").arg(drawn.tensors());
        command.args(["--width", &number("width"), "--height", &number("height")]);
        command.args(["--seed", &number("seed"), "--num-steps", &number("steps")]);
        if request["negative_prompt"].is_string() {
            command.args(["--negative", &text("negative_prompt"), "--guidance", &number("guidance")]);
        }
        command.assert().success();
        drawn
    }

    fn tensors(&self) -> std::path::PathBuf {
        self.0.path().join("tensors")
    }

    fn tensor(&self, name: &str) -> HostTensor {
        tensor(&self.tensors(), name)
    }

    fn png(&self) -> Vec<u8> {
        fs::read(self.0.path().join("picture.png")).unwrap()
    }

    /// The largest difference from the reference's tensors of this name, or of these names with a step's number.
    fn off(&self, reference: &Path, name: &str) -> f32 {
        let steps = json(&reference.join("request.json"))["steps"].as_u64().unwrap();
        let names: Vec<String> = match name.ends_with("_step") {
            true => (0..steps).map(|step| format!("{name}{step}")).collect(),
            false => vec![name.to_owned()],
        };
        let off = |name: &String| difference(&self.tensor(name), &tensor(reference, name));
        names.iter().map(off).fold(0.0, f32::max)
    }
}

/// The smallest correlation of a row with the reference's.
fn row_correlation(a: &HostTensor, b: &HostTensor) -> f64 {
    assert_eq!(a.shape, b.shape);
    let (a, b, width) = (a.to_f32(), b.to_f32(), a.shape[2]);
    let rows = a.chunks(width).zip(b.chunks(width));
    rows.map(|(a, b)| correlation(a, b)).fold(1.0, f64::min)
}

fn correlation(a: &[f32], b: &[f32]) -> f64 {
    let mean = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
    let (a_mean, b_mean) = (mean(a), mean(b));
    let (mut aa, mut bb, mut ab) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (f64::from(*a) - a_mean, f64::from(*b) - b_mean);
        (aa, bb, ab) = (aa + a * a, bb + b * b, ab + a * b);
    }
    ab / (aa * bb).sqrt()
}

/// Every value of the picture is the reference's; one next to a rounding edge may be on either side.
fn assert_same_bytes(png: &[u8], reference: &Path) {
    let exact = tensor(reference, "image_01").to_f32();
    let Values::U8(expected) = tensor(reference, "image_u8").values else { panic!("image_u8 is not u8") };
    let Picture { pixels, channels, .. } = Picture::from_png(png).unwrap();
    assert_eq!((pixels.len(), channels), (expected.len(), 4));
    let plane = expected.len() / 4;
    for (index, found) in pixels.into_iter().enumerate() {
        let place = index % 4 * plane + index / 4;
        let (expected, exact) = (expected[place], exact[place]);
        let to_edge = ((exact * 255.0).fract() - 0.5).abs() / 255.0;
        let allowed = u8::from(to_edge < 1e-4);
        assert!(found.abs_diff(expected) <= allowed, "{found} for {expected} ({exact})");
    }
}

/// The acceptance figures, in a run of its own from the noise on.
fn assert_drawn(name: &str) {
    let (bundle, reference) = (exact(name), oracle(name));
    let drawn = Drawn::of(&bundle, &reference, "cpu");
    for (name, bar) in [
        ("noise_nchw", 2e-6),
        ("sigmas", 1e-6),
        ("timesteps", 1e-6),
        ("txt_cos", 1e-6),
        ("txt_sin", 1e-6),
        ("img_cos", 1e-6),
        ("img_sin", 1e-6),
        ("pred_step", 1e-4),
        ("latents_step", 1e-4),
        ("vae_in", 1e-4),
        // Half of what it is in -1..1.
        ("image_01", 5e-5),
    ] {
        let off = drawn.off(&reference, name);
        println!("{name}: {off:.1e}");
        assert!(off <= bar, "{name}: {off:e}");
    }
    for text in ["enc_hidden_full", "prompt_embeds"] {
        let worst = row_correlation(&drawn.tensor(text), &tensor(&reference, text));
        println!("{text}: {:.1e}", 1.0 - worst);
        assert!(worst >= 0.999_999, "{text}: {worst}");
    }
    assert_same_bytes(&drawn.png(), &reference);
}

#[test]
fn a_picture_is_the_references() {
    assert_drawn(BASE);
}

/// Its noise levels are taken as they are.
#[test]
fn a_picture_of_turbo_is_the_references() {
    assert_drawn(SINK);
}

/// The gates of the recipe, and faults that must miss them.
fn assert_sharp(name: &str, profile: &str, ep: &str) {
    let bundle = Checkpoint::stored(name).export(profile, &[]);
    let report = bundle.verify_with(&oracle(name), ep, &["--no-store"], 0);
    assert_eq!(report["not_compared"], serde_json::json!(["image_u8"]));
    let controls = report["controls"].as_array().unwrap();
    assert_eq!(controls.len(), 8);
    assert!(controls.iter().all(|control| control["verdict"] == "red"), "{name} {profile}: {controls:?}");
    if profile == "f32" {
        for (row, measure, bar) in [
            ("enc_hidden_full", "cosine", 1e-6),
            ("pred_step", "relative", 2e-5),
            ("image_01 (reference latents)", "relative", 5e-5),
        ] {
            let worst = worst(&report, row, measure);
            assert!(worst <= bar, "{name} {ep}: {row} {worst:e}");
        }
    }
}

#[test]
fn cpu_gates_hold_and_are_sharp() {
    for name in [BASE, SINK] {
        for profile in ["f32", "f16", "q8"] {
            assert_sharp(name, profile, "cpu");
        }
    }
}

#[test]
fn webgpu_gates_hold_and_are_sharp() {
    let Some(_alone) = webgpu() else { return };
    assert_sharp(BASE, "f32", "webgpu");
    assert_sharp(SINK, "f32", "webgpu");
}

/// A model whose noise levels are fixed takes as many steps as they are, whatever a reference of another model took.
#[test]
fn fixed_levels_are_as_many_steps() {
    let (bundle, other) = (exact(SINK), oracle(BASE));
    let said = bundle.verify_command(&other, "cpu", COMPARE_ONLY).assert().code(2);
    let said = String::from_utf8(said.get_output().stderr.clone()).unwrap();
    assert!(said.contains("noise levels are fixed"), "{said}");
    let (mut bisect, out) = (viaduct(), scratch());
    bisect.arg("bisect").args([bundle.path(), bundle.path()]).args(["--stage", "transformer", "--ep", "cpu"]);
    bisect.args(["--prompt", "x", "--size", "64x64", "--out"]).arg(out.path().join("out"));
    assert_ne!(bisect.output().unwrap().status.code(), Some(101), "it panicked");
}

/// 8-bit weights have a bar of their own: no row is as near as with 16.
#[test]
fn text_of_8_bits_has_its_own_bar() {
    for name in [BASE, SINK] {
        let report = Checkpoint::stored(name).export("q8", &[]).verify(&oracle(name), "cpu", 0);
        let worst = worst(&report, "enc_hidden_full", "cosine");
        assert!(worst > 1e-4 && worst <= 5e-3, "{name}: {worst}");
    }
}

/// What is left of a residual of thousands is lost where the text encoder computes in 16 bits.
#[test]
fn a_massive_activation_needs_f32() {
    const NARROW: &str = "profiles.f16.components.text_encoder.compute=f16";
    let reference = oracle(SINK);
    let verified = |set: &[&str], code| {
        Checkpoint::stored(SINK).export("f16", set).verify_with(&reference, "cpu", COMPARE_ONLY, code)
    };
    let narrow = verified(&[NARROW], 3);
    assert_eq!(missed(&narrow), ["enc_hidden_full (real rows)"; 2]);
    assert!(worst(&narrow, "enc_hidden_full", "cosine") > 1e-3);
    let shipped = verified(&[], 0);
    assert!(worst(&shipped, "enc_hidden_full", "cosine") <= 1e-8);
    // Nothing but that token needs it.
    let plain = Checkpoint::stored(BASE).export("f16", &[NARROW]);
    plain.verify_with(&oracle(BASE), "cpu", COMPARE_ONLY, 0);
}

/// An error that grows from layer to layer is seen at full depth alone.
#[test]
fn a_transformer_of_32_layers_passes() {
    let reference = oracle(DEEP);
    let off = Drawn::of(&exact(DEEP), &reference, "cpu").off(&reference, "pred_step");
    println!("32 layers: {off:.1e}");
    assert!(off <= 1e-4, "{off:e}");
    for profile in ["f32", "f16"] {
        let bundle = Checkpoint::stored(DEEP).export(profile, &[]);
        bundle.verify_with(&reference, "cpu", COMPARE_ONLY, 0);
    }
}

#[test]
fn webgpu_transformer_of_32_layers_passes() {
    let Some(_alone) = webgpu() else { return };
    let report = exact(DEEP).verify_with(&oracle(DEEP), "webgpu", COMPARE_ONLY, 0);
    assert!(worst(&report, "pred_step", "relative") <= 1e-4);
}

/// Text rows read no image row, so that their keys and values can be computed once.
#[test]
fn one_graph_draws_what_prefix_and_step_do() {
    let reference = oracle(BASE);
    let single = Checkpoint::stored(BASE).export("f32", &["transformer.graphs=single"]);
    let stages = json(&single.path().join("bundle.json"))["stages"].as_array().unwrap().clone();
    assert!(stages.iter().all(|stage| stage["name"] != "prefix"));
    let [single, parted] = [single, exact(BASE)].map(|bundle| Drawn::of(&bundle, &reference, "cpu"));
    let off = difference(&single.tensor("pred_step0"), &parted.tensor("pred_step0"));
    let largest = parted.tensor("pred_step0").to_f32().iter().fold(0f32, |most, x| most.max(x.abs()));
    println!("single graph: {off:.1e} of {largest:.1}");
    assert!(off <= 1e-6 * largest.max(1.0), "{off:e} of {largest}");
}

/// Each fault that an export can be planted with, and the first boundary that it moves.
const FIRST_MISSED: &[(&str, &str)] = &[
    ("text_from_sigma", "pred_step0"),
    ("bidirectional_text", "pred_step0"),
    ("uncentred_grid", "img_cos"),
    ("no_tanh", "pred_step0"),
    ("rope_half_split", "pred_step0"),
    ("norm_not_zero_centred", "pred_step0"),
    ("no_qk_norm", "enc_hidden_full (real rows)"),
    ("theta_1e4", "enc_hidden_full (real rows)"),
    ("final_norm", "enc_hidden_full (real rows)"),
    ("vae_no_first_chunk", "image_01 (reference latents)"),
    ("vae_no_unnormalise", "image_01 (reference latents)"),
    ("vae_unnormalised_twice", "vae_in"),
];

#[test]
fn each_fault_is_found_where_it_is_made() {
    let mut known: Vec<&str> = FIRST_MISSED.iter().map(|row| row.0).collect();
    let mut faults = FAULTS.to_vec();
    known.sort_unstable();
    faults.sort_unstable();
    assert_eq!(known, faults);
    for (fault, first) in FIRST_MISSED {
        let bundle = Checkpoint::stored(BASE).export_with_fault("f32", fault);
        let report = bundle.verify(&oracle(BASE), "cpu", 3);
        let missed = missed(&report);
        println!("{fault}: {missed:?}");
        assert_eq!(missed[0], *first, "{fault}: {missed:?}");
        assert!(missed.contains(&"image_01"), "{fault}: the picture is right all the same");
    }
}

#[test]
fn a_negative_prompt_guides_as_the_references() {
    let reference = fixture(BASE).join("negative");
    let drawn = Drawn::of(&exact(BASE), &reference, "cpu");
    for (name, bar) in [("pred_step", 1e-4), ("latents_step", 1e-4), ("image_01", 1e-4)] {
        let off = drawn.off(&reference, name);
        println!("{name}: {off:.1e}");
        assert!(off <= bar, "{name}: {off:e}");
    }
    let alone = tensor(&oracle(BASE), "pred_step0");
    assert!(difference(&drawn.tensor("pred_step0"), &alone) > 1e-2, "the second prompt changes nothing");
}

/// Draws a picture with some more arguments and returns its file and what was said.
fn draw(bundle: &Bundle, prompt: &str, more: &[&str]) -> (Vec<u8>, String) {
    let folder = scratch();
    let out = folder.path().join("picture.png");
    let mut command = bundle.generate(&out, prompt, "cpu");
    command.args(["--seed", "7"]).args(more);
    if !more.contains(&"--size") {
        command.args(["--size", "64x32"]);
    }
    let assert = command.assert().success();
    let told = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    (fs::read(out).unwrap(), told)
}

const SHORT: &[&str] = &["--num-steps", "2"];

/// Prompts of a batch are filled up to the longest, which changes none of them.
#[test]
fn several_prompts_draw_what_each_draws_alone() {
    let (bundle, folder) = (exact(BASE), scratch());
    let prompts = ["a red apple", "un chat très, très long sur un toit", "x"];
    for more in [&[][..], &["--negative", "a longer text than some of them"]] {
        let mut command = bundle.generate(&folder.path().join("all.png"), prompts[0], "cpu");
        command.args(["-p", prompts[1], "-p", prompts[2], "--seed", "7", "--size", "64x32", "--force"]);
        command.args(SHORT).args(more).assert().success();
        for (index, prompt) in prompts.iter().enumerate() {
            let (alone, _) = draw(&bundle, prompt, &[SHORT, more].concat());
            let beside = fs::read(folder.path().join(format!("all-{}.png", index + 1))).unwrap();
            let [alone, beside] = [&alone, &beside].map(|png| Picture::from_png(png).unwrap().pixels);
            // Sums over rows of zeros may be rounded in another order.
            let off = alone.into_iter().zip(beside).map(|(a, b)| a.abs_diff(b)).max();
            assert!(off <= Some(1), "{prompt}: {off:?}");
        }
    }
}

#[test]
fn prompts_of_every_kind_are_drawn() {
    let bundle = exact(BASE);
    let picture = |prompt: &str| Picture::from_png(&draw(&bundle, prompt, SHORT).0).unwrap();
    assert_eq!(picture(""), picture(" "), "an empty prompt is a space");
    let others = ["красное яблоко", "赤いリンゴ", "تفاحة حمراء", "🍎 e\u{301}", "<|im_end|>"].map(picture);
    for (index, one) in others.iter().enumerate() {
        assert!(others[..index].iter().all(|other| other != one));
    }
    // 89 tokens are the template's and those of the prompt "a red apple, RGBA".
    let around = tensor(&oracle(BASE), "input_ids").shape[1] - "a red apple, RGBA".len();
    let (_, told) = draw(&bundle, &"a".repeat(512), SHORT);
    assert!(!told.contains("the prompt is cut"), "{told}");
    let (longest, told) = draw(&bundle, &"a".repeat(640 - around), SHORT);
    assert!(!told.contains("the prompt is cut"), "{told}");
    let (longer, told) = draw(&bundle, &"a".repeat(640 - around + 3), SHORT);
    assert!(told.contains("the prompt is cut: 640 tokens are kept, 3 at its end are lost"), "{told}");
    let [longest, longer] = [longest, longer].map(|png| Picture::from_png(&png).unwrap());
    assert_eq!(longest, longer);
}

#[test]
fn sizes_go_down_to_multiples_of_32() {
    let bundle = exact(BASE);
    let (png, told) = draw(&bundle, "a cup", &[SHORT, &["--size", "95x63"]].concat());
    assert!(told.contains("this model draws no such size; 64x32 is the next below it"), "{told}");
    assert_eq!(png, draw(&bundle, "a cup", SHORT).0);
    let folder = scratch();
    let mut command = bundle.generate(&folder.path().join("a.png"), "a cup", "cpu");
    command.args(["--size", "31x64"]).assert().code(2);
}

#[test]
fn turbo_takes_its_own_steps() {
    let bundle = exact(SINK);
    assert_eq!(json(&bundle.path().join("bundle.json"))["name"], "qwen-image-2.1-turbo");
    let (own, _) = draw(&bundle, "a cup", &[]);
    let (asked, told) = draw(&bundle, "a cup", &["--num-steps", "4"]);
    assert!(told.contains("--num-steps 4: this model's noise levels are fixed; 8 steps are taken"), "{told}");
    assert_eq!(own, asked);
}

#[test]
fn a_background_makes_a_picture_opaque() {
    let bundle = exact(BASE);
    let [clear, blue] = [SHORT, &[SHORT, &["--background", "#0000ff"]].concat()]
        .map(|more| Picture::from_png(&draw(&bundle, "a cup", more).0).unwrap());
    assert_eq!([clear.channels, blue.channels], [4, 3]);
    assert_eq!(clear.on_background(Colour([0, 0, 255])), blue);
}

/// A strip with the rows around it has all that its own rows depend on.
#[test]
fn a_picture_in_strips_is_that_of_one_piece() {
    let bundle = exact(BASE);
    let large = |more: &[&str]| draw(&bundle, "a cup", &[SHORT, &["--size", "512x768"], more].concat());
    let (whole, told) = large(&["--budget", "2GiB"]);
    assert!(!told.contains("vae_post2: its work in smaller pieces"), "{told}");
    let (strips, told) = large(&["--budget", "60MiB"]);
    assert!(told.contains("vae_post2: its work in smaller pieces"), "{told}");
    assert!(whole == strips);
}

/// Both prompts are kept, and the latents after each step.
#[test]
fn a_killed_run_goes_on() {
    let (bundle, folder) = (exact(BASE), scratch());
    let out = folder.path().join("picture.png");
    let command = || {
        let mut command = viaduct();
        command.arg("generate").arg("-b").arg(bundle.path()).arg("-o").arg(&out);
        command.args(["-p", "a cup", "--negative", "a lid", "--seed", "7", "--size", "64x32"]);
        command.args(["--num-steps", "3", "--ep", "cpu", "--json"]).env("VIADUCT_RUNS", folder.path());
        command
    };
    command().env("VIADUCT_TEST_STOP", "KILL@kept:latents_step1").assert().failure();
    assert!(!out.exists());
    let resumed = command().assert().success();
    let report: Value = serde_json::from_slice(&resumed.get_output().stdout).unwrap();
    assert_eq!(report["resumed_from"], "step 2/3");
    let (whole, _) = draw(&bundle, "a cup", &["--negative", "a lid", "--num-steps", "3"]);
    assert!(fs::read(&out).unwrap() == whole);
}

#[test]
fn a_licence_stays_with_the_weights() {
    let folder = scratch();
    let out = folder.path().join("bundle");
    let assert = Checkpoint::stored(BASE).export_command(&out, "q8", &[]).assert().success();
    let told = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    let licence = "Qwen Research License (non-commercial)";
    assert_eq!(told.matches(licence).count(), 1, "{told}");
    assert!(fs::read_to_string(out.join("bundle.json")).unwrap().contains(licence));
}

/// What a recipe's value cannot be is the user's to mend, in both families.
#[test]
fn settings_that_cannot_be_are_usage_errors() {
    let folder = scratch();
    let families = [Checkpoint::stored(BASE), Checkpoint::of_fixture("flux2-a")];
    let shared = [
        ("text_encoder.length=0", "expected 1 to 8192"),
        ("text_encoder.length=8193", "expected 1 to 8192"),
        ("schedule.steps=0", "expected 1 to 1000"),
        ("vae_decoder.attention_rows=0", "expected 1 to 16777216"),
        ("vae_decoder.attention_rows=99999999999", "from 0 to 4294967295"),
        ("vae_decoder.cuts=9", "the decoder's up blocks"),
    ];
    let own = [("transformer.graphs=foo", "prefix or single")];
    let cases = families.iter().flat_map(|family| shared.iter().map(move |case| (family, case)));
    for (family, (set, expected)) in cases.chain(own.iter().map(|case| (&families[0], case))) {
        let mut command = family.export_command(&folder.path().join("b"), "f32", &[set]);
        let output = command.assert().code(2).get_output().clone();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(expected), "{set}: {stderr}");
    }
    // No shipped profile of this family fits weights.
    let mut command = families[0].export_command(&folder.path().join("b"), "q4", &[]);
    let output = command.args(["--calibration", "none.safetensors"]).assert().code(2).get_output().clone();
    assert!(String::from_utf8(output.stderr).unwrap().contains("profiles.NAME.fit=feedback"));
}
