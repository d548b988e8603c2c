//! The model's own band: how far its pictures lie apart if the encoded prompt is moved by next to nothing.

use serde::{Deserialize, Serialize};

use super::{
    VerifyError,
    judge::{TEXT, picture_db},
    replay::{Progress, Recording, Replayer},
    subject::{Drawn, Subject},
};
use crate::{
    pipeline::{
        event::{Event, Listener},
        image::to_unit,
        noise::torch_randn,
        probe::Probe,
    },
    runtime::Executor,
    tensor::{HostTensor, Sums},
};

/// Deviation of the factors around 1 that the encoded prompt is multiplied with.
const STRENGTH: f32 = 1e-5;

/// What all seeds led to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Band {
    pub worst: f64,
    pub mean: f64,
    pub best: f64,
}

impl Band {
    /// None of no values. `worse` is the worse of two.
    fn of(values: &[f64], worse: fn(f64, f64) -> f64, better: fn(f64, f64) -> f64) -> Option<Band> {
        let worst = values.iter().copied().reduce(worse)?;
        let best = values.iter().copied().reduce(better)?;
        Some(Band { worst, mean: values.iter().sum::<f64>() / values.len() as f64, best })
    }
}

/// How far the runs of disturbed prompts end from the undisturbed one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sensitivity {
    pub seeds: usize,
    pub strength: f32,
    /// PSNR of the picture, dB.
    pub image_db: Band,
    /// Cosine error of the last step's velocity.
    pub velocity: Option<Band>,
    /// Cosine error of the final latents.
    pub latents: Option<Band>,
}

/// Draws with a disturbed prompt for each seed from 0 on, and compares with the free run that the recording is of.
pub fn sense(
    seeds: usize,
    (free, ends): (&HostTensor, &Ends),
    (subject, recording): (&Subject<'_>, &Recording),
    executor: &mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Option<Sensitivity>, VerifyError> {
    let (mut pictures, mut velocities, mut latents) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 0..seeds {
        listener.on_event(Event::note(format!("disturbed prompt {} of {seeds}", seed + 1)));
        let progress = Progress::default();
        let mut probe = Disturbance { seed: seed as u64, progress: &progress, ends: ends.unseen() };
        let mut replayer = Replayer { executor, recording, progress: &progress };
        let Drawn { image, .. } = subject.draw(&mut replayer, &mut probe, listener)?;
        pictures.push(picture_db(&to_unit(&image), free));
        velocities.extend(error(&probe.ends.velocity.1, &ends.velocity.1));
        latents.extend(error(&probe.ends.latents.1, &ends.latents.1));
    }
    let errors = |values: &[f64]| Band::of(values, f64::max, f64::min);
    Ok(Band::of(&pictures, f64::min, f64::max).map(|image_db| Sensitivity {
        seeds,
        strength: STRENGTH,
        image_db,
        velocity: errors(&velocities),
        latents: errors(&latents),
    }))
}

fn error(a: &Option<HostTensor>, b: &Option<HostTensor>) -> Option<f64> {
    let (a, b) = (a.as_ref()?, b.as_ref()?);
    (a.shape == b.shape).then(|| Sums::of(&a.to_f32(), &b.to_f32()).cosine_error())
}

/// Where a run of the transformer ends: the last velocity and the final latents, each with its name.
pub struct Ends {
    velocity: (String, Option<HostTensor>),
    latents: (String, Option<HostTensor>),
}

impl Ends {
    /// Of a run of so many steps, before it.
    pub fn of(steps: usize) -> Ends {
        let named = |name| (format!("{name}_step{}", steps.saturating_sub(1)), None);
        Ends { velocity: named("pred"), latents: named("latents") }
    }

    fn unseen(&self) -> Ends {
        Ends { velocity: (self.velocity.0.clone(), None), latents: (self.latents.0.clone(), None) }
    }
}

impl Probe for Ends {
    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        for (wanted, end) in [&mut self.velocity, &mut self.latents] {
            if wanted == name {
                *end = Some(tensor.clone());
            }
        }
        tensor
    }
}

/// The probe of a disturbed run.
struct Disturbance<'a> {
    seed: u64,
    progress: &'a Progress,
    ends: Ends,
}

impl Probe for Disturbance<'_> {
    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        if name != TEXT {
            return self.ends.boundary(name, tensor);
        }
        self.progress.altered.set(true);
        let noise = torch_randn(self.seed, tensor.values.len());
        let values = tensor.to_f32().into_iter().zip(noise).map(|(x, noise)| x * (1.0 + STRENGTH * noise));
        HostTensor::f32(&tensor.shape, values.collect()).as_type(tensor.values.dtype())
    }
}
