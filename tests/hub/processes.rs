//! `viaduct pull` as a process: several at once, killed, interrupted.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use viaduct_hub_server::{Endpoint, Fault, Request, noise};

use crate::{
    bad::{finish, text},
    place::{Files, ID, Place, repository, said},
};

const SIZE: usize = 3_000_000;

pub fn files() -> Files {
    Files::from([
        ("a/weights.safetensors".into(), noise(1, SIZE)),
        ("b.bin".into(), noise(2, SIZE)),
        ("config.json".into(), noise(3, 5000)),
    ])
}

fn start(place: &Place) -> Child {
    place.pull_program().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Bodies come slowly, so that there is a middle: each takes a second or two.
fn slow(place: &Place) {
    let drip = Fault::Drip(20_000, Duration::from_millis(5));
    place.server.fail([drip], usize::MAX, |request: &Request| request.endpoint == Endpoint::Blob);
}

/// Waits until so many bytes are in the cache.
fn wait_for(place: &Place, bytes: u64) {
    let start = Instant::now();
    while there(place) < bytes {
        assert!(start.elapsed() < Duration::from_secs(60), "{} bytes after a minute", there(place));
        thread::sleep(Duration::from_millis(2));
    }
}

fn there(place: &Place) -> u64 {
    place.files.keys().map(|path| place.there(path)).sum()
}

/// Ends it without a chance to tidy up.
fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn two_processes_at_once_bring_each_file_once() {
    let place = Place::new(&files());
    slow(&place);
    let outputs = place.watched(|| {
        let children: Vec<Child> = (0..3).map(|_| start(&place)).collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect::<Vec<_>>()
    });
    place.assert_whole();
    assert_eq!(place.server.file_bytes(), place.bytes());
    let told: Vec<Value> = outputs.iter().map(said).collect();
    let transferred: u64 = told.iter().map(|json| json["transferred"].as_u64().unwrap()).sum();
    assert_eq!(transferred, place.bytes());
    assert!(told.iter().all(|json| json["path"] == told[0]["path"]));
}

#[test]
fn after_a_kill_only_what_was_missing_comes() {
    let place = Place::new(&files());
    slow(&place);
    for share in [1, 2, 3] {
        let child = start(&place);
        wait_for(&place, place.bytes() * share / 4);
        kill(child);
        place.look().unwrap();
    }
    place.server.heal();
    let (missing, before) = (place.bytes() - there(&place), place.server.served().len());
    assert!(missing < place.bytes() / 2);
    let told = said(&finish(place.pull_program()));
    place.assert_whole();
    assert_eq!(place.server.file_bytes_since(before), missing);
    assert_eq!(told["transferred"].as_u64(), Some(missing));
    assert_eq!(told["bytes"].as_u64(), Some(place.bytes()));
}

#[test]
fn who_waits_goes_on_where_a_killed_one_was() {
    let place = Place::new(&files());
    slow(&place);
    let first = start(&place);
    wait_for(&place, place.bytes() / 4);
    let second = start(&place);
    wait_for(&place, place.bytes() / 2);
    kill(first);
    let there = there(&place);
    place.server.heal();
    let told = said(&second.wait_with_output().unwrap());
    place.assert_whole();
    // Some of it may have come between the kill and the look.
    assert!(
        told["transferred"].as_u64().unwrap() <= place.bytes() - place.bytes() / 2,
        "{told} after {there}"
    );
}

#[test]
fn an_interrupted_pull_can_be_gone_on_with() {
    let place = Place::new(&files());
    slow(&place);
    let child = start(&place);
    wait_for(&place, place.bytes() / 3);
    // SAFETY: it sends a signal to a process that was started here and has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) }, 0);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("run it again to go on") && output.stdout.is_empty());
    place.look().unwrap();
    place.server.heal();
    let (missing, before) = (place.bytes() - there(&place), place.server.served().len());
    said(&finish(place.pull_program()));
    place.assert_whole();
    assert_eq!(place.server.file_bytes_since(before), missing);
}

#[test]
fn pulls_say_what_they_did() {
    let place = Place::new(&files());
    let first = said(&finish(place.pull_program()));
    let again = said(&finish(place.pull_program()));
    for (told, transferred) in [(&first, place.bytes()), (&again, 0)] {
        assert_eq!((told["repo"].as_str(), told["revision"].as_str()), (Some(ID), Some("main")));
        assert_eq!(told["bytes"].as_u64(), Some(place.bytes()));
        assert_eq!(told["transferred"].as_u64(), Some(transferred));
        let path = fs::canonicalize(told["path"].as_str().unwrap()).unwrap();
        assert!(path.ends_with(told["commit"].as_str().unwrap()), "{told}");
    }
    assert_eq!(place.server.file_bytes(), place.bytes());
    let plain = finish(place.program(&format!("pull {ID} --all")));
    assert_eq!(text(&plain.stdout).trim_end(), first["path"].as_str().unwrap());
    let commit = first["commit"].as_str().unwrap();
    let pinned = said(&finish(place.program(&format!("pull hf://{ID}@{commit} --all --json"))));
    assert_eq!(pinned["path"], first["path"]);
    place.assert_whole();
}

#[test]
fn a_new_commit_brings_what_changed() {
    let place = Place::new(&files());
    let pull = || said(&finish(place.pull_program()));
    let old = pull();
    let mut changed = files();
    changed.insert("b.bin".into(), noise(9, 7000));
    changed.remove("config.json");
    place.server.add(repository(&changed));
    let new = pull();
    assert_eq!((new["transferred"].as_u64(), new["files"].as_array().unwrap().len()), (Some(7000), 2));
    let read =
        |commit: &Value, file: &str| fs::read(Path::new(commit["path"].as_str().unwrap()).join(file)).ok();
    for (path, content) in &changed {
        assert!(read(&new, path).as_ref() == Some(content), "{path}");
    }
    assert_eq!(read(&new, "config.json"), None);
    // The files of the commit before stay what they were.
    for (path, content) in &files() {
        assert!(read(&old, path).as_ref() == Some(content), "{path}");
    }
}

#[test]
fn the_environment_is_that_of_all_tools_for_the_hub() {
    let place = Place::serving(&files(), repository(&files()).private("hf_secret"));
    let pull = |variables: &[(&str, &str)]| {
        let mut command = place.pull_program();
        command.envs(variables.iter().copied());
        finish(command)
    };
    assert_eq!(pull(&[]).status.code(), Some(1));
    let elsewhere = place.home.path().join("else where");
    let elsewhere = elsewhere.to_str().unwrap();
    let told = said(&pull(&[("HF_TOKEN", "hf_secret"), ("HF_HUB_CACHE", elsewhere)]));
    assert!(told["path"].as_str().unwrap().starts_with(elsewhere), "{told}");
    assert!(!place.settings.cache.exists());
    fs::write(place.home.path().join("token"), "hf_secret\n").unwrap();
    let told = said(&pull(&[]));
    let folder = place.folder();
    assert!(told["path"].as_str().unwrap().starts_with(folder.to_str().unwrap()), "{told}");
    assert!(
        place.server.served().iter().all(|served| served.endpoint != Endpoint::Blob || !served.authorised)
    );
    let refused = pull(&[("HF_ENDPOINT", "hub.example")]);
    assert!(text(&refused.stderr).contains("HF_ENDPOINT=hub.example"), "{}", text(&refused.stderr));
}

#[test]
fn pulls_that_fail_say_so_in_one_line_and_with_their_code() {
    let place = Place::new(&files());
    let failed = |arguments: &str, code: i32, says: &[&str]| {
        let output = finish(place.program(arguments));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {told}");
        assert!(says.iter().all(|text| told.contains(text)), "{arguments}: {told}");
        assert!(output.stdout.is_empty() && !told.contains("panicked"), "{arguments}: {told}");
    };
    failed("pull", 2, &["REPOSITORY", "--help"]);
    failed("pull no-repository", 2, &["no-repository"]);
    failed(&format!("pull {ID}@v9 --all"), 1, &["no revision 'v9'"]);
    failed("pull someone/else", 1, &["no such repository", "HF_TOKEN"]);
    place.server.fail([Fault::Flip(0.5)], usize::MAX, |request: &Request| request.wants("b.bin"));
    failed(&format!("pull {ID} --all"), 1, &["b.bin", "another hash"]);
    assert!(!place.blob("b.bin").exists() && !place.incomplete("b.bin").exists());
    place.look().unwrap();

    let mut command = place.pull_program();
    command.env("HF_HUB_OFFLINE", "1");
    let before = place.server.served().len();
    let output = finish(command);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("HF_HUB_OFFLINE"), "{}", text(&output.stderr));
    assert_eq!(place.server.served().len(), before);
}
