//! Graph helpers: links between nodes and values, captures of subgraphs, edits, and the rules of valid graphs.

mod onnx_support;

use onnx_support::*;
use viaduct_export::onnx::{Attribute, Dim, Graph, GraphError, Node, NodeId, Tensor, ValueType};

/// x -> Relu -> a; If(x) whose branch uses a, w and its own b; y
fn with_branch() -> (Graph, NodeId) {
    let mut graph = model(|_| ()).graph;
    node(&mut graph, "Relu", &["x"], &["a"]);
    graph.add_constant("w", Tensor::from_f32(&[1], &[1.0]));
    let mut branch = Graph::new("branch");
    node(&mut branch, "Add", &["a", "w"], &["b"]);
    node(&mut branch, "Add", &["b", "a"], &["c"]);
    let c = branch.value("c");
    branch.outputs.push(c);
    let (x, z) = (graph.value("x"), graph.value("z"));
    let id = graph.add_node(Node {
        op_type: "If".into(),
        name: "choice".into(),
        inputs: vec![Some(x), None],
        outputs: vec![Some(z)],
        attributes: vec![("then_branch".into(), Attribute::Graph(Box::new(branch)))],
        ..Node::default()
    });
    (graph, id)
}

#[test]
fn links_see_into_subgraphs() {
    let (graph, choice) = with_branch();
    graph.validate().unwrap();
    let links = graph.links();
    let id = |name| graph.find(name).unwrap();
    let nodes: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    assert_eq!(links.producer(id("a")), Some(nodes[1]));
    assert_eq!(links.producer(id("x")), None);
    assert_eq!(links.producer(id("w")), None);
    assert_eq!(links.uses(id("x")), nodes);
    assert_eq!(links.uses(id("a")), [choice], "once, though the branch uses it twice");
    assert_eq!(links.uses(id("w")), [choice]);
    assert_eq!(links.uses(id("z")), []);
    assert_eq!((graph.producer(id("z")), graph.uses(id("w"))), (Some(choice), vec![choice]));
    let mut captures: Vec<&str> = graph[choice].subgraphs().flat_map(Graph::captures).collect();
    captures.sort();
    assert_eq!(captures, ["a", "w"]);
}

#[test]
fn removing_a_producer_makes_the_graph_invalid() {
    let (mut graph, choice) = with_branch();
    let relu = graph.producer(graph.find("a").unwrap()).unwrap();
    assert_eq!(graph.remove_node(relu).unwrap().op_type, "Relu");
    assert!(graph.remove_node(relu).is_none());
    let undefined = GraphError::Undefined { value: "a".into(), node: "#0 (Add)".into() };
    assert_eq!(graph.validate(), Err(undefined));
    graph.remove_node(choice);
    graph.validate().unwrap();
}

#[test]
fn replacing_keeps_the_place_in_the_order() {
    let (mut graph, choice) = with_branch();
    let relu = graph.producer(graph.find("a").unwrap()).unwrap();
    let (x, t, a) = (graph.value("x"), graph.value("t"), graph.value("a"));
    let step = |op_type: &str, input, output| Node {
        op_type: op_type.into(),
        inputs: vec![Some(input)],
        outputs: vec![Some(output)],
        ..Node::default()
    };
    graph.replace_node(relu, vec![step("Neg", x, t), step("Abs", t, a)]);
    graph.validate().unwrap();
    let order: Vec<&str> = graph.nodes().map(|(_, node)| node.op_type.as_str()).collect();
    assert_eq!(order, ["Identity", "Neg", "Abs", "If"]);
    graph[choice].name = "renamed".into();
    assert_eq!(graph.label(choice), "'renamed' (If)");
}

#[test]
fn any_value_can_become_an_output() {
    let (mut graph, _) = with_branch();
    let (w, a) = (graph.find("w").unwrap(), graph.find("a").unwrap());
    for id in [a, w, a] {
        graph.add_output(id);
    }
    assert_eq!(graph.outputs[1..], [a, w]);
    assert_eq!(graph[a].ty, None);
    assert_eq!(graph[w].ty, float(&[1]));
    let ValueType::Tensor { shape: Some(shape), .. } = graph[w].ty.clone().unwrap() else { panic!() };
    assert_eq!(shape, [Dim::Fixed(1)]);
    graph.validate().unwrap();
}

#[test]
fn names_stay_unique() {
    let (mut graph, _) = with_branch();
    let a = graph.find("a").unwrap();
    graph[a].name = "w".into();
    assert!(matches!(graph.validate(), Err(GraphError::DuplicateName { .. })));
    let mut other = Graph::new("other");
    for i in 0..100 {
        other.value(&format!("v{i}"));
    }
    let mut graph = model(|_| ()).graph;
    let foreign = other.find("v99");
    graph.add_node(Node { op_type: "Relu".into(), inputs: vec![foreign], ..Node::default() });
    assert!(matches!(graph.validate(), Err(GraphError::ForeignValue { id: 99, .. })));
}
