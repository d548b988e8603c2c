//! From a bundle to statistics of what its layers read, and to weights that are fitted with them.

mod support;

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use support::{Bundle, Checkpoint, json, oracle, scratch, viaduct};
use viaduct_export::weights::{self, Calibration};

fn calibrate(bundle: &Path, out: &Path, options: &[&str]) -> assert_cmd::Command {
    let mut command = viaduct();
    command.arg("calibrate").arg(bundle).arg("-o").arg(out).args(["--ep", "cpu", "--progress", "none"]);
    command.args(options);
    command
}

/// The same tensors, with the same numbers in those that count, but for the order of sums.
fn assert_same_sums(one: &Path, other: &Path, counts: impl Fn(&str) -> bool) {
    let [one, other] = [one, other].map(|file| weights::Checkpoint::open(file).unwrap());
    assert_eq!(one.names().collect::<Vec<_>>(), other.names().collect::<Vec<_>>());
    for name in one.names().filter(|name| counts(name)) {
        let [sums, again] = [&one, &other].map(|file| file.raw(name).unwrap().to_f32().unwrap().unwrap());
        let size: f32 = sums.iter().map(|x| x.abs()).sum();
        let difference: f32 = sums.iter().zip(&again).map(|(a, b)| (a - b).abs()).sum();
        assert!(
            size > 0.0 && sums.len() == again.len() && difference <= 1e-3 * size,
            "{name}: {difference:e}"
        );
    }
}

/// Bytes of a bundle's files.
fn size(bundle: &Path) -> u64 {
    let files = json(&bundle.join("bundle.json"))["files"].as_array().unwrap().clone();
    let manifest = fs::metadata(bundle.join("bundle.json")).unwrap().len();
    files.iter().map(|file| file["bytes"].as_u64().unwrap()).sum::<u64>() + manifest
}

#[test]
fn fitted_weights_are_nearer_and_a_target_size_is_kept() {
    let checkpoint = Checkpoint::klein_emoji();
    let folder = scratch();
    let statistics = folder.path().join("s.safetensors");
    let bundle = checkpoint.export("f32", &[]);
    let options = ["--count", "2", "--json"];
    let output = calibrate(&bundle.path(), &statistics, &options).assert().success().get_output().clone();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["passes"], &report["pictures"]), (&1.into(), &2.into()));
    assert_eq!(report["bytes"], fs::metadata(&statistics).unwrap().len());
    // An error of the last layer is one of the result; one of the text encoder's layers is less.
    let known = Calibration::open(&statistics).unwrap();
    assert!((known.sensitivity_of("proj_out.weight").unwrap() - 1.0).abs() < 1e-3);
    let of_text = known.sensitivity_of("model.layers.3.mlp.down_proj.weight").unwrap();
    assert!(of_text > 1e-5 && of_text < 0.1, "{of_text}");

    let export = |name: &str, options: &[&str]| {
        let out = folder.path().join(name);
        let mut command = viaduct();
        command.arg("export").arg(checkpoint.source()).arg("-o").arg(&out).args(["--progress", "none"]);
        command.args(options);
        (command, out)
    };
    let calibration = statistics.to_str().unwrap();
    let velocity_error = |bundle: &Path| {
        let mut command = viaduct();
        command.arg("verify").arg(bundle).arg("--oracle").arg(oracle("klein-emoji/0"));
        let output = command.args(["--ep", "cpu", "--json", "--no-controls"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let steps = rows.iter().filter(|row| row["name"].as_str().unwrap().starts_with("pred_step"));
        steps.filter_map(|row| row["cosine_error"].as_f64()).sum::<f64>()
    };
    let (mut command, fitted) = export("fitted", &["--profile", "q4-fit", "--calibration", calibration]);
    command.assert().success();
    let (mut command, rounded) =
        export("rounded", &["--profile", "q4-fit", "--set", "profiles.q4-fit.fit=nearest"]);
    command.assert().success();
    assert!(size(&fitted).abs_diff(size(&rounded)) < 1000);
    let (fitted_error, rounded_error) = (velocity_error(&fitted), velocity_error(&rounded));
    assert!(fitted_error < 0.8 * rounded_error, "{fitted_error:e} of {rounded_error:e}");
    let manifest = json(&fitted.join("bundle.json"));
    assert_eq!(manifest["recipe"]["profiles"]["q4-fit"]["fit"], "feedback");
    assert_eq!(manifest["calibration"].as_str().unwrap().len(), 64);

    let target = size(&fitted) * 6 / 5;
    let target_size = target.to_string();
    let options = ["--profile", "auto", "--calibration", calibration, "--target-size", &target_size];
    let (mut command, larger) = export("larger", &options);
    command.assert().success();
    let found = size(&larger);
    assert!(found <= target && found > target * 99 / 100, "{found} of {target}");
    let error = velocity_error(&larger);
    assert!(error < 0.6 * fitted_error, "{error:e} of {fitted_error:e}");
    // Statistics of one checkpoint are no other's.
    let other = Checkpoint::of_fixture("flux2-a");
    let mut command = other.export_command(&folder.path().join("other"), "q4-fit", &[]);
    let output = command.args(["--calibration", calibration]).assert().code(1).get_output().clone();
    assert!(String::from_utf8(output.stderr).unwrap().contains("is of another checkpoint"));
}

#[test]
fn passes_change_nothing_and_the_least_size_is_told() {
    let checkpoint = Checkpoint::of_fixture("flux2-a");
    let folder = scratch();
    let (statistics, again) = (folder.path().join("s.safetensors"), folder.path().join("t.safetensors"));
    let bundle = checkpoint.export("f32", &[]);
    let calibrated = |out: &Path, options: &[&str]| -> serde_json::Value {
        let options = [&["--count", "2", "--json"], options].concat();
        let output = calibrate(&bundle.path(), out, &options).assert().success().get_output().clone();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(calibrated(&statistics, &[])["passes"], 1);
    let report = calibrated(&again, &["--budget", "512KiB"]);
    assert!(report["passes"].as_u64().unwrap() > 1, "{report}");
    assert_same_sums(&statistics, &again, |_| true);
    calibrate(&bundle.path(), &statistics, &[]).assert().code(2);

    // Who asks for too little is told the least, which then is enough.
    let export = |out: &Path, target: &str| {
        let mut command = checkpoint.export_command(out, "auto", &[]);
        command.arg("--calibration").arg(&statistics).args(["--target-size", target]);
        command
    };
    let smallest = folder.path().join("smallest");
    let output = export(&smallest, "1kB").assert().code(2).get_output().clone();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let least = stderr.split_once(" bytes)").and_then(|(least, _)| least.rsplit('(').next()).unwrap();
    assert!(stderr.contains("--set profiles.auto.block=64"), "{stderr}");
    assert!(stderr.contains("--target-size: 1000 bytes"), "{stderr}");
    export(&smallest, least).assert().success();
    assert!(size(&smallest) <= least.parse().unwrap());
    let rounded = stderr.split_once("at least ").and_then(|(_, rest)| rest.split_once(" (")).unwrap().0;
    let again = folder.path().join("again");
    export(&again, rounded).assert().success();
}

/// Weights of several stages, or of several products of one, are inputs of one name.
#[test]
fn weights_that_stages_share_have_one_input() {
    let checkpoint = Checkpoint::stored("qwen-image");
    let folder = scratch();
    let calibrated = |graphs: &str| {
        let bundle: Bundle = checkpoint.export("f32", &[&format!("transformer.graphs={graphs}")]);
        let out = folder.path().join(format!("{graphs}.safetensors"));
        calibrate(&bundle.path(), &out, &["--count", "1", "--size", "64x64"]).assert().success();
        out
    };
    let [prefix, single] = ["prefix", "single"].map(calibrated);
    // A single graph meets the text's rows again at every step.
    assert_same_sums(&prefix, &single, |name| ["img_in.weight", "proj_out.weight"].contains(&name));
    // Errors of every stage reach the result, whatever the inputs of later ones are called.
    for known in [&prefix, &single].map(|file| Calibration::open(file).unwrap()) {
        for weight in
            ["layers.0.mlp.down_proj.weight", "modulation.1.weight", "transformer_blocks.0.attn.to_k.weight"]
        {
            assert!(known.sensitivity_of(weight).unwrap() > 0.0, "{weight}");
        }
    }
    let out = folder.path().join("fitted");
    let mut command = checkpoint.export_command(&out, "q4", &["profiles.q4.fit=feedback"]);
    command.arg("--calibration").arg(&prefix).assert().success();
}

fn files_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// What an interrupted calibration has written goes with it, what a killed one has with the next.
#[test]
fn nothing_half_written_stays() {
    let bundle = Checkpoint::of_fixture("flux2-a").export("f32", &[]);
    let folder = scratch();
    let out = folder.path().join("s.safetensors");
    let start = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_viaduct"));
        command.env("VIADUCT_RUNTIME", support::runtime_folder());
        command.arg("calibrate").arg(bundle.path()).arg("-o").arg(&out);
        let child = command.args(["--ep", "cpu", "--count", "10000"]).stderr(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while files_in(folder.path()).is_empty() {
            assert!(Instant::now() < end, "no file appears");
            thread::sleep(Duration::from_millis(5));
        }
        child
    };
    let send = |child: &Child, signal: i32| unsafe { libc::kill(child.id() as i32, signal) };
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let mut child = start();
        send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(128 + signal));
        assert!(files_in(folder.path()).is_empty(), "{signal}");
    }
    let mut child = start();
    send(&child, libc::SIGKILL);
    child.wait().unwrap();
    assert_eq!(files_in(folder.path()).len(), 1);
    calibrate(&bundle.path(), &out, &["--count", "1"]).assert().success();
    assert_eq!(files_in(folder.path()), ["s.safetensors"]);
}

/// Makes the values of a tensor as large as 1e30.
fn enlarge(file: &Path, tensor: &str) {
    let mut bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let [begin, end] = [0, 1].map(|i| header[tensor]["data_offsets"][i].as_u64().unwrap() as usize);
    let large = 1e30f32.to_le_bytes();
    let value = if header[tensor]["dtype"] == "BF16" { &large[2..] } else { &large[..] };
    let values = &mut bytes[8 + length..][begin..end];
    values.chunks_exact_mut(value.len()).for_each(|element| element.copy_from_slice(value));
    fs::write(file, bytes).unwrap();
}

#[test]
fn infinite_statistics_name_their_layer() {
    let checkpoint = Checkpoint::of_fixture("flux2-a");
    enlarge(&checkpoint.source().join("text_encoder/model.safetensors"), "model.layers.1.mlp.up_proj.weight");
    let bundle = checkpoint.export("f32", &[]);
    let statistics = bundle.path().parent().unwrap().join("infinite.safetensors");
    let output =
        calibrate(&bundle.path(), &statistics, &["--count", "1"]).assert().code(1).get_output().clone();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("model.layers.1.mlp.down_proj.weight is multiplied with is not finite"),
        "{stderr}"
    );
    assert!(!statistics.exists());
}

#[test]
fn what_a_profile_has_no_use_for_is_refused() {
    let checkpoint = Checkpoint::of_fixture("flux2-a");
    let folder = scratch();
    let (out, statistics) = (folder.path().join("b"), folder.path().join("s.safetensors"));
    // Of no weight of this checkpoint.
    let other = [("other.weight".to_owned(), 2)];
    fs::write(&statistics, [weights::header(&other), vec![0; 4 * (4 + 1)]].concat()).unwrap();
    let refused = |profile: &str, options: &[&str], code: i32, words: &[&str]| {
        let mut command = checkpoint.export_command(&out, profile, &[]);
        command.arg("--calibration").arg(&statistics).args(options);
        let output = command.assert().code(code).get_output().clone();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
        assert!(!out.exists());
    };
    refused("q4", &["--target-size", "1GB"], 2, &["--target-size", "'q4'", "auto, q4-fit"]);
    refused("f16", &["--target-size", "1GB"], 2, &["--target-size", "'f16'", "auto, q4-fit"]);
    refused("q8", &[], 2, &["--calibration", "'q8'", "auto, q4-fit"]);
    refused("q4-fit", &[], 1, &["no statistics of", "another checkpoint", "viaduct calibrate"]);
}

#[test]
fn what_is_missing_is_named() {
    let checkpoint = Checkpoint::of_fixture("flux2-a");
    let folder = scratch();
    let said = |mut command: assert_cmd::Command, words: &str| {
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(words), "{stderr}");
    };
    said(checkpoint.export_command(&folder.path().join("b"), "q4-fit", &[]), "viaduct calibrate");
    let quantised = checkpoint.export("q8", &[]);
    let statistics = folder.path().join("s.safetensors");
    said(calibrate(&quantised.path(), &statistics, &[]), "quantised weights");
    said(calibrate(&quantised.path(), &folder.path().join("s.bin"), &[]), ".safetensors");
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "\n \n").unwrap();
    said(
        calibrate(&quantised.path(), &statistics, &["--prompts", empty.to_str().unwrap()]),
        "no line is a prompt",
    );
    let mut command = checkpoint.export_command(&folder.path().join("b"), "q4-fit", &[]);
    fs::write(&statistics, [0; 7]).unwrap();
    command.arg("--calibration").arg(&statistics);
    said(command, "s.safetensors");
    let mut command = checkpoint.export_command(&folder.path().join("b"), "q4-fit", &[]);
    command.args(["--calibration", "/dev/zero"]).timeout(Duration::from_secs(60));
    said(command, "/dev/zero: not a regular file");
    let mut command = checkpoint.export_command(&folder.path().join("b"), "auto", &[]);
    command.args(["--target-size", "1GB"]);
    said(command, "--calibration");
}
