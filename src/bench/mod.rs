//! How fast and how large a bundle is on a device: whole pictures, drawn again and again, with every session timed.

mod report;
mod sweep;
mod table;
mod timed;

use std::time::Instant;

use viaduct_export::{
    arch::{SizesError, SizesRequest},
    bundle::{BundleError, Stages},
    flops::flops,
};

use self::timed::Timed;
pub use self::{
    report::{Environment, PictureTimes, Report, SizeReport, StageReport},
    sweep::{Sweep, Trial},
    table::{sweep_table, table},
};
use crate::{
    pipeline::{
        event::Listener,
        probe::NoProbe,
        run::{Run, Watch},
        run_folder::RunFolder,
        size::Size,
        text_to_image::{Noise, PipelineError, Request, TextToImage},
    },
    plan::{Plan, PlannedStage, analyse_stage},
    runtime::{Executor, MemoryMeter},
};

/// What every picture shows. Neither prompt nor seed changes the work.
const PROMPT: &str = "a lighthouse in fog, seen from the sea";
const SEED: u64 = 1000;

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Sizes(#[from] SizesError),
}

/// What is measured: pictures of one size, one cold and `runs` warm ones.
#[derive(Clone, Copy)]
pub struct Measured {
    pub size: Size,
    pub steps: usize,
    pub runs: usize,
}

impl Measured {
    fn request(&self) -> Request {
        let Measured { size, steps, .. } = *self;
        Request { prompt: PROMPT.to_owned(), negative: None, size, steps, noise: Noise::Seed(SEED) }
    }
}

/// A bundle whose pictures are measured.
pub struct Subject<'a> {
    pub pipeline: &'a TextToImage<'a>,
}

impl Subject<'_> {
    /// What a plan needs to know of the pictures.
    pub fn asked(&self, measured: Measured) -> Result<SizesRequest, PipelineError> {
        self.pipeline.asked(&[measured.request()])
    }

    /// Draws the pictures and reports on them. The first is cold: no session is loaded before it. `plan` is that of the
    /// size, and says whether the executor may keep sessions.
    pub fn measure(
        &self,
        measured: Measured,
        executor: &mut dyn Executor,
        plan: &Plan,
        listener: &mut dyn Listener,
    ) -> Result<SizeReport, BenchError> {
        let runs = measured.runs;
        let request = measured.request();
        let device = executor.device().profile();
        let meter = MemoryMeter::start(executor.device());
        let mut pictures = Vec::with_capacity(runs + 1);
        let mut fence = None;
        for _ in 0..=runs {
            let mut timed = Timed::new(executor, &mut fence);
            let started = Instant::now();
            self.draw(&request, &mut timed, plan, listener)?;
            pictures.push(timed.into_picture(started.elapsed().as_secs_f64()));
        }
        let peak = meter.stop();
        let asked = self.asked(measured)?;
        let sizes_of = |stage: &PlannedStage| {
            self.pipeline.bundle().sizes(&SizesRequest { halvings: stage.settings.halvings, ..asked })
        };
        let mut stages = Vec::with_capacity(plan.stages.len());
        for planned in &plan.stages {
            let mut model = self.pipeline.bundle().model(&planned.name)?;
            let (_, _, shapes) = analyse_stage(&mut model, &sizes_of(planned)?, &device, &planned.settings);
            stages.push(StageReport::new(planned, flops(&model, &shapes).total, &pictures));
        }
        Ok(SizeReport::new(measured, plan.may_stay_loaded, stages, &pictures, peak))
    }

    fn draw(
        &self,
        request: &Request,
        executor: &mut dyn Executor,
        plan: &Plan,
        listener: &mut dyn Listener,
    ) -> Result<(), PipelineError> {
        let mut probe = NoProbe;
        let watch = Watch::new(listener, &mut probe);
        let mut run = Run { executor, plan: Some(plan), watch, folder: RunFolder::none() };
        self.pipeline.draw(request, &mut run).map(drop)
    }
}
