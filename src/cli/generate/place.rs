//! Where a command's stages run, and how they are set.

use viaduct_export::{arch::SizesRequest, bundle::Bundle};

use super::Arguments;
use crate::{
    cli::{progress::Progress, runs::Exchange},
    pipeline::event::{Event, Listener},
    plan::{OverBudget, Plan},
    runtime::{Executor, KeptSessions},
};

/// An executor and the plan for its device.
pub struct Place {
    pub executor: Box<dyn Executor>,
    pub plan: Plan,
    /// Where tensors pass between this process and its workers; none without workers.
    pub exchange: Option<Exchange>,
    /// Whether sessions stay loaded.
    pub kept: bool,
}

impl Place {
    /// Starts what the command asks for; `exchange` makes the folder for the workers' tensors. Sessions that cannot stay loaded are opened one at a time instead, which is said.
    pub fn start(
        arguments: &Arguments,
        bundle: &Bundle,
        picture: &SizesRequest,
        exchange: &mut dyn FnMut() -> anyhow::Result<Exchange>,
        progress: &mut Progress,
    ) -> anyhow::Result<Place> {
        let Arguments { device, memory, force, .. } = arguments;
        if arguments.keep_loaded
            && let Some(place) = Place::kept(arguments, bundle, picture, progress)?
        {
            return Ok(place);
        }
        let exchange = match arguments.in_process {
            true => None,
            false => Some(exchange()?),
        };
        let executor: Box<dyn Executor> = match &exchange {
            None => Box::new(device.start(progress)?),
            Some(exchange) => {
                let watchdog = memory.watchdog(progress);
                Box::new(device.start_workers(exchange.path(), watchdog, progress)?)
            }
        };
        let in_process = arguments.in_process;
        let plan = memory.plan(bundle, picture, executor.device(), *force, in_process, progress)?;
        Ok(Place { executor, plan, exchange, kept: false })
    }

    /// All sessions in this process; none if they do not fit beside each other.
    fn kept(
        arguments: &Arguments,
        bundle: &Bundle,
        picture: &SizesRequest,
        progress: &mut Progress,
    ) -> anyhow::Result<Option<Place>> {
        let runtime = arguments.device.start(progress)?;
        let plan = arguments.memory.plan(bundle, picture, runtime.device(), arguments.force, true, progress);
        let problem = match plan {
            Ok(plan) if plan.may_stay_loaded => {
                let executor = Box::new(KeptSessions::new(runtime));
                return Ok(Some(Place { executor, plan, exchange: None, kept: true }));
            }
            Ok(plan) => format!("the stages do not fit beside each other into {}", plan.budget),
            // In processes of their own, stages take less of the host.
            Err(error) if error.is::<Box<OverBudget>>() || error.is::<OverBudget>() => error.to_string(),
            Err(error) => return Err(error),
        };
        let message = format!("--keep-loaded: {problem}; stages are opened one at a time");
        progress.on_event(Event::warning(message));
        Ok(None)
    }
}
