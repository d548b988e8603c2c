//! Named dimensions that get a number for good.
//!
//! Before: an input `ctx` of shape [1, text_seq, 192]; after `--dim text_seq=64`: [1, 64, 192]. Everything that was
//! computed from the size at run time becomes a constant for `fold_constants`. Refused: nothing; a name that no input has
//! is an error, because it is a mistake of the user's.

use std::collections::BTreeSet;

use super::{Outcome, Pass, PassError, Settings};
use crate::onnx::{Dim, Graph, Model, Value, ValueType};

pub const PASS: Pass = Pass {
    name: "bind_sizes",
    what: "named dimensions that --dim gives a number -> that number",
    why: "a size that never changes needs no computation at run time",
    run,
};

fn run(model: &mut Model, settings: &Settings) -> Result<Outcome, PassError> {
    let graph = &mut model.graph;
    let mut applied = 0;
    for id in graph.values().map(|(id, _)| id).collect::<Vec<_>>() {
        for dim in dims(&mut graph[id]) {
            let Dim::Symbol(name) = &dim else { continue };
            if let Some(size) = settings.sizes.get(name) {
                *dim = Dim::Fixed(*size);
                applied += 1;
            }
        }
    }
    Ok(Outcome::applied(applied))
}

/// Fails if a size is to be bound that no input of the graph has.
pub fn check(graph: &Graph, settings: &Settings) -> Result<(), PassError> {
    let symbols = symbols(graph);
    let missing = settings.sizes.keys().find(|name| !symbols.contains(name.as_str()));
    let Some(name) = missing else { return Ok(()) };
    let known: Vec<&str> = symbols.into_iter().collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Err(PassError::UnknownSize { name: name.clone(), known })
}

/// Names of the open dimensions of the graph's inputs.
pub fn symbols(graph: &Graph) -> BTreeSet<&str> {
    let types = graph.inputs.iter().filter_map(|id| graph[*id].ty.as_ref());
    let shapes = types.filter_map(|ty| match ty {
        ValueType::Tensor { shape, .. } => shape.as_ref(),
        ValueType::Other(_) => None,
    });
    let names = shapes.flatten().filter_map(|dim| match dim {
        Dim::Symbol(name) => Some(name.as_str()),
        _ => None,
    });
    names.collect()
}

fn dims(value: &mut Value) -> impl Iterator<Item = &mut Dim> {
    let shape = match &mut value.ty {
        Some(ValueType::Tensor { shape: Some(shape), .. }) => Some(shape),
        _ => None,
    };
    shape.into_iter().flatten()
}
