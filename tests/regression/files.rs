//! Checkpoints and bundles whose files are not what they should be.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    bad::{Good, SET, edit, header, json, put, snapshot, text},
    run, told,
};

/// A half-downloaded file passes for a whole one: <https://github.com/huggingface/huggingface_hub/issues/4223>,
/// <https://github.com/huggingface/huggingface_hub/issues/4779>. Weights, and files of a bundle, that are cut are
/// refused; a byte that differs is found by its hash. What a download does about it is in `downloads`.
#[test]
fn bug_28_half_downloaded_files() {
    let good = Good::checkpoint();
    let weights: Vec<PathBuf> = snapshot(good.copy().path())
        .into_keys()
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    assert_eq!(weights.len(), 5);
    for path in weights {
        let directory = good.copy();
        edit(&directory.path().join(&path), |bytes| bytes.truncate(bytes.len() * 6 / 10));
        let output = run(directory.path(), &format!("export ck -o b {SET}"));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains(path.to_str().unwrap()) && told.contains("the download did not finish"),
            "{told}"
        );
        assert!(!directory.path().join("b").exists());
    }
}

#[test]
fn bug_28_damaged_bundles() {
    let good = Good::bundle();
    told(good.copy().path(), "inspect b --hashes", 0);
    for file in ["transformer-00000.data", "transformer.onnx", "embedding.bin"] {
        let path = Path::new("b").join(file);
        let directory = good.copy();
        edit(&directory.path().join(&path), |bytes| bytes.truncate(bytes.len() * 6 / 10));
        let (_, complaint) = told(directory.path(), crate::DRAW, 1);
        assert!(complaint.contains(file), "{complaint}");
        let directory = good.copy();
        edit(&directory.path().join(&path), |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        });
        let (_, complaint) = told(directory.path(), "inspect b --hashes", 1);
        assert!(complaint.contains(file), "{complaint}");
    }
}

/// An index that lies gives garbage weights: <https://github.com/sgl-project/sglang/issues/32279>,
/// <https://github.com/Blaizzy/mlx-vlm/issues/1827>, <https://github.com/huggingface/huggingface_hub/issues/4728>.
/// Each lie has a message of its own, and files that are in nobody's list do no harm.
#[test]
fn bug_29_lying_index() {
    const INDEX: &str = "ck/transformer/diffusion_pytorch_model.safetensors.index.json";
    const SHARD: &str = "ck/transformer/diffusion_pytorch_model-00002-of-00003.safetensors";
    let map = |d: &Path, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        json(&d.join(INDEX), |index| change(index["weight_map"].as_object_mut().unwrap()));
    };
    let good = Good::checkpoint();
    let told = |harm: &dyn Fn(&Path)| {
        let directory = good.copy();
        harm(directory.path());
        let output = run(directory.path(), &format!("export ck -o b {SET} --progress none"));
        (output.status.code(), text(&output.stderr))
    };
    type Harm<'a> = &'a dyn Fn(&Path);
    let first = "x_embedder.weight";
    let cases: [(Harm, &[&str]); 5] = [
        (&|d| fs::remove_file(d.join(SHARD)).unwrap(), &[SHARD, "shard file is missing", "for `"]),
        (
            &|d| map(d, &|map| drop(map.insert("ghost".to_owned(), map[first].clone()))),
            &[INDEX, "`ghost`", "does not have it"],
        ),
        (&|d| map(d, &|map| drop(map.remove(first))), &[INDEX, first, "does not list it"]),
        (&|d| map(d, &|map| map[first] = "../x.safetensors".into()), &[INDEX, first, "leaves the directory"]),
        // Neither listed nor in a header.
        (
            &|d| {
                header(&d.join("ck/text_encoder/model.safetensors"), |header| {
                    let header = header.as_object_mut().unwrap();
                    let weight = header.remove("model.layers.0.mlp.up_proj.weight").unwrap();
                    header.insert("model.layers.0.mlp.up.weight".to_owned(), weight);
                })
            },
            &["no tensor `model.layers.0.mlp.up_proj.weight`", "ck/text_encoder: "],
        ),
    ];
    for (harm, parts) in cases {
        let (code, told) = told(harm);
        assert_eq!(code, Some(1), "{told}");
        assert!(parts.iter().all(|part| told.contains(part)), "{parts:?}: {told}");
    }
    let stray = "ck/transformer/diffusion_pytorch_model.safetensors";
    let (code, told) = told(&|d| put(&d.join(stray), "a stray file"));
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(told, format!("warning: {stray}: ignored, no part of the checkpoint\n"));
    assert_eq!(self::told(good.copy().path(), &format!("export ck -o b {SET} --progress none"), 0).1, "");
}
