//! From a bundle to statistics of what its layers read, and to weights that are fitted with them.

mod support;

use std::{fs, path::Path};

use support::{Checkpoint, json, oracle, scratch, viaduct};
use viaduct_export::weights;

fn calibrate(bundle: &Path, out: &Path, options: &[&str]) -> assert_cmd::Command {
    let mut command = viaduct();
    command.arg("calibrate").arg(bundle).arg("-o").arg(out).args(["--ep", "cpu", "--progress", "none"]);
    command.args(options);
    command
}

/// The same tensors with the same numbers, but for the order of sums.
fn assert_same_sums(one: &Path, other: &Path) {
    let [one, other] = [one, other].map(|file| weights::Checkpoint::open(file).unwrap());
    assert_eq!(one.names().collect::<Vec<_>>(), other.names().collect::<Vec<_>>());
    for name in one.names() {
        let [sums, again] = [&one, &other].map(|file| file.raw(name).unwrap().to_f32().unwrap().unwrap());
        let size: f32 = sums.iter().map(|x| x.abs()).sum();
        let difference: f32 = sums.iter().zip(&again).map(|(a, b)| (a - b).abs()).sum();
        assert!(
            size > 0.0 && sums.len() == again.len() && difference <= 1e-3 * size,
            "{name}: {difference:e}"
        );
    }
}

#[test]
fn fitted_weights_are_nearer_and_a_target_size_is_kept() {
    let checkpoint = Checkpoint::klein_emoji();
    let folder = scratch();
    let (statistics, again) = (folder.path().join("s.safetensors"), folder.path().join("t.safetensors"));
    let bundle = checkpoint.export("f32", &[]);
    let options = ["--count", "2", "--json"];
    let output = calibrate(&bundle.path(), &statistics, &options).assert().success().get_output().clone();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["passes"], &report["pictures"]), (&1.into(), &2.into()));
    assert_eq!(report["bytes"], fs::metadata(&statistics).unwrap().len());
    // In several passes as much.
    let output = calibrate(&bundle.path(), &again, &["--count", "2", "--json", "--budget", "24MiB"]).assert();
    let report: serde_json::Value = serde_json::from_slice(&output.success().get_output().stdout).unwrap();
    assert!(report["passes"].as_u64().unwrap() > 1, "{report}");
    assert_same_sums(&statistics, &again);
    calibrate(&bundle.path(), &statistics, &[]).assert().code(2);

    let export = |name: &str, options: &[&str]| {
        let out = folder.path().join(name);
        let mut command = viaduct();
        command.arg("export").arg(checkpoint.source()).arg("-o").arg(&out).args(["--progress", "none"]);
        command.args(options);
        (command, out)
    };
    let size = |bundle: &Path| {
        let files = json(&bundle.join("bundle.json"))["files"].as_array().unwrap().clone();
        let manifest = fs::metadata(bundle.join("bundle.json")).unwrap().len();
        files.iter().map(|file| file["bytes"].as_u64().unwrap()).sum::<u64>() + manifest
    };
    let calibration = statistics.to_str().unwrap();
    let velocity_error = |bundle: &Path| {
        let mut command = viaduct();
        command.arg("verify").arg(bundle).arg("--oracle").arg(oracle("klein-emoji/0"));
        let output = command.args(["--ep", "cpu", "--json"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = report["rows"].as_array().unwrap();
        let steps = rows.iter().filter(|row| row["name"].as_str().unwrap().starts_with("pred_step"));
        steps.map(|row| row["cosine_error"].as_f64().unwrap()).sum::<f64>()
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
    assert!(found <= target && found > target * 97 / 100, "{found} of {target}");
    assert!(velocity_error(&larger) < 0.8 * fitted_error);
    let options = ["--profile", "auto", "--calibration", calibration, "--target-size", "1MB"];
    let stderr = String::from_utf8(export("none", &options).0.assert().failure().get_output().stderr.clone());
    assert!(stderr.unwrap().contains("takes at least"));
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
    let mut command = checkpoint.export_command(&folder.path().join("b"), "auto", &[]);
    command.args(["--target-size", "1GB"]);
    said(command, "--calibration");
}
