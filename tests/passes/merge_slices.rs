use viaduct_export::{
    onnx::DType,
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, one, rewrite},
};

/// x [2, 6, count * 4], sliced into pieces of 4 columns that are added up.
fn chunks(count: usize) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 6, count * 4]).ints("axes", &[-1]);
    for i in 0..count {
        let [start, end, piece] = ["start", "end", "piece"].map(|name| format!("{name}{i}"));
        let last = if i + 1 == count { i64::MAX } else { 4 * (i as i64 + 1) };
        net.ints(&start, &[4 * i as i64]).ints(&end, &[last]);
        net.node("Slice", &["x", &start, &end, "axes"], &piece, &[]);
    }
    let pieces: Vec<String> = (0..count).map(|i| format!("piece{i}")).collect();
    net.node("Sum", &pieces.iter().map(String::as_str).collect::<Vec<_>>(), "y", &[]);
    net
}

#[test]
fn chunks_become_one_split() {
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 6, 12], &noise(1, 144)))];
    let after = one(&chunks(3).model(&["y"]), "merge_slices", &feeds, Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Split", 1), ("Sum", 1)]);
}

#[test]
fn more_pieces_than_a_shader_writes_are_refused() {
    let pass = pass("merge_slices").unwrap();
    let after = rewrite(&chunks(8).model(&["y"]), &[pass], &Settings::default());
    assert_eq!(after.applied(), 0);
    let reasons: Vec<_> = after.refusals().into_keys().collect();
    assert_eq!(reasons, ["more pieces than a shader of the smallest devices writes"]);
}
