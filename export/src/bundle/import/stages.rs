//! Makes the stages of a bundle out of graphs that others exported: rewritten for WebGPU, stored as a recipe says, decoders cut.

use regex::Regex;

use crate::{
    arch::flux2::imported::contract::Role,
    bundle::{ExportError, ExportEvent},
    onnx::{Model, ValueId},
    passes::{self, LEFT_OUT, Linears, Part, PassError, QUANTIZE_MATMUL_Q8, Settings, Splitting, symbols},
    recipe::{Compute, Precision, WeightFormat},
};

/// Makes a graph lean and fit for WebGPU, and stores it as the recipe's precision for its component says; without one,
/// weights stay as they are. What is not quantised becomes f16 where the recipe computes in f16, and stays as it is otherwise.
pub(super) fn rewrite(
    role: Role,
    model: &mut Model,
    precision: Option<&Precision>,
    text_length: usize,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<(), ExportError> {
    let failed = |source| ExportError::Rewrite { role, source: Box::new(source) };
    let half = precision.is_some_and(|precision| precision.compute == Compute::F16);
    let sequence = passes::sequence(if half { "f16" } else { "webgpu" }).map_err(failed)?;
    let text_seq = Some(("text_seq".to_owned(), text_length));
    let is_open = |(name, _): &(String, usize)| symbols(&model.graph).contains(name.as_str());
    let settings = Settings { sizes: text_seq.into_iter().filter(is_open).collect(), ..Default::default() };
    passes::apply(model, &sequence, &settings).map_err(failed)?;
    match precision {
        Some(precision) => quantise(role, model, precision, progress).map_err(failed),
        None => Ok(()),
    }
}

/// Quantises linear layers as the precision says, layer by layer, and tells of those that cannot be.
fn quantise(
    role: Role,
    model: &mut Model,
    precision: &Precision,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<(), PassError> {
    let linears = linears_of(precision);
    if linears.rules.iter().all(|(_, bits)| bits.is_none()) {
        return Ok(());
    }
    let settings = Settings { linears, ..Default::default() };
    for report in passes::apply(model, &[&QUANTIZE_MATMUL_Q8], &settings)? {
        for (why, (count, place)) in report.reasons() {
            if why != LEFT_OUT {
                let message = format!("{role}: {count} linear layers are not quantised ({place} ...): {why}");
                progress(ExportEvent::Warning(message));
            }
        }
    }
    Ok(())
}

/// A stage, and by this program's names of its ports those that it has.
pub(super) type NamedStage = (Role, Model, Vec<(String, String)>);

/// The stages that a component becomes. A decoder is cut around its attention and where the recipe says, so that the largest
/// activations stand alone; one that has no such attention stays whole.
pub(super) fn stages_of(role: Role, model: Model, cuts: &[usize]) -> Result<Vec<NamedStage>, ExportError> {
    if role != Role::Decoder {
        return Ok(vec![(role, model, Vec::new())]);
    }
    let failed = |source| ExportError::Rewrite { role, source: Box::new(source) };
    let split_vae = passes::split_named("split_vae").map_err(failed)?;
    // Decoders of few levels have no block for every cut.
    for cuts in [cuts, &[]] {
        let split = Splitting { cuts: cuts.to_vec(), ..Splitting::default() };
        let settings = Settings { split, ..Default::default() };
        let (parts, _) = passes::split(&model, split_vae, &settings).map_err(failed)?;
        if !parts.is_empty() {
            return Ok(decoder_stages(parts));
        }
    }
    Ok(vec![(role, model, Vec::new())])
}

/// The parts of a decoder in order: before the attention, the attention, and the stages after it.
fn decoder_stages(parts: Vec<Part>) -> Vec<NamedStage> {
    let last = parts.len().saturating_sub(3);
    let stage = |(place, part): (usize, Part)| {
        let role = match place {
            0 => Role::DecoderStart,
            1 => Role::Attention,
            _ => Role::DecoderEnd { index: place - 2, last: place - 2 == last },
        };
        let names = names_between(role, &part.model);
        (role, part.model, names)
    };
    parts.into_iter().enumerate().map(stage).collect()
}

/// What passes between the stages after the attention has the name of the stage that it comes from.
fn names_between(role: Role, model: &Model) -> Vec<(String, String)> {
    let Role::DecoderEnd { index, last } = role else { return Vec::new() };
    let named = |index, id: Option<&ValueId>| {
        Some((Role::DecoderEnd { index, last: false }.stage(), model.graph[*id?].name.clone()))
    };
    let before = index.checked_sub(1).and_then(|before| named(before, model.graph.inputs.first()));
    let behind = if last { None } else { named(index, model.graph.outputs.first()) };
    before.into_iter().chain(behind).collect()
}

/// A rule for each of the recipe's, and one for all other weights. A recipe's patterns are for the checkpoint's names, which
/// exporters keep as a part of theirs.
fn linears_of(precision: &Precision) -> Linears {
    let rules = precision.rules.iter().map(|rule| (rule.pattern.trim_start_matches('^'), rule.weights));
    let rules = rules.chain([("", precision.weights)]);
    Linears {
        block: precision.block,
        symmetric: precision.symmetric,
        accuracy_level: precision.accuracy_level,
        include: Vec::new(),
        rules: rules.filter_map(|(name, weights)| Some((Regex::new(name).ok()?, bits_of(weights)))).collect(),
    }
}

fn bits_of(weights: WeightFormat) -> Option<u8> {
    match weights {
        WeightFormat::F32 | WeightFormat::F16 => None,
        WeightFormat::Q8 => Some(8),
        WeightFormat::Q4 => Some(4),
    }
}
