use viaduct_export::{
    onnx::{DType, Dim},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Net, float, int, noise, tensor},
    same::{Bar, one, rewrite},
};

/// Eight channels in four groups, as torch exports them.
fn exported(dtype: DType) -> Net {
    let mut net = Net::new(dtype);
    let open = |name: &str| Dim::Symbol(name.to_owned());
    net.input("x", dtype, &[Dim::Fixed(1), Dim::Fixed(8), open("h"), open("w")])
        .ints("groups", &[0, 4, -1])
        .float("ones", &[4], &[1.0; 4])
        .float("zeros", &[4], &[0.0; 4])
        .float("weight", &[8, 1, 1], &noise(2, 8))
        .node("Reshape", &["x", "groups"], "grouped", &[])
        .node("InstanceNormalization", &["grouped", "ones", "zeros"], "normed", &[("epsilon", float(1e-6))])
        .node("Shape", &["x"], "shape", &[])
        .node("Reshape", &["normed", "shape"], "joined", &[])
        .node("Mul", &["joined", "weight"], "y", &[]);
    net
}

#[test]
fn the_shape_goes_and_f16_is_normalised_in_f32() {
    for (dtype, bar, casts) in [(DType::F32, 1e-6, None), (DType::F16, 5e-3, Some(&4))] {
        let feeds = vec![("x".to_owned(), tensor(dtype, &[1, 8, 3, 5], &noise(1, 120)))];
        let after = one(&exported(dtype).model(&["y"]), "fuse_group_norm", &feeds, Bar::Relative(bar));
        assert_eq!(after.applied(), 1);
        assert_eq!(after.operators().get("Shape"), None);
        assert_eq!(after.operators().get("Cast"), casts);
    }
}

fn contrib(channels: usize, shape: &[usize]) -> Net {
    let mut net = Net::new(DType::F32);
    net.x("x", shape)
        .float("gamma", &[channels], &noise(2, channels))
        .float("beta", &[channels], &noise(3, channels))
        .node(
            "ms.GroupNorm",
            &["x", "gamma", "beta"],
            "y",
            &[
                ("groups", int(4)),
                ("epsilon", float(1e-5)),
                ("activation", int(1)),
                ("channels_last", int(1)),
            ],
        );
    net
}

#[test]
fn a_contributed_group_norm_is_written_out() {
    let pass = pass("fuse_group_norm").unwrap();
    let after = rewrite(&contrib(8, &[1, 3, 5, 8]).model(&["y"]), &[pass], &Settings::default());
    assert_eq!(after.applied(), 1);
    let operators = after.operators();
    for (op, count) in [("InstanceNormalization", 1), ("Transpose", 2), ("Sigmoid", 1), ("Reshape", 4)] {
        assert_eq!(operators.get(op), Some(&count), "{op}");
    }
    assert!(!operators.contains_key("GroupNorm"));
}

#[test]
fn channels_that_the_groups_do_not_divide_and_other_ranks_are_refused() {
    let refusal = |net: &Net| {
        let pass = pass("fuse_group_norm").unwrap();
        rewrite(&net.model(&["y"]), &[pass], &Settings::default()).refusals().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(
        refusal(&contrib(6, &[1, 3, 5, 6])),
        ["the channels are not a constant multiple of the groups"]
    );
    assert_eq!(refusal(&contrib(8, &[1, 2, 3, 5, 8])), ["its rank is not 3 or 4"]);
}

#[test]
fn a_node_without_a_name_is_called_by_its_output() {
    let mut model = contrib(6, &[1, 3, 5, 6]).model(&["y"]);
    let (id, _) = model.graph.nodes().next().unwrap();
    model.graph[id].name.clear();
    let after = rewrite(&model, &[pass("fuse_group_norm").unwrap()], &Settings::default());
    assert_eq!(after.reports[0].refused[0].place, "y");
}
