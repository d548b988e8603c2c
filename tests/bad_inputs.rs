//! Bad inputs: each ends in the right exit code, one clear line, and nothing left behind.

#[path = "support/bad.rs"]
mod bad;

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::{ffi::OsStrExt, fs::symlink, process::ExitStatusExt},
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use bad::{
    Case, Good, SET, case, check, edit, finish, header, json, limit_files, put, replace_listed, root,
    snapshot, text, unread, viaduct,
};
use serde_json::{Value, json};

const TEXT: &str = "ck/text_encoder/model.safetensors";
const SHARD: &str = "ck/transformer/diffusion_pytorch_model-00001-of-00003.safetensors";
const INDEX: &str = "ck/transformer/diffusion_pytorch_model.safetensors.index.json";
const NORM: &str = "model.layers.0.input_layernorm.weight";

/// `export` of the checkpoint after something was done to it.
fn export(
    name: &'static str,
    harm: impl Fn(&Path) + 'static,
    code: i32,
    says: &'static [&'static str],
) -> Case {
    case(name, &format!("export ck -o out --profile f32 {SET}"), harm, code, says)
}

#[test]
fn weights() {
    let cases = [
        export("truncated", |d| edit(&d.join(TEXT), |b| b.truncate(b.len() / 2)), 1, &[TEXT, "truncated"]),
        export("cut in the header", |d| edit(&d.join(TEXT), |b| b.truncate(100)), 1, &[TEXT, "truncated"]),
        export("empty", |d| put(&d.join(TEXT), ""), 1, &[TEXT, "truncated", "0 found"]),
        export(
            "bytes at the end",
            |d| edit(&d.join(TEXT), |b| b.extend([0; 9])),
            1,
            &[TEXT, "9 bytes after"],
        ),
        export(
            "huge header length",
            |d| edit(&d.join(TEXT), |b| b[..8].fill(0xFF)),
            1,
            &[TEXT, "header of 18446744073709551615 bytes"],
        ),
        export("header length too small", |d| edit(&d.join(TEXT), |b| b[0] ^= 8), 1, &[TEXT, "bad header"]),
        export(
            "header of garbage",
            |d| edit(&d.join(TEXT), |b| b[8..40].fill(b'!')),
            1,
            &[TEXT, "bad header"],
        ),
        export(
            "overlapping tensors",
            |d| header(&d.join(TEXT), |h| h[NORM]["data_offsets"] = json!([0, 384])),
            1,
            &[TEXT, "model.embed_tokens.weight", "the tensor before it ends at"],
        ),
        export(
            "shape that overflows",
            |d| header(&d.join(TEXT), |h| h[NORM]["shape"] = json!([u64::MAX, u64::MAX])),
            1,
            &[TEXT, NORM, "impossible size"],
        ),
        export(
            "type that is no weight",
            |d| header(&d.join(TEXT), |h| h[NORM]["dtype"] = json!("I32")),
            1,
            &[TEXT, NORM, "is I32; only F32, F16 and BF16"],
        ),
        export(
            "unknown type",
            |d| header(&d.join(TEXT), |h| h[NORM]["dtype"] = json!("F4_NEW")),
            1,
            &[TEXT, NORM, "F4_NEW"],
        ),
        export(
            "wrong shape",
            |d| header(&d.join(TEXT), |h| h[NORM]["shape"] = json!([4, 24])),
            1,
            &[TEXT, NORM, "[4, 24], [96] expected"],
        ),
        export(
            "missing tensor",
            |d| header(&d.join(TEXT), |h| h["model.layers.0.input_layernorm.weights"] = take(h, NORM)),
            1,
            &["no tensor", NORM, "nearest is `model.layers.0.input_layernorm.weights`"],
        ),
        export(
            "missing file",
            |d| fs::remove_file(d.join(TEXT)).unwrap(),
            1,
            &["ck/text_encoder", "no *.safetensors"],
        ),
        export(
            "LFS pointer",
            |d| put(&d.join(TEXT), "version https://git-lfs.github.com/spec/v1\n"),
            1,
            &["LFS pointer"],
        ),
        export("missing shard", |d| fs::remove_file(d.join(SHARD)).unwrap(), 1, &[SHARD, "missing", INDEX]),
        export(
            "index that leaves its folder",
            |d| {
                json(&d.join(INDEX), |i| {
                    i["weight_map"]["x_embedder.weight"] = json!("../../secret.safetensors")
                })
            },
            1,
            &[INDEX, "x_embedder.weight", "leaves the directory"],
        ),
        export(
            "index that lists too much",
            |d| {
                json(&d.join(INDEX), |i| {
                    i["weight_map"]["ghost"] = i["weight_map"]["x_embedder.weight"].clone()
                })
            },
            1,
            &[INDEX, "ghost", "not from the same checkpoint"],
        ),
        export(
            "index that lists too little",
            |d| json(&d.join(INDEX), |i| drop(take(&mut i["weight_map"], "x_embedder.weight"))),
            1,
            &[INDEX, "x_embedder.weight", "does not list it"],
        ),
        export("index of garbage", |d| put(&d.join(INDEX), "{\"weight_map\": 3"), 1, &[INDEX]),
        export("empty index", |d| put(&d.join(INDEX), "{\"weight_map\": {}}"), 1, &[INDEX, "empty"]),
    ];
    check(&Good::checkpoint(), &cases);
}

fn take(object: &mut Value, key: &str) -> Value {
    object.as_object_mut().unwrap().remove(key).unwrap()
}

/// One value of a component's config.json is replaced, or removed if it is null.
fn config(component: &'static str, key: &'static str, value: Value, says: &'static [&'static str]) -> Case {
    let harm = move |d: &Path| {
        json(&d.join("ck").join(component).join("config.json"), |config| {
            take(config, key);
            if !value.is_null() {
                config[key] = value.clone();
            }
        });
    };
    export(key, harm, 1, says)
}

#[test]
fn configs_and_recipes() {
    let own = |name, recipe: &'static str, code, says| {
        export(name, move |d| put(&d.join("ck/recipe.toml"), recipe), code, says)
    };
    let asked = |name, arguments: &str, says| {
        case(name, &format!("export ck -o out {SET} {arguments}"), |_| (), 2, says)
    };
    let cases = [
        config("text_encoder", "hidden_size", Value::Null, &["text_encoder/config.json", "`hidden_size`"]),
        config("text_encoder", "hidden_size", json!(0), &["text_encoder/config.json", "hidden_size is 0"]),
        config(
            "text_encoder",
            "hidden_size",
            json!(-96),
            &["text_encoder/config.json", "`hidden_size`", "-96"],
        ),
        config(
            "text_encoder",
            "vocab_size",
            json!(1u64 << 60),
            &["text_encoder/config.json", "vocab_size is"],
        ),
        config("text_encoder", "num_key_value_heads", json!(4), &["num_key_value_heads does not divide"]),
        config("text_encoder", "head_dim", json!(23), &["head_dim is odd"]),
        config("transformer", "num_layers", json!(7), &["no tensor", "transformer_blocks.1."]),
        config("transformer", "num_layers", json!(1u64 << 50), &["num_layers is", "the most is"]),
        config("transformer", "mlp_ratio", json!(-1.0), &["transformer/config.json", "mlp_ratio"]),
        config("transformer", "guidance_embeds", json!(true), &["guidance_embeds", "only Klein"]),
        config("transformer", "axes_dims_rope", json!([8, 16, 12]), &["axes_dims_rope"]),
        config("transformer", "attention_head_dim", json!("48"), &["`attention_head_dim`", "invalid type"]),
        config("vae", "norm_num_groups", json!(7), &["norm_num_groups does not divide"]),
        config("vae", "block_out_channels", json!([]), &["vae/config.json", "block_out_channels"]),
        config("vae", "latent_channels", json!(1), &["latent_channels"]),
        export(
            "no config",
            |d| fs::remove_file(d.join("ck/vae/config.json")).unwrap(),
            1,
            &["ck/vae/config.json"],
        ),
        export("no tokenizer", |d| fs::remove_dir_all(d.join("ck/tokenizer")).unwrap(), 1, &["ck/tokenizer"]),
        export(
            "no model",
            |d| fs::remove_dir_all(d.join("ck/transformer")).unwrap(),
            1,
            &["ck: no supported model"],
        ),
        own("recipe of garbage", "base = 'flux2-klein'\ntaps = [", 1, &["ck/recipe.toml: line 2"]),
        own(
            "recipe without profiles",
            "name = 'x'\n[text_encoder]\ntaps = [1]\nlength = 1",
            1,
            &["ck/recipe.toml", "family"],
        ),
        own("recipe of nothing known", "base = 'flux3'", 2, &["unknown recipe 'flux3'", "flux2-klein"]),
        own("recipe with a bad block", "base = 'flux2-klein'\n[profiles.f32]\nblock = 7", 1, &["block 7"]),
        own(
            "recipe with a bad rule",
            "base = 'flux2-klein'\n[profiles.f32]\nrules = [{ match = '(', weights = 'q4' }]",
            1,
            &["rule '('"],
        ),
        asked("profile", "--profile q5", &["unknown profile 'q5'", "f16, f32, q4, q4-fit, q8"]),
        asked("recipe", "--recipe sdxl", &["unknown recipe 'sdxl'", "flux2-klein"]),
        asked("key", "--set text_encoder.tabs=1", &["--set text_encoder.tabs", "taps"]),
        asked("section", "--set encoder.taps=1", &["--set encoder.taps", "text_encoder"]),
        asked("no value", "--set text_encoder.taps", &["write key=value"]),
        asked(
            "kind of value",
            "--set text_encoder.length=long",
            &["text_encoder.length=long", "a whole number"],
        ),
        asked("table", "--set text_encoder=1", &["--set text_encoder=1", "a single value"]),
        asked(
            "taps beyond the layers",
            "--set text_encoder.taps=1,3,6",
            &["text_encoder.taps", "1,3,6", "0 to the text encoder's 5"],
        ),
        asked(
            "width of the taps",
            "--set text_encoder.taps=1,3",
            &["192 columns", "joint_attention_dim is 288"],
        ),
        asked("no rows", "--set text_encoder.length=0", &["text_encoder.length", "1 to 8192"]),
        asked(
            "negative length",
            "--set text_encoder.length=-1",
            &["text_encoder.length=-1", "a whole number from 0"],
        ),
        asked("no steps", "--set schedule.steps=0", &["schedule.steps", "1 to 1000"]),
        asked("value of a profile", "--set profiles.q8.weights=q5", &["--set", "q5", "profiles.q8"]),
        asked("block", "--set profiles.q8.block=7", &["profile q8", "block 7"]),
        asked("switch", "--set profiles.q8.symmetric=maybe", &["profiles.q8.symmetric", "true or false"]),
        asked("value's name", "--set profiles.q8.blok=32", &["profiles.q8.blok", "no such value"]),
        asked("rules", "--set profiles.q8.rules=x", &["profiles.q8.rules", "recipe file"]),
        asked("flag", "--prolife q4", &["'--prolife'", "--profile"]),
        case("no folder", "export nowhere -o out", |_| (), 2, &["nowhere: not a folder"]),
        case("no -o", "export ck", |_| (), 2, &["--out <BUNDLE>"]),
        case("no verb", "exprot ck", |_| (), 2, &["'exprot'", "'export'"]),
    ];
    check(&Good::checkpoint(), &cases);
}

#[test]
fn places_for_a_bundle() {
    let to = |name, arguments: &str, harm: fn(&Path), code, says| {
        case(name, &format!("export ck --profile f32 {SET} {arguments}"), harm, code, says)
    };
    let nothing = |_: &Path| ();
    let cases = [
        to(
            "a folder",
            "-o there",
            |d| fs::create_dir(d.join("there")).unwrap(),
            2,
            &["there exists", "--force"],
        ),
        to("a foreign folder", "-o ck --force", nothing, 2, &["ck exists and is not a bundle"]),
        to(
            "a file",
            "-o file --force",
            |d| put(&d.join("file"), "mine"),
            2,
            &["file exists and is not a bundle"],
        ),
        to("below a file", "-o file/b", |d| put(&d.join("file"), "mine"), 1, &["file", "not a directory"]),
        to("where nobody writes", "-o /proc/viaduct/b", nothing, 1, &["/proc/viaduct", "No such file"]),
        to("a full disk", "-o out", nothing, 1, &["out", "File too large"])
            .with(|command| limit_files(command, 1 << 20)),
        to(
            "a dangling link",
            "-o link",
            |d| symlink("nowhere", d.join("link")).unwrap(),
            2,
            &["link exists"],
        ),
    ];
    check(&Good::checkpoint(), &cases);
}

const DRAW: &str = "generate -b b -p cat --size 32x32 --steps 1 --seed 1 --ep cpu -o out.png";

/// `generate` with a bundle to which something was done.
fn draw(
    name: &'static str,
    harm: impl Fn(&Path) + 'static,
    code: i32,
    says: &'static [&'static str],
) -> Case {
    case(name, DRAW, harm, code, says)
}

fn manifest(d: &Path, change: impl FnOnce(&mut Value)) {
    json(&d.join("b/bundle.json"), change);
}

#[test]
fn requests() {
    let ask = |name, arguments: &str, says| {
        case(name, &format!("generate -b b --ep cpu -o out.png {arguments}"), |_| (), 2, says)
    };
    let to = |name, arguments: &str, harm: fn(&Path), code, says| {
        case(
            name,
            &format!("generate -b b -p cat --size 32x32 --steps 1 --ep cpu {arguments}"),
            harm,
            code,
            says,
        )
    };
    let cases = [
        ask("width between", "-p cat --width 100", &["width 100 is not a multiple of 16", "96 or 112"]),
        ask("width 0", "-p cat --width 0", &["width 0 is out of range"]),
        ask(
            "height beyond all",
            "-p cat --height 9999999999999999",
            &["height 9999999999999999 is out of range"],
        ),
        ask("size beyond numbers", "-p cat --size 99999999999999999999999x16", &["is not a size"]),
        ask("no size", "-p cat --size big", &["'big'", "WIDTHxHEIGHT"]),
        ask("negative width", "-p cat --width=-16", &["-16", "--width"]),
        ask("two sizes", "-p cat --size 32x32 --width 32", &["--size", "--width"]),
        ask("0 steps", "-p cat --num-steps 0", &["--num-steps 0", "1 to 1000"]),
        ask("many steps", "-p cat --num-steps 100000", &["--num-steps 100000", "1 to 1000"]),
        ask("negative seed", "-p cat --seed=-1", &["-1", "--seed"]),
        ask("no prompt", "", &["--prompt"]),
        case(
            "unknown provider",
            "generate -b b -p cat -o out.png --ep cuda",
            |_| (),
            2,
            &["cuda", "auto, webgpu, cpu"],
        ),
        ask("seed and noise", "-p cat --seed 1 --noise n.npy", &["--seed", "--noise"]),
        to(
            "existing file",
            "-o out.png",
            |d| put(&d.join("out.png"), "mine"),
            2,
            &["out.png exists", "--force"],
        ),
        to("a folder", "-o b --force", |_| (), 2, &["-o b: that is a folder"]),
        to(
            "below a file",
            "-o file/out.png",
            |d| put(&d.join("file"), ""),
            1,
            &["cannot write into", "file"],
        ),
        to("where nobody writes", "-o /proc/out.png", |_| (), 1, &["/proc"]),
        to("missing noise", "-o new/out.png --noise n.npy", |_| (), 1, &["n.npy"]),
        to("full disk", "-o out.png --in-process", |_| (), 1, &["out.png", "File too large"])
            .with(|command| limit_files(command, 100)),
        to("dump below a file", "-o out.png --dump file/d", |d| put(&d.join("file"), ""), 1, &["file/d"]),
        to("dump where nobody writes", "-o out.png --dump /proc/viaduct", |_| (), 1, &["/proc/viaduct"]),
    ];
    check(&Good::bundle(), &cases);
}

/// What is written when the disk is full is whole or not there.
#[test]
fn a_dump_on_a_full_disk() {
    let good = Good::bundle();
    let directory = good.copy();
    let mut command = viaduct(directory.path(), &format!("{DRAW} --in-process --dump dump --progress none"));
    limit_files(&mut command, 8 << 10);
    let output = finish(command);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(".npy: File too large"), "{}", text(&output.stderr));
    assert!(!directory.path().join("out.png").exists());
    for entry in fs::read_dir(directory.path().join("dump")).unwrap() {
        viaduct::npy::read(&entry.unwrap().path()).unwrap();
    }
}

/// A disk that is really full, where the system lets a user mount one.
#[test]
fn a_full_disk() {
    let user = ["--user", "--map-root-user", "--mount"];
    let mut probe = Command::new("unshare");
    probe.args(user).args(["mount", "-t", "tmpfs", "none", "/mnt"]);
    if !probe.output().is_ok_and(|output| output.status.success()) {
        return println!("this system mounts nothing for users: not tried");
    }
    let export = format!("export ck -o disk/out {SET}");
    let draw = DRAW.replace("out.png", "disk/out.png");
    for (good, ballast, arguments) in [(Good::checkpoint(), 0, export), (Good::bundle(), 1 << 20, draw)] {
        let directory = good.copy();
        fs::create_dir(directory.path().join("disk")).unwrap();
        let script = format!(
            "mount -t tmpfs -o size=1m none disk && head -c {ballast} /dev/zero > disk/ballast; \
             \"$0\" \"$@\"; code=$?; ls -A disk; exit $code"
        );
        let inner = viaduct(directory.path(), &arguments);
        let mut command = Command::new("unshare");
        command.args(user).args(["sh", "-c", &script]).current_dir(directory.path());
        command.arg(inner.get_program()).args(inner.get_args()).args(["--progress", "none"]);
        command.envs(inner.get_envs().filter_map(|(key, value)| Some((key, value?))));
        let output = finish(command);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("No space left on device") && told.lines().count() == 1, "{told}");
        assert_eq!(text(&output.stdout), "ballast\n");
    }
}

#[test]
fn bundles() {
    const JSON: &str = "b/bundle.json";
    let cases = [
        case("no bundle", "generate -b nowhere -p cat -o out.png", |_| (), 1, &["nowhere: no such folder"]),
        draw(
            "manifest of garbage",
            |d| put(&d.join(JSON), "{\"format\": 1, oops"),
            1,
            &[JSON, "not a valid manifest"],
        ),
        draw(
            "manifest of a later format",
            |d| manifest(d, |m| m["format"] = json!(99)),
            1,
            &[JSON, "format 99"],
        ),
        draw("empty manifest", |d| put(&d.join(JSON), ""), 1, &[JSON]),
        draw("deep manifest", |d| put(&d.join(JSON), "[".repeat(100_000)), 1, &[JSON]),
        draw(
            "missing file",
            |d| fs::remove_file(d.join("b/transformer.onnx")).unwrap(),
            1,
            &["b/transformer.onnx is missing"],
        ),
        draw(
            "short file",
            |d| edit(&d.join("b/embedding.bin"), |b| b.truncate(999)),
            1,
            &["b/embedding.bin: 999 bytes"],
        ),
        draw(
            "file outside",
            |d| manifest(d, |m| m["files"][0]["path"] = json!("../ck")),
            1,
            &[JSON, "'../ck'", "leaves"],
        ),
        draw(
            "file from the root",
            |d| manifest(d, |m| m["files"][0]["path"] = json!("/etc/passwd")),
            1,
            &["/etc/passwd"],
        ),
        draw(
            "unlisted graph",
            |d| manifest(d, |m| m["stages"][0]["graph"] = json!("x.onnx")),
            1,
            &["x.onnx"],
        ),
        draw(
            "missing stage",
            |d| manifest(d, |m| m["stages"][2]["name"] = json!("x")),
            1,
            &["'transformer' is not in this bundle"],
        ),
        draw(
            "another family's parameters",
            |d| manifest(d, |m| m["parameters"] = json!({})),
            1,
            &[JSON, "text"],
        ),
        draw(
            "no pixels per token",
            |d| manifest(d, |m| m["parameters"]["vae"]["pixels_per_token"] = json!(0)),
            1,
            &[JSON, "vae.pixels_per_token is 0"],
        ),
        draw(
            "endless text",
            |d| manifest(d, |m| m["parameters"]["text"]["length"] = json!(1u64 << 40)),
            1,
            &[JSON, "text.length is 1099511627776"],
        ),
        draw(
            "another width",
            |d| manifest(d, |m| m["parameters"]["transformer"]["width"] = json!(7)),
            1,
            &["stage modulation", "dit_temb", "[1, 7]"],
        ),
        draw(
            "ids beyond the table",
            |d| manifest(d, |m| m["parameters"]["text"]["pad_id"] = json!(100_000)),
            1,
            &["token id 100000", "264 rows"],
        ),
        draw(
            "negative id",
            |d| manifest(d, |m| m["parameters"]["text"]["pad_id"] = json!(-1)),
            1,
            &["-1 is not a token id"],
        ),
        draw(
            "another table",
            |d| manifest(d, |m| m["parameters"]["text"]["embedding"]["rows"] = json!(1)),
            1,
            &["b/embedding.bin", "1 x 96"],
        ),
        case(
            "changed byte",
            "inspect b --hashes",
            |d| edit(&d.join("b/vae_pre-00000.data"), |b| b[7] ^= 1),
            1,
            &["b/vae_pre-00000.data: SHA-256 is"],
        ),
        draw(
            "graph of garbage",
            |d| edit(&d.join("b/vae_pre.onnx"), |b| b.fill(0xA5)),
            1,
            &["vae_pre.onnx is not an ONNX model", "vae_pre.onnx"],
        ),
        draw(
            "graph cut and padded",
            |d| {
                edit(&d.join("b/text_encoder.onnx"), |b| {
                    let half = b.len() / 2;
                    b[half..].fill(0)
                })
            },
            1,
            &["text_encoder.onnx is not an ONNX model"],
        ),
        draw(
            "graph of another stage",
            |d| {
                let graph = fs::read(d.join("b/vae_post1.onnx")).unwrap();
                replace_listed(&d.join("b"), "vae_post0.onnx", &graph);
            },
            1,
            &["stage vae_post0"],
        ),
        draw(
            "not a number",
            |d| edit(&d.join("b/transformer-00000.data"), |b| b.fill(0xFF)),
            1,
            &["transformer, step 0", "NaN"],
        ),
        draw(
            "not a number in the text",
            |d| edit(&d.join("b/text_encoder-00000.data"), |b| b.fill(0xFF)),
            1,
            &["text_encoder", "NaN"],
        ),
        draw(
            "constant picture",
            |d| edit(&d.join("b/vae_post1-00000.data"), |b| b.fill(0)),
            1,
            &["vae", "the same everywhere"],
        ),
        draw(
            "tokenizer of garbage",
            |d| edit(&d.join("b/tokenizer/tokenizer.json"), |b| b[0] = b'['),
            1,
            &["b/tokenizer/tokenizer.json is not a tokenizer"],
        ),
        draw(
            "endless template",
            |d| {
                let endless = b"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
                replace_listed(&d.join("b"), "tokenizer/chat_template.jinja", endless);
            },
            1,
            &["chat template", "b/tokenizer"],
        ),
        draw(
            "template of garbage",
            |d| {
                replace_listed(&d.join("b"), "tokenizer/chat_template.jinja", b"{% if %}");
            },
            1,
            &["chat template", "b/tokenizer"],
        ),
    ];
    check(&Good::bundle(), &cases);
}

/// NumPy's header for a shape, and data.
fn npy(descr: &str, fortran: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}");
    let text = format!("{text:<117}\n");
    [b"\x93NUMPY\x01\x00", &(text.len() as u16).to_le_bytes()[..], text.as_bytes(), data].concat()
}

#[test]
fn noise() {
    // 32x32 pixels are 2x2 tokens of 16 channels.
    let with = |name, bytes: Vec<u8>, code, says| {
        let arguments = "generate -b b -p cat --size 32x32 --steps 1 --ep cpu -o out.png --noise n.npy";
        case(name, arguments, move |d| put(&d.join("n.npy"), &bytes), code, says)
    };
    let zeros = [0; 256];
    let cases = [
        with(
            "wrong shape",
            npy("<f4", "False", "(1, 16, 4, 1)", &zeros),
            2,
            &["[1, 16, 4, 1]", "32x32 needs [1, 16, 2, 2]"],
        ),
        with("no axes", npy("<f4", "False", "()", &zeros[..4]), 2, &["shape []"]),
        // Before anything is planned or opened.
        case(
            "wrong shape and no memory",
            "generate -b b -p cat --size 32x32 --ep cpu -o out.png --noise n.npy --budget 1MiB",
            move |d| put(&d.join("n.npy"), npy("<f4", "False", "(1, 16, 4, 1)", &zeros)),
            2,
            &["32x32 needs [1, 16, 2, 2]"],
        ),
        with("not a number", npy("<f4", "False", "(1, 16, 2, 2)", &[0xFF; 256]), 1, &["n.npy", "NaN"]),
        with("no npy", b"PK\x03\x04".to_vec(), 1, &["n.npy: not a .npy file"]),
        with("empty", Vec::new(), 1, &["n.npy"]),
        with(
            "truncated",
            npy("<f4", "False", "(1, 16, 2, 2)", &zeros[..99]),
            1,
            &["n.npy", "needs 256 bytes", "99"],
        ),
        with(
            "lying shape",
            npy("<f4", "False", "(1, 99999999999, 99999999999)", &zeros),
            1,
            &["n.npy", "more elements"],
        ),
        with("objects", npy("|O", "False", "(1, 16, 2, 2)", &zeros), 1, &["n.npy", "dtype \"|O\""]),
        with("big-endian", npy(">f4", "False", "(1, 16, 2, 2)", &zeros), 1, &["n.npy", "dtype \">f4\""]),
        with("garbage order", npy("<f4", "Maybe", "(1, 16, 2, 2)", &zeros), 1, &["n.npy", "True or False"]),
        case(
            "missing",
            "generate -b b -p cat --ep cpu -o out.png --noise nowhere.npy",
            |_| (),
            1,
            &["nowhere.npy: No such file"],
        ),
    ];
    check(&Good::bundle(), &cases);
    // Fortran order is legal: the picture is that of the same values in C order.
    let directory = Good::bundle().copy();
    let values: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    // [1, 16, 2, 2] with the first axis fastest.
    let flipped: Vec<f32> = (0..64).map(|i| values[(i % 16) * 4 + (i / 16 % 2) * 2 + i / 32]).collect();
    let pictures = [("False", &values), ("True", &flipped)].map(|(order, values)| {
        put(&directory.path().join("n.npy"), npy("<f4", order, "(1, 16, 2, 2)", &bytes(values)));
        let arguments =
            "generate -b b -p cat --size 32x32 --steps 1 --ep cpu -o out.png --force --noise n.npy";
        let output = finish(viaduct(directory.path(), arguments));
        assert!(output.status.success(), "{}", text(&output.stderr));
        fs::read(directory.path().join("out.png")).unwrap()
    });
    assert_eq!(pictures[0], pictures[1]);
}

#[test]
fn oracles() {
    let with = |name, harm: fn(&Path), code, says| {
        let harm = move |d: &Path| {
            fs::create_dir(d.join("o")).unwrap();
            for entry in fs::read_dir(root().join("tests/fixtures/flux2-a/oracle")).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, d.join("o").join(path.file_name().unwrap())).unwrap();
            }
            harm(d);
        };
        case(name, "verify b --oracle o --ep cpu --no-store --no-controls", harm, code, says)
    };
    fn request(d: &Path, change: impl FnOnce(&mut Value)) {
        json(&d.join("o/request.json"), change);
    }
    let cases = [
        with(
            "no request",
            |d| fs::remove_file(d.join("o/request.json")).unwrap(),
            1,
            &["o/request.json: No such file"],
        ),
        with("request of garbage", |d| put(&d.join("o/request.json"), "{"), 1, &["o/request.json"]),
        with(
            "another length",
            |d| request(d, |r| r["text_length"] = json!(64)),
            2,
            &["text_encoder.length", "has 40, the oracle 64", "--set"],
        ),
        with(
            "other taps",
            |d| request(d, |r| r["taps"] = json!([1, 2, 3])),
            2,
            &["text_encoder.taps", "1,2,3"],
        ),
        with("illegal size", |d| request(d, |r| r["width"] = json!(100)), 2, &["width 100"]),
        with("0 steps", |d| request(d, |r| r["steps"] = json!(0)), 2, &["steps is 0"]),
        with(
            "steps beyond number",
            |d| request(d, |r| r["steps"] = json!(1_000_000_000_000_u64)),
            2,
            &["steps is 1000000000000", "1 to 1000"],
        ),
        with(
            "request without an end",
            |d| {
                fs::remove_file(d.join("o/request.json")).unwrap();
                std::os::unix::fs::symlink("/dev/zero", d.join("o/request.json")).unwrap();
            },
            1,
            &["o/request.json: not a regular file"],
        ),
        with(
            "text that is not finite",
            |d| edit(&d.join("o/prompt_embeds.npy"), |b| *b.last_chunk_mut().unwrap() = [0xFF; 4]),
            1,
            &["o/prompt_embeds.npy: value", "is NaN"],
        ),
        with(
            "noise that is not finite",
            |d| {
                edit(&d.join("o/noise_nchw.npy"), |b| {
                    *b.last_chunk_mut().unwrap() = f32::INFINITY.to_le_bytes()
                })
            },
            1,
            &["o/noise_nchw.npy: value", "is inf"],
        ),
        with(
            "ids of another shape",
            |d| {
                edit(&d.join("o/input_ids.npy"), |b| {
                    let text = b.windows(7).position(|w| w == b"(1, 40)").unwrap();
                    b[text..text + 7].copy_from_slice(b"(40, 1)");
                })
            },
            3,
            &["the first is input_ids: 40 differ"],
        ),
        with(
            "ids as floats",
            |d| put(&d.join("o/input_ids.npy"), npy("<f4", "False", "(1, 40)", &[0; 160])),
            3,
            &["the first is input_ids: 40 differ"],
        ),
        with(
            "noise elsewhere",
            |d| request(d, |r| r["noise"] = json!("../n.npy")),
            1,
            &["o/request.json", "../n.npy"],
        ),
        with(
            "missing noise",
            |d| fs::remove_file(d.join("o/noise_nchw.npy")).unwrap(),
            1,
            &["o/noise_nchw.npy"],
        ),
        with(
            "corrupt noise",
            |d| edit(&d.join("o/noise_nchw.npy"), |b| b.truncate(300)),
            1,
            &["o/noise_nchw.npy", "bytes"],
        ),
        with(
            "corrupt tensor",
            |d| put(&d.join("o/dit_temb.npy"), "junk"),
            1,
            &["o/dit_temb.npy: not a .npy file"],
        ),
        with("corrupt picture", |d| put(&d.join("o/image_01.npy"), ""), 1, &["o/image_01.npy"]),
        with(
            "mask of another length",
            |d| put(&d.join("o/attention_mask.npy"), npy("<i8", "False", "(100000,)", &[0; 800_000])),
            3,
            &["attention_mask"],
        ),
        with(
            "another value",
            |d| edit(&d.join("o/pred_step0.npy"), |b| *b.last_mut().unwrap() ^= 0x80),
            3,
            &["bars are missed", "pred_step0"],
        ),
        case("no oracle", "verify b --oracle nowhere --ep cpu", |_| (), 1, &["nowhere/request.json"]),
    ];
    check(&Good::bundle(), &cases);
}

#[test]
fn files_to_inspect() {
    let show = |name, file: &str, harm: fn(&Path), code, says| {
        case(name, &format!("inspect {file}"), harm, code, says)
    };
    let png = root().join("tests/fixtures/klein-emoji/0/image.png");
    let cut = move |keep: usize| {
        let png = png.clone();
        move |d: &Path| put(&d.join("x.png"), &fs::read(&png).unwrap()[..keep])
    };
    let cases = [
        show("nothing", "nowhere", |_| (), 1, &["nowhere: No such file"]),
        show("missing picture", "nowhere.png", |_| (), 1, &["nowhere.png: No such file"]),
        show("any file", "x.bin", |d| put(&d.join("x.bin"), [7; 99]), 2, &["x.bin: not a bundle folder"]),
        show("any folder", "b/tokenizer", |_| (), 1, &["b/tokenizer: no bundle.json"]),
        show("picture of garbage", "x.png", |d| put(&d.join("x.png"), [7; 99]), 1, &["x.png"]),
        case("picture cut in its pixels", "inspect x.png", cut(600), 1, &["x.png", "cannot decode"]),
        case("picture cut in its header", "inspect x.png", cut(20), 1, &["x.png", "cannot decode"]),
        show("model of garbage", "x.onnx", |d| put(&d.join("x.onnx"), [0xA5; 999]), 1, &["x.onnx"]),
        show("empty model", "x.onnx", |d| put(&d.join("x.onnx"), ""), 1, &["x.onnx"]),
        show(
            "truncated model",
            "b/vae_pre.onnx",
            |d| edit(&d.join("b/vae_pre.onnx"), |b| b.truncate(3000)),
            1,
            &["b/vae_pre.onnx"],
        ),
    ];
    check(&Good::bundle(), &cases);
}

#[test]
fn what_is_missing_around() {
    let nowhere = |command: &mut Command| {
        command.env("VK_DRIVER_FILES", "/nowhere").env("VK_ICD_FILENAMES", "/nowhere");
    };
    let runtime = |command: &mut Command| {
        command.env("VIADUCT_RUNTIME", "rt");
    };
    let full = |command: &mut Command| {
        command.stdout(File::create("/dev/full").unwrap());
    };
    let webgpu = DRAW.replace("--ep cpu", "--ep webgpu");
    let rt = |file: Option<&'static str>| {
        move |d: &Path| {
            fs::create_dir(d.join("rt")).unwrap();
            if let Some(bytes) = file {
                put(&d.join("rt/libonnxruntime.so"), bytes);
            }
        }
    };
    let cases = [
        case("no adapter", &webgpu, |_| (), 6, &["no adapter for WebGPU", "--ep cpu"]).with(nowhere),
        case("another adapter", &format!("{webgpu} --adapter Voodoo2"), |_| (), 6, &["no adapter"])
            .with(nowhere),
        case("no runtime", DRAW, rt(None), 1, &["libonnxruntime.so", "rt", "make setup"]).with(runtime),
        case(
            "runtime of garbage",
            DRAW,
            rt(Some("not a library")),
            1,
            &["rt/libonnxruntime.so", "make setup"],
        )
        .with(runtime),
        case("full standard output", "inspect b", |_| (), 1, &["standard output", "No space left"])
            .with(full),
        case("full standard output, help", "--help", |_| (), 1, &["standard output"]).with(full),
    ];
    check(&Good::bundle(), &cases);
}

#[test]
fn readers_that_go_away() {
    let directory = Good::bundle().copy();
    for arguments in ["inspect b", "inspect b --json", "--help", "generate --help", "--version", DRAW] {
        let output = unread(viaduct(directory.path(), arguments));
        assert!(output.status.success(), "{arguments}: {}: {}", output.status, text(&output.stderr));
    }
    let mut command = viaduct(directory.path(), "inspect nowhere");
    command.stderr(File::create("/dev/full").unwrap());
    assert_eq!(command.status().unwrap().code(), Some(1));
}

#[test]
fn names_that_are_no_text() {
    let directory = Good::bundle().copy();
    let name = OsStr::from_bytes(b"\xFFb");
    fs::rename(directory.path().join("b"), directory.path().join(name)).unwrap();
    let run = |arguments: &str, more: &[&OsStr]| {
        let mut command = viaduct(directory.path(), arguments);
        command.args(more);
        let output = finish(command);
        (output.status.code(), text(&output.stderr))
    };
    let (code, told) = run("inspect --json", &[name]);
    assert_eq!(code, Some(0), "{told}");
    let picture = OsStr::from_bytes(b"\xFF.png");
    let draw = "generate -p cat --size 32x32 --steps 1 --ep cpu --json --progress none -b";
    // ONNX Runtime takes the folder of the weights as text.
    let (code, told) = run(draw, &[name, OsStr::new("-o"), picture]);
    assert!(code == Some(1) && told.contains("not UTF-8") && told.lines().count() == 1, "{told}");
    fs::rename(directory.path().join(name), directory.path().join("b")).unwrap();
    let (code, told) = run(draw, &[OsStr::new("b"), OsStr::new("-o"), picture]);
    assert_eq!(code, Some(0), "{told}");
    assert!(directory.path().join(picture).is_file());
    let (code, told) = run("generate -b b -o x.png -p", &[name]);
    assert_eq!(code, Some(2), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let (code, told) = run("inspect", &[OsStr::from_bytes(b"\xFE")]);
    assert_eq!((code, told.lines().count()), (Some(1), 1), "{told}");
}

/// An export that is stopped at any time leaves a whole bundle or none.
#[test]
fn interrupted_exports() {
    let source = root().join("bundles/klein-emoji/source");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL] {
        for delay in [0, 5, 20, 50, 100, 200, 400, 800] {
            let directory = tempfile::tempdir().unwrap();
            let mut command = viaduct(directory.path(), "export -o out --profile q4 --progress none");
            let child = command.arg(&source).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            sleep(Duration::from_millis(delay));
            // SAFETY: the child has not been waited for, so the number is still its own.
            unsafe { libc::kill(child.id() as i32, signal) };
            let output = child.wait_with_output().unwrap();
            let (status, told) = (output.status, text(&output.stderr));
            let left: Vec<_> = snapshot(directory.path()).into_keys().collect();
            // What has the bundle's name is whole, also if the process died between the renaming and its end.
            if status.success() || signal == libc::SIGKILL && directory.path().join("out").exists() {
                let check = finish(viaduct(directory.path(), "inspect out --hashes"));
                assert!(check.status.success(), "{signal} after {delay} ms: {}", text(&check.stderr));
            } else if signal != libc::SIGKILL {
                let stopped = status.code() == Some(128 + signal) || status.signal() == Some(signal);
                assert!(stopped, "signal {signal} after {delay} ms: {status}: {told}");
                assert!(left.is_empty(), "signal {signal} after {delay} ms: {left:?}");
                assert!(told.lines().count() <= 1 && !told.contains("panicked"), "{told}");
            }
        }
    }
}
