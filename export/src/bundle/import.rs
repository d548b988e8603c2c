//! Graphs that others exported, assembled into a bundle.

mod stages;

use std::{
    fs,
    path::{Path, PathBuf},
};

use self::stages::{rewrite, stages_of};
use super::{
    Bundle, ExportError, ExportEvent, ExportSummary, FORMAT, Manifest, Origin,
    folder::{FolderWriter, write_manifest},
    target::Target,
    write::WRITER,
};
use crate::{
    arch::{
        CopiedFiles, CopiedFolder, StageGraph,
        flux2::{
            TextSection, VaeSection,
            imported::{
                Settings,
                contract::{Role, adapt, fixed_size},
                describe,
            },
            parameters::Schedule,
            tokenizer::pad_id,
        },
    },
    onnx::{DType, Model, read_model},
    recipe::Recipe,
};

/// The family of the models whose contracts are known.
const FAMILY: &str = "flux2";
/// The recipe whose steps, text length and bars are taken where no other is named.
const DEFAULT_RECIPE: &str = "flux2-klein";
/// The bundle's folder of tokenizer files.
const TOKENIZER: &str = "tokenizer";

pub struct ImportRequest<'a> {
    /// Each an `.onnx` file, and its part of the model where the user says it.
    pub graphs: &'a [(Option<Role>, PathBuf)],
    /// A folder with `tokenizer.json` and the chat template.
    pub tokenizer: &'a Path,
    pub out: &'a Path,
    pub recipe: Option<&'a str>,
    /// How weights are stored: a profile of the recipe; as they are if absent.
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
    let profile = request.profile.map(|name| recipe.profile(name)).transpose()?;
    let target = Target { out: request.out, force: request.force };
    let files = request.graphs.iter().map(|(_, path)| path.as_path());
    target.check(&files.chain([request.tokenizer]).collect::<Vec<_>>())?;
    let vae: VaeSection = recipe.section("vae_decoder")?;
    let pad_id = pad_id(request.tokenizer).map_err(|e| ExportError::Arch(e.into()))?;
    let components = components(request.graphs)?;
    let settings = Settings { pad_id, ..settings(&recipe, &vae, &components)? };
    let mut graphs = Vec::new();
    for (role, mut model) in components {
        let precision = profile.map(|profile| profile.component(role.component()));
        rewrite(role, &mut model, precision.as_ref(), settings.text_length, progress)?;
        for (role, mut model, names) in stages_of(role, model, &vae.cuts)? {
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
    let tokenizer = CopiedFolder { from: String::new(), to: TOKENIZER.to_owned(), files: CopiedFiles::All };
    writer.copy_folder(request.tokenizer, &tokenizer)?;
    let manifest = Manifest {
        format: FORMAT,
        family: FAMILY.to_owned(),
        name: recipe.name.clone(),
        writer: WRITER.to_owned(),
        source: Origin { checkpoint: file_names(request.graphs), ..Origin::default() },
        profile,
        calibration: None,
        parameters: serde_json::to_value(&parameters).unwrap_or_default(),
        stages,
        files: writer.files,
        recipe: recipe.of_imported(),
        verified: Vec::new(),
    };
    write_manifest(staging.path(), &manifest)?;
    Bundle::open(staging.path())?;
    target.publish(staging)?;
    let bytes = manifest.files.iter().map(|file| file.bytes).sum();
    Ok(ExportSummary { manifest, bytes })
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

/// What the graphs leave open, as the recipe says it. Graphs that were traced with a number of rows of text say that.
fn settings(
    recipe: &Recipe,
    vae: &VaeSection,
    components: &[(Role, Model)],
) -> Result<Settings, ExportError> {
    let text: TextSection = recipe.section("text_encoder")?;
    let schedule: Schedule = recipe.section("schedule")?;
    let rows = |name| components.iter().find_map(|(_, model)| fixed_size(&model.graph, name, 1));
    let rows = ["input_ids", "prompt_embeds", "txt_ids"].into_iter().find_map(rows);
    Ok(Settings {
        text_length: rows.unwrap_or(text.length),
        attention_rows: vae.attention_rows,
        steps: schedule.steps,
        ..Settings::default()
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
