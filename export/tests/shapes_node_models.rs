//! Shape inference over every node model of the ONNX standard's own test suite: what the models record about their
//! outputs is taken out, and what is inferred is compared with the outputs that the suite expects.

mod onnx_support;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use onnx_support::*;
use prost::Message;
use viaduct_export::{
    onnx::{
        Graph, Model,
        proto::{GraphProto, ModelProto, TensorProto, TypeProto, type_proto},
        read_model_bytes,
    },
    shapes::{Elements, Fact, Shapes, infer, operators},
};

/// `SequenceProto` of ONNX, as far as the suite uses it.
#[derive(Clone, PartialEq, Message)]
struct Sequence {
    #[prost(message, repeated, tag = "3")]
    tensors: Vec<TensorProto>,
}

/// `OptionalProto` of ONNX, as far as the suite uses it.
#[derive(Clone, PartialEq, Message)]
struct Optional {
    #[prost(message, optional, tag = "3")]
    tensor: Option<TensorProto>,
    #[prost(message, optional, tag = "5")]
    sequence: Option<Sequence>,
}

const FIND: &str =
    "import os, onnx.backend.test as t; print(os.path.join(os.path.dirname(t.__file__), 'data', 'node'))";

const GIVEN_INTS: usize = 64;
const GIVEN_FLOATS: usize = 8;

/// The facts about a stored tensor, with its contents.
fn fact_of_tensor(tensor: TensorProto) -> Fact {
    let tensor = TensorProto { name: Some("value".into()), ..tensor };
    let model = ModelProto {
        graph: Some(GraphProto { initializer: vec![tensor], ..GraphProto::default() }),
        ..ModelProto::default()
    };
    let model = read_model_bytes(model.encode_to_vec().into(), None).unwrap();
    let id = model.graph.find("value").unwrap();
    infer(&model, &BTreeMap::new(), &BTreeMap::new()).fact(id).clone()
}

/// The facts about a stored value of a graph's input or output. An optional value is what it holds.
fn stored(path: &Path, ty: Option<&TypeProto>) -> Option<Fact> {
    let bytes = fs::read(path).ok()?;
    let sequence = |sequence: Sequence| {
        let items = sequence.tensors.into_iter().map(fact_of_tensor).collect();
        Fact { items: Some(items), ..Fact::default() }
    };
    match ty?.value.as_ref()? {
        type_proto::Value::TensorType(_) => {
            Some(fact_of_tensor(TensorProto::decode(bytes.as_slice()).unwrap()))
        }
        type_proto::Value::SequenceType(_) => Some(sequence(Sequence::decode(bytes.as_slice()).unwrap())),
        type_proto::Value::OptionalType(_) => {
            let optional = Optional::decode(bytes.as_slice()).unwrap();
            optional.tensor.map(fact_of_tensor).or(optional.sequence.map(sequence))
        }
        _ => None,
    }
}

/// What inference may know of an input: contents only of what an operator's sizes can depend on, which are a few
/// integers, or a list of floats such as the scales of Resize.
fn given(fact: Fact) -> Fact {
    let list = fact.rank().is_some_and(|rank| rank <= 1);
    let few = |elements: &Elements| match elements {
        Elements::Ints(values) => values.len() <= GIVEN_INTS,
        Elements::Floats(values) => list && values.len() <= GIVEN_FLOATS,
    };
    let items = fact.items.map(|items| items.into_iter().map(given).collect());
    Fact { items, elements: fact.elements.filter(few), ..fact }
}

fn operators_of(graph: &Graph, into: &mut BTreeSet<(String, String)>) {
    for (_, node) in graph.nodes() {
        into.insert((node.domain.clone(), node.op_type.clone()));
        node.subgraphs().for_each(|graph| operators_of(graph, into));
    }
}

/// Whether what is inferred says nothing that is not so.
fn contradicts(inferred: &Fact, expected: &Fact) -> bool {
    let shape = match (&inferred.shape, expected.full_shape()) {
        (Some(dims), Some(expected)) => {
            dims.len() != expected.len()
                || dims.iter().zip(expected).any(|(dim, expected)| dim.is_some_and(|dim| dim != expected))
        }
        _ => false,
    };
    let items = match (&inferred.items, &expected.items) {
        (Some(inferred), Some(expected)) => {
            inferred.len() != expected.len() || inferred.iter().zip(expected).any(|(a, b)| contradicts(a, b))
        }
        (Some(_), None) => true,
        _ => false,
    };
    let contents = match (&inferred.elements, &expected.elements) {
        (Some(Elements::Ints(a)), Some(Elements::Ints(b))) => {
            a.iter().zip(b).any(|(a, b)| a.is_some() && a != b)
        }
        (Some(Elements::Floats(a)), Some(Elements::Floats(b))) => {
            let near =
                |a: f64, b: f64| a == b || (a - b).abs() <= 1e-6 * b.abs() || (a.is_nan() && b.is_nan());
            a.iter().zip(b).any(|(a, b)| a.zip(*b).is_some_and(|(a, b)| !near(a, b)))
        }
        (Some(_), Some(_)) => true,
        _ => false,
    };
    let dtype = inferred.dtype.zip(expected.dtype).is_some_and(|(a, b)| a != b);
    shape || items || contents || dtype
}

fn complete(fact: &Fact) -> bool {
    match &fact.items {
        Some(items) => items.iter().all(complete),
        None => fact.dtype.is_some() && fact.full_shape().is_some(),
    }
}

/// The operator that first leaves something open.
fn first_unknown(model: &Model, shapes: &Shapes) -> String {
    let open = |(_, node): &(_, &viaduct_export::onnx::Node)| {
        node.outputs.iter().flatten().any(|id| !complete(shapes.fact(*id)))
    };
    model.graph.nodes().find(open).map_or_else(String::new, |(_, node)| node.op_type.clone())
}

#[test]
fn node_models_have_the_shapes_that_they_compute() {
    let Some(python) = python() else { return };
    let source = String::from_utf8(run_python(&python, FIND, &[]).stdout).unwrap();
    let supported: BTreeSet<(String, String)> =
        operators().map(|(domain, name)| (domain.to_owned(), name.to_owned())).collect();
    let (mut equal, mut unsupported) = (0, BTreeMap::<String, usize>::new());
    let (mut wrong, mut unknown) = (Vec::new(), BTreeMap::<String, Vec<String>>::new());
    let mut covered = BTreeSet::new();
    for entry in fs::read_dir(source.trim()).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let data = |kind: &str, index: usize| folder.join(format!("test_data_set_0/{kind}_{index}.pb"));
        let mut proto = ModelProto::decode(fs::read(folder.join("model.onnx")).unwrap().as_slice()).unwrap();
        let graph = proto.graph.as_mut().unwrap();
        let mut contents = BTreeMap::new();
        for (index, input) in graph.input.iter_mut().enumerate() {
            if let Some(fact) = stored(&data("input", index), input.r#type.as_ref()) {
                contents.insert(input.name().to_owned(), given(fact));
                input.r#type = None;
            }
        }
        let expected: Vec<Option<Fact>> = graph
            .output
            .iter_mut()
            .enumerate()
            .map(|(index, output)| stored(&data("output", index), output.r#type.take().as_ref()))
            .collect();
        graph.value_info.clear();
        let model = read_model_bytes(proto.encode_to_vec().into(), None).unwrap();
        let mut used = BTreeSet::new();
        operators_of(&model.graph, &mut used);
        let missing: Vec<_> = used.difference(&supported).collect();
        if !missing.is_empty() {
            missing.iter().for_each(|(_, name)| *unsupported.entry(name.clone()).or_default() += 1);
        }
        let shapes = infer(&model, &BTreeMap::new(), &contents);
        let outputs: Vec<_> = model.graph.outputs.iter().map(|id| shapes.fact(*id)).zip(expected).collect();
        if !shapes.conflicts.is_empty() {
            wrong.push(format!("{name}: {:?}", shapes.conflicts));
        } else if let Some((inferred, expected)) =
            outputs.iter().find(|(a, b)| b.as_ref().is_some_and(|b| contradicts(a, b)))
        {
            wrong.push(format!("{name}: {inferred:?} instead of {expected:?}"));
        } else if missing.is_empty() {
            if outputs.iter().all(|(inferred, expected)| complete(inferred) || expected.is_none()) {
                equal += 1;
                covered.extend(used);
            } else {
                unknown.entry(first_unknown(&model, &shapes)).or_default().push(name);
            }
        }
    }
    let open: usize = unknown.values().map(Vec::len).sum();
    println!("{equal} equal, {open} unknown, {} wrong; {} operators", wrong.len(), covered.len());
    println!("operators without a rule: {unsupported:?}");
    unknown.iter().for_each(|(operator, models)| println!("unknown after {operator}: {}", models.join(" ")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(covered.len() >= 190, "only {} operators", covered.len());
    assert!(equal * 100 >= (equal + open) * 98, "only {equal} of {} models", equal + open);
}
