//! The one way in which passes are tested.

use std::collections::BTreeMap;

use viaduct::tensor::HostTensor;
use viaduct_export::{
    onnx::{DType, Model, model_bytes},
    passes::{Pass, Report, Settings, apply, pass},
};

use crate::runtime_support::{Feeds, cpu, relative_error, run};

/// How much outputs may differ.
#[derive(Clone, Copy, Debug)]
pub enum Bar {
    /// Every bit is the same.
    Exact,
    /// max|a-b| / max|b| of every output, in f32.
    Relative(f32),
}

/// A model after passes, and what they said.
pub struct Rewritten {
    pub model: Model,
    pub reports: Vec<Report>,
}

impl Rewritten {
    /// How many places the passes rewrote.
    pub fn applied(&self) -> usize {
        self.reports.iter().map(|report| report.applied).sum()
    }

    /// Why places were left alone, each reason with how often it was given.
    pub fn refusals(&self) -> BTreeMap<String, usize> {
        let mut refusals = BTreeMap::new();
        for refusal in self.reports.iter().flat_map(|report| &report.refused) {
            *refusals.entry(refusal.why.to_string()).or_default() += 1;
        }
        refusals
    }

    /// Nodes by operator.
    pub fn operators(&self) -> BTreeMap<&str, usize> {
        let mut operators = BTreeMap::new();
        for (_, node) in self.model.graph.nodes() {
            *operators.entry(node.op_type.as_str()).or_default() += 1;
        }
        operators
    }
}

/// Runs one pass with default settings: see [`passes`].
pub fn one(model: &Model, name: &str, feeds: &Feeds, bar: Bar) -> Rewritten {
    passes(model, &[pass(name).unwrap()], &Settings::default(), feeds, bar)
}

/// Runs passes, asserts that a second run changes nothing, and that the outputs on the CPU provider are the same before
/// and after.
pub fn passes(
    model: &Model,
    passes: &[&'static Pass],
    settings: &Settings,
    feeds: &Feeds,
    bar: Bar,
) -> Rewritten {
    let rewritten = rewrite(model, passes, settings);
    let mut runtime = cpu();
    let outputs: Vec<&str> = model.graph.outputs.iter().map(|id| model.graph[*id].name.as_str()).collect();
    let before = run(&mut runtime, model, feeds, &outputs).expect("the model as it was");
    let after = run(&mut runtime, &rewritten.model, feeds, &outputs).expect("the rewritten model");
    for ((name, before), after) in outputs.iter().zip(&before).zip(&after) {
        assert_same(name, before, after, bar);
    }
    rewritten
}

/// Runs passes and asserts that a second run changes nothing; the model need not run.
pub fn rewrite(model: &Model, passes: &[&'static Pass], settings: &Settings) -> Rewritten {
    let mut rewritten = model.clone();
    let reports = apply(&mut rewritten, passes, settings).unwrap();
    let mut again = rewritten.clone();
    let settled = Settings { sizes: BTreeMap::new(), ..settings.clone() };
    let second = apply(&mut again, passes, &settled).unwrap();
    assert!(second.iter().all(|report| report.applied == 0), "a second run applied {second:?}");
    assert_eq!(
        model_bytes(&rewritten).unwrap(),
        model_bytes(&again).unwrap(),
        "a second run changed the model"
    );
    Rewritten { model: rewritten, reports }
}

fn assert_same(name: &str, before: &HostTensor, after: &HostTensor, bar: Bar) {
    assert_eq!(before.shape, after.shape, "{name}");
    match bar {
        Bar::Exact => assert_eq!(before, after, "{name}"),
        Bar::Relative(bar) => {
            assert_eq!(before.values.dtype(), after.values.dtype(), "{name}");
            if before.values.dtype() != DType::F32 && before.values.dtype() != DType::F16 {
                return assert_eq!(before, after, "{name}");
            }
            let error = relative_error(&after.to_f32(), &before.to_f32());
            assert!(error <= bar, "{name}: relative error {error:e}, bar {bar:e}");
        }
    }
}
