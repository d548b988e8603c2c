//! Opens a stage of a bundle: reads its graph, fits it to the device, makes the session.

use viaduct_export::{
    bundle::Bundle,
    onnx::{DType, Value, ValueType, read_model},
    shapes::Sizes,
};

use super::{Runtime, RuntimeError, Stage, lower::lower};

/// How a stage is to be opened.
pub struct Binding<'a> {
    /// Sizes of named dimensions, those of other graphs among them; one that is missing stays open.
    pub sizes: &'a Sizes,
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
        let unreadable = |e| RuntimeError::Graph { stage: name.to_owned(), source: Box::new(e) };
        let mut model = read_model(&path).map_err(unreadable)?;
        let graph = &model.graph;
        if !self.device().f16 && graph.values().any(|(_, value)| is_f16(value)) {
            let (stage, adapter) = (name.to_owned(), self.device().name.clone());
            return Err(RuntimeError::NoF16 { stage, adapter });
        }
        let inner =
            graph.values().filter(|(id, value)| (binding.exposed)(&value.name) && !graph.inputs.contains(id));
        let inner: Vec<String> = inner.map(|(_, value)| value.name.clone()).collect();
        let exposed: Vec<&str> = inner.iter().map(String::as_str).collect();
        let unfit = |e| RuntimeError::Lower { stage: name.to_owned(), source: Box::new(e) };
        lower(&mut model, self.device(), binding.sizes, &exposed).map_err(unfit)?;
        self.open_model(name, model)
    }
}

fn is_f16(value: &Value) -> bool {
    matches!(value.ty, Some(ValueType::Tensor { dtype: DType::F16, .. }))
}
