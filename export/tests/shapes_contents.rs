//! The contents of small tensors, which exports compute their shapes from.

mod onnx_support;

use std::collections::BTreeMap;

use onnx_support::node;
use viaduct_export::{
    onnx::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueType},
    shapes::{Elements, Fact, Shapes, Sizes, infer},
};

fn model(build: impl FnOnce(&mut Graph)) -> Model {
    let mut graph = Graph::new("test");
    build(&mut graph);
    Model { graph, ir_version: 10, opsets: vec![(String::new(), 21)], ..Model::default() }
}

fn ints(dtype: DType, values: &[Option<i64>]) -> Fact {
    Fact::with_elements(Some(dtype), &[values.len()], Some(Elements::Ints(values.to_vec())))
}

fn known(values: &[i64]) -> Vec<Option<i64>> {
    values.iter().copied().map(Some).collect()
}

/// What is known about the output `y` of one node whose inputs are `a`, `b` ….
fn result(op_type: &str, inputs: &[Fact]) -> Fact {
    let names = &["a", "b", "c", "d", "e"][..inputs.len()];
    let model = model(|graph| node(graph, op_type, names, &["y"]));
    let given = names.iter().map(|name| name.to_string()).zip(inputs.iter().cloned()).collect();
    let shapes = infer(&model, &BTreeMap::new(), &given);
    assert_eq!(shapes.conflicts, [], "{op_type}");
    fact(&model, &shapes, "y")
}

fn fact(model: &Model, shapes: &Shapes, name: &str) -> Fact {
    shapes.fact(model.graph.find(name).unwrap()).clone()
}

#[test]
fn integers_are_computed_as_onnx_defines_them() {
    const MIN: i64 = i64::MIN;
    const MAX: i64 = i64::MAX;
    type Row<'a> = (&'a str, DType, &'a [i64], &'a [i64], &'a [Option<i64>]);
    let rows: &[Row<'_>] = &[
        ("Div", DType::I64, &[7, -7, 7, -7], &[2, 2, -2, -2], &[Some(3), Some(-3), Some(-3), Some(3)]),
        ("Div", DType::I64, &[7, MIN], &[0, -1], &[None, None]),
        ("Mod", DType::I64, &[7, -7, 7, -7], &[3, 3, -3, -3], &[Some(1), Some(2), Some(-2), Some(-1)]),
        ("Mod", DType::I64, &[7, MIN], &[0, -1], &[None, None]),
        ("Add", DType::I64, &[MAX, MAX], &[1, -1], &[None, Some(MAX - 1)]),
        ("Sub", DType::U8, &[3, 3], &[2, 4], &[Some(1), None]),
        ("Mul", DType::I32, &[1 << 16, 1 << 15], &[1 << 15, 1 << 15], &[None, Some(1 << 30)]),
        ("Equal", DType::I64, &[3, 3], &[2, 3], &[Some(0), Some(1)]),
        ("LessOrEqual", DType::I64, &[3, 3], &[2, 3], &[Some(0), Some(1)]),
        ("Max", DType::I64, &[3, -3], &[2, 3], &[Some(3), Some(3)]),
    ];
    for (op_type, dtype, a, b, expected) in rows {
        let output = result(op_type, &[ints(*dtype, &known(a)), ints(*dtype, &known(b))]);
        assert_eq!(output.partial_ints(), Some(*expected), "{op_type} {a:?} {b:?}");
    }
}

#[test]
fn what_is_partly_known_stays_partly_known() {
    let sizes = ints(DType::I64, &[Some(2), None, Some(64)]);
    let twos = ints(DType::I64, &known(&[2]));
    let partial = |fact: Fact| fact.partial_ints().map(<[_]>::to_vec);
    assert_eq!(partial(result("Mul", &[sizes.clone(), twos.clone()])), Some(vec![Some(4), None, Some(128)]));
    assert_eq!(
        partial(result("Gather", &[sizes.clone(), ints(DType::I64, &[Some(-1), Some(1), None, Some(3)])])),
        Some(vec![Some(64), None, None, None])
    );
    let condition = ints(DType::Bool, &[Some(1), Some(0), None]);
    assert_eq!(
        partial(result("Where", &[condition, twos.clone(), sizes.clone()])),
        Some(vec![Some(2), None, None])
    );
    let reshaped = |data: &[Option<usize>]| {
        result("Reshape", &[Fact::partial(Some(DType::F32), Some(data.to_vec())), sizes.clone()]).shape
    };
    // What is left is what the size that is not known must be.
    assert_eq!(reshaped(&[Some(16), Some(64)]), Some(vec![Some(2), Some(8), Some(64)]));
    assert_eq!(reshaped(&[None, Some(64)]), Some(vec![Some(2), None, Some(64)]));
    // Copied sizes cancel.
    let copied = ints(DType::I64, &known(&[0, 0, 4, -1]));
    let data = Fact::partial(Some(DType::F32), Some(vec![Some(1), None, Some(64)]));
    let shape = result("Reshape", &[data, copied]).shape;
    assert_eq!(shape, Some(vec![Some(1), None, Some(4), Some(16)]));
}

/// Symbols of outputs and of values in between are bound by name, but inference goes first.
#[test]
fn records_fill_what_inference_leaves_open() {
    let typed = |graph: &mut Graph, name: &str, dims: &[Dim]| {
        let id = graph.value(name);
        graph[id].ty = Some(ValueType::Tensor { dtype: DType::F32, shape: Some(dims.to_vec()) });
        id
    };
    let symbol = |name: &str| Dim::Symbol(name.into());
    let model = model(|graph| {
        let x = typed(graph, "x", &[symbol("n"), Dim::Fixed(3)]);
        graph.inputs.push(x);
        node(graph, "Relu", &["x"], &["y"]);
        node(graph, "Unheard", &["x"], &["z"]);
        node(graph, "Relu", &["x"], &["w"]);
        typed(graph, "y", &[symbol("unbound"), Dim::Fixed(3)]);
        typed(graph, "z", &[symbol("n"), symbol("unbound"), Dim::Fixed(7)]);
        typed(graph, "w", &[symbol("n"), Dim::Fixed(4)]);
    });
    let shapes = infer(&model, &Sizes::from([("n".into(), 5)]), &BTreeMap::new());
    assert_eq!(fact(&model, &shapes, "y").shape, Some(vec![Some(5), Some(3)]));
    assert_eq!(fact(&model, &shapes, "z").shape, Some(vec![Some(5), None, Some(7)]));
    assert_eq!(fact(&model, &shapes, "w").shape, Some(vec![Some(5), Some(3)]));
    let [conflict] = &shapes.conflicts[..] else { panic!("{:?}", shapes.conflicts) };
    assert_eq!(conflict.problem, "its shape is [5, 3], the graph records [5, 4]");
    assert_eq!(shapes.unknown(&model.graph), BTreeMap::from([("Unheard".into(), 1)]));
}

/// A body sees the values around it, those two graphs away as well.
#[test]
fn bodies_see_outer_values_by_name() {
    let branch = |name: &str, nodes: &dyn Fn(&mut Graph)| {
        let mut graph = Graph::new(name);
        nodes(&mut graph);
        let out = graph.value(name);
        graph.outputs.push(out);
        graph
    };
    let choice = |then: Graph, other: Graph| {
        vec![
            ("then_branch".to_owned(), Attribute::Graph(Box::new(then))),
            ("else_branch".to_owned(), Attribute::Graph(Box::new(other))),
        ]
    };
    let inner = |name: &'static str| branch(name, &|graph| node(graph, "Add", &["outer", "own"], &[name]));
    let middle = |name: &'static str| {
        branch(name, &|graph| {
            graph.add_constant("own", Tensor::from_f32(&[4, 1], &[0.0; 4]));
            node(graph, "If", &["condition"], &[name]);
            let (id, _) = graph.nodes().next().unwrap();
            graph[id].attributes = choice(inner("a"), inner("b"));
        })
    };
    let model = model(|graph| {
        graph.add_constant("outer", Tensor::from_f32(&[3], &[0.0; 3]));
        let (condition, out) = (graph.value("condition"), graph.value("y"));
        graph.inputs.push(condition);
        graph.add_node(Node {
            op_type: "If".into(),
            inputs: vec![Some(condition)],
            outputs: vec![Some(out)],
            attributes: choice(middle("c"), middle("d")),
            ..Node::default()
        });
    });
    let shapes = infer(&model, &BTreeMap::new(), &BTreeMap::new());
    assert_eq!(shapes.conflicts, []);
    assert_eq!(fact(&model, &shapes, "y").shape, Some(vec![Some(4), Some(3)]));
}
