//! Equal constants, stored once.
//!
//! Before: the same bytes, type and shape under several names (tied weights, the scalars of every block). After: the first
//! of them. Constants in memory are compared by their bytes, mapped ones and computed ones by where they come from.
//! Mapped ones from different places are compared too, but read only where [`PROBES`] places agree, and their pages are
//! given back. Refused: constants that a body uses by name, or that are graph outputs, next to an equal one.

use std::{
    collections::{HashMap, HashSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Arc,
};

use super::{Outcome, Pass, PassError, Settings, View, substitution::Substitution};
use crate::onnx::{Bytes, DType, Model, Tensor, ValueId};

pub const PASS: Pass = Pass {
    name: "dedupe_initializers",
    what: "equal constants -> one of them",
    why: "each copy is stored, loaded and uploaded",
    run,
};

/// Places at which two mapped constants are compared before they are read.
const PROBES: usize = 64;

const BY_NAME: &str = "a graph output, or used by a body by name";

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let (substitution, outcome) = find(&View::of(model));
    substitution.apply(&mut model.graph);
    Ok(outcome)
}

/// What two constants that may be equal agree on.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    dtype: DType,
    shape: Vec<usize>,
    content: Content,
}

#[derive(PartialEq, Eq, Hash)]
enum Content {
    /// A hash of the bytes, or of some of them.
    Bytes(u64),
    Computed(usize, usize),
}

fn find(view: &View<'_>) -> (Substitution, Outcome) {
    let mut outcome = Outcome::default();
    let mut substitution = Substitution::default();
    let captured = view.graph.captured();
    let named: HashSet<ValueId> = view.graph.outputs.iter().copied().chain(captured).collect();
    let mut kept: HashMap<Key, Vec<ValueId>> = HashMap::new();
    for (id, value) in view.graph.values() {
        let Some(tensor) = view.constant(id) else { continue };
        let Some(key) = key(tensor) else { continue };
        let alike = kept.entry(key).or_default();
        let same =
            alike.iter().find(|other| view.constant(**other).is_some_and(|other| equal(other, tensor)));
        match same {
            Some(_) if named.contains(&id) => outcome.refuse(value.name.clone(), BY_NAME),
            Some(same) => {
                substitution.put(id, *same);
                outcome.applied += 1;
            }
            None => alike.push(id),
        }
    }
    (substitution, outcome)
}

fn key(tensor: &Tensor) -> Option<Key> {
    let content = match &tensor.bytes {
        Bytes::Computed { source, part, .. } => {
            Content::Computed(Arc::as_ptr(source).cast::<()>() as usize, *part)
        }
        Bytes::Absent { .. } => return None,
        other => Content::Bytes(probe(other.in_memory()?)),
    };
    Some(Key { dtype: tensor.dtype, shape: tensor.shape.clone(), content })
}

/// A hash of the bytes, or of words at places all over them.
fn probe(bytes: &[u8]) -> u64 {
    const WORD: usize = 16;
    let mut hasher = DefaultHasher::new();
    if bytes.len() <= PROBES * WORD {
        bytes.hash(&mut hasher);
        return hasher.finish();
    }
    let step = bytes.len() / PROBES;
    for at in (0..PROBES).map(|probe| probe * step) {
        bytes.get(at..at + WORD).hash(&mut hasher);
    }
    hasher.finish()
}

fn equal(a: &Tensor, b: &Tensor) -> bool {
    match (&a.bytes, &b.bytes) {
        // Their keys name the computation.
        (Bytes::Computed { .. }, Bytes::Computed { .. }) => true,
        (Bytes::Mapped { file: one, range: here }, Bytes::Mapped { file: other, range: there })
            if Arc::ptr_eq(one, other) && here == there =>
        {
            true
        }
        (a, b) => {
            let same = a.in_memory().zip(b.in_memory()).is_some_and(|(a, b)| a == b);
            a.release();
            b.release();
            same
        }
    }
}
