//! Exports of a repository: weights are exported as they come, and whatever happens on the way, the bundle is the one that
//! the same files in a folder give.

use std::{collections::BTreeMap, fs, path::Path, thread, time::Duration};

use viaduct_hub_server::{Endpoint, Fault, Repository, Request};

use crate::{
    bad::{Good, SET, finish, snapshot, text},
    place::{Files, ID, Place},
};

const WEIGHTS: &str = ".safetensors";

/// A hub with a checkpoint, and the bundle that its folder gives.
fn place() -> (Place, BTreeMap<String, Vec<u8>>) {
    let good = Good::checkpoint();
    let directory = good.copy();
    let place =
        Place::serving(&Files::new(), Repository::from_folder(ID, &directory.path().join("ck")).unwrap());
    let output =
        finish(crate::bad::viaduct(directory.path(), &format!("export ck -o b --profile f32 {SET}")));
    assert!(output.status.success(), "{}", text(&output.stderr));
    (place, bundle(&directory.path().join("b")))
}

/// The files of a bundle, but for the one that tells where it comes from.
fn bundle(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = snapshot(folder).into_keys().filter(|path| folder.join(path).is_file());
    let names = names.map(|path| path.to_str().unwrap().to_owned()).filter(|name| name != "bundle.json");
    names.map(|name| (name.clone(), fs::read(folder.join(name)).unwrap())).collect()
}

/// Exports the repository; the exit code and what was said.
fn export(place: &Place, more: &str) -> (Option<i32>, String) {
    let arguments = format!("export {ID} -o b --profile f32 {SET} --progress none {more}");
    let output = finish(place.program(&arguments));
    (output.status.code(), text(&output.stderr))
}

fn assert_same(place: &Place, expected: &BTreeMap<String, Vec<u8>>) {
    let found = bundle(&place.home.path().join("b"));
    let names: [Vec<&String>; 2] = [found.keys().collect(), expected.keys().collect()];
    assert_eq!(names[0], names[1]);
    for (name, content) in expected {
        assert!(found[name] == *content, "{name}");
    }
}

fn is_weights(request: &Request) -> bool {
    request.endpoint == Endpoint::Blob && request.file.ends_with(WEIGHTS)
}

/// The look into a shard's header, before the shard itself comes.
fn is_beginning(request: &Request) -> bool {
    is_weights(request) && request.header("range").is_some_and(|range| range.starts_with("bytes=0-"))
}

fn is_shard(request: &Request) -> bool {
    is_weights(request) && !is_beginning(request)
}

fn weights_in_cache(place: &Place) -> usize {
    let is_weights = |path: &&std::path::PathBuf| path.to_str().unwrap().ends_with(WEIGHTS) && path.exists();
    crate::place::walk(&place.folder().join("snapshots")).iter().filter(is_weights).count()
}

/// Bytes of what is still on its way.
fn incomplete_bytes(place: &Place) -> u64 {
    let paths = crate::place::walk(&place.folder().join("blobs"));
    let incomplete = paths.iter().filter(|path| path.extension().is_some_and(|e| e == "incomplete"));
    incomplete.filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum()
}

#[test]
fn an_export_of_a_repository_is_that_of_its_folder() {
    let (place, expected) = place();
    let (code, told) = export(&place, "");
    assert_eq!(code, Some(0), "{told}");
    assert_same(&place, &expected);
    assert_eq!(weights_in_cache(&place), 0, "nothing asked to keep them");
    fs::remove_dir_all(place.home.path().join("b")).unwrap();
    let (code, told) = export(&place, "--keep-source");
    assert_eq!(code, Some(0), "{told}");
    assert_same(&place, &expected);
    assert!(weights_in_cache(&place) > 0);
    // What is there is exported without a word to the hub.
    let before = place.server.served().len();
    let (code, told) = export(&place, "--force");
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(place.server.served().len(), before);
    assert_same(&place, &expected);
    assert!(weights_in_cache(&place) > 0, "they were there before");
}

#[test]
fn an_export_survives_what_a_download_survives() {
    type Matches = fn(&Request) -> bool;
    let shards: [Vec<Fault>; 6] = [
        vec![Fault::Cut(0.6)],
        vec![Fault::Chunked, Fault::Cut(0.6)],
        vec![Fault::Reset(0.3)],
        vec![Fault::Flip(0.5)],
        vec![Fault::Status(503)],
        vec![Fault::TooManyRequests("0".into())],
    ];
    let beginnings: [Vec<Fault>; 6] = [
        vec![Fault::Cut(0.1)],
        vec![Fault::IgnoreRange],
        vec![Fault::RangeFrom(8)],
        vec![Fault::NotSatisfiable],
        vec![Fault::Status(503)],
        vec![Fault::Header("Content-Range", None)],
    ];
    let (place, expected) = place();
    let rules = shards.into_iter().map(|faults| (faults, is_shard as Matches));
    for (faults, matches) in
        rules.chain(beginnings.into_iter().map(|faults| (faults, is_beginning as Matches)))
    {
        place.server.heal();
        place.server.fail(faults.clone(), 1, matches);
        let (code, told) = export(&place, "--force");
        assert_eq!(code, Some(0), "{faults:?}: {told}");
        assert_same(&place, &expected);
    }
}

/// No hash tells of a header alone. When the shard comes whole, it does.
#[test]
fn a_header_with_a_wrong_byte_gives_no_wrong_bundle() {
    let (place, expected) = place();
    for share in [0.0, 0.00002, 0.001, 0.003, 0.01, 0.02] {
        for fault in [Fault::Flip(share), Fault::Changed] {
            place.server.heal();
            place.server.fail([fault.clone()], 1, is_beginning);
            let (code, told) = export(&place, "--force");
            match code {
                Some(0) => assert_same(&place, &expected),
                _ => assert!(code == Some(1) && !told.contains("panicked"), "{fault:?}: {code:?} {told}"),
            }
        }
    }
    place.server.heal();
    let (code, told) = export(&place, "--force");
    assert_eq!(code, Some(0), "{told}");
    assert_same(&place, &expected);
}

#[test]
fn an_export_that_fails_or_is_killed_leaves_no_bundle_and_what_has_come() {
    let (place, expected) = place();
    place.server.fail([Fault::Flip(0.5)], usize::MAX, is_shard);
    let (code, told) = export(&place, "");
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("another hash"), "{told}");
    assert!(!place.home.path().join("b").exists());

    place.server.heal();
    place.server.fail([Fault::Drip(5000, Duration::from_millis(20))], usize::MAX, is_shard);
    let arguments = format!("export {ID} -o b --profile f32 {SET} --progress none");
    let mut child = place.program(&arguments).spawn().unwrap();
    while incomplete_bytes(&place) < 200_000 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be killed");
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!place.home.path().join("b").exists());
    place.server.heal();
    let before = place.server.served().len();
    let (code, told) = export(&place, "");
    assert_eq!(code, Some(0), "{told}");
    assert_same(&place, &expected);
    let resumed = |(_, range): &(String, Option<String>)| {
        range.as_ref().is_some_and(|range| range.ends_with('-') && range != "bytes=0-")
    };
    assert!(place.bodies(before).iter().any(resumed), "{:?}", place.bodies(before));
}
