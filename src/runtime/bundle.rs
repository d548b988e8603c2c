//! Opens a stage of a bundle: reads its graph, fits it to the device, makes the session.

use viaduct_export::{bundle::Bundle, onnx::read_model};

use super::{Runtime, RuntimeError, Stage, lower::lower};

/// How a stage is to be opened.
pub struct Binding<'a> {
    /// Sizes of the graph's named dimensions, where they are known.
    pub sizes: &'a [(&'a str, usize)],
    /// Values inside the graph that become outputs, by name.
    pub exposed: fn(&str) -> bool,
}

impl Runtime {
    /// Makes the session of a bundle's stage. Weights stay in the bundle's files.
    pub fn open_stage(
        &mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Stage<'_>, RuntimeError> {
        let stage = bundle.stage(name)?;
        let path = bundle.path(&stage.graph)?;
        let mut model =
            read_model(&path).map_err(|source| RuntimeError::Graph { stage: name.to_owned(), source })?;
        let graph = &model.graph;
        let inner =
            graph.values().filter(|(id, value)| (binding.exposed)(&value.name) && !graph.inputs.contains(id));
        let inner: Vec<String> = inner.map(|(_, value)| value.name.clone()).collect();
        let exposed: Vec<&str> = inner.iter().map(String::as_str).collect();
        let sizes = binding.sizes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        lower(&mut model, self.device(), &sizes, &exposed)
            .map_err(|source| RuntimeError::Lower { stage: name.to_owned(), source })?;
        self.open_model(name, model)
    }
}
