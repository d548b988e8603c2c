//! The plan of a run: how each stage is set so that it fits the memory there is, decided before anything is allocated.
//!
//! A stage has two settings that trade speed for memory. They are tried from the fastest on, and the first that fits is
//! taken. What fits with none of them is refused, with the largest offender and the nearest size that would fit. Where
//! there is room for more than one stage, the next component's sessions are made ahead ([`Overlap`]).

mod budget;
mod model;
mod overlap;

use std::fmt;

use serde::Serialize;
use viaduct_export::{
    bytes::ByteSize,
    device::DeviceProfile,
    memory::{PENDING_DISPATCHES, Predicted, StageMemory, TensorUse, analyse, symbols},
    onnx::Model,
    shapes::{Shapes, Sizes},
};

pub use self::{
    budget::Budget,
    model::{PlanError, PlannedModel},
    overlap::{Beside, Overlap},
};
pub use crate::runtime::Settings;
use crate::runtime::{LowerError, Lowered, OpenedAhead, lower};

/// One stage of the plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedStage {
    pub name: String,
    pub settings: Settings,
    pub predicted: Predicted,
    /// The largest activation.
    pub largest: Option<TensorUse>,
    /// Whether every tensor's size is known; where not, the prediction is too small.
    pub complete: bool,
    /// A node that cannot run at these sizes: graphs that others traced at one size may hold it in places.
    pub contradiction: Option<String>,
}

/// How all stages are set, and what they take.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    pub budget: Budget,
    pub stages: Vec<PlannedStage>,
    /// Whether the sessions of all stages fit beside each other, so that they could stay loaded.
    pub may_stay_loaded: bool,
    /// What is loaded beside each stage; nothing unless it was asked for ([`PlannedModel::overlapped`]).
    pub overlap: Overlap,
}

/// A stage that fits with no setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct OverBudget {
    /// What was planned: `1024x1024`, or a file's name.
    pub what: String,
    pub stage: String,
    pub predicted: Predicted,
    pub budget: Budget,
    /// The largest activation, in words.
    pub largest: Option<String>,
    /// What fits instead, in words.
    pub nearest: Option<String>,
}

impl fmt::Display for OverBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OverBudget { what, stage, predicted, budget, largest, nearest } = self;
        write!(f, "{what} needs {} in {stage}", ByteSize(budget.counted(*predicted)))?;
        write!(f, " (device {}, host {})", ByteSize(predicted.device), ByteSize(predicted.host))?;
        write!(f, ", more than {budget}")?;
        if let Some(tensor) = largest {
            write!(f, "; its largest tensor is {tensor}")?;
        }
        match nearest {
            Some(nearest) => write!(f, "; {nearest} fits"),
            None => write!(f, "; no smaller size fits"),
        }
    }
}

/// Fits a graph to the device under the settings, and analyses it.
pub fn analyse_stage(
    model: &mut Model,
    sizes: &Sizes,
    device: &DeviceProfile,
    settings: &Settings,
) -> (Result<Lowered, LowerError>, StageMemory, Shapes) {
    let lowered = lower(model, device, sizes, &[], settings);
    let (memory, shapes) = analyse(model, sizes, device, settings.pending_dispatches);
    (lowered, memory, shapes)
}

impl Plan {
    /// Plans all stages, each a name and a graph for any device. `sizes` gives the graphs' symbols under the settings;
    /// `besides` are bytes that the process of every stage holds of other things.
    pub fn new(
        graphs: &[(String, Model)],
        sizes: &dyn Fn(&Settings) -> Sizes,
        device: &DeviceProfile,
        budget: Budget,
        besides: u64,
    ) -> Plan {
        let planned = |graph| plan_stage(graph, sizes, device, budget, besides);
        let stages: Vec<_> = graphs.iter().map(planned).collect();
        let may_stay_loaded = budget.holds(overlap::sum(&stages));
        Plan { budget, stages, may_stay_loaded, overlap: Overlap::default() }
    }

    pub fn stage(&self, name: &str) -> Option<&PlannedStage> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// How a stage is set; the default for one that was not planned.
    pub fn settings(&self, name: &str) -> Settings {
        self.stage(name).map(|stage| stage.settings).unwrap_or_default()
    }

    /// Bytes that a stage's process is predicted to take, with the stages that it has opened ahead.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        let own = self.overlap.of(name).map_or(&[][..], |beside| &beside.own);
        let waiting = own.iter().filter_map(|name| self.stage(name));
        Some(overlap::sum([self.stage(name)?].into_iter().chain(waiting)).total())
    }

    /// What may be opened in another process while the stage is in use.
    pub fn opened_ahead(&self, name: &str) -> Vec<OpenedAhead<'_>> {
        let next = self.overlap.of(name).map_or(&[][..], |beside| &beside.next);
        let stages = next.iter().filter_map(|name| self.stage(name));
        let ahead = stages.map(|PlannedStage { name, settings, .. }| OpenedAhead {
            stage: name,
            settings: *settings,
            planned: self.bytes(name).unwrap_or_default(),
        });
        ahead.collect()
    }

    /// The stage beside which the most is held, and the sum of both.
    pub fn peak<'p>(&'p self) -> Option<(&'p PlannedStage, Predicted)> {
        let moment = |stage: &'p PlannedStage| {
            let beside = self.overlap.of(&stage.name).into_iter().flat_map(Beside::all);
            (stage, overlap::sum([stage].into_iter().chain(beside.filter_map(|name| self.stage(name)))))
        };
        self.stages.iter().rev().map(moment).max_by_key(|(_, sum)| self.budget.counted(*sum))
    }

    /// The stage with the largest counted peak.
    pub fn largest(&self) -> Option<&PlannedStage> {
        self.largest_of(|_| true)
    }

    /// The largest of the stages that do not fit, if there is one. It need not be the largest of all: on a card with
    /// memory of its own a stage may exceed what is free on the host.
    pub fn offender(&self) -> Option<&PlannedStage> {
        self.largest_of(|stage| !self.budget.holds(stage.predicted))
    }

    fn largest_of(&self, wanted: impl Fn(&PlannedStage) -> bool) -> Option<&PlannedStage> {
        let stages = self.stages.iter().rev().filter(|stage| wanted(stage));
        stages.max_by_key(|stage| self.budget.counted(stage.predicted))
    }

    /// Stages of which not every tensor's size is known: the plan is too low there.
    pub fn incomplete(&self) -> Vec<&str> {
        let stages = self.stages.iter().filter(|stage| !stage.complete);
        stages.map(|stage| stage.name.as_str()).collect()
    }

    /// Whether the sizes contradict a graph.
    pub fn contradicts(&self) -> bool {
        self.stages.iter().any(|stage| stage.contradiction.is_some())
    }

    /// Refuses if a stage does not fit. `what` was planned; `nearest` looks for what would fit.
    pub fn check(&self, what: &str, nearest: impl FnOnce() -> Option<String>) -> Result<(), Box<OverBudget>> {
        let Some(stage) = self.offender() else { return Ok(()) };
        Err(Box::new(OverBudget {
            what: what.to_owned(),
            stage: stage.name.clone(),
            predicted: stage.predicted,
            budget: self.budget,
            largest: stage.largest.as_ref().map(in_words),
            nearest: nearest(),
        }))
    }

    /// Why stages are not set as they usually are: a line for each.
    pub fn choices(&self) -> Vec<String> {
        let changed = self.stages.iter().filter(|stage| stage.settings.saves_memory());
        changed.map(|stage| format!("{}: {}", stage.name, choice(stage, self.budget))).collect()
    }
}

fn choice(stage: &PlannedStage, budget: Budget) -> String {
    let PlannedStage { settings, predicted, .. } = stage;
    let mut parts = Vec::new();
    if settings.pending_dispatches < PENDING_DISPATCHES {
        let (few, usual) = (settings.pending_dispatches, PENDING_DISPATCHES);
        parts.push(format!("{few} dispatch per submission instead of {usual}"));
    }
    if settings.halvings > 0 {
        parts.push("its work in smaller pieces".to_owned());
    }
    if settings.fused {
        parts.push("the fused attention operator".to_owned());
    }
    let outcome = if budget.holds(*predicted) { "to stay below" } else { "and yet above" };
    format!("{}, slower, {outcome} {budget}", parts.join(" and "))
}

/// `scores [1,1,16384,16384] f16, 512 MiB`
pub fn in_words(tensor: &TensorUse) -> String {
    let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
    format!("{} [{}] {}, {}", tensor.name, shape.join(","), tensor.dtype, ByteSize(tensor.bytes))
}

/// The first settings under which a stage fits; those with the smallest peak if there are none.
fn plan_stage(
    (name, graph): &(String, Model),
    sizes: &dyn Fn(&Settings) -> Sizes,
    device: &DeviceProfile,
    budget: Budget,
    besides: u64,
) -> PlannedStage {
    let mut best: Option<PlannedStage> = None;
    for (settings, sizes, model) in forms(graph, sizes, device) {
        let (memory, shapes) = analyse(&model, &sizes, device, settings.pending_dispatches);
        let Predicted { device, host } = memory.predicted;
        let planned = PlannedStage {
            name: name.clone(),
            settings,
            predicted: Predicted { device, host: host.saturating_add(besides) },
            complete: memory.is_complete(),
            contradiction: shapes.conflicts.into_iter().next().map(|conflict| conflict.to_string()),
            largest: memory.largest.into_iter().next(),
        };
        if budget.holds(planned.predicted) {
            return planned;
        }
        // Equal peaks: the faster setting stays.
        let smaller =
            |best: &PlannedStage| budget.counted(planned.predicted) < budget.counted(best.predicted);
        if best.as_ref().is_none_or(smaller) {
            best = Some(planned);
        }
    }
    best.expect("there is at least one setting")
}

/// The graph with its sizes as each of the settings leaves them, the fastest first, without settings that change nothing:
/// most stages have no attention.
fn forms<'a>(
    graph: &'a Model,
    sizes: &'a dyn Fn(&Settings) -> Sizes,
    device: &'a DeviceProfile,
) -> impl Iterator<Item = (Settings, Sizes, Model)> + 'a {
    let symbols = symbols(&graph.graph);
    let mut before = None;
    Settings::all(device).filter_map(move |settings| {
        let sizes = sizes(&settings);
        let mut model = graph.clone();
        let lowered = lower(&mut model, device, &sizes, &[], &settings);
        let own: Vec<_> = symbols.iter().map(|symbol| sizes.get(symbol).copied()).collect();
        let form = Some((settings.pending_dispatches, own, lowered.ok().map(|lowered| lowered.attention)));
        let changed = form != before;
        before = form;
        changed.then_some((settings, sizes, model))
    })
}

/// The largest value in `1..below` for which something holds, if it holds for small ones and not for large ones. Where it
/// does not even hold for 1, no other is tried.
pub fn largest_that(below: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    if below <= 1 || !holds(1) {
        return None;
    }
    let (mut good, mut bad) = (1, below);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}

#[cfg(test)]
mod tests {
    use viaduct_export::onnx::{Builder, DType, Dim};

    use super::*;

    /// Settings that are tried for a graph with one input of `rows` rows, where the host drives chunks of `chunk_rows`.
    fn tried(rows: &str, device: &str) -> Vec<(u32, u32)> {
        let mut graph = Builder::new("test");
        let dims = [Dim::Symbol(rows.to_owned())];
        let x = graph.input("x", DType::F32, &dims);
        let y = graph.op("Neg", &[x], &[]);
        graph.output(y, "y", &dims);
        let sizes = |settings: &Settings| {
            Sizes::from([("tokens".to_owned(), 64), ("chunk_rows".to_owned(), 64 >> settings.halvings)])
        };
        let (graph, device) = (graph.finish(), DeviceProfile::preset(device).unwrap());
        let forms = forms(&graph, &sizes, &device);
        forms.map(|(settings, ..)| (settings.pending_dispatches, settings.halvings)).collect()
    }

    #[test]
    fn settings_that_change_nothing_are_not_tried() {
        assert_eq!(tried("tokens", "bc250"), [(4, 0), (1, 0)]);
        assert_eq!(tried("tokens", "cpu"), [(4, 0)]);
        assert_eq!(tried("chunk_rows", "bc250"), [(4, 0), (1, 0), (1, 1), (1, 2), (1, 3)]);
        assert_eq!(tried("chunk_rows", "cpu"), [(4, 0), (4, 1), (4, 2), (4, 3)]);
    }

    #[test]
    fn a_stage_that_exceeds_the_host_alone_is_the_offender() {
        let stage = |name: &str, device, host| PlannedStage {
            name: name.to_owned(),
            settings: Settings::default(),
            predicted: Predicted { device, host },
            largest: None,
            complete: true,
            contradiction: None,
        };
        let budget = Budget { unified: false, host: 5, device: 10, total: 15 };
        let stages = vec![stage("transformer", 9, 1), stage("vae", 2, 6)];
        let plan = Plan { budget, stages, may_stay_loaded: false, overlap: Overlap::default() };
        assert_eq!(plan.largest().unwrap().name, "transformer");
        assert_eq!(plan.offender().unwrap().name, "vae");
        assert!(plan.check("64x64", || None).is_err());
    }

    #[test]
    fn bisection_finds_the_last_that_holds() {
        assert_eq!(largest_that(100, |n| n <= 37), Some(37));
        assert_eq!(largest_that(100, |_| true), Some(99));
        assert_eq!(largest_that(100, |_| false), None);
        assert_eq!(largest_that(1, |_| true), None);
    }
}
