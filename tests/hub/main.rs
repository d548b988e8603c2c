//! Downloads from a hub that behaves and one that does not: what comes is whole or not there, what was broken off goes
//! on where it was, and other tools share the cache.
//!
//! The hub is `tests/hub_server`; it counts what it sends, and each of its faults has a test of its own here.

#[path = "../support/bad.rs"]
mod bad;
mod exports;
mod faults;
mod first_use;
mod leftovers;
mod listings;
#[path = "../support/place.rs"]
mod place;
mod processes;
#[path = "../support/python.rs"]
#[allow(dead_code, reason = "it also runs scripts")]
mod python;
mod python_cache;
mod random;

use std::fs;

use bad::root;
use place::{Files, Place};

#[test]
fn looks_find_a_wrong_byte_a_partial_file_and_a_stray_one() {
    let place = Place::new(&Files::from([("w".into(), vec![7; 1000]), ("a.json".into(), b"{}".to_vec())]));
    place.pull().unwrap();
    place.assert_whole();
    let blob = place.blob("w");
    for broken in [[vec![7; 999], vec![6]].concat(), vec![7; 600], Vec::new()] {
        fs::write(&blob, broken).unwrap();
        assert!(place.look().is_err());
        assert!(place.whole().is_err());
    }
    fs::write(&blob, vec![7; 1000]).unwrap();
    place.look().unwrap();
    fs::write(place.folder().join("blobs").join("0".repeat(64)), "stray").unwrap();
    assert!(place.look().is_err());
    fs::remove_file(place.folder().join("blobs").join("0".repeat(64))).unwrap();
    fs::write(place.home.path().join("outside"), "").unwrap();
    assert!(place.look().is_err());
    fs::remove_file(place.home.path().join("outside")).unwrap();
    fs::remove_file(&blob).unwrap();
    assert!(place.look().unwrap_err().contains("leads nowhere"));
}
