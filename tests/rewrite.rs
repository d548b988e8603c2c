//! `viaduct rewrite` as a user meets it: files in, files out, a table, and nothing half-written.

mod support;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use assert_cmd::Command;
use serde_json::Value;
use support::{scratch, viaduct};

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign").join(name)
}

fn rewrite(source: &Path, out: &Path, options: &[&str]) -> Command {
    let mut command = viaduct();
    command.arg("rewrite").arg(source).arg("-o").arg(out).args(options);
    command
}

fn json(mut command: Command) -> Value {
    serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap()
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_second_run_changes_no_byte() {
    let folder = scratch();
    for sequence in ["lean", "webgpu", "f16", "q8", "q4"] {
        let [once, twice] =
            ["once", "twice"].map(|name| folder.path().join(format!("{sequence}-{name}/m.onnx")));
        for path in [&once, &twice] {
            fs::create_dir(path.parent().unwrap()).unwrap();
        }
        let first =
            json(rewrite(&foreign("transformer/dynamo.onnx"), &once, &["--passes", sequence, "--json"]));
        assert!(first["after"]["nodes"].as_u64() < first["before"]["nodes"].as_u64(), "{first}");
        let second = json(rewrite(&once, &twice, &["--passes", sequence, "--json"]));
        let applied =
            second["passes"].as_array().unwrap().iter().map(|pass| pass["applied"].as_u64().unwrap());
        assert_eq!(applied.sum::<u64>(), 0, "{sequence}: {second}");
        let [once, twice] = [once, twice].map(|path| path.parent().unwrap().to_owned());
        assert_eq!(files(&once), files(&twice));
        for name in files(&once) {
            assert!(
                fs::read(once.join(&name)).unwrap() == fs::read(twice.join(&name)).unwrap(),
                "{sequence} {name}"
            );
        }
    }
}

#[test]
fn the_table_says_what_was_left_alone_and_why() {
    let folder = scratch();
    let mut command = rewrite(
        &foreign("transformer/dynamo.onnx"),
        &folder.path().join("m.onnx"),
        &["--passes", "q8", "--exclude", "."],
    );
    let told = String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap();
    assert!(
        told.contains("quantize_matmul_q8") && told.contains("23 x a rule about names leaves it out ("),
        "{told}"
    );
}

#[test]
fn a_folder_of_stages_is_made_whole() {
    let folder = scratch();
    let out = folder.path().join("stages");
    let options = ["--passes", "webgpu", "--split", "split_vae", "--cuts", "1", "--json"];
    json(rewrite(&foreign("vae/legacy.onnx"), &out, &options));
    let graphs: Vec<String> = files(&out).into_iter().filter(|name| name.ends_with(".onnx")).collect();
    assert_eq!(graphs, ["vae_attention.onnx", "vae_post0.onnx", "vae_post1.onnx", "vae_pre.onnx"]);
    assert_eq!(files(folder.path()), ["stages"]);
    // What is not only graphs is not replaced.
    File::create(out.join("notes.txt")).unwrap();
    let mut again = rewrite(&foreign("vae/legacy.onnx"), &out, &options);
    again.arg("--force").assert().code(2);
    assert!(out.join("notes.txt").exists());
}

#[test]
fn mistakes_leave_nothing_behind() {
    let folder = scratch();
    let source = folder.path().join("model.onnx");
    fs::copy(foreign("transformer/legacy.onnx"), &source).unwrap();
    let out = folder.path().join("out.onnx");
    let cases: [(&Path, &[&str], i32, &str); 10] = [
        (&out, &[], 2, "nothing to do: --passes lean|"),
        (&out, &["--passes", "leaner"], 2, "no sequence 'leaner'"),
        (&out, &["--pass", "fuse"], 2, "no pass 'fuse'"),
        (
            &out,
            &["--passes", "lean", "--dim", "rows=3"],
            2,
            "no dimension 'rows' to bind; it has image_seq, text_seq",
        ),
        (
            &out,
            &["--passes", "lean", "--dim", "image_seq=18446744073709551615"],
            2,
            "no kernel takes so many; at most 2147483647",
        ),
        (&out, &["--passes", "lean", "--dim", "image_seq=2147483648"], 2, "at most 2147483647"),
        (&out, &["--passes", "lean", "--split", "half"], 2, "half"),
        (&source, &["--passes", "lean"], 2, "cannot be rewritten in place"),
        (folder.path(), &["--passes", "lean", "--force"], 2, "is a folder"),
        (&out, &["--passes", "q8", "--block", "48"], 2, "16, 32, 64"),
    ];
    for (out, options, code, says) in cases {
        let told = rewrite(&source, out, options).assert().code(code).get_output().stderr.clone();
        let told = String::from_utf8(told).unwrap();
        assert!(told.contains(says) && told.lines().count() == 1, "{told}");
        assert_eq!(files(folder.path()), ["model.onnx"]);
    }
    let mut missing = rewrite(&folder.path().join("nowhere.onnx"), &out, &["--passes", "lean"]);
    missing.assert().code(1);
    assert_eq!(files(folder.path()), ["model.onnx"]);
}

/// What killed rewrites left goes with the next one to the same place; what living ones fill stays.
#[test]
fn killed_rewrites_are_cleared_away() {
    let folder = scratch();
    let path = |name: &str| folder.path().join(name);
    let names = [".viaduct-dead.part", ".viaduct-alive.part", ".others.part"];
    names.iter().for_each(|name| fs::write(path(name), "half").unwrap());
    let folders = [".stages.partial-dead", ".stages.partial-alive", ".other.partial-dead"];
    folders.iter().for_each(|name| fs::create_dir(path(name)).unwrap());
    let locks = [names[1], folders[1]].map(|name| File::open(path(name)).unwrap());
    locks.iter().for_each(|lock| lock.lock().unwrap());
    rewrite(&foreign("transformer/legacy.onnx"), &path("m.onnx"), &["--passes", "lean"]).assert().success();
    assert_eq!(names.map(|name| path(name).exists()), [false, true, true]);
    let options = ["--passes", "lean", "--split", "split_vae"];
    rewrite(&foreign("vae/legacy.onnx"), &path("stages"), &options).assert().success();
    assert_eq!(folders.map(|name| path(name).exists()), [false, true, true]);
    // Models that were to be replaced are not lost with the folder that was to replace them.
    fs::rename(path("stages"), path(".stages.partial-old.replaced")).unwrap();
    rewrite(&foreign("vae/legacy.onnx"), &path("stages"), &options).assert().success();
    assert!(path(".stages.partial-old.replaced").exists());
}

/// Data files are not written over: others' without --force, the source's own never.
#[test]
fn data_of_others_stays() {
    let folder = scratch();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("out-00000.data"), "precious").unwrap();
    let source = foreign("transformer/legacy.onnx");
    rewrite(&source, &path("out.onnx"), &["--passes", "lean"]).assert().code(2);
    assert_eq!(fs::read(path("out-00000.data")).unwrap(), b"precious");
    rewrite(&source, &path("out.onnx"), &["--passes", "lean", "--force"]).assert().success();
    // Now the model is renamed, and its data is called what the next one would be.
    fs::rename(path("out.onnx"), path("model.onnx")).unwrap();
    let weights = fs::read(path("out-00000.data")).unwrap();
    rewrite(&path("model.onnx"), &path("out.onnx"), &["--passes", "q8", "--force"]).assert().code(2);
    assert!(fs::read(path("out-00000.data")).unwrap() == weights && !path("out.onnx").exists());
}
