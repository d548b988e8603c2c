//! Makes the stages of a bundle out of graphs that others exported: rewritten for WebGPU, stored as a profile says, decoders cut.

use regex::Regex;

use crate::{
    arch::flux2::imported::contract::Role,
    bundle::{ExportError, ExportEvent},
    onnx::{Model, ValueId},
    passes::{self, Linears, Part, Splitting, symbols},
    recipe::{Precision, Recipe},
};

/// Sequences of passes that store a model as a profile says: of the linear layers' components, and of the decoder, which is
/// made of convolutions.
const PROFILES: &[(&str, &[&str], &[&str])] = &[
    ("f32", &["webgpu"], &["webgpu"]),
    ("f16", &["f16"], &["f16"]),
    ("q8", &["f16", "q8"], &["f16"]),
    ("q4", &["f16", "q4"], &["f16"]),
];
/// What graphs go through that keep their weights as they are.
const UNCHANGED: &[&str] = &["webgpu"];

/// How weights are to be stored.
pub(super) struct Storage<'a> {
    /// Sequences of passes for components of linear layers, and for the decoder.
    linears: &'static [&'static str],
    decoder: &'static [&'static str],
    /// The recipe's say about linear layers.
    precision: Option<&'a Precision>,
}

impl<'a> Storage<'a> {
    pub fn of(recipe: &'a Recipe, profile: Option<&str>) -> Result<Storage<'a>, ExportError> {
        let Some(name) = profile else {
            return Ok(Storage { linears: UNCHANGED, decoder: UNCHANGED, precision: None });
        };
        let row = PROFILES.iter().find(|row| row.0 == name);
        let (_, linears, decoder) = row.ok_or_else(|| ExportError::NoProfile { name: name.to_owned() })?;
        Ok(Storage { linears, decoder, precision: Some(recipe.profile(name)?) })
    }
}

/// Makes a graph lean and fit for WebGPU, and stores its weights as the recipe's profile says.
pub(super) fn rewrite(
    role: Role,
    model: &mut Model,
    storage: &Storage<'_>,
    text_length: usize,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<(), ExportError> {
    let failed = |source| ExportError::Rewrite { role, source: Box::new(source) };
    let sequences = if role == Role::Decoder { storage.decoder } else { storage.linears };
    let linears = storage.precision.map(|precision| linears_of(&precision.component(role.component())));
    let text_seq = Some(("text_seq".to_owned(), text_length));
    let is_open = |(name, _): &(String, usize)| symbols(&model.graph).contains(name.as_str());
    let sizes = text_seq.into_iter().filter(is_open).collect();
    let settings = passes::Settings { sizes, linears: linears.unwrap_or_default(), ..Default::default() };
    let passes = passes::sequences(sequences).map_err(failed)?;
    let reports = passes::apply(model, &passes, &settings).map_err(failed)?;
    for report in reports.iter().filter(|report| report.pass.name.starts_with("quantize")) {
        for (why, (count, place)) in report.reasons() {
            if why != passes::LEFT_OUT {
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
        let settings = passes::Settings { split, ..Default::default() };
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

/// Weights for which a recipe has a rule of its own stay in 16 bits. Its patterns are for the checkpoint's names, which
/// exporters keep as a part of theirs.
fn linears_of(precision: &Precision) -> Linears {
    let patterns = precision.rules.iter().map(|rule| rule.pattern.trim_start_matches('^'));
    Linears {
        block: precision.block,
        symmetric: precision.symmetric,
        accuracy_level: precision.accuracy_level,
        include: Vec::new(),
        exclude: patterns.filter_map(|pattern| Regex::new(pattern).ok()).collect(),
    }
}
