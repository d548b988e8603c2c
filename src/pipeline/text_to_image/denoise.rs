//! The steps of a picture in the transformer's open session.

use std::time::Instant;

use super::{Conditions, EMBEDS, Opened, PipelineError, Request, TRANSFORMER, latents_after};
use crate::{
    pipeline::{event::Event, image::check_finite, run::Watch, run_folder::RunFolder, schedule::Schedule},
    runtime::{Placement, TensorView},
    tensor::HostTensor,
};

/// A picture that the transformer works on.
pub struct Sampling {
    /// Which of the encoded prompts it shows.
    pub prompt: usize,
    /// Which of them it does not show, and how much.
    pub negative: Option<(usize, f32)>,
    /// After how many steps the latents are.
    pub done: usize,
    /// [1, tokens, channels].
    pub latents: HostTensor,
}

impl Sampling {
    /// A picture at its first step, whose prompt and negative prompt are at these places.
    pub fn first(request: &Request, [prompt, negative]: [usize; 2], latents: HostTensor) -> Sampling {
        let negative = request.negative.as_ref().map(|own| (negative, own.scale));
        Sampling { prompt, negative, done: 0, latents }
    }
}

/// The remaining steps of one picture in the transformer's open session.
pub fn denoise_one(
    picture: Sampling,
    schedule: &Schedule,
    conditions: &Conditions,
    stage: &mut Opened<'_>,
    watch: &mut Watch<'_>,
    folder: &mut RunFolder,
) -> Result<HostTensor, PipelineError> {
    let Sampling { prompt, negative, done, mut latents } = picture;
    let (exposed, count) = (stage.exposed(), schedule.steps());
    let bind = |stage: &mut Opened<'_>, place: usize| {
        conditions.prompts[place].iter().try_for_each(|(name, tensor)| stage.bind(name, tensor))
    };
    for step in done..count {
        let started = Instant::now();
        // Two prompts take turns under the same names.
        if step == done || negative.is_some() {
            bind(stage, prompt)?;
        }
        let wanted = if step == 0 { &exposed[..] } else { &[] };
        let mut velocity = velocity(step, &latents, conditions, wanted, stage, watch)?;
        if let Some((place, scale)) = negative {
            bind(stage, place)?;
            let other = self::velocity(step, &latents, conditions, &[], stage, watch)?;
            velocity = guided(&velocity, &other, scale);
        }
        let velocity = watch.boundary(&format!("pred_step{step}"), velocity);
        schedule.euler_step(step, &mut latents, &velocity)?;
        latents = watch.boundary(&latents_after(step), latents);
        let seconds = started.elapsed().as_secs_f64();
        watch.listener.on_event(Event::Step { index: step + 1, count, seconds });
        if step + 1 < count {
            check_finite(TRANSFORMER, Some(step), &latents)?;
            folder.keep(&[(latents_after(step).as_str(), &latents)], &EMBEDS, watch.listener);
        }
    }
    Ok(latents)
}

/// What the transformer makes of the latents for the prompt whose inputs are bound.
fn velocity(
    step: usize,
    latents: &HostTensor,
    conditions: &Conditions,
    exposed: &[String],
    stage: &mut Opened<'_>,
    watch: &mut Watch<'_>,
) -> Result<HostTensor, PipelineError> {
    let mut inputs = vec![("latents", TensorView::Host(latents))];
    inputs.extend(conditions.steps[step].iter().map(|(name, tensor)| (&**name, tensor.into())));
    let velocity = stage.run_and_probe(&inputs, ("pred", Placement::Host), exposed, watch)?;
    let velocity = velocity.into_host()?.widened();
    check_finite(TRANSFORMER, Some(step), &velocity)?;
    Ok(velocity)
}

/// `negative + scale * (positive - negative)`.
fn guided(positive: &HostTensor, negative: &HostTensor, scale: f32) -> HostTensor {
    let pairs = positive.to_f32().into_iter().zip(negative.to_f32());
    HostTensor::f32(&positive.shape, pairs.map(|(p, n)| n + scale * (p - n)).collect())
}

/// The encoded prompts that the pictures have, and the pictures with their places among these: what the transformer takes
/// for a prompt can be large.
pub fn own_prompts(embeds: &[HostTensor], mut pictures: Vec<Sampling>) -> (Vec<HostTensor>, Vec<Sampling>) {
    let mut places = Vec::new();
    let mut place = |prompt: usize| {
        places.iter().position(|known| *known == prompt).unwrap_or_else(|| {
            places.push(prompt);
            places.len() - 1
        })
    };
    for picture in &mut pictures {
        picture.prompt = place(picture.prompt);
        picture.negative = picture.negative.map(|(prompt, scale)| (place(prompt), scale));
    }
    (places.into_iter().map(|prompt| embeds[prompt].clone()).collect(), pictures)
}
