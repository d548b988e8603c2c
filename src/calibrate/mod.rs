//! Statistics of what the linear layers of a model read, from pictures that it draws: `viaduct export --calibration` fits
//! quantised weights with them.
//!
//! The model is run as usual, with the inputs of its layers exposed. What does not fit the budget at once is looked at in
//! several passes, each of which draws the same pictures. Then the first of them are drawn once more, to see what an error of
//! each layer does to the result.

mod layers;
mod prompts;
mod recorder;
mod sensor;
mod sums;

use std::{
    io::{self, Write},
    path::Path,
};

use viaduct_export::{
    bundle::{Bundle, BundleError, Stages},
    weights::{Calibration, header},
};

pub use self::prompts::PROMPTS;
use self::{
    layers::{LayerInput, Source, layer_inputs, layers},
    recorder::Recorder,
    sensor::Sensor,
    sums::Sums,
};
use crate::{
    atomic_file::{self, Existing, FileError},
    pipeline::{
        event::{Event, Listener},
        probe::NoProbe,
        run::{Run, Watch},
        run_folder::RunFolder,
        text_to_image::{PipelineError, Request, TEXT_ENCODER, TextToImage},
    },
    runtime::Executor,
};

#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot write the statistics: {0}")]
    Write(#[source] io::Error),
    #[error("a bundle of profile {profile} has quantised weights; calibrate one of f32 or f16")]
    Quantised { profile: String },
    #[error(
        "the graphs of this bundle were exported by others; only a bundle of a checkpoint can be calibrated"
    )]
    Imported,
    #[error(
        "stage {stage}: what {weights} is multiplied with is not finite, or its squares are not; `viaduct inspect` says whether the bundle is whole, and f32 holds larger values than f16"
    )]
    NotFinite { stage: String, weights: String },
    #[error(
        "a small error of {weight} makes the model's result infinite, or no number; f32 holds larger values than f16"
    )]
    Sensitivity { weight: String },
    #[error(
        "no later stage reads what stage {stage} gives, so that nothing is known of what its errors do; its graphs are not this program's, export the checkpoint again"
    )]
    Unread { stage: String },
    #[error("{value} of stage {stage} has {width} columns, of which there are no statistics")]
    Width { stage: String, value: String, width: usize },
}

/// How a model is calibrated.
pub struct CalibrationRequest<'a> {
    /// What to draw. Pictures of the same size and number of steps come one after the other.
    pub pictures: &'a [Request],
    /// Bytes for statistics and for the values that they are of, at a time; an input that takes more is looked at alone.
    pub budget: u64,
    pub out: &'a Path,
    pub existing: Existing,
}

/// What was written.
#[derive(Debug)]
pub struct Calibrated {
    /// Values whose statistics are kept.
    pub inputs: usize,
    /// Weights that they are multiplied with.
    pub weights: usize,
    pub passes: usize,
    pub bytes: u64,
}

/// Pictures of which it is seen what errors do: each is many runs.
const SENSED: usize = 2;

/// The inputs that one pass looks at.
type Pass = Vec<LayerInput>;

/// Names the file while it is written.
const TEMPORARY: &str = "statistics";

/// Draws the pictures, without decoding them, and writes the statistics of what the layers read. The file is there when
/// it is complete, or not at all.
pub fn calibrate(
    bundle: &Bundle,
    request: &CalibrationRequest<'_>,
    executor: &mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Calibrated, CalibrationError> {
    if bundle.is_imported() {
        return Err(CalibrationError::Imported);
    }
    let pipeline = TextToImage::open(bundle)?;
    let text = pipeline.family().text_length();
    let joint = text + request.pictures.iter().map(|picture| picture.size.tokens()).max().unwrap_or(0);
    let rows = |stage: &str| if stage == TEXT_ENCODER { text } else { joint };
    let passes = passes(inputs(bundle)?, rows, request.budget)?;
    let inputs: Vec<_> = passes.iter().flatten().map(|input| (input_name(input), input.width)).collect();
    let header = header(&inputs);
    let weights: Vec<&String> = passes.iter().flatten().flat_map(|input| &input.weights).collect();
    let sums = inputs.iter().filter_map(|(_, width)| Sums::bytes(*width)).sum::<u64>();
    let bytes = header.len() as u64 + sums + size_of::<f32>() as u64 * weights.len() as u64;
    // An error of the run is no error of the file.
    let mut failed = None;
    let mut fill = |file: &mut dyn Write| -> Result<(), CalibrationError> {
        file.write_all(&header).map_err(CalibrationError::Write)?;
        for (index, pass) in passes.iter().enumerate() {
            listener.on_event(Event::note(format!("pass {} of {}", index + 1, passes.len())));
            for sums in look(&pipeline, pass, request.pictures, executor, listener)? {
                sums.write(file).map_err(CalibrationError::Write)?;
            }
        }
        listener.on_event(Event::note(format!("sensitivity of {} layers", weights.len())));
        let sensor = sense(&pipeline, request.pictures, executor, listener)?;
        for weight in &weights {
            let sensitivity = sensor.sensitivity(weight) as f32;
            if !sensitivity.is_finite() {
                return Err(CalibrationError::Sensitivity { weight: (*weight).clone() });
            }
            file.write_all(&sensitivity.to_le_bytes()).map_err(CalibrationError::Write)?;
        }
        Ok(())
    };
    let written = atomic_file::write_through(request.out, request.existing, Some(TEMPORARY), |file| {
        fill(file).map_err(|error| {
            failed = Some(error);
            io::Error::other("the calibration failed")
        })
    });
    failed.map_or(Ok(()), Err)?;
    written?;
    Ok(Calibrated { inputs: inputs.len(), weights: weights.len(), passes: passes.len(), bytes })
}

/// One pass: the sums of its inputs, in their order.
fn look(
    pipeline: &TextToImage<'_>,
    pass: &Pass,
    pictures: &[Request],
    executor: &mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Vec<Sums>, CalibrationError> {
    let mut recorder = Recorder::new(executor, pass);
    let mut nothing = NoProbe;
    let watch = Watch::new(listener, &mut nothing);
    let mut run = Run { executor: &mut recorder, plan: None, watch, folder: RunFolder::none() };
    let text_alone = pass.iter().flat_map(|input| &input.sources).all(|source| source.stage == TEXT_ENCODER);
    let drawn = match text_alone {
        true => pipeline.embeds_of_all(pictures, &mut run),
        false => pipeline.latents_of_all(pictures, &mut run),
    };
    let sums = recorder.sums;
    // A run that fails of infinite values does not know where they began.
    let broken = pass.iter().zip(&sums).find(|(_, sums)| !sums.are_finite());
    if let Some((input, _)) = broken {
        let stages = input.sources.iter().map(|source| source.stage.as_str());
        let (stage, weights) = (stages.collect::<Vec<_>>().join(" or "), input.weights.join(", "));
        return Err(CalibrationError::NotFinite { stage, weights });
    }
    drawn?;
    Ok(sums)
}

/// What errors of the layers do to the first pictures.
fn sense<'e>(
    pipeline: &'e TextToImage<'_>,
    pictures: &[Request],
    executor: &'e mut dyn Executor,
    listener: &mut dyn Listener,
) -> Result<Sensor<'e>, CalibrationError> {
    let mut sensor = Sensor::new(executor, pipeline.family());
    let mut nothing = NoProbe;
    let watch = Watch::new(listener, &mut nothing);
    let mut run = Run { executor: &mut sensor, plan: None, watch, folder: RunFolder::none() };
    pipeline.latents_of_all(&pictures[..SENSED.min(pictures.len())], &mut run)?;
    match sensor.unread() {
        Some(stage) => Err(CalibrationError::Unread { stage: stage.to_owned() }),
        None => Ok(sensor),
    }
}

/// What the layers of all stages before the decoder read.
fn inputs(bundle: &Bundle) -> Result<Pass, CalibrationError> {
    let mut found = Vec::new();
    for stage in bundle.manifest.stages.iter().filter(|stage| !stage.name.starts_with("vae_")) {
        let model = bundle.model(&stage.name)?;
        if model.graph.nodes().any(|(_, node)| node.op_type == "MatMulNBits") {
            return Err(CalibrationError::Quantised { profile: bundle.manifest.profile.clone() });
        }
        found.push((stage.name.clone(), layers(&model.graph)));
    }
    Ok(layer_inputs(found))
}

/// Inputs in passes that keep to the budget; the values of a stage have at most so many rows.
fn passes(inputs: Pass, rows: impl Fn(&str) -> usize, budget: u64) -> Result<Vec<Pass>, CalibrationError> {
    let mut passes: Vec<Pass> = Vec::new();
    let mut left = 0;
    for input in inputs {
        let rows = input.sources.iter().map(|source| rows(&source.stage) as u64).sum::<u64>();
        let values = rows.saturating_mul(input.width as u64).saturating_mul(8);
        let bytes = Sums::bytes(input.width).filter(|bytes| *bytes > 0).ok_or_else(|| {
            let Source { stage, value, .. } = input.sources[0].clone();
            CalibrationError::Width { stage, value, width: input.width }
        })?;
        let bytes = bytes.saturating_add(values);
        match passes.last_mut().filter(|_| bytes <= left) {
            Some(pass) => pass.push(input),
            None => {
                passes.push(vec![input]);
                left = budget;
            }
        }
        left = left.saturating_sub(bytes);
    }
    Ok(passes)
}

fn input_name(input: &LayerInput) -> String {
    Calibration::tensor_name(input.weights.iter().map(String::as_str))
}
