//! Branches and loops: what is known about values that depend on how often or whether a body runs.

mod onnx_support;

use std::collections::BTreeMap;

use onnx_support::node;
use viaduct_export::{
    onnx::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueType},
    shapes::{Dims, Shapes, infer},
};

fn tensor(graph: &mut Graph, name: &str, dtype: DType, shape: &[usize]) {
    let id = graph.value(name);
    let shape = Some(shape.iter().copied().map(Dim::Fixed).collect());
    graph[id].ty = Some(ValueType::Tensor { dtype, shape });
    graph.inputs.push(id);
}

fn body(inputs: &[&str], outputs: &[&str], build: impl FnOnce(&mut Graph)) -> Attribute {
    let mut graph = Graph::new("body");
    graph.inputs = inputs.iter().map(|name| graph.value(name)).collect();
    build(&mut graph);
    graph.outputs = outputs.iter().map(|name| graph.value(name)).collect();
    Attribute::Graph(Box::new(graph))
}

fn with(graph: &mut Graph, op_type: &str, inputs: &[&str], outputs: &[&str], bodies: Vec<(&str, Attribute)>) {
    node(graph, op_type, inputs, outputs);
    let last = graph.nodes().last().unwrap().0;
    graph[last].attributes.extend(bodies.into_iter().map(|(name, body)| (name.to_owned(), body)));
}

/// Infers the graph that `build` makes around an input `x` [2, 3], and gives the shapes of the named values.
fn shapes(names: &[&str], build: impl FnOnce(&mut Graph)) -> (Vec<Option<Dims>>, Shapes) {
    let mut graph = Graph::new("test");
    tensor(&mut graph, "x", DType::F32, &[2, 3]);
    tensor(&mut graph, "condition", DType::Bool, &[]);
    graph.add_constant("yes", Tensor::inline(DType::Bool, &[], vec![1]));
    graph.add_constant("turns", Tensor::from_i64(&[], &[4]));
    build(&mut graph);
    let model = Model { graph, ir_version: 8, opsets: vec![(String::new(), 17)], ..Model::default() };
    let shapes = infer(&model, &BTreeMap::new(), &BTreeMap::new());
    let shape = |name: &&str| shapes.fact(model.graph.find(name).unwrap()).shape.clone();
    (names.iter().map(shape).collect(), shapes)
}

/// A branch that gives x with the axis removed or, second, x with an axis in front.
fn branches() -> Vec<(&'static str, Attribute)> {
    let then = body(&[], &["a"], |graph| {
        graph.add_constant("first", Tensor::from_i64(&[1], &[0]));
        node(graph, "Squeeze", &["x", "first"], &["a"]);
    });
    let other = body(&[], &["b"], |graph| {
        graph.add_constant("first", Tensor::from_i64(&[1], &[0]));
        node(graph, "Unsqueeze", &["x", "first"], &["b"]);
    });
    vec![("then_branch", then), ("else_branch", other)]
}

#[test]
fn a_branch_that_contradicts_itself_is_not_taken() {
    // Of x [2, 3], the first axis cannot be squeezed.
    let (found, shapes) = shapes(&["y"], |graph| with(graph, "If", &["condition"], &["y"], branches()));
    assert_eq!(shapes.conflicts, []);
    assert_eq!(found, [Some(vec![Some(1), Some(2), Some(3)])]);
}

#[test]
fn a_branch_that_is_taken_must_hold() {
    let (found, shapes) = shapes(&["y"], |graph| with(graph, "If", &["yes"], &["y"], branches()));
    assert_eq!(shapes.conflicts.len(), 1);
    assert_eq!(found, [None]);
}

#[test]
fn branches_that_differ_leave_the_size_open() {
    let (found, _) = shapes(&["y"], |graph| {
        let then = body(&[], &["a"], |graph| node(graph, "Identity", &["x"], &["a"]));
        let other = body(&[], &["b"], |graph| {
            with(graph, "Concat", &["x", "x"], &["b"], vec![("axis", Attribute::Int(0))])
        });
        with(graph, "If", &["condition"], &["y"], vec![("then_branch", then), ("else_branch", other)]);
    });
    assert_eq!(found, [Some(vec![None, Some(3)])]);
}

/// A loop over x [2, 3] that carries one value whose shape stays and one that grows by x, and stacks slices like x.
fn growing(turns: &str) -> Vec<Option<Dims>> {
    let names = ["kept out", "grown out", "stacked"];
    let (found, shapes) = shapes(&names, |graph| {
        graph.add_constant("few", Tensor::from_i64(&[], &[4]));
        graph.add_constant("many", Tensor::from_i64(&[], &[1 << 40]));
        tensor(graph, "open", DType::I64, &[]);
        let each =
            body(&["turn", "go", "kept", "grown"], &["go on", "kept on", "grown on", "slice"], |graph| {
                node(graph, "Identity", &["go"], &["go on"]);
                node(graph, "Relu", &["kept"], &["kept on"]);
                with(graph, "Concat", &["grown", "x"], &["grown on"], vec![("axis", Attribute::Int(0))]);
                node(graph, "Relu", &["x"], &["slice"]);
            });
        with(graph, "Loop", &[turns, "yes", "x", "x"], &names, vec![("body", each)]);
    });
    assert_eq!(shapes.conflicts, []);
    found
}

#[test]
fn loops_stack_their_slices_and_forget_what_changes() {
    let [kept, grown] = [vec![Some(2), Some(3)], vec![None, Some(3)]].map(Some);
    let stacked = |turns: Option<usize>| Some(vec![turns, Some(2), Some(3)]);
    assert_eq!(growing("few"), [kept.clone(), Some(vec![Some(10), Some(3)]), stacked(Some(4))]);
    assert_eq!(growing("many"), [kept.clone(), grown.clone(), stacked(Some(1 << 40))]);
    assert_eq!(growing("open"), [kept, grown, stacked(None)]);
}

#[test]
fn a_known_number_of_turns_is_the_length_of_the_stack() {
    let (found, _) = shapes(&["stacked"], |graph| {
        let each = body(&["turn", "go"], &["go on", "slice"], |graph| {
            graph.add_constant("go on", Tensor::inline(DType::Bool, &[], vec![1]));
            node(graph, "Relu", &["x"], &["slice"]);
        });
        with(graph, "Loop", &["turns", "yes"], &["stacked"], vec![("body", each)]);
    });
    assert_eq!(found, [Some(vec![Some(4), Some(2), Some(3)])]);
}

#[test]
fn scans_take_their_length_from_what_they_scan() {
    let (found, _) = shapes(&["last", "stacked"], |graph| {
        graph.add_constant("start", Tensor::from_f32(&[3], &[0.0; 3]));
        let each = body(&["sum", "row"], &["sum on", "slice"], |graph| {
            node(graph, "Add", &["sum", "row"], &["sum on"]);
            node(graph, "Identity", &["sum on"], &["slice"]);
        });
        let attributes = vec![("body", each), ("num_scan_inputs", Attribute::Int(1))];
        with(graph, "Scan", &["start", "x"], &["last", "stacked"], attributes);
    });
    assert_eq!(found, [Some(vec![Some(3)]), Some(vec![Some(2), Some(3)])]);
}

#[test]
fn an_absent_condition_holds() {
    let (found, _) = shapes(&["stacked"], |graph| {
        let each = body(&["turn", "go"], &["go on", "slice"], |graph| {
            graph.add_constant("go on", Tensor::inline(DType::Bool, &[], vec![1]));
            node(graph, "Relu", &["x"], &["slice"]);
        });
        let (turns, stacked) = (graph.value("turns"), graph.value("stacked"));
        graph.add_node(Node {
            op_type: "Loop".into(),
            inputs: vec![Some(turns), None],
            outputs: vec![Some(stacked)],
            attributes: vec![("body".into(), each)],
            ..Node::default()
        });
    });
    assert_eq!(found, [Some(vec![Some(4), Some(2), Some(3)])]);
}
