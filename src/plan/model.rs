//! Plans a model's picture: its stages' graphs, the sizes that the picture gives them, and what else would fit.

use viaduct_export::{
    arch::{SizesError, SizesRequest},
    bundle::{BundleError, Stages},
    device::DeviceProfile,
    onnx::Model,
    shapes::Sizes,
};

use super::{Budget, OverBudget, Overlap, Plan, Settings, largest_that};

#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Sizes(#[from] SizesError),
}

/// A model whose pictures can be planned.
pub struct PlannedModel<'a> {
    stages: &'a dyn Stages,
    graphs: Vec<(String, Model)>,
    device: DeviceProfile,
    budget: Budget,
    besides: u64,
    overlapped: bool,
}

impl<'a> PlannedModel<'a> {
    /// Reads the graphs; weights are not touched.
    pub fn new(
        stages: &'a dyn Stages,
        device: DeviceProfile,
        budget: Budget,
    ) -> Result<PlannedModel<'a>, BundleError> {
        let graph = |name: &str| Ok((name.to_owned(), stages.model(name)?));
        let graphs = stages.stage_names().into_iter().map(graph).collect::<Result<_, BundleError>>()?;
        Ok(PlannedModel { stages, graphs, device, budget, besides: 0, overlapped: false })
    }

    /// The process of every stage holds so many bytes of other things.
    pub fn besides(self, bytes: u64) -> PlannedModel<'a> {
        PlannedModel { besides: bytes, ..self }
    }

    /// Stages run in a process per component, of which the next opens its first stages ahead where they fit.
    pub fn overlapped(self) -> PlannedModel<'a> {
        PlannedModel { overlapped: true, ..self }
    }

    pub fn graphs(&self) -> &[(String, Model)] {
        &self.graphs
    }

    pub fn device(&self) -> &DeviceProfile {
        &self.device
    }

    /// Sizes of all symbols under the settings.
    pub fn sizes(&self, picture: &SizesRequest, settings: &Settings) -> Result<Sizes, SizesError> {
        self.stages.sizes(&SizesRequest { halvings: settings.halvings, ..*picture })
    }

    /// Plans a picture.
    pub fn plan(&self, picture: &SizesRequest) -> Result<Plan, SizesError> {
        // One failing request fails for all settings: they differ in the chunks alone.
        self.sizes(picture, &Settings::default())?;
        let sizes = |settings: &Settings| self.sizes(picture, settings).unwrap_or_default();
        let mut plan = Plan::new(&self.graphs, &sizes, &self.device, self.budget, self.besides);
        // What does not fit by itself is refused, or forced and then run with as little beside it as can be.
        if self.overlapped && plan.stages.iter().all(|stage| self.budget.holds(stage.predicted)) {
            let stages: Vec<_> =
                plan.stages.iter().map(|stage| (self.stages.component(&stage.name), stage)).collect();
            plan.overlap = Overlap::new(&stages, self.budget);
        }
        Ok(plan)
    }

    /// Refuses a picture that does not fit, and names the nearest size of the same shape that does.
    pub fn check(&self, plan: &Plan, picture: &SizesRequest) -> Result<(), Box<OverBudget>> {
        plan.check(&format!("{}x{}", picture.width, picture.height), || {
            let nearest = self.nearest(picture)?;
            Some(format!("{}x{}", nearest.width, nearest.height))
        })
    }

    /// The largest picture of about the same shape that fits, found by bisection over the longer side.
    fn nearest(&self, picture: &SizesRequest) -> Option<SizesRequest> {
        // Sides that a model can draw are multiples of a power of two, at most 64.
        let square = |side| SizesRequest { width: side, height: side, ..*picture };
        let step = (3..=6)
            .map(|bits| 1 << bits)
            .find(|step| self.sizes(&square(*step), &Settings::default()).is_ok())?;
        let (columns, rows) = (picture.width / step, picture.height / step);
        let longer = columns.max(rows);
        let scaled = |part: usize| {
            let side = |units: usize| (units * part / longer).max(1) * step;
            SizesRequest { width: side(columns), height: side(rows), ..*picture }
        };
        let fits = |part| self.plan(&scaled(part)).is_ok_and(|plan| plan.offender().is_none());
        largest_that(longer, fits).map(scaled)
    }
}
