//! Where stages run: in this process, or in a child of it. The pipeline does not know which.

use std::collections::BTreeMap;

use viaduct_export::bundle::Bundle;

use super::{Binding, Device, Placement, Runtime, RuntimeError, Stage, Tensor, TensorView, peak};
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

    /// Runs the graph once. Outputs that may lie anywhere stay on the device where the executor can leave them there;
    /// all others are read back.
    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError>;

    /// Runs the graph once and reads the named outputs back.
    fn run(
        &mut self,
        inputs: &[(&str, &HostTensor)],
        outputs: &[&str],
    ) -> Result<Vec<HostTensor>, RuntimeError> {
        let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, TensorView::Host(tensor))).collect();
        let outputs: Vec<_> = outputs.iter().map(|name| (*name, Placement::Host)).collect();
        self.run_placed(&inputs, &outputs)?.into_iter().map(Tensor::into_host).collect()
    }

    /// Ends the session and returns its memory. The result is the peak of its process since the session was opened, in
    /// bytes, where the system tells. A session that is dropped instead ends, too.
    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError>;
}

/// What stands between a session and its user.
pub trait Between {
    /// See [`Session::outputs`].
    fn outputs(&self, session: &dyn Session) -> Vec<String> {
        session.outputs()
    }

    /// See [`Session::bind`].
    fn bind(
        &mut self,
        session: &mut dyn Session,
        name: &str,
        tensor: &HostTensor,
    ) -> Result<(), RuntimeError> {
        session.bind(name, tensor)
    }

    /// See [`Session::run_placed`].
    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError>;
}

/// A session that is used through something else.
pub struct Attended<'r, B> {
    pub session: Box<dyn Session + 'r>,
    pub between: B,
}

impl<B: Between> Session for Attended<'_, B> {
    fn name(&self) -> &str {
        self.session.name()
    }

    fn outputs(&self) -> Vec<String> {
        self.between.outputs(&*self.session)
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        self.session.nodes()
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.between.bind(&mut *self.session, name, tensor)
    }

    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        self.between.run_placed(&mut *self.session, inputs, outputs)
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        self.session.finish()
    }
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

    /// Everything is read back: a tensor on the device holds its session, and this one is to go before the next is made.
    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let outputs: Vec<_> = outputs.iter().map(|(name, _)| (*name, Placement::Host)).collect();
        Stage::run_placed(self, inputs, &outputs)
    }

    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        drop(self);
        Ok(peak::bytes())
    }
}
