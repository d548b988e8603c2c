//! What is looked at: all stages of a model or one, with the sizes that the user binds.

use viaduct_export::{
    arch::{SizesError, SizesRequest},
    bundle::{BundleError, Stages},
    onnx::Model,
    shapes::Sizes,
};

/// The stages of a model, seen through the user's question.
pub struct Subject<'a> {
    pub stages: &'a dyn Stages,
    /// Only this stage.
    pub only: Option<&'a str>,
    /// Sizes that take the place of the picture's.
    pub bound: &'a Sizes,
}

impl Stages for Subject<'_> {
    fn family(&self) -> &str {
        self.stages.family()
    }

    fn name(&self) -> &str {
        self.stages.name()
    }

    fn profile(&self) -> &str {
        self.stages.profile()
    }

    fn family_parameters(&self) -> &serde_json::Value {
        self.stages.family_parameters()
    }

    fn stage_names(&self) -> Vec<&str> {
        let names = self.stages.stage_names().into_iter();
        names.filter(|name| self.only.is_none_or(|only| only == *name)).collect()
    }

    fn component(&self, stage: &str) -> &str {
        self.stages.component(stage)
    }

    fn model(&self, stage: &str) -> Result<Model, BundleError> {
        self.stages.model(stage)
    }

    fn sizes(&self, request: &SizesRequest) -> Result<Sizes, SizesError> {
        let mut sizes = self.stages.sizes(request)?;
        sizes.extend(self.bound.clone());
        Ok(sizes)
    }
}
