//! Opens a stage of a bundle: reads its graph, fits it to the device, makes the session.

use viaduct_export::{
    bundle::{Bundle, BundleError, Stages},
    onnx::{DType, Graph, Value, ValueType},
    shapes::Sizes,
};

use super::{Runtime, RuntimeError, Settings, Stage, lower::lower, stage::CpuNodes};

/// How a stage is to be opened.
pub struct Binding<'a> {
    /// Sizes of named dimensions, those of other graphs among them; one that is missing stays open.
    pub sizes: &'a Sizes,
    /// Values inside the graph that become outputs: those of one of these names, and those whose name begins with one
    /// that ends with `_`.
    pub exposed: &'a [&'a str],
    pub settings: Settings,
    /// Bytes that the plan predicts for the stage's process, for whoever watches it.
    pub planned: Option<u64>,
    /// The first stages of the component that comes next, in their order, under the same sizes and with the same values
    /// exposed: a hint. An executor may have another process open them while this one's component computes, if the plan
    /// has room for both.
    pub ahead: &'a [OpenedAhead<'a>],
}

/// A stage that may be opened before its turn.
#[derive(Clone, Copy, Debug)]
pub struct OpenedAhead<'a> {
    pub stage: &'a str,
    pub settings: Settings,
    /// As in [`Binding`].
    pub planned: u64,
}

impl<'a> Binding<'a> {
    /// As usual, under these sizes.
    pub fn new(sizes: &'a Sizes) -> Binding<'a> {
        Binding { sizes, exposed: &[], settings: Settings::default(), planned: None, ahead: &[] }
    }
}

impl Runtime {
    /// Makes the session of a bundle's stage. Weights stay in the bundle's files.
    pub fn open_stage(
        &mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Stage<'_>, RuntimeError> {
        self.load_stage(bundle, name, binding)
    }

    /// [`Runtime::open_stage`] whose session does not borrow the runtime.
    pub(super) fn load_stage(
        &mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Stage<'static>, RuntimeError> {
        let mut model = bundle.model(name).map_err(|error| match error {
            BundleError::Graph(source) => RuntimeError::Graph { stage: name.to_owned(), source },
            other => other.into(),
        })?;
        let graph = &model.graph;
        self.check_f16(name, graph)?;
        let fits = |name: &str, exposed: &str| {
            name == exposed || (exposed.ends_with('_') && name.starts_with(exposed))
        };
        let exposed = |name: &str| binding.exposed.iter().any(|exposed| fits(name, exposed));
        let inner = graph.values().filter(|(id, value)| exposed(&value.name) && !graph.inputs.contains(id));
        let inner: Vec<String> = inner.map(|(_, value)| value.name.clone()).collect();
        let exposed: Vec<&str> = inner.iter().map(String::as_str).collect();
        let unfit = |e| RuntimeError::Lower { stage: name.to_owned(), source: Box::new(e) };
        lower(&mut model, &self.device().profile(), binding.sizes, &exposed, &binding.settings)
            .map_err(unfit)?;
        let cpu_nodes = if bundle.is_imported() { CpuNodes::Allowed } else { CpuNodes::Refused };
        self.open_model_with(name, model, binding.settings.pending_dispatches, cpu_nodes)
    }

    /// Refuses a graph in f16 for a device that does not compute in it.
    pub(super) fn check_f16(&self, stage: &str, graph: &Graph) -> Result<(), RuntimeError> {
        if self.device().f16 || !graph.values().any(|(_, value)| is_f16(value)) {
            return Ok(());
        }
        Err(RuntimeError::NoF16 { stage: stage.to_owned(), adapter: self.device().name.clone() })
    }
}

fn is_f16(value: &Value) -> bool {
    let constant = value.constant.as_ref().is_some_and(|tensor| tensor.dtype == DType::F16);
    constant || matches!(value.ty, Some(ValueType::Tensor { dtype: DType::F16, .. }))
}

#[cfg(test)]
mod tests {
    use viaduct_export::onnx::{Builder, Dim};

    use super::*;
    use crate::runtime::{Provider, RuntimeOptions};

    /// The adapter is the CPU provider in another's clothes.
    #[test]
    fn a_graph_in_f16_does_not_start_without_f16() {
        let graph = |dtype| {
            let mut graph = Builder::new("f16");
            let x = graph.input("x", dtype, &[Dim::Fixed(4)]);
            let y = graph.op("Neg", &[x], &[]);
            graph.output(y, "y", &[Dim::Fixed(4)]);
            graph.finish().graph
        };
        let cpu = RuntimeOptions { provider: Provider::Cpu, ..RuntimeOptions::default() };
        let mut runtime = Runtime::start(&cpu).unwrap();
        assert!(runtime.check_f16("decoder", &graph(DType::F16)).is_ok());
        runtime.device.f16 = false;
        assert!(runtime.check_f16("decoder", &graph(DType::F32)).is_ok());
        let error = runtime.check_f16("decoder", &graph(DType::F16)).unwrap_err();
        assert!(matches!(&error, RuntimeError::NoF16 { stage, .. } if stage == "decoder"), "{error}");
        assert_eq!(error.exit_code(), 6);
    }
}
