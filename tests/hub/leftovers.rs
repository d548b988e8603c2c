//! What nobody needs any more goes, what somebody needs stays, and each kind of model is told from the other.

use std::{fs, process::Command};

use serde_json::Value;
use viaduct_hub_server::{Endpoint, Fault, Repository, Request, noise};

use crate::{
    bad::{Good, SET, finish, text},
    place::{Files, ID, Place, repository, said},
};

fn files(seed: u64) -> Files {
    Files::from([("a.json".into(), b"{}".to_vec()), ("w.bin".into(), noise(seed, 200_000))])
}

/// Runs a command that ends with this code, and what it says.
fn ends(command: Command, code: i32) -> String {
    let output = finish(command);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{told}");
    told
}

fn listed(place: &Place) -> Value {
    said(&finish(place.program("list --all --json")))["models"][0].clone()
}

#[test]
fn what_is_damaged_is_brought_again_if_it_is_looked_for() {
    let place = Place::new(&files(1));
    said(&finish(place.pull_program()));
    let mut bytes = fs::read(place.blob("w.bin")).unwrap();
    bytes[777] ^= 1;
    fs::write(place.blob("w.bin"), bytes).unwrap();
    let pull = |more: &str| {
        let before = place.server.served().len();
        let output = finish(place.program(&format!("pull {ID} --all --json {more}")));
        said(&output);
        (place.server.file_bytes_since(before), text(&output.stderr))
    };
    assert_eq!(pull("").0, 0);
    let (came, told) = pull("--check");
    assert_eq!(came, 200_000);
    assert!(told.contains("w.bin is damaged"), "{told}");
    place.assert_whole();
    assert_eq!(pull("--check").0, 0);
}

/// `cp -rL` of a cache leaves files where links were.
#[test]
fn a_cache_that_was_copied_without_links_is_used() {
    let place = Place::new(&files(1));
    let folder = said(&finish(place.pull_program()))["path"].as_str().unwrap().to_owned();
    for name in place.files.keys() {
        let link = std::path::Path::new(&folder).join(name);
        let content = fs::read(&link).unwrap();
        fs::remove_file(&link).unwrap();
        fs::write(&link, content).unwrap();
    }
    fs::remove_dir_all(place.folder().join("blobs")).unwrap();
    let before = place.server.served().len();
    said(&finish(place.pull_program()));
    assert_eq!(place.server.file_bytes_since(before), 0);
    place.assert_whole();
}

#[test]
fn older_revisions_are_told_of_and_can_be_removed() {
    let place = Place::new(&files(1));
    said(&finish(place.pull_program()));
    place.server.add(repository(&files(2)));
    let told = ends(place.pull_program(), 0);
    assert!(told.contains("viaduct rm --old"), "{told}");
    let snapshots = || fs::read_dir(place.folder().join("snapshots")).unwrap().count();
    assert_eq!(snapshots(), 2);
    let told = ends(place.program(&format!("rm --old {ID}")), 0);
    assert!(told.contains("196 KiB are free again"), "{told}");
    assert_eq!(snapshots(), 1);
    let blob = Place::new(&files(2)).blob("w.bin").file_name().unwrap().to_owned();
    assert!(place.folder().join("blobs").join(blob).exists() && !place.blob("w.bin").exists());
    // The file that both have.
    assert!(place.blob("a.json").exists());
    assert!(ends(place.program(&format!("rm --old {ID}")), 0).contains("0 B"));
}

#[test]
fn nothing_is_removed_by_mistake() {
    let place = Place::new(&files(1));
    said(&finish(place.pull_program()));
    assert!(ends(place.program(&format!("rm {ID}@main")), 2).contains("write owner/name alone"));
    assert!(
        ends(place.program(&format!("rm {ID} someone/else")), 1).contains("someone/else is not in the cache")
    );
    place.assert_whole();
    let locks = place.settings.cache.join(".locks").join(place.folder().file_name().unwrap());
    let lock = fs::File::create(locks.join("x.lock")).unwrap();
    lock.lock().unwrap();
    assert!(ends(place.program(&format!("rm {ID}")), 1).contains("another process"));
    assert_eq!(listed(&place)["busy"], true);
    drop(lock);
    // Of a folder that lies elsewhere, what it holds goes.
    let elsewhere = place.home.path().join("elsewhere");
    fs::rename(place.folder(), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, place.folder()).unwrap();
    ends(place.program(&format!("rm {ID}")), 0);
    assert!(!elsewhere.exists() && place.folder().symlink_metadata().is_err());
    assert_eq!(listed(&place), Value::Null);
}

#[test]
fn transfers_that_are_of_no_use_any_more_go() {
    let place = Place::new(&files(1));
    place.server.fail([Fault::Cut(0.5)], usize::MAX, |request| request.endpoint == Endpoint::Blob);
    place.pull().unwrap_err();
    assert!(listed(&place)["incomplete"].as_u64().unwrap() > 0);
    place.server.heal();
    place.server.add(repository(&files(2)));
    ends(place.pull_program(), 0);
    assert_eq!((&listed(&place)["incomplete"], place.incomplete("w.bin").exists()), (&Value::from(0), false));
}

/// A checkpoint on the hub, and a bundle of it in the same place.
fn checkpoint() -> Place {
    let folder = Good::checkpoint().copy();
    Place::serving(&Files::new(), Repository::from_folder(ID, &folder.path().join("ck")).unwrap())
}

fn weights_came(place: &Place) -> bool {
    let is_weights = |file: &String| file.ends_with(".safetensors");
    place.bodies(0).into_iter().any(|(file, range)| is_weights(&file) && range.is_none())
}

#[test]
fn a_checkpoint_is_no_bundle_and_a_bundle_no_checkpoint() {
    let place = checkpoint();
    for command in ["generate -p cat -o x.png -b", "inspect", "bench --ep cpu"] {
        let told = ends(place.program(&format!("{command} {ID}")), 2);
        assert!(told.contains(&format!("viaduct export {ID}")), "{command}: {told}");
    }
    assert!(!weights_came(&place));
    let folder = Good::bundle().copy();
    let place = Place::serving(&Files::new(), Repository::from_folder(ID, &folder.path().join("b")).unwrap());
    let told = ends(place.program(&format!("export {ID} -o out")), 2);
    assert!(told.contains("is a bundle already"), "{told}");
    assert!(!place.home.path().join("out").exists());
}

fn export(place: &Place, more: &str) -> Command {
    place.program(&format!("export {ID} -o b --force --profile f32 {SET} --progress none {more}"))
}

fn weights(place: &Place) -> usize {
    let paths = crate::place::walk(&place.folder().join("snapshots"));
    paths.iter().filter(|path| path.to_str().unwrap().ends_with(".safetensors")).count()
}

/// The last of the weight files cannot be had.
fn breaks(place: &Place) {
    let is_last = |request: &Request| request.endpoint == Endpoint::Blob && request.file.starts_with("vae/");
    place.server.fail([Fault::Status(404)], usize::MAX, is_last);
}

#[test]
fn weights_that_only_exports_wanted_go_even_after_a_broken_one() {
    let place = checkpoint();
    let whole = {
        let place = checkpoint();
        ends(export(&place, "--keep-source"), 0);
        weights(&place)
    };
    breaks(&place);
    ends(export(&place, ""), 1);
    place.server.heal();
    ends(export(&place, ""), 0);
    assert_eq!(weights(&place), 0);
    // A pull in between makes them the user's.
    ends(place.pull_program(), 0);
    assert!(weights(&place) >= whole && whole > 0);
    ends(export(&place, ""), 0);
    assert!(weights(&place) >= whole);
}

#[test]
fn weights_stay_while_somebody_else_uses_them() {
    let place = checkpoint();
    let locks = place.settings.cache.join(".locks").join(place.folder().file_name().unwrap());
    fs::create_dir_all(&locks).unwrap();
    let other = fs::File::create(locks.join("exports.lock")).unwrap();
    other.lock_shared().unwrap();
    ends(export(&place, ""), 0);
    assert!(weights(&place) > 0);
    drop(other);
    ends(export(&place, ""), 0);
    assert_eq!(weights(&place), 0);
}

#[test]
fn a_local_folder_takes_the_hubs_place() {
    let place = Place::new(&files(1));
    let folder = Good::bundle().copy();
    let models = place.home.path().join("models");
    fs::create_dir_all(models.join("someone")).unwrap();
    fs::rename(folder.path().join("b"), models.join("someone/model")).unwrap();
    for dir in ["models", "models/someone", "models/someone/model"] {
        let told = ends(place.program(&format!("inspect {ID} --model-dir {dir}")), 0);
        assert!(told.contains("is taken from"), "{told}");
    }
    let mut command = place.program(&format!("inspect {ID}"));
    command.env("VIADUCT_MODEL_DIR", &models);
    ends(command, 0);
    assert!(
        ends(place.program("inspect someone/else --model-dir models"), 2).contains("no model someone/else")
    );
    assert!(ends(place.program(&format!("inspect {ID} --model-dir nowhere")), 2).contains("no such folder"));
    assert!(place.server.served().is_empty());
}
