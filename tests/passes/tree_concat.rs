use viaduct_export::{
    onnx::{DType, Dim},
    passes::Settings,
};

use crate::{
    runtime_support::{Net, int, noise, tensor},
    same::{Bar, one, rewrite},
};

#[test]
fn no_concat_has_more_than_eight_operands() {
    for count in [9, 16, 17, 65] {
        let mut net = Net::new(DType::F32);
        net.x("x", &[2, 3]).x("y", &[2, 1]);
        let operands: Vec<&str> = (0..count).map(|i| if i % 3 == 0 { "y" } else { "x" }).collect();
        net.node("Concat", &operands, "z", &[("axis", int(1))]);
        let feeds = vec![
            ("x".to_owned(), tensor(DType::F32, &[2, 3], &noise(1, 6))),
            ("y".to_owned(), tensor(DType::F32, &[2, 1], &noise(2, 2))),
        ];
        let after = one(&net.model(&["z"]), "tree_concat", &feeds, Bar::Exact);
        assert_eq!(after.applied(), 1);
        assert!(after.model.graph.nodes().all(|(_, node)| node.inputs.len() <= 8));
    }
}

#[test]
fn no_split_has_more_than_eight_parts() {
    for count in [9, 16, 17, 65] {
        let mut net = Net::new(DType::F32);
        net.x("x", &[2, 2 * count]);
        let names: Vec<String> = (0..count).map(|i| format!("part{i}")).collect();
        let mut sizes = vec![2; count];
        (sizes[0], sizes[1]) = (1, 3);
        net.ints("sizes", &sizes);
        net.node("Split", &["x", "sizes"], &names.join(" "), &[("axis", int(-1))]);
        let feeds = vec![("x".to_owned(), tensor(DType::F32, &[2, 2 * count], &noise(1, 4 * count)))];
        let outputs: Vec<&str> = names.iter().map(String::as_str).collect();
        let after = one(&net.model(&outputs), "tree_concat", &feeds, Bar::Exact);
        assert_eq!(after.applied(), 1);
        assert!(after.model.graph.nodes().all(|(_, node)| node.outputs.len() <= 8));
    }
}

#[test]
fn a_split_of_an_unknown_size_is_refused() {
    let mut net = Net::new(DType::F32);
    net.input("x", DType::F32, &[Dim::Symbol("rows".to_owned())]);
    let names: Vec<String> = (0..9).map(|i| format!("part{i}")).collect();
    net.node("Split", &["x"], &names.join(" "), &[("num_outputs", int(9))]);
    let outputs: Vec<&str> = names.iter().map(String::as_str).collect();
    let pass = viaduct_export::passes::pass("tree_concat").unwrap();
    let after = rewrite(&net.model(&outputs), &[pass], &Settings::default());
    assert_eq!(
        after.refusals().into_iter().collect::<Vec<_>>(),
        [("the sizes of its parts are not known".into(), 1)]
    );
}
