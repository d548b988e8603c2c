//! Prompts and pictures.

use std::fs;

use viaduct::{
    npy,
    tensor::{HostTensor, Values},
};

use crate::{
    DRAW,
    bad::{Good, edit, put, root, text},
    run, succeed,
};

/// Padding rows of the prompt reach the transformer: <https://github.com/black-forest-labs/flux2/issues/59>. They are
/// compared apart from the real rows, and zeroed ones are noticed.
#[test]
fn bug_25_padding_rows() {
    let directory = Good::bundle().copy();
    let oracle = directory.path().join("o");
    fs::create_dir(&oracle).unwrap();
    for entry in fs::read_dir(root().join("tests/fixtures/flux2-a/oracle")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, oracle.join(path.file_name().unwrap())).unwrap();
    }
    let output = succeed(directory.path(), "verify b --oracle o --ep cpu");
    for class in ["prompt_embeds (real rows)", "prompt_embeds (padding rows)"] {
        assert!(text(&output.stdout).contains(class), "{}", text(&output.stdout));
    }
    let mask = npy::read(&oracle.join("attention_mask.npy")).unwrap().to_f32();
    let embeds = npy::read(&oracle.join("prompt_embeds.npy")).unwrap();
    let (shape, mut values) = (embeds.shape.clone(), embeds.to_f32());
    let width = values.len() / mask.len();
    for (row, _) in mask.iter().enumerate().filter(|(_, mask)| **mask == 0.0) {
        values[row * width..][..width].fill(0.0);
    }
    put(
        &oracle.join("prompt_embeds.npy"),
        npy::to_bytes(&HostTensor::new(&shape, Values::F32(values.into()))),
    );
    let output = run(directory.path(), "verify b --oracle o --ep cpu");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("the first is prompt_embeds (padding rows)"),
        "{}",
        text(&output.stderr)
    );
}

/// NaN and constant pictures are written as black ones: <https://github.com/Tongyi-MAI/Z-Image/issues/14>,
/// <https://github.com/huggingface/diffusers/issues/1083>, <https://github.com/leejet/stable-diffusion.cpp/issues/968>.
#[test]
fn bug_27_broken_numbers_are_no_picture() {
    let good = Good::bundle();
    for (file, byte, told) in [
        ("transformer-00000.data", 0xFF, "transformer, step 0"),
        ("vae_post0-00000.data", 0xFF, "vae_post0"),
        ("vae_post1-00000.data", 0, "vae: the same everywhere"),
    ] {
        let directory = good.copy();
        put(&directory.path().join("out.png"), "a good picture");
        edit(&directory.path().join("b").join(file), |bytes| bytes.fill(byte));
        let output = run(directory.path(), &format!("{DRAW} --force"));
        assert_eq!(output.status.code(), Some(1), "{file}");
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
        assert_eq!(fs::read(directory.path().join("out.png")).unwrap(), b"a good picture");
    }
}
