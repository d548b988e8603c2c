//! Where to cut a graph so that no part takes more than a budget.
//!
//! A part takes its weights, the values that cross into it, and at the worst moment the values of its own that are still
//! used; views share their bytes with what they show. What a provider takes besides, for other layouts and free buffers,
//! is not counted. Among all ways to cut that keep to the budget the one with the fewest parts is taken, and among those the one
//! where the fewest bytes cross.

use std::collections::{HashMap, HashSet};

use super::{
    PassError, Refusal, View,
    bind_sizes::symbols,
    part::{Origin, Origins},
};
use crate::{
    onnx::{Graph, NodeId, ValueId},
    shapes::{Shapes, Sizes, infer},
};

const UNKNOWN: &str = "its size is not known";
const TOO_LARGE: &str = "the node alone takes more than the budget";
const NO_CUT: &str = "the budget asks for a cut where none can be";
const FITS: &str = "the whole keeps to the budget";

/// Fails if an open dimension has no size.
pub fn check_sizes(graph: &Graph, sizes: &Sizes) -> Result<(), PassError> {
    let open: Vec<&str> = symbols(graph).into_iter().filter(|name| !sizes.contains_key(*name)).collect();
    if open.is_empty() { Ok(()) } else { Err(PassError::OpenSizes(open.join(", "))) }
}

/// Operators whose result is their first input in another shape.
const VIEWS: &[&str] = &["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"];

/// Values that a node uses and makes, without what can be had again for little.
struct Step {
    node: NodeId,
    weights: Vec<ValueId>,
    reads: Vec<ValueId>,
    makes: Vec<ValueId>,
}

/// A graph's nodes in execution order, and what its values take.
pub struct Costs<'a> {
    view: &'a View<'a>,
    steps: Vec<Step>,
    bytes: HashMap<ValueId, u64>,
    /// What a view shows.
    shown: HashMap<ValueId, ValueId>,
    /// The step that makes a value, and the last that uses it.
    made: HashMap<ValueId, usize>,
    last: HashMap<ValueId, usize>,
    /// The last step that uses a value or a view of it.
    last_shown: HashMap<ValueId, usize>,
}

impl<'a> Costs<'a> {
    /// Counts under sizes of the open dimensions.
    pub fn of(view: &'a View<'a>, sizes: &Sizes) -> Result<Result<Costs<'a>, Refusal>, PassError> {
        check_sizes(view.graph, sizes)?;
        Ok(Costs::counted(view, &infer(view.model, sizes, &Default::default())))
    }

    fn counted(view: &'a View<'a>, shapes: &Shapes) -> Result<Costs<'a>, Refusal> {
        let origins = Origins::of(view);
        let mut costs = Costs {
            view,
            steps: Vec::new(),
            bytes: HashMap::new(),
            shown: HashMap::new(),
            made: HashMap::new(),
            last: HashMap::new(),
            last_shown: HashMap::new(),
        };
        for (node_id, node) in view.graph.nodes().filter(|(_, node)| origins.computes(node)) {
            let mut step = Step { node: node_id, weights: Vec::new(), reads: Vec::new(), makes: Vec::new() };
            for value in view.graph.used_by(node) {
                match origins.get(value) {
                    Origin::Constant => step.weights.push(value),
                    Origin::Integers => continue,
                    Origin::Given | Origin::Computed => step.reads.push(value),
                }
            }
            step.makes.extend(node.outputs.iter().flatten());
            let at = costs.steps.len();
            for value in step.weights.iter().chain(&step.reads).chain(&step.makes) {
                let in_file = view.constant(*value).map(|tensor| tensor.bytes.len() as u64);
                let unknown = || Refusal { place: view.graph[*value].name.clone(), why: UNKNOWN.into() };
                let bytes = in_file.or_else(|| shapes.bytes(*value)).ok_or_else(unknown)?;
                costs.bytes.insert(*value, bytes);
            }
            if let (true, Some(x), Some(view)) =
                (VIEWS.iter().any(|op| node.is(op)), step.reads.first(), node.output(0))
            {
                let x = costs.root(*x);
                costs.shown.insert(view, x);
            }
            costs.last.extend(step.reads.iter().map(|value| (*value, at)));
            costs
                .last_shown
                .extend(step.reads.iter().map(|value| (costs.root(*value), at)).collect::<Vec<_>>());
            costs.made.extend(step.makes.iter().map(|value| (*value, at)));
            costs.steps.push(step);
        }
        Ok(costs)
    }

    /// The nodes behind which the cuts come.
    pub fn cuts(&self, budget: u64) -> Result<Vec<NodeId>, Refusal> {
        let end = self.steps.len();
        if self.reach(0, budget).last() == Some(end) {
            return Err(Refusal { place: self.view.graph.name.clone(), why: FITS.into() });
        }
        let crossing = self.crossing();
        // By the number of steps before a cut: parts so far, bytes that crossed, the cut before.
        let mut best: Vec<Option<(usize, u64, usize)>> = vec![None; end + 1];
        best[0] = Some((0, 0, 0));
        for start in 0..end {
            let Some((parts, crossed, _)) = best[start] else { continue };
            for stop in self.reach(start, budget) {
                let Some(bytes) = crossing[stop] else { continue };
                let found = (parts + 1, crossed.saturating_add(bytes), start);
                if best[stop].is_none_or(|old| (found.0, found.1) < (old.0, old.1)) {
                    best[stop] = Some(found);
                }
            }
        }
        if best[end].is_none() {
            return Err(self.refusal(budget));
        }
        let mut cuts = Vec::new();
        let mut stop = end;
        while let Some((_, _, start)) = best[stop].filter(|found| found.2 > 0) {
            cuts.push(self.steps[start - 1].node);
            stop = start;
        }
        cuts.reverse();
        Ok(cuts)
    }

    fn refusal(&self, budget: u64) -> Refusal {
        let too_large = (0..self.steps.len()).find(|start| self.reach(*start, budget).next().is_none());
        match too_large {
            Some(at) => Refusal { place: self.view.graph.label(self.steps[at].node), why: TOO_LARGE.into() },
            None => Refusal { place: self.view.graph.name.clone(), why: NO_CUT.into() },
        }
    }

    /// What a value shows, if it is a view; else itself.
    fn root(&self, value: ValueId) -> ValueId {
        self.shown.get(&value).copied().unwrap_or(value)
    }

    fn size(&self, value: ValueId) -> u64 {
        self.bytes.get(&value).copied().unwrap_or(0)
    }

    /// Bytes that cross a cut before each step and at the end; none where a value's shape could not be written down.
    fn crossing(&self) -> Vec<Option<u64>> {
        let mut crossing: Vec<Option<u64>> = vec![Some(0); self.steps.len() + 1];
        for (value, made) in &self.made {
            let Some(last) = self.last.get(value) else { continue };
            let known = self.view.facts().dtype(*value).is_some()
                && self.view.facts().shape(*value).is_some_and(|shape| {
                    (0..shape.len()).all(|axis| self.view.facts().sizes(*value, axis as i64).is_some())
                });
            for bytes in crossing.get_mut(made + 1..=*last).into_iter().flatten() {
                *bytes = bytes.filter(|_| known).map(|bytes| bytes.saturating_add(self.size(*value)));
            }
        }
        crossing
    }

    /// Where a part that begins with a step may end, nearest first.
    fn reach(&self, start: usize, budget: u64) -> impl Iterator<Item = usize> {
        let outputs: HashSet<ValueId> =
            self.view.graph.outputs.iter().map(|output| self.root(*output)).collect();
        let mut held: HashSet<ValueId> = HashSet::new();
        let (mut constant, mut live, mut most) = (0u64, 0u64, 0u64);
        (start..self.steps.len()).map_while(move |at| {
            let step = &self.steps[at];
            let reads: Vec<ValueId> = step.reads.iter().map(|value| self.root(*value)).collect();
            let makes: Vec<ValueId> =
                step.makes.iter().copied().filter(|value| !self.shown.contains_key(value)).collect();
            let before = |value: &&ValueId| self.made.get(*value).is_none_or(|made| *made < start);
            for value in step.weights.iter().chain(reads.iter().filter(before)) {
                if held.insert(*value) {
                    constant = constant.saturating_add(self.size(*value));
                }
            }
            live = makes.iter().fold(live, |live, value| live.saturating_add(self.size(*value)));
            most = most.max(live);
            let ends = |value: &ValueId| {
                self.made.get(value).is_some_and(|made| *made >= start)
                    && self.last_shown.get(value).is_none_or(|last| *last == at)
                    && !outputs.contains(value)
            };
            let ending: HashSet<ValueId> = reads.into_iter().chain(makes).filter(ends).collect();
            live = ending.into_iter().fold(live, |live, value| live.saturating_sub(self.size(value)));
            (constant.saturating_add(most) <= budget).then_some(at + 1)
        })
    }
}
