//! A step under every form that `doctor --tune` chooses among: whether its choice is the best for a bundle.

use serde::Serialize;
use viaduct_export::tuning::{AttentionForm, Tuning};

use super::{Measured, Subject, timed::Timed};
use crate::{
    pipeline::{
        event::{Event, Listener},
        flux2::TRANSFORMER,
        probe::NoProbe,
        run::{Run, Watch},
        run_folder::RunFolder,
    },
    plan::Plan,
    runtime::Runtime,
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
    /// Of the fastest warm step.
    pub step_seconds: f64,
}

/// Makes the plan of a picture for the runtime's device as it is tuned.
pub type Planner<'p> = dyn FnMut(&Runtime) -> anyhow::Result<Plan> + 'p;

impl Subject<'_> {
    /// Runs text encoder and transformer under every form, and once as the device is tuned, last.
    pub fn sweep(
        &self,
        measured: Measured,
        runtime: &mut Runtime,
        plan: &mut Planner<'_>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<Sweep> {
        let own = runtime.device().tuning.clone();
        let binding = runtime.device().profile().max_binding;
        let written = SCORE_BYTES.into_iter().filter(|bytes| *bytes < binding).chain([binding]);
        let written = written.map(|score_bytes| AttentionForm::Written { score_bytes });
        let forms: Vec<_> =
            own.fused_attention.then_some(AttentionForm::Fused).into_iter().chain(written).collect();
        let count = forms.len() * DISPATCHES.len() + 1;
        let mut trials = Vec::with_capacity(count);
        for attention in forms {
            for pending_dispatches in DISPATCHES {
                let name = format!("attention {attention}, {pending_dispatches} dispatches per submission");
                listener.on_event(Event::Stage { name, index: trials.len() + 1, count });
                runtime.set_tuning(Tuning { pending_dispatches, ..own.always(attention) });
                let step_seconds = self.fastest_step(measured, runtime, plan, listener)?;
                trials.push(Trial { attention, pending_dispatches, step_seconds });
            }
        }
        listener.on_event(Event::Stage { name: "as tuned".to_owned(), index: count, count });
        let rows = self.flux2.form().text_length() + measured.size.tokens();
        let own_form = (own.attention_at(rows), own.pending_dispatches);
        runtime.set_tuning(own);
        // Of the tuning's own form the better time counts, if it was a trial, too: they differ by chance alone.
        let again = trials.iter().filter(|trial| (trial.attention, trial.pending_dispatches) == own_form);
        let again = again.map(|trial| trial.step_seconds).fold(f64::INFINITY, f64::min);
        let tuned_step_seconds = self.fastest_step(measured, runtime, plan, listener)?.min(again);
        let best = trials.iter().map(|trial| trial.step_seconds).fold(tuned_step_seconds, f64::min);
        let (width, height) = (measured.size.width(), measured.size.height());
        Ok(Sweep { width, height, trials, tuned_step_seconds, tuned_over_best: tuned_step_seconds / best })
    }

    fn fastest_step(
        &self,
        measured: Measured,
        runtime: &mut Runtime,
        plan: &mut Planner<'_>,
        listener: &mut dyn Listener,
    ) -> anyhow::Result<f64> {
        let plan = plan(runtime)?;
        let request = Measured { steps: measured.steps.max(LEAST_STEPS), ..measured }.request();
        let mut fence = None;
        let mut timed = Timed::new(runtime, &mut fence);
        let mut probe = NoProbe;
        let watch = Watch::new(listener, &mut probe);
        let mut run = Run { executor: &mut timed, plan: Some(&plan), watch, folder: RunFolder::none() };
        self.flux2.latents(&request, &mut run)?;
        let picture = timed.into_picture(0.0);
        Ok(picture.runs(TRANSFORMER).skip(1).fold(f64::INFINITY, f64::min))
    }
}
