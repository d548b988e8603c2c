//! `viaduct doctor --tune`, through the binary.

mod support;

use std::fs;

use serde_json::Value;
use support::{scratch, viaduct, webgpu::webgpu};

fn doctor(folder: &std::path::Path, arguments: &[&str]) -> (i32, Value) {
    let mut command = viaduct();
    command.arg("doctor").args(arguments).arg("--json").env("VIADUCT_TUNING", folder);
    let output = command.output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code().unwrap(), report)
}

#[test]
fn webgpu_what_was_measured_is_kept_and_read_again() {
    let Some(gpu) = webgpu() else { return };
    let scratch = scratch();
    let folder = scratch.path().join("not there yet");
    let (code, report) = doctor(&folder, &["--ep", "webgpu", "--tune"]);
    assert_eq!(code, 0);
    drop(gpu);
    let measured = &report["measured"];
    let tests = measured["tests"].as_array().unwrap();
    assert!(tests.iter().any(|test| test["name"] == "long graph" && test["passed"] == true), "{measured}");
    assert!(!measured["attention"].as_array().unwrap().is_empty(), "{measured}");
    assert!(measured["linears"][0]["rate"].as_f64().unwrap() > 0.0, "{measured}");
    let tuning = &measured["tuning"];
    assert_eq!((&report["device"]["tuning"], &report["profile"]["tuning"]), (tuning, tuning));

    let (_, later) = doctor(&folder, &["--ep", "webgpu"]);
    assert_eq!((&later["device"]["tuning"], &later["device"]["tuned"]), (tuning, &Value::Bool(true)));
    let file = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&file).unwrap();
    let other_driver = text.replacen("\"driver\": \"", "\"driver\": \"another ", 1);
    for damaged in ["", "{}", &text[..text.len() / 2], &other_driver] {
        fs::write(&file, damaged).unwrap();
        let (code, report) = doctor(&folder, &["--ep", "webgpu"]);
        assert_eq!((code, &report["device"]["tuned"]), (0, &Value::Bool(false)), "{damaged}");
    }
}

#[test]
fn the_cpu_provider_is_not_tuned() {
    let scratch = scratch();
    let (code, _) = doctor(scratch.path(), &["--ep", "cpu", "--tune"]);
    assert_eq!(code, 2);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    let (code, report) = doctor(scratch.path(), &["--ep", "cpu"]);
    assert_eq!((code, &report["profile"]["tuning"]["fused_attention"]), (0, &Value::Bool(true)));
}
