//! Where stages run: in this process, or in a child of it. The pipeline does not know which.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{Binding, Device, Runtime, RuntimeError, Stage, peak};
use crate::tensor::HostTensor;

/// Opens stages, one at a time: a session borrows its executor. What [`Binding::ahead`] names may be loaded meanwhile, but it is
/// used only when it is opened.
///
/// ```compile_fail,E0499
/// # use viaduct::runtime::{Binding, Executor, RuntimeError};
/// # use viaduct_export::bundle::Bundle;
/// fn two(executor: &mut dyn Executor, bundle: &Bundle, binding: &Binding) -> Result<(), RuntimeError> {
///     let first = executor.open_stage(bundle, "vae_pre", binding)?;
///     let second = executor.open_stage(bundle, "vae_post0", binding)?; // the executor is lent to `first`
///     drop(first);
///     Ok(())
/// }
/// ```
pub trait Executor {
    fn device(&self) -> &Device;

    /// Makes the session of a bundle's stage.
    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError>;
}

/// An open stage. See [`Stage`] for what its methods do.
pub trait Session {
    fn name(&self) -> &str;

    /// Names of the graph's outputs, exposed values included.
    fn outputs(&self) -> Vec<String>;

    /// How many nodes each execution provider runs.
    fn nodes(&self) -> &BTreeMap<String, usize>;

    /// Uploads an input that stays for every run.
    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError>;

    /// Runs the graph once and reads the named outputs back.
    fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, RuntimeError>;

    /// Ends the session and returns its memory. The result is the peak of its process since the session was opened, in
    /// bytes, where the system tells. A session that is dropped instead ends, too.
    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError>;
}

impl Executor for Runtime {
    fn device(&self) -> &Device {
        self.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        peak::restart();
        Ok(Box::new(Runtime::open_stage(self, bundle, name, binding)?))
    }
}

impl Session for Stage<'_> {
    fn name(&self) -> &str {
        self.name()
    }

    fn outputs(&self) -> Vec<String> {
        self.outputs().iter().map(|output| output.name.clone()).collect()
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        self.nodes()
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        Stage::bind(self, name, tensor)
    }

    fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, RuntimeError> {
        Stage::run(self, inputs, outputs)
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        drop(self);
        Ok(peak::bytes())
    }
}
