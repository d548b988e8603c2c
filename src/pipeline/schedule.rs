//! Sigmas, the Euler step and the time embedding of flow matching, rounded as diffusers rounds them.

pub use viaduct_export::arch::{parameters::TimeOrder, qwen_image::parameters::Shift};

use crate::tensor::{HostTensor, Values};

/// The schedule was trained on 1000 time steps; more steps than that add nothing.
pub const MAX_STEPS: usize = 1000;

/// The model's time is `1000 * sigma`.
const TIME_SCALE: f32 = 1000.0;

/// Why a schedule cannot be made, or a step of it not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    #[error("the number of steps is {0}; it must be from 1 to {MAX_STEPS}")]
    Steps(usize),
    #[error("the schedule's shift mu is {0}; it must be finite and below 80")]
    Shift(f64),
    #[error("step {step} does not exist: the schedule has {steps} steps")]
    NoSuchStep { step: usize, steps: usize },
    #[error("step {step}: the velocity has shape {velocity:?}, the latents {latents:?}")]
    Shape { step: usize, velocity: Vec<usize>, latents: Vec<usize> },
    #[error("step {step}: {what} is not f32")]
    NotF32 { step: usize, what: &'static str },
}

/// The noise levels of a run: `steps + 1` sigmas from 1 down to 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    sigmas: Vec<f32>,
}

/// FLUX.2's shift for `tokens` output tokens (references not counted) and a number of steps.
///
/// Source: `compute_empirical_mu` in Black Forest Labs' `flux2` and in diffusers' FLUX.2 pipelines. It replaces
/// `shift`, `base_shift` and `max_shift` of `scheduler_config.json`, which these pipelines do not read.
pub fn empirical_mu(tokens: usize, steps: usize) -> f64 {
    let (n, steps) = (tokens as f64, steps as f64);
    let at_200 = 0.00016927 * n + 0.45666666;
    if n > 4300.0 {
        return at_200;
    }
    let at_10 = 8.73809524e-05 * n + 1.89833333;
    let slope = (at_200 - at_10) / 190.0;
    slope * steps + (at_200 - 200.0 * slope)
}

impl Schedule {
    /// FLUX.2's schedule for `tokens` output tokens.
    pub fn flux2(tokens: usize, steps: usize) -> Result<Schedule, ScheduleError> {
        Schedule::shifted(empirical_mu(tokens, steps), steps)
    }

    /// Evenly spaced times `1, 1 - 1/N, ... 1/N`, shifted exponentially by `mu`, then 0.
    ///
    /// In f32 with `exp(mu)` rounded first: these are the bits of diffusers' `FlowMatchEulerDiscreteScheduler`.
    pub fn shifted(mu: f64, steps: usize) -> Result<Schedule, ScheduleError> {
        if !(1..=MAX_STEPS).contains(&steps) {
            return Err(ScheduleError::Steps(steps));
        }
        // Above 88, exp(mu) is no finite f32.
        if !mu.is_finite() || mu >= 80.0 {
            return Err(ScheduleError::Shift(mu));
        }
        let shift = mu.exp() as f32;
        let sigma = |i: usize| {
            let time = linspace_down(i, steps) as f32;
            shift / (shift + (1.0 / time - 1.0))
        };
        Ok(Schedule { sigmas: (0..steps).map(sigma).chain([0.0]).collect() })
    }

    /// Qwen-Image's schedule for `tokens` image tokens: a shift that grows with them, beyond its largest, too, and a stretch
    /// that ends the levels at `terminal`, before the last 0.
    ///
    /// Source: `calculate_shift` in diffusers' Qwen-Image pipelines and `stretch_shift_to_terminal` in its
    /// `FlowMatchEulerDiscreteScheduler`, in f32 as there.
    pub fn stretched(tokens: usize, steps: usize, shift: &Shift) -> Result<Schedule, ScheduleError> {
        let slope = (shift.max - shift.base) / (shift.max_tokens as f64 - shift.base_tokens as f64);
        let mu = tokens as f64 * slope + (shift.base - slope * shift.base_tokens as f64);
        let mut schedule = Schedule::shifted(mu, steps)?;
        let Some(terminal) = shift.terminal else { return Ok(schedule) };
        let levels = &mut schedule.sigmas[..steps];
        let scale = (1.0 - levels[steps - 1]) / (1.0 - terminal) as f32;
        // A single step begins at 1, and there is nothing to stretch.
        if scale > 0.0 {
            levels.iter_mut().for_each(|sigma| *sigma = 1.0 - (1.0 - *sigma) / scale);
        }
        Ok(schedule)
    }

    /// Levels that are taken as they are, and 0.
    pub fn fixed(levels: &[f32]) -> Result<Schedule, ScheduleError> {
        if !(1..=MAX_STEPS).contains(&levels.len()) {
            return Err(ScheduleError::Steps(levels.len()));
        }
        Ok(Schedule { sigmas: levels.iter().copied().chain([0.0]).collect() })
    }

    /// The schedule at other levels; unchanged where they are not f32 and as many.
    pub fn with_sigmas(self, sigmas: &HostTensor) -> Schedule {
        match &sigmas.values {
            Values::F32(levels) if sigmas.shape == [self.sigmas.len()] => {
                Schedule { sigmas: levels.to_vec() }
            }
            _ => self,
        }
    }

    /// `1000 * sigma` of each step.
    pub fn timesteps(&self) -> Vec<f32> {
        self.sigmas[..self.steps()].iter().map(|sigma| TIME_SCALE * sigma).collect()
    }

    /// The number of steps, at least 1.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// All `steps + 1` sigmas; the first is 1, the last 0, unless a probe put others in their place.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// `latents += (sigma[step + 1] - sigma[step]) * velocity`, in f32, for tensors of one shape.
    pub fn euler_step(
        &self,
        step: usize,
        latents: &mut HostTensor,
        velocity: &HostTensor,
    ) -> Result<(), ScheduleError> {
        if step >= self.steps() {
            return Err(ScheduleError::NoSuchStep { step, steps: self.steps() });
        }
        if latents.shape != velocity.shape {
            let (velocity, latents) = (velocity.shape.clone(), latents.shape.clone());
            return Err(ScheduleError::Shape { step, velocity, latents });
        }
        let Values::F32(x) = &mut latents.values else {
            return Err(ScheduleError::NotF32 { step, what: "the tensor of latents" });
        };
        let Values::F32(v) = &velocity.values else {
            return Err(ScheduleError::NotF32 { step, what: "the velocity" });
        };
        let dt = self.sigmas[step + 1] - self.sigmas[step];
        for (x, v) in x.to_mut().iter_mut().zip(v.iter()) {
            *x += dt * v;
        }
        Ok(())
    }
}

/// `numpy.linspace(1, 1 / steps, steps)[i]`: its own arithmetic, for its rounding.
fn linspace_down(i: usize, steps: usize) -> f64 {
    let last = 1.0 / steps as f64;
    if steps == 1 {
        return 1.0;
    }
    if i == steps - 1 {
        return last;
    }
    i as f64 * ((last - 1.0) / (steps - 1) as f64) + 1.0
}

/// The sinusoidal embedding of a noise level: `channels` values, angles `1000 sigma * 10000^(-j / half)`.
///
/// Frequencies and angles are rounded to f32 as in diffusers' `get_timestep_embedding`: near angle 1000 one unit in
/// the last place is 6e-5, so exact angles would be *further* from the reference. An odd last channel is 0.
pub fn time_embedding(sigma: f32, channels: usize, order: TimeOrder) -> Vec<f32> {
    let half = channels / 2;
    let time = TIME_SCALE * sigma;
    let angle = |j: usize| {
        let exponent = -(10000f64.ln() as f32) * j as f32 / half as f32;
        f64::from(time * f64::from(exponent).exp() as f32)
    };
    let cos = (0..half).map(|j| angle(j).cos() as f32);
    let sin = (0..half).map(|j| angle(j).sin() as f32);
    let mut embedding: Vec<f32> = match order {
        TimeOrder::CosFirst => cos.chain(sin).collect(),
        TimeOrder::SinFirst => sin.chain(cos).collect(),
    };
    embedding.resize(channels, 0.0);
    embedding
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From diffusers 0.42's scheduler.
    #[test]
    fn sigmas_have_the_reference_bits() {
        let schedule = Schedule::flux2(1024, 4).unwrap();
        assert_eq!(schedule.sigmas(), SIGMAS_1024_4);
        assert_eq!(schedule.steps(), 4);
        assert_eq!(Schedule::flux2(4096, 8).unwrap().sigmas(), SIGMAS_4096_8);
        assert_eq!(Schedule::flux2(64, 1).unwrap().sigmas(), [1.0, 0.0]);
    }

    #[test]
    fn mu_has_two_regimes() {
        assert!((empirical_mu(1024, 4) - 2.030690).abs() < 1e-6);
        assert!((empirical_mu(4096, 4) - 2.291180).abs() < 1e-6);
        // Above 4300 tokens the number of steps plays no part.
        assert_eq!(empirical_mu(4301, 4), empirical_mu(4301, 50));
        assert_ne!(empirical_mu(4300, 4), empirical_mu(4300, 50));
    }

    #[test]
    fn sigmas_fall() {
        for steps in [1, 2, 7, 50, MAX_STEPS] {
            let schedule = Schedule::flux2(4096, steps).unwrap();
            assert_eq!(schedule.sigmas().len(), steps + 1);
            assert!(schedule.sigmas().windows(2).all(|s| s[0] > s[1]));
        }
    }

    /// From diffusers 0.42's pipeline: the specs' values.
    #[test]
    fn levels_are_shifted_by_the_picture_and_stretched() {
        let shift = Shift { base_tokens: 256, max_tokens: 8192, base: 0.5, max: 0.9, terminal: Some(0.02) };
        let second = [(256, 0.98435795), (1024, 0.9849191), (4096, 0.98696375), (16384, 0.992646)];
        for (tokens, sigma) in second {
            let schedule = Schedule::stretched(tokens, 40, &shift).unwrap();
            let sigmas = schedule.sigmas();
            assert_eq!((sigmas.len(), sigmas[0], sigmas[40]), (41, 1.0, 0.0));
            assert!((sigmas[1] - sigma).abs() < 1e-6, "{tokens}: {}", sigmas[1]);
            assert!((sigmas[39] - 0.02).abs() < 1e-6);
        }
        assert_eq!(Schedule::stretched(256, 1, &shift).unwrap().sigmas(), [1.0, 0.0]);
        let grid = [1.0, 0.978453, 0.95418];
        assert_eq!(Schedule::fixed(&grid).unwrap().sigmas(), [1.0, 0.978453, 0.95418, 0.0]);
        assert_eq!(Schedule::fixed(&grid).unwrap().timesteps(), [1000.0, 978.453, 954.18]);
        assert_eq!(Schedule::fixed(&[]), Err(ScheduleError::Steps(0)));
    }

    #[test]
    fn impossible_schedules_are_refused() {
        assert_eq!(Schedule::flux2(64, 0), Err(ScheduleError::Steps(0)));
        assert_eq!(Schedule::flux2(64, MAX_STEPS + 1), Err(ScheduleError::Steps(MAX_STEPS + 1)));
        assert!(matches!(Schedule::shifted(f64::NAN, 4), Err(ScheduleError::Shift(_))));
        assert!(matches!(Schedule::flux2(1 << 40, 4), Err(ScheduleError::Shift(_))));
    }

    #[test]
    fn euler_steps_need_their_shapes() {
        let schedule = Schedule::shifted(1.0, 2).unwrap();
        let velocity = HostTensor::f32(&[1, 2], vec![1.0, -2.0]);
        let mut latents = HostTensor::f32(&[1, 2], vec![0.0; 2]);
        let step = |step, latents: &mut HostTensor, v: &HostTensor| schedule.euler_step(step, latents, v);
        assert_eq!(step(2, &mut latents, &velocity), Err(ScheduleError::NoSuchStep { step: 2, steps: 2 }));
        assert!(matches!(step(usize::MAX, &mut latents, &velocity), Err(ScheduleError::NoSuchStep { .. })));
        let wrong = HostTensor::f32(&[2, 1], vec![0.0; 2]);
        assert!(matches!(step(0, &mut latents, &wrong), Err(ScheduleError::Shape { step: 0, .. })));
        let integers = HostTensor::i64(&[1, 2], vec![0; 2]);
        assert!(matches!(step(0, &mut latents, &integers), Err(ScheduleError::NotF32 { .. })));
        step(1, &mut latents, &velocity).unwrap();
        let sigma = schedule.sigmas()[1];
        assert_eq!(latents.to_f32(), [-sigma, 2.0 * sigma]);
    }

    /// From diffusers 0.42 at 256 channels. At three of the 128 frequencies (13, 44, 119) PyTorch's `exp` is one unit
    /// in the last place off, and the embedding 3e-5; with exact f64 angles it is up to 7e-5 away.
    #[test]
    fn time_embedding_is_the_reference() {
        for (sigma, values) in TIMES {
            let embedding = time_embedding(sigma, 256, TimeOrder::CosFirst);
            assert_eq!(embedding.len(), 256);
            for (channel, value) in values {
                assert!((embedding[channel] - value).abs() < 1e-6, "sigma {sigma}, channel {channel}");
            }
            let swapped = time_embedding(sigma, 256, TimeOrder::SinFirst);
            assert_eq!(swapped[..128], embedding[128..]);
            assert_eq!(swapped[128..], embedding[..128]);
        }
        assert_eq!(time_embedding(0.0, 5, TimeOrder::CosFirst), [1.0, 1.0, 0.0, 0.0, 0.0]);
    }

    const SIGMAS_1024_4: [f32; 5] = [1.0, 0.95808536, 0.8839819, 0.7174966, 0.0];
    const SIGMAS_4096_8: [f32; 9] =
        [1.0, 0.9854255, 0.9666411, 0.94151473, 0.9061826, 0.8528417, 0.7630145, 0.57980675, 0.0];
    const TIMES: [(f32, [(usize, f32); 5]); 3] = [
        (1.0, [(0, 0.56237906), (1, 0.78962666), (64, -0.8390715), (129, 0.6135876), (255, 0.10725406)]),
        (
            0.95808536,
            [(0, -0.99496704), (1, 0.79917806), (64, -0.98784494), (129, -0.60109437), (255, 0.102774784)],
        ),
        (
            0.7174966,
            [(0, 0.34978285), (1, -0.09367455), (64, 0.62802744), (129, 0.99560285), (255, 0.07702636)],
        ),
    ];
}
