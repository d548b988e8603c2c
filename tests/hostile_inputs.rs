//! Inputs that mean harm, or that would lose what a user has: files that never end, names that leave their folder,
//! folders with more in them than a bundle, bundles that contradict themselves.

#[path = "support/bad.rs"]
mod bad;

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use bad::{Case, Good, SET, case, check, edit, finish, json, put, replace_listed, viaduct};
use serde_json::json;

const DRAW: &str = "generate -b b -p cat --size 32x32 --steps 1 --seed 1 --ep cpu -o out.png";

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// `export` of the checkpoint with more arguments.
fn export(name: &'static str, more: &str, harm: fn(&Path), code: i32, says: &'static [&'static str]) -> Case {
    case(name, &format!("export ck --profile f32 {SET} {more}"), harm, code, says)
}

fn draw(name: &'static str, harm: fn(&Path), code: i32, says: &'static [&'static str]) -> Case {
    case(name, DRAW, harm, code, says)
}

fn set_manifest(d: &Path, pointer: &str, value: serde_json::Value) {
    json(&d.join("b/bundle.json"), |m| *m.pointer_mut(pointer).unwrap() = value);
}

#[test]
fn force_removes_nothing_of_the_users() {
    fn bundle_at(d: &Path, folder: &str) {
        let made = finish(viaduct(d, &format!("export ck -o {folder} --profile f32 {SET}")));
        assert!(made.status.success());
    }
    let cases = [
        export(
            "a manifest of something else",
            "-o mine --force",
            |d| {
                fs::create_dir(d.join("mine")).unwrap();
                put(&d.join("mine/bundle.json"), "{}");
                put(&d.join("mine/thesis.txt"), "x");
            },
            2,
            &["mine exists and is not a bundle"],
        ),
        export(
            "a picture in the bundle",
            "-o b --force",
            |d| {
                bundle_at(d, "b");
                put(&d.join("b/picture.png"), "x");
            },
            2,
            &["b/picture.png", "not part of the bundle"],
        ),
        case(
            "the checkpoint in the bundle",
            &format!("export b/ck -o b --force --profile f32 {SET}"),
            |d| {
                bundle_at(d, "b");
                fs::rename(d.join("ck"), d.join("b/ck")).unwrap();
            },
            2,
            &["b: the checkpoint lies inside"],
        ),
        export("no name", "-o b/..", |d| fs::create_dir(d.join("b")).unwrap(), 2, &["b/..: name a folder"]),
    ];
    check(&Good::checkpoint(), &cases);
}

/// A name that an earlier run may have left does not stop a later one.
#[test]
fn force_works_after_a_kill() {
    let directory = Good::checkpoint().copy();
    let run = |more: &str| {
        finish(viaduct(directory.path(), &format!("export ck -o b --profile f32 {SET} {more}")))
            .status
            .success()
    };
    assert!(run(""));
    fs::create_dir(directory.path().join(".b.replaced")).unwrap();
    put(&directory.path().join(".b.replaced/x"), "x");
    assert!(run("--force") && run("--force"));
}

#[test]
fn checkpoints() {
    let cases = [
        export(
            "config that never ends",
            "-o out",
            |d| pipe(&d.join("ck/vae/config.json")),
            1,
            &["ck/vae/config.json", "not a regular file"],
        ),
        export(
            "weights that never end",
            "-o out",
            |d| pipe(&d.join("ck/vae/diffusion_pytorch_model.safetensors")),
            1,
            &["not a regular file"],
        ),
        export(
            "recipe that never ends",
            "-o out --recipe r.toml",
            |d| pipe(&d.join("r.toml")),
            1,
            &["r.toml: not a regular file"],
        ),
        export(
            "recipe of zeros",
            "-o out",
            |d| symlink("/dev/zero", d.join("ck/recipe.toml")).unwrap(),
            1,
            &["ck/recipe.toml: not a regular file"],
        ),
        export("bar that is none", "-o out --set gates.f32.tensor=nan", |_| (), 2, &["gates.f32", "NaN"]),
        export(
            "bar of a component that is none",
            "-o out --set gates.f32.transformer.velocity=-1",
            |_| (),
            2,
            &["gates.f32", "-1"],
        ),
        export(
            "unknown control",
            "-o out --recipe r.toml",
            |d| {
                let control = "alters = \"x\"\nhow = \"melt\"\nmisses = \"y\"\nmeasure = \"psnr\"";
                put(&d.join("r.toml"), format!("base = \"flux2-klein\"\n[controls.x]\n{control}\n"));
            },
            1,
            &["melt", "zero_padding"],
        ),
        export(
            "misspelt section",
            "-o out --recipe r.toml",
            |d| {
                put(&d.join("r.toml"), "base = \"flux2-klein\"\nvae_decodr = { cuts = [] }\n");
            },
            1,
            &["unknown key 'vae_decodr'", "vae_decoder"],
        ),
        export(
            "misspelt value",
            "-o out --recipe r.toml",
            |d| {
                put(&d.join("r.toml"), "base = \"flux2-klein\"\nprofiles.f32.blok = 64\n");
            },
            1,
            &["blok", "block"],
        ),
    ];
    check(&Good::checkpoint(), &cases);
}

/// Streams that some downloads leave beside the tokenizer's files are not taken into the bundle.
#[test]
fn streams_beside_the_tokenizer() {
    let directory = Good::checkpoint().copy();
    put(&directory.path().join("ck/tokenizer/tokenizer.json:Zone.Identifier"), "x");
    for arguments in [format!("export ck -o b --profile f32 {SET}"), "inspect b --hashes".to_owned()] {
        let output = finish(viaduct(directory.path(), &arguments));
        assert!(output.status.success(), "{}", bad::text(&output.stderr));
    }
}

#[test]
fn bundles_and_targets() {
    let cases = [
        draw("another family", |d| set_manifest(d, "/family", json!("sdxl")), 1, &["family 'sdxl'"]),
        draw(
            "other pixels per token",
            |d| set_manifest(d, "/parameters/vae/pixels_per_token", json!(8)),
            1,
            &["[1, 3, 64, 64]", "32x32"],
        ),
        draw(
            "long template",
            |d| {
                let template = format!("{{{{ {} 1 }}}}", "not ".repeat(100_000));
                replace_listed(&d.join("b"), "tokenizer/chat_template.jinja", template.as_bytes());
            },
            1,
            &["chat_template.jinja"],
        ),
        draw("target that is a pipe", |d| pipe(&d.join("out.png")), 2, &["out.png exists"]),
        case(
            "target that is a pipe, forced",
            &format!("{DRAW} --force"),
            |d| pipe(&d.join("out.png")),
            2,
            &["out.png is not a regular file"],
        ),
        case("picture of another kind", &DRAW.replace("out.png", "out.jpg"), |_| (), 2, &["PNG", "out.jpg"]),
        case("folder as a picture", &DRAW.replace("out.png", "out/"), |_| (), 2, &["name a .png file"]),
        case(
            "noise that never comes",
            &format!("{DRAW} --noise n.npy").replace("--seed 1 ", ""),
            |d| {
                pipe(&d.join("n.npy"));
            },
            1,
            &["n.npy: not a regular file"],
        ),
        case(
            "noise without end",
            &format!("{DRAW} --noise n.npy").replace("--seed 1 ", ""),
            |d| {
                let file = fs::File::create(d.join("n.npy")).unwrap();
                file.set_len(40 << 30).unwrap();
            },
            1,
            &["n.npy: 42949672960 bytes"],
        ),
        case(
            "dump among other files",
            &format!("{DRAW} --dump dump"),
            |d| {
                fs::create_dir(d.join("dump")).unwrap();
                put(&d.join("dump/pred_step7.npy"), "of another run");
            },
            2,
            &["dump: the folder is not empty", "--force"],
        ),
        case(
            "picture that never ends",
            "inspect x.png",
            |d| pipe(&d.join("x.png")),
            1,
            &["not a regular file"],
        ),
        case(
            "request that never comes",
            "verify b --oracle o --ep cpu",
            |d| {
                fs::create_dir(d.join("o")).unwrap();
                pipe(&d.join("o/request.json"));
            },
            1,
            &["o/request.json: not a regular file"],
        ),
        case(
            "oracle of nothing",
            "verify b --oracle o --ep cpu --no-store --no-controls",
            |d| {
                fs::create_dir(d.join("o")).unwrap();
                let oracle = bad::root().join("tests/fixtures/flux2-a/oracle");
                for name in ["request.json", "noise_nchw.npy"] {
                    fs::copy(oracle.join(name), d.join("o").join(name)).unwrap();
                }
            },
            1,
            &["no tensor of the model"],
        ),
    ];
    check(&Good::bundle(), &cases);
}

/// A graph may call its tensors what it likes; a dump stays in its folder.
#[test]
fn a_dump_stays_in_its_folder() {
    let directory = Good::bundle().copy();
    let (from, to) = (b"image_raw", b"../escape");
    for entry in fs::read_dir(directory.path().join("b")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "onnx") {
            edit(&path, |bytes| {
                while let Some(place) = bytes.windows(from.len()).position(|w| w == from) {
                    bytes[place..place + from.len()].copy_from_slice(to);
                }
            });
        }
    }
    let output = finish(viaduct(directory.path(), &format!("{DRAW} --dump dump")));
    assert_eq!(output.status.code(), Some(1), "{}", bad::text(&output.stderr));
    assert!(bad::text(&output.stderr).contains("'../escape'"), "{}", bad::text(&output.stderr));
    assert!(!directory.path().join("escape.npy").exists() && !directory.path().join("out.png").exists());
}
