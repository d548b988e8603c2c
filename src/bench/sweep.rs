//! A step under every form that `doctor --tune` chooses among: whether its choice is the best for a bundle.

use std::fmt;

use serde::Serialize;
use viaduct_export::tuning::{AttentionForm, Tuning};

use super::{Measured, Subject, timed::Timed};
use crate::{
    pipeline::{
        event::{Event, Listener},
        probe::NoProbe,
        run::{Run, Watch},
        run_folder::RunFolder,
        text_to_image::{Request, TRANSFORMER},
    },
    plan::{Plan, Settings},
    runtime::Runtime,
    tensor::HostTensor,
    tune::DISPATCHES,
};

/// Limits of score tensors; all of them together, where a binding covers that, is a limit, too.
const SCORE_BYTES: [u64; 4] = [16 << 20, 64 << 20, 128 << 20, 512 << 20];
/// The first step compiles shaders; of the others the fastest counts.
const LEAST_STEPS: usize = 3;

/// All forms at one size.
#[derive(Serialize)]
pub struct Sweep {
    pub width: usize,
    pub height: usize,
    pub trials: Vec<Trial>,
    /// Of the fastest warm step as the device is tuned.
    pub tuned_step_seconds: f64,
    /// That, beside the fastest of all trials.
    pub tuned_over_best: f64,
}

/// One form.
#[derive(Serialize)]
pub struct Trial {
    pub attention: AttentionForm,
    pub pending_dispatches: u32,
    pub written_head_norms: Option<usize>,
    /// Of the fastest warm step.
    pub step_seconds: f64,
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trial { attention, pending_dispatches, .. } = self;
        let norms = if self.written_head_norms.is_some() { "written out" } else { "as operators" };
        write!(
            f,
            "attention {attention}, {pending_dispatches} dispatches per submission, norms of heads {norms}"
        )
    }
}

/// Makes the plan of a picture for the runtime's device as it is tuned.
pub type Planner<'p> = dyn FnMut(&Runtime) -> anyhow::Result<Plan> + 'p;

impl Subject<'_> {
    /// Runs the transformer under every form, and once as the device is tuned, last.
    pub fn sweep(
        &self,
        measured: Measured,
        runtime: &mut Runtime,
        plan: &mut Planner<'_>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Sweep> {
        let steps = self.pipeline.family().steps(Some(measured.steps.max(LEAST_STEPS)));
        let request = Measured { steps, ..measured }.request();
        let embeds = self.embeds(&request, runtime, plan, listener)?;
        let own = runtime.device().tuning.clone();
        let binding = runtime.device().profile().max_binding;
        let written = SCORE_BYTES.into_iter().filter(|bytes| *bytes < binding).chain([binding]);
        let written = written.map(|score_bytes| AttentionForm::Written { score_bytes });
        let forms: Vec<_> =
            own.fused_attention.then_some(AttentionForm::Fused).into_iter().chain(written).collect();
        let tunings: Vec<_> = forms.into_iter().flat_map(|form| tunings(&own, form)).collect();
        let count = tunings.len() + 1;
        let mut trials = Vec::with_capacity(count);
        for (attention, tuning) in tunings {
            let Tuning { pending_dispatches, written_head_norms, .. } = tuning;
            let mut trial = Trial { attention, pending_dispatches, written_head_norms, step_seconds: 0.0 };
            listener.on_event(Event::Stage { name: trial.to_string(), index: trials.len() + 1, count });
            runtime.set_tuning(tuning);
            trial.step_seconds = self.fastest_step(&request, &embeds, runtime, plan, listener)?;
            trials.push(trial);
        }
        listener.on_event(Event::Stage { name: "as tuned".to_owned(), index: count, count });
        let rows = self.pipeline.attended_rows(&request)?;
        let writes_norms = own.written_head_norms.is_some_and(|least| rows >= least);
        runtime.set_tuning(own.clone());
        let attention = match Settings::default().fuses(&runtime.device().profile(), rows) {
            true => AttentionForm::Fused,
            false => own.attention_at(rows),
        };
        let own_form = (attention, own.pending_dispatches, writes_norms);
        // Of the tuning's own form the better time counts, if it was a trial, too: they differ by chance alone.
        let form =
            |trial: &Trial| (trial.attention, trial.pending_dispatches, trial.written_head_norms.is_some());
        let again = trials.iter().filter(|trial| form(trial) == own_form);
        let again = again.map(|trial| trial.step_seconds).fold(f64::INFINITY, f64::min);
        let tuned_step_seconds = self.fastest_step(&request, &embeds, runtime, plan, listener)?.min(again);
        let best = trials.iter().map(|trial| trial.step_seconds).fold(tuned_step_seconds, f64::min);
        let (width, height) = (measured.size.width(), measured.size.height());
        Ok(Sweep { width, height, trials, tuned_step_seconds, tuned_over_best: tuned_step_seconds / best })
    }

    fn embeds(
        &self,
        request: &Request,
        runtime: &mut Runtime,
        plan: &mut Planner<'_>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<HostTensor> {
        let plan = plan(runtime)?;
        let mut probe = NoProbe;
        let watch = Watch::new(listener, &mut probe);
        let mut run = Run { executor: runtime, plan: Some(&plan), watch, folder: RunFolder::none() };
        Ok(self.pipeline.encode_prompt(request, &mut run)?)
    }

    fn fastest_step(
        &self,
        request: &Request,
        embeds: &HostTensor,
        runtime: &mut Runtime,
        plan: &mut Planner<'_>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<f64> {
        let plan = plan(runtime)?;
        let mut fence = None;
        let mut timed = Timed::new(runtime, &mut fence);
        let mut probe = NoProbe;
        let watch = Watch::new(listener, &mut probe);
        let mut run = Run { executor: &mut timed, plan: Some(&plan), watch, folder: RunFolder::none() };
        self.pipeline.latents(request, embeds.clone(), &mut run)?;
        let picture = timed.into_picture(0.0);
        Ok(picture.runs(TRANSFORMER).skip(1).fold(f64::INFINITY, f64::min))
    }
}

/// The tuning with one form of attention for all lengths and every choice of the rest.
fn tunings(own: &Tuning, attention: AttentionForm) -> Vec<(AttentionForm, Tuning)> {
    let mut tunings = Vec::new();
    for pending_dispatches in DISPATCHES {
        for written_head_norms in [None, Some(1)] {
            // Where the operator is right it would be taken for rows that no vector divides, whatever the form.
            let fused_attention = attention == AttentionForm::Fused;
            let own = own.always(attention);
            let tuning = Tuning { fused_attention, pending_dispatches, written_head_norms, ..own };
            tunings.push((attention, tuning));
        }
    }
    tunings
}
