//! Makes a graph ready to run on a device: fits it, and makes sure that it fits the memory.

use viaduct_export::{
    device::DeviceProfile,
    memory::{Predicted, StageMemory, analyse},
    onnx::{DType, Model, Node},
    shapes::{Shapes, Sizes},
};

use super::{BisectError, side::Subject};
use crate::{
    plan::{Budget, OverBudget, Plan, in_words},
    runtime::{Optimisation, RuntimeError, Settings, lower},
};

/// A device, and the memory that may be used there.
#[derive(Clone, Debug)]
pub struct Place {
    pub profile: DeviceProfile,
    pub budget: Budget,
}

/// In what form a graph runs.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// As it is written, whatever the device computes wrongly or cannot bind.
    pub as_is: bool,
    pub optimisation: Optimisation,
}

/// Bytes of one probe at most, however much memory there is: progress is to be seen.
const LARGEST_PROBE: u64 = 4 << 30;

/// Fits a graph to a device, and predicts what its process takes.
pub fn prepare(
    name: &str,
    mut model: Model,
    sizes: &Sizes,
    place: &Place,
    form: Form,
) -> Result<(Subject, Predicted), BisectError> {
    // Constants that callers could replace; none is replaced here.
    let graph = &mut model.graph;
    let inputs = std::mem::take(&mut graph.inputs);
    graph.inputs = inputs.into_iter().filter(|id| graph[*id].constant.is_none()).collect();
    let mut settings = Settings::default();
    if !form.as_is {
        let graphs = [(name.to_owned(), model.clone())];
        let plan = Plan::new(&graphs, &|_| sizes.clone(), &place.profile, place.budget, 0);
        plan.check(name, || None)?;
        settings = plan.settings(name);
        let unfit = |e| RuntimeError::Lower { stage: name.to_owned(), source: Box::new(e) };
        lower(&mut model, &place.profile, sizes, &[], &settings).map_err(unfit)?;
    }
    let (predicted, shapes) = fits(name, &model, sizes, place, settings.pending_dispatches)?;
    let subject = Subject {
        name: name.to_owned(),
        model,
        shapes,
        pending_dispatches: settings.pending_dispatches,
        optimisation: form.optimisation,
    };
    Ok((subject, predicted))
}

/// Whether the CPU provider of ONNX Runtime 1.31.1 computes the graph rightly only with all optimisations, which it is not
/// given: it makes zeros of `x * Sigmoid(x)` behind a `MatMulNBits` in f16 with 8-bit activations.
pub fn needs_optimisation_on_cpu(subject: &Subject) -> bool {
    let Subject { model, shapes, optimisation, .. } = subject;
    let is_f16 = |value| shapes.fact(value).dtype == Some(DType::F16);
    let eight_bits = |node: &Node| {
        node.is_contrib("MatMulNBits")
            && node.int("accuracy_level") == Some(4)
            && node.input(0).is_some_and(is_f16)
    };
    *optimisation != Optimisation::All && model.graph.nodes().any(|(_, node)| eight_bits(node))
}

/// What a graph takes on a device; an error if that is more than there is.
pub fn fits(
    name: &str,
    model: &Model,
    sizes: &Sizes,
    place: &Place,
    pending_dispatches: u32,
) -> Result<(Predicted, Shapes), BisectError> {
    let (StageMemory { predicted, largest, .. }, shapes) =
        analyse(model, sizes, &place.profile, pending_dispatches);
    if place.budget.holds(predicted) {
        return Ok((predicted, shapes));
    }
    Err(Box::new(OverBudget {
        what: name.to_owned(),
        stage: name.to_owned(),
        predicted,
        budget: place.budget,
        largest: largest.first().map(in_words),
        nearest: None,
    })
    .into())
}

/// Bytes of values that one probe may look at beside a graph that takes so much: on the device until the run ends, and on
/// the host those of both sides.
pub fn probe_bytes(budget: Budget, predicted: Predicted) -> u64 {
    let host = budget.host.saturating_sub(predicted.host) / 2;
    let device = budget.device.saturating_sub(predicted.device);
    let total = budget.total.saturating_sub(predicted.total()) / 3;
    host.min(device).min(total).min(LARGEST_PROBE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_leaves_room_for_the_graph_and_for_both_sides() {
        let budget = Budget { unified: true, host: 1000, device: 1000, total: 1000 };
        assert_eq!(probe_bytes(budget, Predicted { device: 300, host: 100 }), 200);
        let card = Budget { unified: false, host: 1000, device: 500, total: 1500 };
        assert_eq!(probe_bytes(card, Predicted { device: 400, host: 0 }), 100);
        assert_eq!(probe_bytes(card, Predicted { device: 501, host: 0 }), 0);
        let any = Budget { unified: true, host: u64::MAX, device: u64::MAX, total: u64::MAX };
        assert_eq!(probe_bytes(any, Predicted::default()), LARGEST_PROBE);
    }
}
