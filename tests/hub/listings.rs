//! Listings that no honest hub has: refused, and nothing is written.

use std::fs;

use serde_json::{Value, json};
use viaduct_hub_server::{Listed, Repository};

use crate::place::{Files, ID, Place};

fn listed(path: &str, size: Value, sha256: Option<&str>) -> Listed {
    Listed {
        path: path.to_owned(),
        size,
        blob: "0123456789abcdef0123456789abcdef01234567".to_owned(),
        sha256: sha256.map(str::to_owned),
        pointer_size: 100,
    }
}

/// The error of a pull of such a repository; nothing was asked for but the listing, and nothing was written.
fn refusal(listing: Vec<Listed>) -> String {
    let files = Files::from([("a.json".into(), b"{}".to_vec())]);
    let place = Place::serving(&files, Repository::new(ID).file("a.json", "{}").lists(listing));
    let error = place.pull().unwrap_err().to_string();
    assert_eq!(place.bodies(0), []);
    let left: Vec<_> = fs::read_dir(place.home.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    error
}

#[test]
fn names_that_lead_out_of_the_folder_are_refused() {
    let names = [
        "../x",
        "a/../../x",
        "..",
        ".",
        "",
        "/etc/x",
        "//x",
        "a//b",
        "a/",
        "./a",
        "a/./b",
        "a\\..\\..\\x",
        "\\\\host\\x",
        "C:\\x",
        "a\0b",
    ];
    for name in names {
        let error = refusal(vec![listed("config.json", json!(2), None), listed(name, json!(2), None)]);
        assert!(
            error.contains("no name of a file inside a folder") && error.contains(ID),
            "{name:?}: {error}"
        );
    }
}

#[test]
fn names_that_cannot_all_be_files_are_refused() {
    let two = |a: &str, b: &str| refusal(vec![listed(a, json!(2), None), listed(b, json!(2), None)]);
    assert!(two("a", "a").contains("listed twice"));
    for (a, b) in [("a", "a/b"), ("a/b/c", "a"), ("a/b", "a/b/c/d")] {
        assert!(two(a, b).contains("lies in what is a file itself"));
    }
}

#[test]
fn sizes_and_hashes_that_cannot_be_are_refused() {
    let right = "0123456789abcdef".repeat(4);
    let sizes = [
        json!(-1),
        json!(1.5),
        json!("5"),
        Value::Null,
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e300),
        json!([]),
    ];
    for size in sizes {
        for sha256 in [None, Some(right.as_str())] {
            let error = refusal(vec![listed("a", size.clone(), sha256)]);
            assert!(error.contains("list of files cannot be used"), "{size}: {error}");
        }
    }
    for sha256 in ["", "../../../../x", &"z".repeat(64), &right.to_uppercase(), &right[1..]] {
        let error = refusal(vec![listed("a", json!(5), Some(sha256))]);
        assert!(error.contains("no size or no hash"), "{error}");
    }
    let blob = Listed { blob: "../../x".to_owned(), ..listed("a", json!(5), None) };
    assert!(refusal(vec![blob]).contains("no size or no hash"));
}

/// Sizes that are possible, but not here.
#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let sha256 = ["0123456789abcdef".repeat(4), "fedcba9876543210".repeat(4)];
    let huge = |i: usize| listed(&format!("w{i}"), json!(i64::MAX), Some(&sha256[i]));
    for listing in [vec![huge(0)], vec![huge(0), huge(1)]] {
        let error = refusal(listing);
        assert!(error.contains("more are needed") && error.contains("make room"), "{error}");
    }
}

#[test]
fn a_million_files_are_refused() {
    let million: Vec<Listed> = (0..1_000_000).map(|i| listed(&format!("f{i}"), json!(1), None)).collect();
    let error = refusal(million);
    assert!(error.contains("list of files cannot be used"), "{error}");
    let many: Vec<Listed> = (0..120_000).map(|i| listed(&format!("f{i}"), json!(1), None)).collect();
    assert!(refusal(many).contains("120000 files; at most"));
}
