//! The parent's side: an executor whose sessions live in a child per component.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use viaduct_export::bundle::Bundle;

use super::{
    exchange::Exchange,
    process::{Process, Silence, TEARDOWN},
    protocol::{Open, PathBytes, Reply, Request, TensorRef},
};
use crate::{
    runtime::{
        Binding, Device, Executor, Guard, OpenedAhead, Placement, Provider, RuntimeError, RuntimeOptions,
        Session, Tensor, TensorView, Watchdog,
    },
    tensor::HostTensor,
};

/// Runs each component of a model in a child process, one at a time. Where [`Binding::ahead`] names stages of the next
/// component, its child is started meanwhile and opens them: starting a process, a device and a session take longer than
/// many a stage's computation. That child is the first to be killed when memory runs out, and one that is lost is replaced when
/// its turn comes, by one that opens nothing ahead.
pub struct Workers {
    options: RuntimeOptions,
    device: Device,
    exchange: Exchange,
    watchdog: Option<Watchdog>,
    child: Option<Watched>,
    /// What the child has run so far; empty for one that has run nothing.
    component: String,
    ahead: Option<Ahead>,
    /// The child of the component before, which ends by itself while the next one, that was opened ahead, computes.
    leaving: Option<Watched>,
    /// Whether a child that opened stages ahead was lost: what happened once is likely to happen again.
    lost_one: bool,
}

/// The child of the component that comes next.
struct Ahead {
    component: String,
    /// What it was told to open.
    stages: Vec<Open>,
    child: Watched,
}

/// A child and, once it has opened a stage, its guard. The guard goes first: it must not outlive the process.
struct Watched {
    guard: Option<Guard>,
    process: Process,
}

impl Watched {
    /// Tells the watchdog what the child does next.
    fn begin_stage(&mut self, watchdog: Option<&Watchdog>, stage: &str, planned: u64) {
        match (&self.guard, watchdog) {
            (Some(guard), _) => guard.begin_stage(stage, planned),
            (None, Some(watchdog)) => self.guard = watchdog.guard(self.process.id(), stage, planned).ok(),
            (None, None) => {}
        }
    }

    /// Has the watchdog kill the child before others, until it begins a stage.
    fn yield_to_others(&self) {
        self.guard.iter().for_each(Guard::yield_to_others);
    }

    /// Tells the child to end by itself.
    fn dismiss(&mut self) {
        self.yield_to_others();
        self.process.dismiss();
    }

    /// Why the watchdog killed the child, if it did.
    fn stopped(&self) -> Option<RuntimeError> {
        Some(RuntimeError::Stopped(Box::new(self.guard.as_ref()?.stopped()?)))
    }

    /// What the watchdog saw the child hold at most in this stage: with the memory of a GPU, which its own figure lacks.
    fn held(&self) -> Option<u64> {
        Some(self.guard.as_ref()?.peaks().last()?.held)
    }

    fn stop(self) {
        drop(self.guard);
        self.process.stop();
    }
}

impl Workers {
    /// Starts a first child and asks it for the device. Tensors pass through files in `exchange`, an empty folder.
    pub fn start(
        mut options: RuntimeOptions,
        exchange: &Path,
        watchdog: Option<Watchdog>,
    ) -> Result<Workers, RuntimeError> {
        let exchange = Exchange::new(exchange, "p");
        let (child, device) = start_child(&options, exchange.folder())?;
        // Later children take the tuning for which the plan is made.
        options.tuning = Some(device.tuning.clone());
        let mut child = Some(Watched { guard: None, process: child });
        if device.provider == Provider::Cpu && options.provider != Provider::Cpu {
            // This one has Vulkan's libraries in its memory, for nothing.
            options.provider = Provider::Cpu;
            child.take().into_iter().for_each(Watched::stop);
        }
        let (component, ahead, leaving) = (String::new(), None, None);
        Ok(Workers { options, device, exchange, watchdog, child, component, ahead, leaving, lost_one: false })
    }

    /// A child for the component: the present one if it is that component's or has run nothing, else the one that opens its
    /// stages ahead, else a new one. The result is whether the child has opened stages ahead.
    fn child_for(&mut self, component: &str) -> Result<bool, RuntimeError> {
        let mut ahead = None;
        if !self.component.is_empty() && self.component != component {
            self.leaving = self.child.take();
            self.leaving.iter_mut().for_each(Watched::dismiss);
            ahead = self.ahead.take().filter(|ahead| ahead.component == component);
        }
        self.component = component.to_owned();
        if let Some(Ahead { mut child, .. }) = ahead {
            if matches!(child.process.answer(None), Ok(Reply::Started { .. })) {
                self.child = Some(child);
                return Ok(true);
            }
            self.lose(component);
        }
        if self.child.is_none() {
            self.see_off();
            let (process, _) = start_child(&self.options, self.exchange.folder())?;
            self.child = Some(Watched { guard: None, process });
        }
        Ok(false)
    }

    /// Has another child open the next component's first stages. Where that fails, they are opened when their turn comes.
    fn open_ahead(&mut self, component: &str, stages: Vec<Open>, first: &OpenedAhead<'_>) {
        if self.lost_one || self.ahead.as_ref().is_some_and(|ahead| ahead.stages == stages) {
            return;
        }
        // One that opens something else is killed.
        self.ahead = None;
        self.see_off();
        match self.start_ahead(component, stages, first) {
            Ok(ahead) => self.ahead = Some(ahead),
            Err(e) => tracing::warn!("{component} is not opened ahead: {e}"),
        }
    }

    fn start_ahead(
        &self,
        component: &str,
        stages: Vec<Open>,
        first: &OpenedAhead<'_>,
    ) -> Result<Ahead, RuntimeError> {
        let mut child = Watched { guard: None, process: Process::start()? };
        child.begin_stage(self.watchdog.as_ref(), first.stage, first.planned);
        child.yield_to_others();
        child.process.tell(&start(&self.options, self.exchange.folder()));
        stages.iter().for_each(|stage| child.process.tell(&Request::OpenAhead(stage.clone())));
        Ok(Ahead { component: component.to_owned(), stages, child })
    }

    /// Notes that a child was lost which opened stages ahead.
    fn lose(&mut self, component: &str) {
        tracing::warn!("the worker that opened {component} ahead is lost; another one is started");
        self.lost_one = true;
    }

    /// Waits for the end of the child that leaves.
    fn see_off(&mut self) {
        self.leaving.take().into_iter().for_each(Watched::stop);
    }

    /// Asks the child; one that does not answer is gone afterwards.
    fn ask(&mut self, stage: &str, request: &Request) -> Result<Reply, RuntimeError> {
        let Some(child) = &mut self.child else {
            let (stage, end) = (stage.to_owned(), "has ended".to_owned());
            return Err(RuntimeError::WorkerDied { stage, end });
        };
        match child.process.ask(request, None) {
            Ok(Reply::Failed { message, exit_code }) => Err(RuntimeError::Worker { message, exit_code }),
            Ok(reply) => Ok(reply),
            Err(silence) => Err(self.bury(stage, silence)),
        }
    }

    fn ask_to_open(&mut self, stage: &str, request: &Request, planned: u64) -> Result<Reply, RuntimeError> {
        if let Some(child) = &mut self.child {
            child.begin_stage(self.watchdog.as_ref(), stage, planned);
        }
        self.ask(stage, request)
    }

    fn bury(&mut self, stage: &str, silence: Silence) -> RuntimeError {
        let Some(child) = self.child.take() else {
            return RuntimeError::WorkerUnusable { problem: "is gone".to_owned() };
        };
        if let Some(stopped) = child.stopped() {
            return stopped;
        }
        drop(child.guard);
        let child = child.process;
        match silence {
            Silence::Ended | Silence::TimedOut => {
                RuntimeError::WorkerDied { stage: stage.to_owned(), end: child.end() }
            }
            Silence::Unintelligible(problem) => unexpected(&problem),
        }
    }
}

fn unexpected(what: &str) -> RuntimeError {
    RuntimeError::WorkerUnusable { problem: format!("said what nobody expected: {what}") }
}

fn start(options: &RuntimeOptions, exchange: &Path) -> Request {
    Request::Start { options: options.clone(), exchange: PathBytes::of(exchange) }
}

fn start_child(options: &RuntimeOptions, exchange: &Path) -> Result<(Process, Device), RuntimeError> {
    let mut child = Process::start()?;
    match child.ask(&start(options, exchange), None) {
        Ok(Reply::Started { device }) => Ok((child, *device)),
        Ok(Reply::Failed { message, exit_code }) => Err(RuntimeError::Worker { message, exit_code }),
        Ok(other) => Err(unexpected(&format!("{other:?}"))),
        Err(Silence::Unintelligible(problem)) => Err(unexpected(&problem)),
        Err(_) => Err(RuntimeError::WorkerUnusable { problem: format!("did not start: it {}", child.end()) }),
    }
}

impl Executor for Workers {
    fn device(&self) -> &Device {
        &self.device
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        let folder = bundle.folder.to_str().ok_or_else(|| RuntimeError::Open {
            stage: name.to_owned(),
            reason: format!(
                "{}: the name is not UTF-8, as ONNX Runtime needs it; rename it",
                bundle.folder.display()
            ),
        })?;
        let open = |stage: &str, settings| Open {
            bundle: folder.to_owned(),
            stage: stage.to_owned(),
            sizes: binding.sizes.clone(),
            exposed: binding.exposed.iter().map(|prefix| (*prefix).to_owned()).collect(),
            settings,
        };
        let component = bundle.stage(name)?.component();
        self.see_off();
        let was_ahead = self.child_for(component)?;
        // Before this stage is open, so that both are loaded at once.
        if let Some(first) = binding.ahead.first() {
            let stages = binding.ahead.iter().map(|ahead| open(ahead.stage, ahead.settings)).collect();
            self.open_ahead(bundle.stage(first.stage)?.component(), stages, first);
        }
        let (request, planned) = (Request::Open(open(name, binding.settings)), binding.planned.unwrap_or(0));
        let mut reply = self.ask_to_open(name, &request, planned);
        if was_ahead && self.child.is_none() {
            self.lose(component);
            self.child_for(component)?;
            reply = self.ask_to_open(name, &request, planned);
        }
        match reply? {
            Reply::Opened { outputs, nodes } => Ok(Box::new(RemoteStage {
                workers: self,
                name: name.to_owned(),
                outputs,
                nodes,
                finished: false,
            })),
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }
}

/// A session in a child.
struct RemoteStage<'r> {
    workers: &'r mut Workers,
    name: String,
    outputs: Vec<String>,
    nodes: BTreeMap<String, usize>,
    finished: bool,
}

impl RemoteStage<'_> {
    /// Asks the child something that names tensors; their files are the child's to read until it has answered.
    fn ask_with(
        &mut self,
        tensors: &[(&str, &HostTensor)],
        request: impl FnOnce(Vec<(String, TensorRef)>) -> Request,
    ) -> Result<Reply, RuntimeError> {
        let mut mine: Vec<PathBuf> = Vec::new();
        let sent: Result<Vec<_>, RuntimeError> = tensors
            .iter()
            .map(|(name, tensor)| {
                let reference = self.workers.exchange.put(tensor, &mut mine)?;
                Ok(((*name).to_owned(), reference))
            })
            .collect();
        let reply = sent.and_then(|sent| self.workers.ask(&self.name, &request(sent)));
        for path in mine {
            let _ = fs::remove_file(path);
        }
        reply
    }
}

impl Session for RemoteStage<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn outputs(&self) -> Vec<String> {
        self.outputs.clone()
    }

    fn nodes(&self) -> &BTreeMap<String, usize> {
        &self.nodes
    }

    fn bind(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let reply = self.ask_with(&[(name, tensor)], |mut sent| {
            let (name, tensor) = sent.remove(0);
            Request::Bind { name, tensor }
        })?;
        match reply {
            Reply::Bound => Ok(()),
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }

    /// No device memory passes between processes.
    fn run_placed(
        &mut self,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let wanted = outputs.iter().map(|(name, _)| (*name).to_owned()).collect();
        let inputs = inputs.iter().map(|(name, tensor)| Ok((*name, tensor.on_host()?)));
        let inputs = inputs.collect::<Result<Vec<_>, RuntimeError>>()?;
        let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, &**tensor)).collect();
        let reply = self.ask_with(&inputs, |inputs| Request::Run { inputs, outputs: wanted })?;
        match reply {
            Reply::Ran { tensors } if tensors.len() == outputs.len() => {
                tensors.iter().map(|tensor| Ok(Tensor::Host(self.workers.exchange.take(tensor)?))).collect()
            }
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }

    /// A child that does not get its session closed in time is killed; the results are there, so nobody minds.
    fn finish(mut self: Box<Self>) -> Result<Option<u64>, RuntimeError> {
        self.finished = true;
        let Some(child) = &mut self.workers.child else { return Ok(None) };
        let peak = match child.process.ask(&Request::Close, Some(TEARDOWN)) {
            Ok(Reply::Closing { peak }) => peak,
            Ok(other) => return Err(unexpected(&format!("{other:?}"))),
            Err(_) => None,
        };
        let peak = peak.max(child.held());
        if !matches!(child.process.answer(Some(TEARDOWN)), Ok(Reply::Closed)) {
            tracing::warn!("stage {}: the session did not close and its worker is killed", self.name);
            self.workers.child = None;
        }
        Ok(peak)
    }
}

impl Drop for RemoteStage<'_> {
    fn drop(&mut self) {
        // A session that is given up takes its child with it.
        if !self.finished {
            self.workers.child = None;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.see_off();
        if let Some(child) = self.child.take() {
            child.stop();
        }
    }
}
