//! Checkpoints of other dimensions than the fixtures': all that a config file may say is either drawn or refused.

mod support;

use std::{fs, path::Path};

use serde_json::{Value, json};
use support::{Checkpoint, fixture, json, scratch};
use viaduct::{npy, tensor::HostTensor};

/// A checkpoint like flux2-a, but for some values of its spec (JSON pointer, value) and its taps.
fn changed(changes: &[(&str, Value)], taps: &[usize], length: u64) -> Checkpoint {
    let folder = scratch();
    let mut spec = json(&fixture("flux2-a/checkpoint.json"));
    spec.as_object_mut().unwrap().remove("fingerprints");
    let width = spec["text_encoder"]["config"]["hidden_size"].as_u64().unwrap();
    spec["transformer"]["config"]["joint_attention_dim"] = json!(width * taps.len() as u64);
    for (place, value) in changes {
        *spec.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = value.clone();
    }
    let path = folder.path().join("checkpoint.json");
    fs::write(&path, spec.to_string()).unwrap();
    Checkpoint::procedural(&path, taps, length)
}

/// The picture, which the program has checked to be finite and no constant.
fn draw(checkpoint: &Checkpoint, profile: &str, size: &str) -> HostTensor {
    let (bundle, folder) = (checkpoint.export(profile, &[]), scratch());
    let mut command = bundle.generate(&folder.path().join("picture.png"), "a boat", "cpu");
    command.args(["--seed", "1", "--steps", "2", "--size", size, "--dump"]).arg(folder.path());
    command.assert().success();
    npy::read(&folder.path().join("image_raw.npy")).unwrap()
}

fn assert_draws(changes: &[(&str, Value)], taps: &[usize], length: u64, size: [usize; 2]) {
    let [width, height] = size;
    let checkpoint = changed(changes, taps, length);
    for profile in ["f32", "q4"] {
        let picture = draw(&checkpoint, profile, &format!("{width}x{height}"));
        assert_eq!(picture.shape, [1, 3, height, width], "{changes:?}");
        assert!(picture.to_f32().iter().all(|x| x.is_finite()), "{changes:?}");
    }
}

#[test]
fn taps_may_be_one_unsorted_repeated_the_first_and_the_last() {
    for taps in [&[2][..], &[0], &[5], &[4, 1], &[3, 3, 0, 5]] {
        assert_draws(&[], taps, 33, [16, 16]);
    }
}

#[test]
fn transformers_of_other_dimensions() {
    let config = |name: &str| format!("/transformer/config/{name}");
    let (heads, head_dim, axes) =
        (config("num_attention_heads"), config("attention_head_dim"), config("axes_dims_rope"));
    let (doubles, singles, ratio) = (config("num_layers"), config("num_single_layers"), config("mlp_ratio"));
    // One head, one axis that carries nearly all, an inner width that no block size divides.
    let one_head = [
        (heads.as_str(), json!(1)),
        (head_dim.as_str(), json!(40)),
        (axes.as_str(), json!([2, 2, 2, 34])),
        (ratio.as_str(), json!(2.55)),
    ];
    assert_draws(&one_head, &[1, 2], 1, [16, 176]);
    assert_draws(&[(&doubles, json!(0))], &[1], 17, [48, 16]);
    assert_draws(&[(&singles, json!(0)), (&doubles, json!(3))], &[1], 17, [48, 16]);
    let theta = [("/text_encoder/rope_theta", json!(100.0)), ("/dtype", json!("f16"))];
    assert_draws(&theta, &[5, 5], 64, [32, 16]);
}

#[test]
fn text_encoders_of_other_dimensions() {
    let config = |name: &str| format!("/text_encoder/config/{name}");
    let (heads, kv, dim) = (config("num_attention_heads"), config("num_key_value_heads"), config("head_dim"));
    assert_draws(&[(&kv, json!(6))], &[3], 20, [16, 16]);
    assert_draws(&[(&kv, json!(1)), (&heads, json!(5)), (&dim, json!(14))], &[3], 20, [16, 16]);
}

#[test]
fn decoders_of_other_dimensions() {
    let config = |name: &str| format!("/vae/config/{name}");
    let (attention, post_quant) = (config("mid_block_add_attention"), config("use_post_quant_conv"));
    let (levels, layers, groups) =
        (config("block_out_channels"), config("layers_per_block"), config("norm_num_groups"));
    assert_draws(&[(&attention, json!(false))], &[3], 20, [16, 32]);
    assert_draws(&[(&post_quant, json!(false))], &[3], 20, [16, 32]);
    assert_draws(&[(&attention, json!(false)), (&post_quant, json!(false))], &[3], 20, [16, 32]);
    // One level: a token is 2x2 pixels, and no stage is cut.
    assert_draws(&[(&levels, json!([24]))], &[3], 20, [6, 10]);
    let wide = [(levels.as_str(), json!([8, 16])), (layers.as_str(), json!(3)), (groups.as_str(), json!(1))];
    assert_draws(&wide, &[3], 20, [28, 4]);
}

/// What cannot be drawn is refused at export, by the name of the value and the file that holds it.
#[test]
fn unsupported_configs_are_refused() {
    let refused = |place: &str, value: Value, message: &str| {
        let checkpoint = changed(&[(place, value)], &[3], 20);
        let folder = scratch();
        let out = folder.path().join("bundle");
        let assert = checkpoint.export_command(&out, "f32", &[]).assert().failure();
        let said = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        let file = place.trim_start_matches('/').split('/').next().unwrap();
        assert!(said.contains(message) && said.contains(&format!("{file}/config.json")), "{place}: {said}");
        assert!(!Path::new(&out).exists());
    };
    for axes in [json!([16, 16, 16]), json!([8, 8, 8, 12, 12]), json!([7, 17, 12, 12])] {
        refused("/transformer/config/axes_dims_rope", axes, "is not four even numbers");
    }
    refused("/transformer/config/axes_dims_rope", json!([8, 16, 12, 14]), "does not add up");
    refused("/text_encoder/config/num_key_value_heads", json!(4), "does not divide the heads");
    refused("/text_encoder/config/hidden_act", json!("gelu"), "hidden_act is not silu");
    refused("/vae/config/norm_num_groups", json!(5), "norm_num_groups does not divide");
    refused("/vae/config/act_fn", json!("relu"), "act_fn is not silu");
}
