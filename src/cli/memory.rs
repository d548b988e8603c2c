//! The memory that a run may take, as the command line has it: the plan before the start, the watchdog during the run.

use clap::Args;
use viaduct_export::{arch::SizesRequest, bundle::Stages, bytes::ByteSize};

use crate::{
    pipeline::event::{Event, Listener},
    plan::{Beside, Budget, Plan, PlannedModel},
    runtime::{
        Device, Watchdog,
        memory::{Floor, GpuMemory, MemorySource, effective_budget},
    },
};

#[derive(Args)]
pub struct MemoryArguments {
    /// Memory that the run may take: 12GiB, 512MiB or bytes; by default what is free now, less the floor
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    budget: Option<ByteSize>,
    /// Memory that stays free for the rest of the machine, or the run is stopped: 512MiB or 5%; by default 5 %, and at least
    /// 512 MiB
    #[arg(long, value_name = "SIZE")]
    floor: Option<Floor>,
}

/// Bytes that a process holds besides the stage that runs in it: the program's own pages, its tokenizer, and what ended
/// sessions leave on the heap. Measured on klein-emoji, whose tokenizer is small: 5 to 18 MiB more than a worker on the
/// CPU, 7 to 28 on WebGPU.
const PIPELINE: u64 = 48 << 20;

impl MemoryArguments {
    fn floor(&self) -> Floor {
        self.floor.unwrap_or_default()
    }

    /// What a run may take on the device now.
    pub fn budget(&self, device: &Device, listener: &mut dyn Listener) -> Budget {
        let (source, profile) = (MemorySource::system(), device.profile());
        let asked = self.budget.map(|budget| budget.0);
        let Some(host) = source.host() else {
            listener.on_event(Event::warning("the system does not tell how much memory is free"));
            return Budget::asked(&profile, asked);
        };
        let own = |gpu: &GpuMemory| (gpu.vendor_id, gpu.device_id) == (device.vendor_id, device.device_id);
        let gpu = source.gpus().into_iter().find(own);
        let floor = self.floor().of(host.total());
        Budget::new(&profile, effective_budget(&host, floor, &profile, gpu.as_ref()), asked)
    }

    /// Plans the picture and says what is unusual about it. One that does not fit is refused unless it is forced.
    pub fn plan(
        &self,
        stages: &dyn Stages,
        picture: &SizesRequest,
        device: &Device,
        force: bool,
        in_process: bool,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Plan> {
        let model = PlannedModel::new(stages, device.profile(), self.budget(device, listener))?;
        let model = if in_process { model.besides(PIPELINE) } else { model.overlapped() };
        let plan = model.plan(picture)?;
        if let Err(over) = model.check(&plan, picture) {
            if !force {
                let nothing_left = over.budget.total == 0 && self.budget.is_none();
                let error = anyhow::Error::from(*over);
                return Err(match nothing_left {
                    true => error.context("the floor (--floor) is more than what is free"),
                    false => error,
                });
            }
            listener.on_event(Event::warning(format!("{over}; it is tried nevertheless (--force)")));
        }
        let incomplete = plan.incomplete();
        if !incomplete.is_empty() {
            let message = format!(
                "not every tensor's size is known in {}: more is needed than planned (`viaduct report` lists them)",
                incomplete.join(", ")
            );
            listener.on_event(Event::warning(message));
        }
        for stage in plan.stages.iter().filter(|_| stages.is_imported()) {
            if let Some(contradiction) = &stage.contradiction {
                let size = format!("{}x{}", picture.width, picture.height);
                let message = format!(
                    "{} will hardly run at {size}; its graph may have been traced at one size alone: {contradiction}",
                    stage.name
                );
                listener.on_event(Event::warning(message));
            }
        }
        plan.choices().into_iter().for_each(|choice| listener.on_event(Event::note(choice)));
        if let Some((stage, held)) = plan.peak() {
            let peak = ByteSize(plan.budget.counted(held));
            let beside: Vec<_> = plan.overlap.of(&stage.name).into_iter().flat_map(Beside::all).collect();
            let ahead = match beside.is_empty() {
                true => String::new(),
                false => format!(" with {} loaded ahead", beside.join(", ")),
            };
            listener.on_event(Event::note(format!(
                "plan: at most {peak}, in {}{ahead}, of {}",
                stage.name, plan.budget
            )));
        }
        Ok(plan)
    }

    /// Watches over the workers; a run goes on without, but says so.
    pub fn watchdog(&self, listener: &mut dyn Listener) -> Option<Watchdog> {
        let started = Watchdog::start(MemorySource::system(), self.floor());
        started.map_err(|e| listener.on_event(Event::warning(format!("no watchdog over memory: {e}")))).ok()
    }
}
