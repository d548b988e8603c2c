//! The stored specs give checkpoints with the stored fingerprints, in the layout that the spec asks for.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use viaduct_procedural::{Error, write_checkpoint};

fn spec(fixture: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(fixture).join("checkpoint.json")
}

fn dest(name: &str) -> PathBuf {
    let dest = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dest); // of an earlier run; absent on the first
    dest
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Every tensor of the index is in the file that the index names, and each file holds nothing else.
fn assert_index_is_complete(folder: &Path, index: &str, shards: usize) {
    let index = json(&folder.join(index));
    let map = index["weight_map"].as_object().unwrap();
    let mut files: Vec<&str> = map.values().map(|v| v.as_str().unwrap()).collect();
    files.sort_unstable();
    files.dedup();
    assert_eq!(files.len(), shards);
    let (mut count, mut bytes) = (0, 0);
    for file in files {
        let content = fs::read(folder.join(file)).unwrap();
        for (name, view) in SafeTensors::deserialize(&content).unwrap().iter() {
            assert_eq!(map[name], file);
            count += 1;
            bytes += view.data().len() as u64;
        }
    }
    assert_eq!((count, bytes), (map.len(), index["metadata"]["total_size"].as_u64().unwrap()));
}

#[test]
fn flux2_a_has_a_sharded_transformer_and_rope_theta_at_the_top() {
    let dest = dest("flux2-a");
    write_checkpoint(&spec("flux2-a"), &dest).unwrap();
    assert_index_is_complete(&dest.join("transformer"), "diffusion_pytorch_model.safetensors.index.json", 3);
    let config = json(&dest.join("text_encoder/config.json"));
    assert_eq!(config["rope_theta"], 500000.0);
    assert_eq!(config.get("rope_parameters"), None);
    assert_eq!(config["pad_token_id"], 256);
    let vae = fs::read(dest.join("vae/diffusion_pytorch_model.safetensors")).unwrap();
    let vae = SafeTensors::deserialize(&vae).unwrap();
    assert_eq!(vae.tensor("bn.running_var").unwrap().dtype(), Dtype::F32);
    assert_eq!(vae.tensor("bn.num_batches_tracked").unwrap().dtype(), Dtype::I64);
}

#[test]
fn flux2_b_has_a_sharded_text_encoder_and_rope_parameters() {
    let dest = dest("flux2-b");
    write_checkpoint(&spec("flux2-b"), &dest).unwrap();
    assert_index_is_complete(&dest.join("text_encoder"), "model.safetensors.index.json", 2);
    let config = json(&dest.join("text_encoder/config.json"));
    assert_eq!(config["rope_parameters"]["rope_theta"], 1000000.0);
    assert_eq!(config.get("rope_theta"), None);
    assert_eq!(config["pad_token_id"], Value::Null);
    assert_eq!(json(&dest.join("tokenizer/tokenizer_config.json"))["pad_token"], "<|endoftext|>");
    let vae = fs::read(dest.join("vae/diffusion_pytorch_model.safetensors")).unwrap();
    assert_eq!(
        SafeTensors::deserialize(&vae).unwrap().tensor("bn.running_var").unwrap().dtype(),
        Dtype::BF16
    );
}

#[test]
fn other_weights_than_the_fingerprint_says_are_refused() {
    let dest = dest("refused");
    fs::create_dir_all(&dest).unwrap();
    let mut changed = json(&spec("flux2-a"));
    changed["seed"] = 1.into();
    let path = dest.join("checkpoint.json");
    fs::write(&path, changed.to_string()).unwrap();
    let error = write_checkpoint(&path, &dest.join("out")).unwrap_err();
    assert!(matches!(error, Error::Fingerprint { component: "text_encoder", .. }), "{error}");
}
