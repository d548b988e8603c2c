//! Sessions that stay: for several pictures in one process, where all stages fit beside each other.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use viaduct_export::{bundle::Bundle, shapes::Sizes};

use super::{
    Binding, Device, Executor, Placement, Runtime, RuntimeError, Session, Settings, Stage, Tensor, TensorView,
};
use crate::tensor::HostTensor;

/// Opens stages in this process and keeps their sessions: the first opening of a stage makes its session, later ones that
/// bind it alike take it as it is, and another binding makes a new one in its place. What is bound to a session goes when it
/// is finished; the session and its weights stay. Outputs may stay on the device, for as long as the caller wants, and be
/// inputs of any of the sessions.
///
/// Whether all sessions fit beside each other is the caller's to know ([`crate::plan::Plan::may_stay_loaded`]). One stage at a
/// time is lent, as by every [`Executor`].
pub struct KeptSessions {
    /// By the stage's name.
    kept: BTreeMap<String, Kept>,
    runtime: Runtime,
}

struct Kept {
    stage: Stage<'static>,
    opening: Opening,
    /// Whether a run failed: the session is not used again.
    failed: bool,
}

/// What a session was made of.
#[derive(PartialEq)]
struct Opening {
    bundle: PathBuf,
    sizes: Sizes,
    exposed: Vec<String>,
    scaled: Vec<String>,
    settings: Settings,
}

impl Opening {
    fn new(bundle: &Path, binding: &Binding<'_>) -> Opening {
        let Binding { sizes, exposed, scaled, settings, planned: _, ahead: _ } = binding;
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Opening {
            bundle: bundle.to_owned(),
            sizes: (*sizes).clone(),
            exposed: names(exposed),
            scaled: names(scaled),
            settings: *settings,
        }
    }
}

impl KeptSessions {
    pub fn new(runtime: Runtime) -> KeptSessions {
        KeptSessions { kept: BTreeMap::new(), runtime }
    }

    /// Ends all sessions, and lends the runtime that opens one at a time.
    pub fn runtime(&mut self) -> &mut Runtime {
        self.kept.clear();
        &mut self.runtime
    }

    fn load(&mut self, bundle: &Bundle, name: &str, binding: &Binding<'_>) -> Result<(), RuntimeError> {
        let opening = Opening::new(&bundle.folder, binding);
        if self.kept.get(name).is_some_and(|kept| kept.opening == opening && !kept.failed) {
            return Ok(());
        }
        // Ended first, so that two sessions of one stage are not there at once.
        self.kept.remove(name);
        let stage = self.runtime.load_stage(bundle, name, binding)?;
        self.kept.insert(name.to_owned(), Kept { stage, opening, failed: false });
        Ok(())
    }
}

impl Executor for KeptSessions {
    fn device(&self) -> &Device {
        self.runtime.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        self.load(bundle, name, binding)?;
        let kept = self.kept.get_mut(name).expect("the stage was just loaded");
        Ok(Box::new(Lent(kept)))
    }
}

/// A kept session in use.
struct Lent<'r>(&'r mut Kept);

impl Session for Lent<'_> {
    fn name(&self) -> &str {
        self.0.stage.name()
    }

    fn outputs(&self) -> Vec<String> {
        Session::outputs(&self.0.stage)
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        self.0.stage.nodes()
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.0.stage.bind(name, tensor)
    }

    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let result = self.0.stage.run_placed(inputs, outputs);
        self.0.failed |= result.is_err();
        result
    }

    /// No peak: the process holds other stages, too.
    fn finish(self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        Ok(None)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.0.stage.unbind();
    }
}
