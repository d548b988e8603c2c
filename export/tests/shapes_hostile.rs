//! Graphs that are wrong, and graphs that are made to take long.

mod onnx_support;

use std::collections::BTreeMap;

use onnx_support::node;
use viaduct_export::{
    onnx::{Attribute, DType, Graph, Model, Node, Tensor},
    shapes::{Fact, Shapes, infer},
};

fn model(build: impl FnOnce(&mut Graph)) -> Model {
    let mut graph = Graph::new("test");
    build(&mut graph);
    Model { graph, ir_version: 10, opsets: vec![(String::new(), 21)], ..Model::default() }
}

fn run(model: &Model, given: &[(&str, Fact)]) -> Shapes {
    infer(
        model,
        &BTreeMap::new(),
        &given.iter().map(|(name, fact)| (name.to_string(), fact.clone())).collect(),
    )
}

fn floats(shape: &[usize]) -> Fact {
    Fact::of(Some(DType::F32), shape)
}

fn list(graph: &mut Graph, name: &str, values: &[i64]) {
    graph.add_constant(name, Tensor::from_i64(&[values.len()], values));
}

/// A node `op_type` of `x` and a list gives `y`: what is said about it, or what is wrong.
fn with_list(op_type: &str, x: &[usize], values: &[i64]) -> Result<Option<Vec<usize>>, String> {
    let model = model(|graph| {
        list(graph, "list", values);
        node(graph, op_type, &["x", "list"], &["y"]);
    });
    let shapes = run(&model, &[("x", floats(x))]);
    match shapes.conflicts.first() {
        Some(conflict) => Err(conflict.problem.clone()),
        None => Ok(shapes.shape(model.graph.find("y").unwrap())),
    }
}

#[test]
fn contradictions_are_conflicts() {
    const MAX: usize = usize::MAX;
    let rows: &[(&str, &[usize], &[i64], &str)] = &[
        ("Reshape", &[6], &[-1, -1], "more than one size is -1"),
        ("Reshape", &[6], &[4, -1], "6 elements do not make"),
        ("Reshape", &[6], &[7], "6 elements do not make"),
        ("Reshape", &[6], &[1, 0], "copied, but the input has rank 1"),
        ("Reshape", &[6], &[-2, 3], "size 0 is -2"),
        ("Reshape", &[MAX, 2], &[-1], "does not fit"),
        ("Reshape", &[2], &[i64::MAX, i64::MAX], "does not fit"),
        ("Expand", &[3], &[4], "do not broadcast"),
        ("Expand", &[3], &[-1], "expanded to -1"),
        ("Tile", &[MAX], &[2], "does not fit"),
        ("Tile", &[3, 3], &[2], "1 repeats for rank 2"),
        ("Tile", &[3], &[-1], "repeated"),
        ("Squeeze", &[3], &[0], "cannot be squeezed"),
        ("Squeeze", &[1], &[1], "axis 1 of a tensor of rank 1"),
        ("Squeeze", &[1], &[i64::MIN], "axis -9223372036854775808"),
        ("Unsqueeze", &[1], &[0, 0], "given twice"),
        ("Pad", &[MAX], &[i64::MAX, i64::MAX], "padding makes"),
        ("Pad", &[3], &[-2, -2], "padding makes"),
        ("Split", &[3], &[1], "lengths"),
        ("ReduceSum", &[3], &[1], "axis 1"),
    ];
    for (op_type, x, values, problem) in rows {
        let found = with_list(op_type, x, values);
        assert!(
            found.as_ref().is_err_and(|found| found.contains(problem)),
            "{op_type} {x:?} {values:?}: {found:?}"
        );
    }
}

#[test]
fn keepdims_is_zero_or_one() {
    for op_type in ["ReduceMax", "ArgMax"] {
        for (keepdims, problem) in
            [(0, None), (1, None), (3, Some("keepdims is 3")), (-1, Some("keepdims is -1"))]
        {
            let mut model = model(|graph| node(graph, op_type, &["x"], &["y"]));
            let id = model.graph.nodes().next().unwrap().0;
            model.graph[id].attributes.push(("keepdims".to_owned(), Attribute::Int(keepdims)));
            let conflicts = run(&model, &[("x", floats(&[2, 3]))]).conflicts;
            match problem {
                Some(problem) => assert!(conflicts[0].problem.contains(problem), "{conflicts:?}"),
                None => assert!(conflicts.is_empty(), "{conflicts:?}"),
            }
        }
    }
}

#[test]
fn nothing_is_made_of_zero_sizes() {
    assert_eq!(with_list("Reshape", &[0, 3], &[0, -1]), Ok(None));
    assert_eq!(with_list("Reshape", &[0, 3], &[3, -1]), Ok(Some(vec![3, 0])));
    assert_eq!(with_list("Tile", &[usize::MAX, 0], &[1, 5]), Ok(Some(vec![usize::MAX, 0])));
    assert_eq!(with_list("Expand", &[1], &[0]), Ok(Some(vec![0])));
}

#[test]
fn cycles_and_missing_inputs_end() {
    let model = model(|graph| {
        node(graph, "Add", &["a", "b"], &["b"]);
        node(graph, "Relu", &["later"], &["early"]);
        node(graph, "Relu", &["early"], &["later"]);
        node(graph, "MatMul", &["a"], &["c"]);
        node(graph, "Concat", &[], &["d"]);
    });
    let shapes = run(&model, &[("a", floats(&[2]))]);
    let problems: Vec<_> = shapes.conflicts.iter().map(|conflict| conflict.problem.as_str()).collect();
    assert_eq!(problems, ["input 1 is missing"]);
    assert!(model.graph.values().filter(|(_, v)| v.name != "a").all(|(id, _)| shapes.bytes(id).is_none()));
}

/// Each node makes its output twice as long, deep or nested as its input.
#[test]
fn doubling_ends() {
    const NODES: usize = 200;
    for (op_type, start) in
        [("Concat", floats(&[1])), ("SequenceConstruct", floats(&[1])), ("Expand", floats(&[1]))]
    {
        let model = model(|graph| {
            for at in 0..NODES {
                let (from, to) = (format!("v{at}"), format!("v{}", at + 1));
                node(graph, op_type, &[&from, &from], &[&to]);
                let id = graph.nodes().last().unwrap().0;
                graph[id].attributes = vec![("axis".into(), Attribute::Int(0))];
            }
        });
        let shapes = run(&model, &[("v0", start)]);
        assert_eq!(shapes.bytes(model.graph.find(&format!("v{NODES}")).unwrap()), None, "{op_type}");
    }
}

/// A body that is a loop, whose body is a loop …: looked at turn by turn, the innermost would run 64^12 times.
#[test]
fn loops_within_loops_end() {
    let mut body: Option<Graph> = None;
    for _ in 0..12 {
        let mut graph = Graph::new("body");
        for name in ["turn", "condition", "carried"] {
            let id = graph.value(name);
            graph.inputs.push(id);
        }
        match body {
            None => node(&mut graph, "Identity", &["carried"], &["next"]),
            Some(inner) => {
                graph.add_constant("turns", Tensor::from_i64(&[], &[63]));
                graph.add_constant("holds", Tensor::inline(DType::Bool, &[], vec![1]));
                add_loop(&mut graph, inner, "holds", "carried", "next");
            }
        }
        let (condition, next) = (graph.value("condition"), graph.value("next"));
        graph.outputs = vec![condition, next];
        body = Some(graph);
    }
    let model = model(|graph| {
        graph.add_constant("turns", Tensor::from_i64(&[], &[63]));
        graph.add_constant("holds", Tensor::inline(DType::Bool, &[], vec![1]));
        add_loop(graph, body.unwrap(), "holds", "x", "y");
    });
    let shapes = run(&model, &[("x", floats(&[2]))]);
    assert_eq!(shapes.conflicts, []);
}

fn add_loop(graph: &mut Graph, body: Graph, holds: &str, from: &str, to: &str) {
    let inputs = ["turns", holds, from].map(|name| Some(graph.value(name)));
    let outputs = vec![Some(graph.value(to))];
    let attributes = vec![("body".into(), Attribute::Graph(Box::new(body)))];
    graph.add_node(Node {
        op_type: "Loop".into(),
        inputs: inputs.to_vec(),
        outputs,
        attributes,
        ..Node::default()
    });
}

/// As much as an export of a large model has; it takes milliseconds.
#[test]
fn ten_thousand_nodes_are_no_problem() {
    let model = model(|graph| {
        for at in (0..10_000).step_by(4) {
            let name = |offset: usize| format!("v{}", at + offset);
            node(graph, "Relu", &[&name(0)], &[&name(1)]);
            node(graph, "Shape", &[&name(1)], &[&name(2)]);
            node(graph, "Add", &[&name(1), &name(0)], &[&name(3)]);
            node(graph, "Reshape", &[&name(3), &name(2)], &[&name(4)]);
        }
    });
    let start = std::time::Instant::now();
    let shapes = run(&model, &[("v0", floats(&[2, 3, 4]))]);
    println!("{:?}", start.elapsed());
    assert_eq!(shapes.shape(model.graph.find("v10000").unwrap()), Some(vec![2, 3, 4]));
    assert_eq!(shapes.conflicts, []);
}
