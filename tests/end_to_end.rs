//! What a user does: export, generate, inspect. All through the program.

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use support::{
    Bundle, Checkpoint, difference, oracle, python::python, runtime_folder, scratch, tensor, tensors,
    viaduct, webgpu::webgpu,
};
use viaduct::{
    pipeline::{
        event::Event,
        image::{Picture, png_texts, psnr},
    },
    tensor::HostTensor,
};

const APPLE: &str = "red apple";
const SEED: &str = "1000";

fn picture(path: &Path) -> Picture {
    Picture::from_png(&fs::read(path).unwrap()).unwrap()
}

/// Runs `viaduct inspect --json`.
fn inspect(path: &Path, arguments: &[&str]) -> Value {
    let assert = viaduct().arg("inspect").arg(path).arg("--json").args(arguments).assert().success();
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

/// Draws the oracle's apple with some more arguments.
fn draw(bundle: &Bundle, out: &Path, arguments: &[&str]) {
    bundle.generate(out, APPLE, "cpu").args(arguments).assert().success();
}

/// The decoder's output for the oracle's apple, before it becomes bytes.
fn raw_apple(bundle: &Bundle, ep: &str) -> HostTensor {
    let folder = scratch();
    let mut command = bundle.generate(&folder.path().join("apple.png"), APPLE, ep);
    command.args(["--seed", SEED, "--dump"]).arg(folder.path()).assert().success();
    tensor(folder.path(), "image_raw")
}

#[test]
fn the_picture_is_the_references() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let [apple, again, noise] = ["apple", "again", "noise"].map(|name| folder.path().join(name));
    draw(&bundle, &apple, &["--seed", SEED]);
    let db = psnr(&picture(&apple).to_tensor(), &tensor(&oracle("klein-emoji/0"), "image_01")).unwrap();
    assert!(db >= 45.0, "{db}");

    draw(&bundle, &again, &["--seed", SEED]);
    assert!(fs::read(&apple).unwrap() == fs::read(&again).unwrap(), "one seed, two pictures");

    let file = oracle("klein-emoji/0").join("noise_nchw.npy");
    draw(&bundle, &noise, &["--noise", file.to_str().unwrap()]);
    assert_eq!(picture(&apple), picture(&noise));

    draw(&bundle, &again, &["--seed", "1001", "--force"]);
    assert_ne!(picture(&apple), picture(&again));
}

/// In whatever order stages run, and whether their sessions stay, a picture is that of a command of its own.
#[test]
fn klein_emoji_draws_what_is_asked() {
    let Some(python) = python() else { return };
    let checkpoint = Checkpoint::klein_emoji();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let judge = |bundle: &Bundle| {
        let mut command = Command::new(&python);
        command.arg(root.join("tools/adherence")).arg(bundle.path()).args(["--count", "12", "--program"]);
        command.arg(env!("CARGO_BIN_EXE_viaduct")).env("VIADUCT_RUNTIME", runtime_folder());
        command.output().unwrap()
    };
    let output = judge(&checkpoint.export("q4", &[]));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("swapped (control): label 0.000, background 0.000 of 12"), "{stdout}");
    let output = judge(&checkpoint.export_with_fault("q4", "swiglu_swapped"));
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("asked: label 0.0"));
}

#[test]
fn several_pictures_are_those_of_single_runs() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let path = |name: &str| folder.path().join(name);
    let steps = ["--steps", "2"];
    for (name, prompt, seed) in
        [("a", APPLE, "7"), ("b", APPLE, "8"), ("c", "a fox", "7"), ("d", "a fox", "8")]
    {
        bundle.generate(&path(name), prompt, "cpu").args(["--seed", seed]).args(steps).assert().success();
    }
    for more in [&["--in-process"][..], &["--keep-loaded"], &[]] {
        let mut command = bundle.generate(&path("all.png"), APPLE, "cpu");
        let arguments = ["-p", "a fox", "--seed", "7", "--count", "2", "--force", "--json"];
        let assert = command.args(arguments).args(steps).args(more).assert().success();
        let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        assert_eq!(report["kept_loaded"], more.contains(&"--keep-loaded"), "{report}");
        for (index, (name, seed)) in [("a", 7), ("b", 8), ("c", 7), ("d", 8)].into_iter().enumerate() {
            let file = path(&format!("all-{}.png", index + 1));
            let image = &report["images"][index];
            assert_eq!((&image["image"], &image["seed"]), (&file.to_str().unwrap().into(), &seed.into()));
            assert!(fs::read(path(name)).unwrap() == fs::read(&file).unwrap(), "{more:?} {name}");
        }
    }
}

/// The numbers themselves are the machine's; that they are there, and fit together, is not.
#[test]
fn a_bench_reports_as_json() {
    let bundle = Checkpoint::klein_emoji().export("q8", &[]);
    let bench = |more: &[&str]| -> Value {
        let mut command = viaduct();
        command.arg("bench").arg(bundle.path()).args(["--ep", "cpu", "--json", "--steps", "2"]);
        serde_json::from_slice(&command.args(more).assert().success().get_output().stdout).unwrap()
    };
    let report = bench(&["--runs", "2", "--size", "128x128,128x128"]);
    assert_eq!((&report["bundle"], &report["environment"]["ep"]), (&"klein-emoji q8".into(), &"cpu".into()));
    assert!(report["ceiling_tflops"].as_f64() > Some(0.0), "{report}");
    assert_eq!(report["sizes"].as_array().unwrap().len(), 2);
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    for size in report["sizes"].as_array().unwrap() {
        assert_eq!([&size["width"], &size["height"], &size["steps"], &size["runs"]], [128, 128, 2, 2]);
        assert_eq!(size["kept_loaded"], true);
        let pictures = size["pictures"].as_array().unwrap();
        assert_eq!(pictures.len(), 3);
        for times in pictures.iter().chain([&size["cold_seconds"], &size["warm_seconds"]]) {
            assert_eq!(times["steps"].as_array().unwrap().len(), 2);
            let parts = ["loading", "text_encoder", "decoder"].map(|part| &times[part]);
            let parts: Vec<&Value> = parts.into_iter().chain(times["steps"].as_array().unwrap()).collect();
            assert!(parts.iter().all(|part| positive(part)), "{times}");
            let sum: f64 = parts.iter().filter_map(|part| part.as_f64()).sum();
            assert!(times["whole"].as_f64() > Some(sum) || times == &size["warm_seconds"], "{times}");
        }
        let stages = size["stages"].as_array().unwrap();
        assert_eq!(stages.len(), 6);
        let numbers =
            ["load_seconds", "first_run_seconds", "run_seconds", "runs_per_picture", "flops", "tflops"];
        for stage in stages {
            assert!(numbers.iter().all(|number| positive(&stage[number])), "{stage}");
            assert!(
                stage["settings"]["halvings"].is_u64() && positive(&stage["predicted"]["host"]),
                "{stage}"
            );
        }
        assert!(positive(&size["peak"]["host"]) && size["peak"]["device"].is_null(), "{size}");
    }
    assert_eq!(bench(&["--runs", "1", "--budget", "120MiB"])["sizes"][0]["kept_loaded"], false);

    for (arguments, code) in [(["--size", "130x128"], 2), (["--runs", "0"], 2), (["--budget", "20MiB"], 4)] {
        viaduct().arg("bench").arg(bundle.path()).args(["--ep", "cpu"]).args(arguments).assert().code(code);
    }
}

#[test]
fn sessions_that_do_not_fit_beside_each_other_are_not_kept() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let out = folder.path().join("apple.png");
    let mut command = bundle.generate(&out, APPLE, "cpu");
    let arguments = ["--keep-loaded", "--budget", "120MiB", "--steps", "1", "--json"];
    let assert = command.args(arguments).assert().success();
    let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(report["kept_loaded"], false);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("warning: --keep-loaded: the stages do not fit beside each other"), "{message}");

    // Nothing is written over, and what is for one picture is refused for several.
    fs::write(folder.path().join("several-2.png"), "").unwrap();
    let several = folder.path().join("several.png");
    for arguments in
        [&["--count", "2"][..], &["--count", "0"], &["--count", "2", "--seed", "18446744073709551615"]]
    {
        bundle.generate(&several, APPLE, "cpu").args(arguments).assert().code(2);
    }
    bundle.generate(&several, APPLE, "cpu").args(["-p", "a fox", "--force", "--dump", "x"]).assert().code(2);
}

#[test]
fn a_picture_tells_how_it_was_made() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let out = folder.path().join("un café.png");
    let prompt = "un café\nby \"the\" sea";
    let mut command = bundle.generate(&out, prompt, "cpu");
    let arguments = ["--seed", "18446744073709551615", "--steps", "1", "--size", "160x96"];
    let assert = command.args(arguments).args(["--json", "--progress", "json"]).assert().success();
    let output = assert.get_output();

    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["image"], out.to_str().unwrap());
    assert_eq!(report["seed"], u64::MAX);
    assert_eq!([&report["width"], &report["height"], &report["steps"]], [160, 96, 1]);
    assert_eq!((&report["ep"], &report["adapter"]), (&"cpu".into(), &"CPU".into()));
    assert!(report["nodes"]["CPUExecutionProvider"].as_u64() > Some(100), "{report}");

    let lines = String::from_utf8(output.stderr.clone()).unwrap();
    let events: Vec<Event> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stages: Vec<&str> = events
        .iter()
        .filter_map(|event| match event {
            Event::Stage { name, .. } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let expected = ["text_encoder", "modulation", "transformer", "vae_pre", "vae_attention", "vae_post0"];
    assert_eq!(stages, expected);
    let steps = events.iter().filter(|event| matches!(event, Event::Step { index: 1, count: 1, .. }));
    assert_eq!(steps.count(), 1);

    let picture = picture(&out);
    assert_eq!((picture.width, picture.height), (160, 96));
    let texts = png_texts(&fs::read(&out).unwrap()).unwrap();
    let inspected = inspect(&out, &[]);
    for (keyword, text) in [
        ("prompt", prompt),
        ("seed", "18446744073709551615"),
        ("steps", "1"),
        ("size", "160x96"),
        ("bundle", "klein-emoji q8"),
        ("Software", "viaduct"),
    ] {
        assert!(texts.contains(&(keyword.to_owned(), text.to_owned())), "{texts:?}");
        assert_eq!(inspected[keyword], text);
    }
}

#[test]
fn a_dump_looks_like_an_oracle() {
    let (bundle, folder) = (Checkpoint::of_fixture("flux2-a").export("f32", &[]), scratch());
    let oracle = oracle("flux2-a");
    let mut command = bundle.generate(&folder.path().join("a.png"), " un café", "cpu");
    command.args(["--seed", "7", "--steps", "3", "--size", "112x80", "--dump"]).arg(folder.path());
    command.assert().success();
    let mut expected = tensors(&oracle);
    // The picture itself is in the PNG.
    expected.retain(|name| name != "image_u8");
    let mut dumped = tensors(folder.path());
    // What one stage of the decoder hands the next lies inside an up block, where the reference has no name for it; and what it
    // can be computed of the reference did not keep.
    dumped.retain(|name| !["vae_up0_res", "noise_packed", "timesteps"].contains(&name.as_str()));
    assert_eq!(dumped, expected);
    for name in expected {
        let (ours, theirs) = (tensor(folder.path(), &name), tensor(&oracle, &name));
        assert_eq!(ours.shape, theirs.shape, "{name}");
        // Nothing is put right on the way, so errors have added up.
        let peak = theirs.to_f32().iter().fold(1e-3f32, |peak, x| peak.max(x.abs()));
        let error = difference(&ours, &theirs) / peak;
        assert!(error <= 2e-4, "{name}: {error:e}");
    }
    let bytes = picture(&folder.path().join("a.png")).to_tensor();
    let off = difference(&bytes, &tensor(&oracle, "image_01"));
    assert!(off <= 1.0 / 255.0, "{off}");
}

#[test]
fn a_long_prompt_is_cut_and_says_so() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let prompt = "red apple ".repeat(60);
    let mut command = bundle.generate(&folder.path().join("long.png"), &prompt, "cpu");
    let assert = command.args(["--steps", "1"]).assert().success();
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("warning: the prompt is cut: 64 tokens are kept"), "{message}");
}

#[test]
fn auto_says_what_it_took() {
    let (bundle, folder) = (Checkpoint::klein_emoji().export("q8", &[]), scratch());
    let mut command = bundle.generate(&folder.path().join("auto.png"), APPLE, "auto");
    // No Vulkan driver, as on a machine without a GPU.
    let nowhere = folder.path().join("no-driver.json");
    command.env("VK_DRIVER_FILES", &nowhere).env("VK_ICD_FILENAMES", &nowhere);
    let assert = command.args(["--steps", "1", "--json"]).assert().success();
    let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(report["ep"], "cpu");
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("warning: running on the CPU: no adapter for WebGPU"), "{message}");
    assert!(message.contains("device: CPU"), "{message}");
}

#[test]
fn webgpu_and_cpu_draw_the_same_picture() {
    let Some(_alone) = webgpu() else { return };
    let bundle = Checkpoint::klein_emoji().export("f32", &[]);
    let unit = |ep| {
        let image = raw_apple(&bundle, ep);
        HostTensor::f32(
            &image.shape,
            image.to_f32().iter().map(|x| (x / 2.0 + 0.5).clamp(0.0, 1.0)).collect(),
        )
    };
    let off = difference(&unit("webgpu"), &unit("cpu"));
    assert!(off <= 1.0 / 255.0, "{off}");
}

/// Every file of a folder by its relative path.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push((path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn exports_are_reproducible() {
    let checkpoint = Checkpoint::klein_emoji();
    for profile in ["f32", "f16", "q8", "q4"] {
        let [a, b] = [(); 2].map(|()| contents(&checkpoint.export(profile, &[]).path()));
        assert!(a.len() > 10);
        assert!(a == b, "{profile}");
    }
}

#[test]
fn an_export_reports_as_json() {
    let folder = scratch();
    let out = folder.path().join("bundle");
    let mut command = Checkpoint::klein_emoji().export_command(&out, "q8", &[]);
    let assert = command.args(["--json", "--progress", "json"]).assert().success();
    let output = assert.get_output();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["name"], &report["profile"]), (&"klein-emoji".into(), &"q8".into()));
    let lines = String::from_utf8(output.stderr.clone()).unwrap();
    let events: Vec<Event> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let bytes = events.iter().rev().find_map(|event| match event {
        Event::Bytes { done, total, .. } => Some((*done, *total)),
        _ => None,
    });
    let (done, total) = bytes.unwrap();
    assert_eq!(Some(done), total, "progress ends before or after the end");

    let bundle = inspect(&out, &["--hashes"]);
    assert_eq!([&bundle["bundle"], &bundle["family"], &bundle["profile"]], ["klein-emoji", "flux2", "q8"]);
    assert_eq!(bundle["hashes"], "all equal");
    assert_eq!(bundle["bytes"], report["bytes"]);
    assert_eq!(bundle["parameters"]["text"]["taps"], serde_json::json!([2, 4, 6]));
    assert_eq!(bundle["stages"].as_array().unwrap().len() as u64, report["stages"].as_u64().unwrap());
    assert_eq!(inspect(&out.join("bundle.json"), &[])["bundle"], "klein-emoji");
    let graph = inspect(&out.join("transformer.onnx"), &[]);
    assert_eq!(graph["outputs"], serde_json::json!(["pred f32 [1,image_seq,64]"]));
    assert_eq!(graph["operators"]["MultiHeadAttention"], 8);
}

/// How the decoder is cut into stages, and its attention into chunks, is a matter of memory alone.
#[test]
fn stages_and_chunks_do_not_change_the_picture() {
    let checkpoint = Checkpoint::klein_emoji();
    let apple = raw_apple(&checkpoint.export("f32", &[]), "cpu");
    let peak = apple.to_f32().iter().fold(0f32, |peak, x| peak.max(x.abs()));
    for set in ["vae_decoder.cuts=1,2,3", "vae_decoder.cuts=3", "vae_decoder.attention_rows=7"] {
        let error = difference(&raw_apple(&checkpoint.export("f32", &[set]), "cpu"), &apple) / peak;
        assert!(error <= 1e-5, "{set}: {error:e}");
    }
    // More padding is another prompt to the transformer, but still a picture of the same.
    let longer = raw_apple(&checkpoint.export("f32", &["text_encoder.length=80"]), "cpu");
    let db = psnr(&longer, &apple).unwrap();
    println!("with 80 text rows: {db:.1} dB");
    assert!(db >= 20.0, "{db}");
}

/// What a killed export left goes with the next one of that name; what a living one fills stays.
#[test]
fn killed_exports_are_cleared_away() {
    let folder = scratch();
    let out = folder.path().join("bundle");
    let [dead, living] = ["dead", "living"].map(|name| folder.path().join(format!(".bundle.partial-{name}")));
    for path in [&dead, &living] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("weights.data"), "half").unwrap();
    }
    let lock = fs::File::open(&living).unwrap();
    lock.lock().unwrap();
    Checkpoint::klein_emoji().export_command(&out, "q8", &[]).assert().success();
    assert!(!dead.exists() && living.exists() && out.join("bundle.json").exists());
}

/// Who reads JSON is told of errors in JSON.
#[test]
fn errors_are_json_where_results_are() {
    let arguments = ["-b", "nowhere", "-p", "x", "-o", "x.png", "--json", "--progress", "json"];
    let assert = viaduct().arg("generate").args(arguments).assert().code(1);
    let output = assert.get_output();
    let [result, event]: [serde_json::Value; 2] =
        [&output.stdout, &output.stderr].map(|text| serde_json::from_slice(text).unwrap());
    assert_eq!((&result["code"], &event["event"]), (&1.into(), &"error".into()));
    assert!(result["error"].as_str().unwrap().contains("nowhere"), "{result}");
    // An adapter is none of the CPU's business.
    let arguments = ["-b", "nowhere", "-p", "x", "-o", "x.png", "--ep", "cpu", "--adapter", "llvmpipe"];
    viaduct().arg("generate").args(arguments).assert().code(2);
}
