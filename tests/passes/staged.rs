//! Parts of a split model, run one after another as a caller would.

use std::collections::BTreeMap;

use viaduct::tensor::HostTensor;
use viaduct_export::{
    onnx::{Model, ValueId},
    passes::{Outcome, Part, Settings, split, split_named},
};

use crate::runtime_support::{Feeds, cpu, run};

/// A split that must succeed.
pub fn parts(model: &Model, name: &str, settings: &Settings) -> Vec<Part> {
    let (parts, outcome) = split(model, split_named(name).unwrap(), settings).unwrap();
    assert_eq!(outcome.refused, []);
    assert_eq!(parts.len(), outcome.applied + 1);
    parts
}

/// Why a split was refused: places and reasons.
pub fn refused(model: &Model, name: &str, settings: &Settings) -> Vec<(String, String)> {
    let (parts, Outcome { refused, .. }) = split(model, split_named(name).unwrap(), settings).unwrap();
    assert!(parts.is_empty());
    refused.into_iter().map(|refusal| (refusal.place, refusal.why.to_string())).collect()
}

/// Names of a part's inputs and outputs.
pub fn ports(part: &Part) -> (Vec<&str>, Vec<&str>) {
    let graph = &part.model.graph;
    let names = |ids: &[ValueId]| ids.iter().map(|id| graph[*id].name.as_str()).collect();
    (names(&graph.inputs), names(&graph.outputs))
}

/// Runs parts in order; each gets what it asks for by name.
pub fn run_parts(parts: &[Part], feeds: &Feeds) -> BTreeMap<String, HostTensor> {
    let mut runtime = cpu();
    let mut values: BTreeMap<String, HostTensor> = feeds.iter().cloned().collect();
    for part in parts {
        let (inputs, outputs) = ports(part);
        let feeds: Feeds = inputs.iter().map(|name| ((*name).to_owned(), values[*name].clone())).collect();
        let made = run(&mut runtime, &part.model, &feeds, &outputs).expect(&part.name);
        values.extend(outputs.iter().map(|name| (*name).to_owned()).zip(made));
    }
    values
}
