//! `viaduct pull` as a process: several at once, killed, interrupted.

use std::{
    fs,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use viaduct_hub_server::{Endpoint, Fault, Request, noise};

use crate::{
    bad::{finish, text, viaduct},
    place::{Files, ID, Place},
};

const SIZE: usize = 3_000_000;

pub fn files() -> Files {
    Files::from([
        ("a/weights.safetensors".into(), noise(1, SIZE)),
        ("b.bin".into(), noise(2, SIZE)),
        ("config.json".into(), noise(3, 5000)),
    ])
}

/// The program with the place's hub and cache, and nothing else of the hub's environment.
pub fn program(place: &Place, arguments: &str) -> Command {
    let mut command = viaduct(place.home.path(), arguments);
    for variable in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"] {
        command.env_remove(variable);
    }
    command.env("HF_HOME", place.home.path()).env("HF_ENDPOINT", place.server.url());
    command
}

pub fn pull(place: &Place) -> Command {
    program(place, &format!("pull {ID} --all --json"))
}

fn start(place: &Place) -> Child {
    pull(place).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What a pull that ended well says.
pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stdout)))
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
    let said: Vec<Value> = outputs.iter().map(json).collect();
    let transferred: u64 = said.iter().map(|json| json["transferred"].as_u64().unwrap()).sum();
    assert_eq!(transferred, place.bytes());
    assert!(said.iter().all(|json| json["path"] == said[0]["path"]));
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
    let said = json(&finish(pull(&place)));
    place.assert_whole();
    assert_eq!(place.server.file_bytes_since(before), missing);
    assert_eq!(said["transferred"].as_u64(), Some(missing));
    assert_eq!(said["bytes"].as_u64(), Some(place.bytes()));
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
    let said = json(&second.wait_with_output().unwrap());
    place.assert_whole();
    // Some of it may have come between the kill and the look.
    assert!(
        said["transferred"].as_u64().unwrap() <= place.bytes() - place.bytes() / 2,
        "{said} after {there}"
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
    json(&finish(pull(&place)));
    place.assert_whole();
    assert_eq!(place.server.file_bytes_since(before), missing);
}

#[test]
fn pulls_say_what_they_did() {
    let place = Place::new(&files());
    let first = json(&finish(pull(&place)));
    let again = json(&finish(pull(&place)));
    for (said, transferred) in [(&first, place.bytes()), (&again, 0)] {
        assert_eq!((said["repo"].as_str(), said["revision"].as_str()), (Some(ID), Some("main")));
        assert_eq!(said["bytes"].as_u64(), Some(place.bytes()));
        assert_eq!(said["transferred"].as_u64(), Some(transferred));
        let path = fs::canonicalize(said["path"].as_str().unwrap()).unwrap();
        assert!(path.ends_with(said["commit"].as_str().unwrap()), "{said}");
    }
    assert_eq!(place.server.file_bytes(), place.bytes());
    let plain = finish(program(&place, &format!("pull {ID} --all")));
    assert_eq!(text(&plain.stdout).trim_end(), first["path"].as_str().unwrap());
    let commit = first["commit"].as_str().unwrap();
    let pinned = json(&finish(program(&place, &format!("pull hf://{ID}@{commit} --all --json"))));
    assert_eq!(pinned["path"], first["path"]);
    place.assert_whole();
}

#[test]
fn pulls_that_fail_say_so_in_one_line_and_with_their_code() {
    let place = Place::new(&files());
    let failed = |arguments: &str, code: i32, says: &[&str]| {
        let output = finish(program(&place, arguments));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments}: {told}");
        assert!(says.iter().all(|text| told.contains(text)), "{arguments}: {told}");
        assert!(output.stdout.is_empty() && !told.contains("panicked"), "{arguments}: {told}");
    };
    failed("pull", 2, &["Usage"]);
    failed("pull no-repository", 2, &["no-repository"]);
    failed(&format!("pull {ID}@v9 --all"), 1, &["no revision 'v9'"]);
    failed("pull someone/else", 1, &["no such repository", "HF_TOKEN"]);
    place.server.fail([Fault::Flip(0.5)], usize::MAX, |request: &Request| request.wants("b.bin"));
    failed(&format!("pull {ID} --all"), 1, &["b.bin", "another hash"]);
    assert!(!place.blob("b.bin").exists() && !place.incomplete("b.bin").exists());
    place.look().unwrap();

    let mut command = pull(&place);
    command.env("HF_HUB_OFFLINE", "1");
    let before = place.server.served().len();
    let output = finish(command);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("HF_HUB_OFFLINE"), "{}", text(&output.stderr));
    assert_eq!(place.server.served().len(), before);
}
