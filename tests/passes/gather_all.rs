use viaduct_export::onnx::{DType, Tensor};

use crate::{
    runtime_support::{Net, noise, tensor},
    same::{Bar, one},
};

/// Pairs of indices of a [1, 4] value, as a [1, 1, 4] result takes them.
fn gathered(columns: [i64; 4]) -> Net {
    let mut net = Net::new(DType::F32);
    let indices: Vec<i64> = columns.iter().flat_map(|column| [0, *column]).collect();
    net.x("x", &[1, 4]).constant("indices", Tensor::from_i64(&[1, 1, 4, 2], &indices)).node(
        "GatherND",
        &["x", "indices"],
        "y",
        &[],
    );
    net
}

#[test]
fn what_takes_everything_in_order_becomes_a_reshape_and_nothing_else_does() {
    let feeds = vec![("x".to_owned(), tensor(DType::F32, &[1, 4], &noise(1, 4)))];
    let after = one(&gathered([0, 1, 2, 3]).model(&["y"]), "gather_all", &feeds, Bar::Exact);
    assert_eq!(after.operators().into_iter().collect::<Vec<_>>(), [("Reshape", 1)]);
    for columns in [[0, 2, 1, 3], [0, 1, 2, 2]] {
        let after = one(&gathered(columns).model(&["y"]), "gather_all", &feeds, Bar::Exact);
        assert_eq!(after.applied(), 0);
    }
}
