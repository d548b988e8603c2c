//! Checkpoints as they arrive: whole, sharded, half downloaded, or telling lies.
//!
//! The lies of an index are those of public reports: <https://github.com/sgl-project/sglang/issues/32279> (a missing
//! shard became garbage), <https://github.com/Blaizzy/mlx-vlm/issues/1827> (a stale index and a stray file),
//! <https://github.com/huggingface/huggingface_hub/issues/4728> (listed but absent).

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::{TempDir, tempdir};
use viaduct_export::{
    onnx::{Bytes, DType},
    weights::Checkpoint,
};

/// A safetensors file: header and data, both as given.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

/// A well-formed file of F32 tensors of two elements.
fn shard(names: &[&str]) -> Vec<u8> {
    let entry = |(i, name): (usize, &&str)| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1,2],"data_offsets":[{},{}]}}"#, i * 8, i * 8 + 8)
    };
    let entries: Vec<_> = names.iter().enumerate().map(entry).collect();
    file(&format!("{{{}}}", entries.join(",")), names.len() * 8)
}

fn index(entries: &[(&str, &str)]) -> String {
    let entries: Vec<_> = entries.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, entries.join(","))
}

fn dir(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// The message of opening a file with these bytes.
fn refusal(bytes: &[u8]) -> String {
    let dir = dir(&[("model.safetensors", bytes)]);
    Checkpoint::open(&dir.path().join("model.safetensors")).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn a_tensor_is_mapped_not_read() {
    let dir = dir(&[("a.safetensors", &shard(&["x", "y"]))]);
    let path = dir.path().join("a.safetensors");
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.path(), path);
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["x", "y"]);
    let found = checkpoint.find("y").unwrap();
    assert_eq!((found.dtype, found.shape, found.file), (DType::F32, &[1, 2][..], &*path));
    assert_eq!(checkpoint.find("z"), None);

    let tensor = checkpoint.tensor("y", &[1, 2]).unwrap();
    assert!(matches!(tensor.bytes, Bytes::Mapped { .. }));
    assert_eq!(*tensor.bytes.read().unwrap(), [8, 9, 10, 11, 12, 13, 14, 15]);
}

#[test]
fn a_tensor_that_cannot_be_used_is_named() {
    let header = r#"{"__metadata__":{"format":"pt"},"model.w":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},
        "q":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[4,7]},"new":{"dtype":"X9","shape":[3],"data_offsets":[7,8]}}"#;
    let dir = dir(&[("model.safetensors", &file(header, 8))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let message = |name, shape: &[usize]| checkpoint.tensor(name, shape).unwrap_err().to_string();
    assert_says(&message("model.w", &[1, 2]), &["model.safetensors", "`model.w`", "[2, 1]", "[1, 2]"]);
    assert_says(&message("w", &[2, 1]), &["no tensor `w`", "nearest is `model.w`"]);
    assert_says(&message("q", &[3]), &["`q` is F8_E4M3", "model.safetensors"]);
    assert_says(&message("new", &[3]), &["`new` is X9"]);
    assert_eq!(checkpoint.tensor("model.w", &[2, 1]).unwrap().dtype, DType::BF16);
    assert_eq!(checkpoint.find("q").unwrap().dtype, DType::Other(17));
}

#[test]
fn the_nearest_name_is_one_typo_away() {
    let dir =
        dir(&[("model.safetensors", &shard(&["layers.0.k_proj", "layers.0.q_proj", "layers.10.k_proj"]))]);
    let message =
        Checkpoint::open(dir.path()).unwrap().tensor("layers.1.k_proj", &[1]).unwrap_err().to_string();
    assert_says(&message, &["nearest is `layers.0.k_proj`"]);
}

#[test]
fn truncated_files_say_expected_and_found() {
    let whole = shard(&["x", "y"]);
    let len = whole.len().to_string();
    for cut in 0..whole.len() {
        assert_says(&refusal(&whole[..cut]), &["model.safetensors", "truncated", &format!("{cut} found")]);
    }
    assert_says(&refusal(&whole[..whole.len() - 1]), &[&format!("{len} bytes expected")]);
    assert_says(&refusal(&[&whole[..], &[0, 0]].concat()), &["2 bytes after the last tensor"]);
}

#[test]
fn bad_headers_are_refused() {
    let one = |body: &str, data| refusal(&file(&format!(r#"{{"x":{{{body}}}}}"#), data));
    let f32 =
        |shape: &str, offsets: &str| format!(r#""dtype":"F32","shape":{shape},"data_offsets":{offsets}"#);
    assert_says(&one(&f32("[2]", "[4,12]"), 12), &["`x`", "4..12"]);
    assert_says(&one(&f32("[2]", "[0,4]"), 4), &["`x`", "[2] x F32 is 8 bytes, not 4"]);
    assert_says(&one(&f32("[4294967296,4294967296,2]", "[0,4]"), 4), &["`x`", "impossible size"]);
    assert_says(&one(&f32("[0]", "[8,0]"), 4), &["`x`"]);
    assert_says(&one(&f32("[-1]", "[0,4]"), 4), &["bad header"]);
    let x9 = r#""dtype":"X9","shape":[],"data_offsets":[0,18446744073709551615]"#;
    assert_says(&one(x9, 4), &["`x`", "beyond any file"]);
    let far = r#""dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,1152921504606846976]"#;
    assert_says(&one(far, 4), &["truncated"]);

    let pair = |first: &str, second: &str| {
        let entry = |name: &str, offsets: &str| {
            format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#)
        };
        refusal(&file(&format!("{{{},{}}}", entry("x", first), entry("y", second)), 9))
    };
    assert_says(&pair("[0,4]", "[2,6]"), &["`y`", "ends at 4"]);
    assert_says(&pair("[0,4]", "[5,9]"), &["`y`", "ends at 4"]);
    let twice = r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    assert_says(&refusal(&file(twice, 2)), &["`x`", "listed twice"]);
    assert_says(&refusal(&file("[]", 0)), &["bad header"]);
    assert_says(&refusal(&file("{\"x\":", 0)), &["bad header"]);
    assert_says(&refusal(&[0xff; 64]), &["header of 18446744073709551615 bytes"]);
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert_says(&refusal(pointer), &["Git LFS pointer"]);
}

#[test]
fn empty_tensors_and_empty_files_are_fine() {
    let header = r#"{"e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
    for bytes in [file(header, 4), file("{}  ", 0)] {
        let dir = dir(&[("model.safetensors", &bytes)]);
        Checkpoint::open(dir.path()).unwrap();
    }
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn shards_are_found_beside_their_index() {
    let map = index(&[("x", "1.safetensors"), ("y", "2.safetensors")]);
    let files: [(&str, &[u8]); 4] = [
        (INDEX, map.as_bytes()),
        ("1.safetensors", &shard(&["x"])),
        ("2.safetensors", &shard(&["y"])),
        ("model.safetensors", b"a stray file that nobody opens"),
    ];
    let dir = dir(&files);
    for path in [dir.path().to_owned(), dir.path().join(INDEX)] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(checkpoint.find("y").unwrap().file, dir.path().join("2.safetensors"));
    }
}

#[test]
fn three_lies_three_messages() {
    let map = index(&[("x", "1.safetensors"), ("y", "2.safetensors"), ("z", "2.safetensors")]);
    let open = |second: Option<&[&str]>, wanted: &str| {
        let first = shard(&["x"]);
        let second = second.map(shard);
        let mut files: Vec<(&str, &[u8])> = vec![(INDEX, map.as_bytes()), ("1.safetensors", &first)];
        files.extend(second.as_ref().map(|bytes| ("2.safetensors", &bytes[..])));
        let dir = dir(&files);
        Checkpoint::open(dir.path()).and_then(|c| c.tensor(wanted, &[1])).unwrap_err().to_string()
    };
    let with = |second| open(second, "w");
    assert_says(&with(Some(&["y", "z"])), &["no tensor `w` in this checkpoint"]);
    assert_says(&open(None, "y"), &["2.safetensors: shard file is missing", INDEX, "`y` and 1 more"]);
    assert_says(&with(Some(&["y"])), &[INDEX, "lists tensor `z`", "2.safetensors", "does not have it"]);
    assert_says(
        &with(Some(&["y", "z", "extra"])),
        &["2.safetensors", "holds tensor `extra`", "does not list it"],
    );
}

/// A model need not read all that its checkpoint lists, such as a vision tower.
#[test]
fn a_shard_that_nobody_wants_may_be_missing() {
    let map = index(&[("x", "1.safetensors"), ("y", "2.safetensors")]);
    let first = shard(&["x"]);
    let dir = dir(&[(INDEX, map.as_bytes()), ("1.safetensors", &first)]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.find("x").is_some());
    assert!(checkpoint.find("y").is_none() && checkpoint.lists("y") && !checkpoint.lists("z"));
}

#[test]
fn hostile_and_broken_indices_are_refused() {
    let open = |map: &str| {
        let dir = dir(&[(INDEX, map.as_bytes())]);
        Checkpoint::open(dir.path()).unwrap_err().to_string()
    };
    for name in
        ["../x.safetensors", "/etc/passwd", "a/../../x", "nul\0.safetensors", "..\\x", "C:\\x", "", "."]
    {
        let message = open(&index(&[("x", name)]).replace("\\0", "\\u0000"));
        assert_says(&message, &[INDEX, "of tensor `x`", "refused"]);
    }
    assert_says(&open(r#"{"weight_map":{"x":"1","x":"2"}}"#), &[INDEX, "`x` is listed twice"]);
    assert_says(&open(r#"{"weight_map":{}}"#), &[INDEX, "empty"]);
    assert_says(&open(r#"{"weight_map":{"x":1}}"#), &[INDEX, "key `x`"]);
    assert_says(&open("{}"), &[INDEX, "weight_map"]);
    assert_says(&open(""), &[INDEX]);
}

#[test]
fn a_directory_is_searched_in_order() {
    let x = shard(&["x"]);
    let open = |names: &[&str]| {
        let files: Vec<_> = names.iter().map(|name| (*name, &x[..])).collect();
        let dir = dir(&files);
        let checkpoint = Checkpoint::open(dir.path()).map_err(|e| e.to_string())?;
        let file = checkpoint.find("x").unwrap().file;
        Ok::<_, String>(file.file_name().unwrap().to_str().unwrap().to_owned())
    };
    assert_eq!(open(&["only.safetensors", "config.json", "._only.safetensors"]).unwrap(), "only.safetensors");
    assert_eq!(open(&["model.safetensors", "other.safetensors"]).unwrap(), "model.safetensors");
    let usual = "diffusion_pytorch_model.safetensors";
    assert_eq!(open(&[usual, "diffusion_pytorch_model.fp16.safetensors"]).unwrap(), usual);
    let several = open(&["a.safetensors", "b.safetensors"]).unwrap_err();
    assert_says(&several, &["several weight files", "a.safetensors, b.safetensors"]);
    assert_says(&open(&["config.json"]).unwrap_err(), &["no *.safetensors"]);
    assert_says(&Checkpoint::open(Path::new("no/such/dir")).unwrap_err().to_string(), &["no/such/dir"]);

    let dir = dir(&[("weights.bin", b"")]);
    let message = Checkpoint::open(&dir.path().join("weights.bin")).unwrap_err().to_string();
    assert_says(&message, &["weights.bin", "not a .safetensors file"]);
}

/// <https://github.com/microsoft/onnxruntime/issues/27353>: a download cache keeps blobs under their hashes and links
/// to them.
#[cfg(unix)]
#[test]
fn links_of_a_download_cache_are_followed() {
    let map = index(&[("x", "1.safetensors")]);
    let root = tempdir().unwrap();
    let (blobs, snapshot) = (root.path().join("blobs"), root.path().join("snapshots/rev"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (name, blob, bytes) in [(INDEX, "aa", map.as_bytes()), ("1.safetensors", "bb", &shard(&["x"])[..])] {
        fs::write(blobs.join(blob), bytes).unwrap();
        std::os::unix::fs::symlink(PathBuf::from("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    for path in [snapshot.join(INDEX), snapshot.join("1.safetensors"), snapshot] {
        Checkpoint::open(&path).unwrap().tensor("x", &[1, 2]).unwrap();
    }
}
