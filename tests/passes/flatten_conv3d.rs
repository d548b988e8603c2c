use viaduct_export::{
    onnx::{DType, Dim},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, int, ints, noise, string, tensor},
    same::{Bar, one, rewrite},
};

/// What a kernel of `frames` frames and `size` rows and columns over 4 channels looks like.
fn net(frames: usize, size: usize) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, 4, 1, 6, 5]).float(
        "w",
        &[3, 4, frames, size, size],
        &noise(1, 12 * frames * size * size),
    );
    net.float("b", &[3], &noise(2, 3));
    net
}

fn feeds() -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, &[1, 4, 1, 6, 5], &noise(3, 120)))]
}

#[test]
fn a_causal_convolution_over_one_frame_is_a_plain_one() {
    let mut net = net(3, 3);
    net.ints("pads", &[0, 0, 2, 1, 1, 0, 0, 0, 1, 1]).node("Pad", &["x", "pads"], "p", &[]);
    net.node("Conv", &["p", "w", "b"], "y", &[("kernel_shape", ints(&[3, 3, 3]))]);
    let after = one(&net.model(&["y"]), "flatten_conv3d", &feeds(), Bar::Relative(1e-6));
    assert_eq!(
        after.operators().into_iter().collect::<Vec<_>>(),
        [("Conv", 1), ("Squeeze", 1), ("Unsqueeze", 1)]
    );
}

#[test]
fn padding_in_the_middle_and_kernels_of_one_frame() {
    let mut symmetric = net(3, 1);
    symmetric.node("Conv", &["x", "w"], "y", &[("pads", ints(&[1, 0, 0, 1, 0, 0]))]);
    assert_eq!(one(&symmetric.model(&["y"]), "flatten_conv3d", &feeds(), Bar::Relative(1e-6)).applied(), 1);
    let mut flat = net(1, 3);
    flat.node(
        "Conv",
        &["x", "w"],
        "y",
        &[("strides", ints(&[1, 2, 2])), ("pads", ints(&[0, 1, 0, 0, 0, 1]))],
    );
    assert_eq!(one(&flat.model(&["y"]), "flatten_conv3d", &feeds(), Bar::Relative(1e-6)).applied(), 1);
}

#[test]
fn refusals() {
    type Case = (&'static str, fn(&mut Net));
    let cases: [Case; 7] = [
        ("its kernel is no constant", |net| {
            net.x("k", &[3, 4, 1, 1, 1]).node("Conv", &["x", "k"], "y", &[]);
        }),
        ("its padding is automatic", |net| {
            net.node("Conv", &["x", "w"], "y", &[("auto_pad", string("SAME_UPPER"))]);
        }),
        ("its padding is not understood", |net| {
            net.node("Conv", &["x", "w"], "y", &[("pads", ints(&[-1, 0, 0, 0, 0, 0]))]);
        }),
        ("it sees more than one frame", |net| {
            net.x("many", &[1, 4, 3, 6, 5]).node("Conv", &["many", "w"], "y", &[]);
        }),
        ("the number of its frames is not known", |net| {
            let dims = [1, 4, 0, 6, 5]
                .map(|n| if n == 0 { Dim::Symbol("frames".to_owned()) } else { Dim::Fixed(n) });
            net.input("some", DType::F32, &dims).node("Conv", &["some", "w"], "y", &[]);
        }),
        ("it skips frames", |net| {
            net.node(
                "Conv",
                &["x", "w"],
                "y",
                &[("dilations", ints(&[2, 1, 1])), ("pads", ints(&[4, 0, 0, 0, 0, 0]))],
            );
        }),
        ("its result has several frames", |net| {
            net.node("Conv", &["x", "w"], "y", &[("pads", ints(&[2, 0, 0, 2, 0, 0])), ("group", int(1))]);
        }),
    ];
    for (why, build) in cases {
        let mut net = net(3, 3);
        build(&mut net);
        let after = rewrite(&net.model(&["y"]), &[pass("flatten_conv3d").unwrap()], &Settings::default());
        assert_eq!(after.refusals().into_iter().collect::<Vec<_>>(), [(why.to_owned(), 1)]);
    }
}

#[test]
fn a_pad_that_is_not_zeros_stays_before_the_convolution() {
    let mut net = net(1, 3);
    net.ints("pads", &[0, 0, 0, 1, 1, 0, 0, 0, 1, 1]).node(
        "Pad",
        &["x", "pads"],
        "p",
        &[("mode", string("edge"))],
    );
    net.node("Conv", &["p", "w"], "y", &[]);
    let after = one(&net.model(&["y"]), "flatten_conv3d", &feeds(), Bar::Relative(1e-6));
    assert_eq!(after.operators()["Pad"], 1);
}
