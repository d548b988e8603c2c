//! Graphs that others exported, assembled into a bundle.

use std::{
    fs,
    path::{Path, PathBuf},
};

use regex::Regex;

use super::{
    Bundle, ExportError, ExportEvent, ExportSummary, FORMAT, Manifest, Origin,
    folder::{FolderWriter, write_manifest},
    target::Target,
    write::WRITER,
};
use crate::{
    arch::{
        StageGraph,
        flux2::{
            imported::{
                Settings,
                contract::{Role, adapt, fixed_size},
                describe,
            },
            tokenizer::pad_id,
        },
    },
    onnx::{DType, Model, ValueId, read_model},
    passes::{self, Linears, Part, Splitting, symbols},
    recipe::{Precision, Recipe},
};

/// The family of the models whose contracts are known.
const FAMILY: &str = "flux2";
/// The recipe whose steps, text length and bars are taken where no other is named.
const DEFAULT_RECIPE: &str = "flux2-klein";
/// The bundle's folder of tokenizer files.
const TOKENIZER: &str = "tokenizer";

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

pub struct ImportRequest<'a> {
    /// Each an `.onnx` file, and its part of the model where the user says it.
    pub graphs: &'a [(Option<Role>, PathBuf)],
    /// A folder with `tokenizer.json` and the chat template.
    pub tokenizer: &'a Path,
    pub out: &'a Path,
    pub recipe: Option<&'a str>,
    /// How weights are stored, f32, f16, q8 or q4; as they are if absent.
    pub profile: Option<&'a str>,
    /// Recipe values to change, by dotted key.
    pub set: &'a [(String, String)],
    /// Replace an existing bundle.
    pub force: bool,
}

/// Assembles a bundle. Weights are streamed from the graphs' files; like [`super::export`] it gives a whole bundle or none.
pub fn import(
    request: &ImportRequest<'_>,
    progress: &mut dyn FnMut(ExportEvent),
) -> Result<ExportSummary, ExportError> {
    let name = request.recipe.unwrap_or(DEFAULT_RECIPE);
    let recipe = Recipe::named(name, request.set)?;
    progress(ExportEvent::Recipe { name: recipe.name.clone(), origin: format!("'{name}'") });
    let storage = Storage::of(&recipe, request.profile)?;
    let target = Target { out: request.out, force: request.force };
    let files = request.graphs.iter().map(|(_, path)| path.as_path());
    target.check(&files.chain([request.tokenizer]).collect::<Vec<_>>())?;
    let mut settings = settings(&recipe, request.tokenizer)?;
    let components = components(request.graphs)?;
    // Graphs that were traced with a number of rows say so; the recipe's holds for the others.
    let rows = |name| components.iter().find_map(|(_, model)| fixed_size(&model.graph, name, 1));
    let rows = ["input_ids", "prompt_embeds", "txt_ids"].into_iter().find_map(rows);
    settings.text_length = rows.unwrap_or(settings.text_length);
    let mut graphs = Vec::new();
    for (role, mut model) in components {
        rewrite(role, &mut model, &storage, settings.text_length, progress)?;
        for (role, mut model, names) in stages_of(role, model, &recipe)? {
            adapt(&mut model, role, &names).map_err(|e| ExportError::Incomplete(Box::new(e)))?;
            graphs.push((role, model));
        }
    }
    let described: Vec<_> = graphs.iter().map(|(role, model)| (*role, model)).collect();
    let parameters = describe(&described, &settings).map_err(|e| ExportError::Incomplete(Box::new(e)))?;
    let profile = profile_of(graphs.iter().map(|(_, model)| model)).to_owned();
    let stages: Vec<_> = graphs
        .into_iter()
        .map(|(role, model)| StageGraph::new(&role.stage(), role.component(), model))
        .collect();
    progress(ExportEvent::Total { bytes: stages.iter().map(|stage| stage.model.constant_bytes()).sum() });

    let staging = target.staging_folder()?;
    progress(ExportEvent::Staging(staging.path().to_owned()));
    let mut writer = FolderWriter { folder: staging.path(), files: Vec::new(), progress };
    let stages = writer.stages(&stages)?;
    writer.copy_folder(request.tokenizer, TOKENIZER)?;
    let manifest = Manifest {
        format: FORMAT,
        family: FAMILY.to_owned(),
        name: recipe.name.clone(),
        writer: WRITER.to_owned(),
        source: Origin { checkpoint: file_names(request.graphs), ..Origin::default() },
        profile,
        parameters: serde_json::to_value(&parameters).unwrap_or_default(),
        stages,
        files: writer.files,
        recipe: recipe.of_imported(),
    };
    write_manifest(staging.path(), &manifest)?;
    Bundle::open(staging.path())?;
    target.publish(staging)?;
    let bytes = manifest.files.iter().map(|file| file.bytes).sum();
    Ok(ExportSummary { manifest, bytes })
}

/// How weights are to be stored.
struct Storage<'a> {
    /// Sequences of passes for components of linear layers, and for the decoder.
    linears: &'static [&'static str],
    decoder: &'static [&'static str],
    /// The recipe's say about linear layers.
    precision: Option<&'a Precision>,
}

impl<'a> Storage<'a> {
    fn of(recipe: &'a Recipe, profile: Option<&str>) -> Result<Storage<'a>, ExportError> {
        let Some(name) = profile else {
            return Ok(Storage { linears: UNCHANGED, decoder: UNCHANGED, precision: None });
        };
        let row = PROFILES.iter().find(|row| row.0 == name);
        let (_, linears, decoder) = row.ok_or_else(|| ExportError::NoProfile { name: name.to_owned() })?;
        Ok(Storage { linears, decoder, precision: Some(recipe.profile(name)?) })
    }
}

/// Makes a graph lean and fit for WebGPU, and stores its weights as the recipe's profile says.
fn rewrite(
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
type NamedStage = (Role, Model, Vec<(String, String)>);

/// The stages that a component becomes. A decoder is cut around its attention and where the recipe says, so that the largest
/// activations stand alone; one that has no such attention stays whole.
fn stages_of(role: Role, model: Model, recipe: &Recipe) -> Result<Vec<NamedStage>, ExportError> {
    if role != Role::Decoder {
        return Ok(vec![(role, model, Vec::new())]);
    }
    let failed = |source| ExportError::Rewrite { role, source: Box::new(source) };
    let split_vae = passes::split_named("split_vae").map_err(failed)?;
    // Decoders of few levels have no block for every cut.
    for cuts in [cuts(recipe), Vec::new()] {
        let split = Splitting { cuts, ..Splitting::default() };
        let settings = passes::Settings { split, ..Default::default() };
        let (parts, _) = passes::split(&model, split_vae, &settings).map_err(failed)?;
        if !parts.is_empty() {
            return Ok(decoder_stages(parts));
        }
    }
    Ok(vec![(role, model, Vec::new())])
}

fn cuts(recipe: &Recipe) -> Vec<usize> {
    let cuts = recipe.sections.get("vae_decoder").and_then(|section| section.get("cuts")?.as_array());
    let numbers = cuts.into_iter().flatten().filter_map(toml::Value::as_integer);
    numbers.filter_map(|cut| usize::try_from(cut).ok()).collect()
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

/// Reads the graphs and finds out which part each is: text encoder, transformer, decoder.
fn components(graphs: &[(Option<Role>, PathBuf)]) -> Result<Vec<(Role, Model)>, ExportError> {
    let mut found: Vec<(Role, Model, &Path)> = Vec::new();
    for (role, path) in graphs {
        let mut model = read_model(path).map_err(|e| ExportError::Graph(Box::new(e)))?;
        let role = role.or_else(|| Role::recognise(&model.graph)).ok_or_else(|| {
            let names: Vec<&str> =
                model.graph.inputs.iter().map(|id| model.graph[*id].name.as_str()).collect();
            ExportError::UnknownPart { path: path.clone(), inputs: names.join(", ") }
        })?;
        if let Some((_, _, first)) = found.iter().find(|(other, ..)| *other == role) {
            let (first, second) = (first.to_path_buf(), path.clone());
            return Err(ExportError::PartTwice { role, first, second });
        }
        adapt(&mut model, role, &[])
            .map_err(|e| ExportError::Contract { path: path.clone(), source: Box::new(e) })?;
        found.push((role, model, path));
    }
    let mut take = |role: Role| {
        let place =
            found.iter().position(|(other, ..)| *other == role).ok_or(ExportError::NoPart { role })?;
        let (role, model, _) = found.swap_remove(place);
        Ok((role, model))
    };
    [Role::TextEncoder, Role::Transformer, Role::Decoder].into_iter().map(&mut take).collect()
}

fn settings(recipe: &Recipe, tokenizer: &Path) -> Result<Settings, ExportError> {
    let number = |section: &str, key: &str| {
        let value = recipe.sections.get(section)?.get(key)?.as_integer()?;
        usize::try_from(value).ok()
    };
    let usual = Settings::default();
    Ok(Settings {
        text_length: number("text_encoder", "length").unwrap_or(usual.text_length),
        attention_rows: number("vae_decoder", "attention_rows").unwrap_or(usual.attention_rows),
        steps: number("schedule", "steps").unwrap_or(usual.steps),
        pad_id: pad_id(tokenizer).map_err(|e| ExportError::Arch(e.into()))?,
        ..usual
    })
}

/// The profile that a model's weights are like: by the smallest ones of its matrix products.
pub(super) fn profile_of<'a>(graphs: impl Iterator<Item = &'a Model>) -> &'static str {
    let (mut bits, mut f16) = (None, false);
    for model in graphs {
        let quantised = model.graph.nodes().filter(|(_, node)| node.op_type == "MatMulNBits");
        let smallest = quantised.map(|(_, node)| node.int("bits").unwrap_or(4)).min();
        bits = [bits, smallest].into_iter().flatten().min();
        let constants = model.graph.values().filter_map(|(_, value)| value.constant.as_ref());
        f16 |= constants.into_iter().any(|tensor| tensor.dtype == DType::F16);
    }
    match bits {
        Some(..=4) => "q4",
        Some(_) => "q8",
        None if f16 => "f16",
        None => "f32",
    }
}

fn file_names(graphs: &[(Option<Role>, PathBuf)]) -> String {
    let names = graphs.iter().filter_map(|(_, path)| fs::canonicalize(path).ok());
    let names = names.filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    names.collect::<Vec<_>>().join(", ")
}
