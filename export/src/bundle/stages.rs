//! What opened bundles and outlines have in common: graphs in order, and the family's parameters.

use super::{Bundle, BundleError, Outline, Stage};
use crate::{
    arch::{Architecture, SizesError, SizesRequest, architecture},
    onnx::Model,
    shapes::Sizes,
};

/// The stages of a model, wherever its graphs are.
pub trait Stages {
    fn family(&self) -> &str;

    /// The recipe's name.
    fn name(&self) -> &str;

    fn profile(&self) -> &str;

    /// What the family's pipeline needs to know.
    fn family_parameters(&self) -> &serde_json::Value;

    /// Whether others exported the graphs: they may hold nodes that no GPU runs, and what holds at one size alone.
    fn is_imported(&self) -> bool {
        self.family_parameters().get("graphs").is_some()
    }

    /// Names in the order in which the stages run.
    fn stage_names(&self) -> Vec<&str>;

    /// The part of the model that a stage belongs to; nothing for a stage that is not there.
    fn component(&self, stage: &str) -> &str;

    /// A stage's graph.
    fn model(&self, stage: &str) -> Result<Model, BundleError>;

    /// What is drawn where nothing else is asked for.
    fn usual(&self) -> Result<SizesRequest, SizesError> {
        (known(self.family())?.usual)(self.family_parameters())
    }

    /// Sizes of all symbols of all stages.
    fn sizes(&self, request: &SizesRequest) -> Result<Sizes, SizesError> {
        (known(self.family())?.sizes)(self.family_parameters(), request)
    }
}

fn known(family: &str) -> Result<&'static Architecture, SizesError> {
    architecture(family).ok_or_else(|| SizesError::Family { family: family.to_owned() })
}

impl Stages for Bundle {
    fn family(&self) -> &str {
        &self.manifest.family
    }

    fn name(&self) -> &str {
        &self.manifest.name
    }

    fn profile(&self) -> &str {
        &self.manifest.profile
    }

    fn family_parameters(&self) -> &serde_json::Value {
        &self.manifest.parameters
    }

    fn stage_names(&self) -> Vec<&str> {
        self.manifest.stages.iter().map(|stage| stage.name.as_str()).collect()
    }

    fn component(&self, stage: &str) -> &str {
        let found = self.manifest.stages.iter().find(|s| s.name == stage);
        found.map_or("", Stage::component)
    }

    fn model(&self, stage: &str) -> Result<Model, BundleError> {
        Bundle::model(self, stage)
    }
}

impl Stages for Outline {
    fn family(&self) -> &str {
        self.family
    }

    fn name(&self) -> &str {
        &self.recipe.name
    }

    fn profile(&self) -> &str {
        &self.profile
    }

    fn family_parameters(&self) -> &serde_json::Value {
        &self.parameters
    }

    fn stage_names(&self) -> Vec<&str> {
        self.stages.iter().map(|stage| stage.name.as_str()).collect()
    }

    fn component(&self, stage: &str) -> &str {
        let found = self.stages.iter().find(|s| s.name == stage);
        found.map_or("", |stage| stage.component)
    }

    fn model(&self, stage: &str) -> Result<Model, BundleError> {
        let found = self.stages.iter().find(|s| s.name == stage);
        let missing =
            || BundleError::NoStage { path: self.recipe.name.clone().into(), stage: stage.to_owned() };
        Ok(found.ok_or_else(missing)?.model.clone())
    }
}
