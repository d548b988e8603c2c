//! Recipes: what a model family's export needs beyond the checkpoint's own config files. Data, not code.
//!
//! A recipe is TOML: the family's default ships in `recipes/`, a checkpoint folder may carry a `recipe.toml`
//! that names a `base` and changes some values, and `--set key=value` changes single ones.

use std::{
    collections::BTreeMap,
    io, iter,
    path::{Path, PathBuf},
};

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::{
    files::read_limited,
    gates::{Control, Gates},
    onnx::DType,
    quant::Fit,
};

/// The recipes that ship with the program.
const RECIPES: &[(&str, &str)] = &[
    ("flux2-klein", include_str!("../recipes/flux2-klein.toml")),
    ("flux2-klein-4b", include_str!("../recipes/flux2-klein-4b.toml")),
    ("flux2-klein-9b", include_str!("../recipes/flux2-klein-9b.toml")),
    ("qwen-image-2.1", include_str!("../recipes/qwen-image-2.1.toml")),
    ("qwen-image-2.1-turbo", include_str!("../recipes/qwen-image-2.1-turbo.toml")),
];
/// The section that states what the config files of the recipe's published checkpoint say.
pub const CONFIGS: &str = "configs";
/// The name of a checkpoint folder's own recipe.
pub const RECIPE_FILE: &str = "recipe.toml";
const MAX_RECIPE_BYTES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    #[error("unknown recipe '{name}'; known: {known} (or the path of a .toml file)")]
    UnknownRecipe { name: String, known: String },
    #[error("unknown profile '{name}'; recipe '{recipe}' has: {known}")]
    UnknownProfile { name: String, recipe: String, known: String },
    #[error("--set {key}: recipe '{recipe}' has no such value; near it: {near}")]
    UnknownKey { key: String, recipe: String, near: String },
    #[error("--set {key}={value}: expected {expected}")]
    BadValue { key: String, value: String, expected: &'static str },
    #[error("--set: {message}")]
    BadSet { message: String },
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "recipe '{name}' has no [{CONFIGS}], so a checkpoint is needed for its dimensions; recipes that have them: {known}"
    )]
    NoConfigs { name: String, known: String },
    #[error("recipe {origin}: {message}")]
    Invalid { origin: String, message: String },
}

/// A resolved recipe. Sections that only one family knows are kept as TOML and read by that family.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recipe {
    pub name: String,
    pub family: String,
    /// Licence of all of the family's checkpoints, where they have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    #[serde(default)]
    pub source: SourceRef,
    /// By profile name.
    pub profiles: BTreeMap<String, Precision>,
    /// Bars of `verify`, by profile name.
    #[serde(default)]
    pub gates: BTreeMap<String, Gates>,
    /// Faults that `verify` plants to see that its bars notice them, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub controls: BTreeMap<String, Control>,
    #[serde(flatten)]
    pub sections: toml::Table,
}

/// Where the family's checkpoint is published.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SourceRef {
    pub repo: Option<String>,
    pub revision: Option<String>,
    pub license: Option<String>,
}

/// How the weights of a linear layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    F32,
    F16,
    Q8,
    Q4,
}

/// The type in which a graph computes between its linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    F32,
    F16,
}

impl Compute {
    pub fn dtype(self) -> DType {
        match self {
            Compute::F32 => DType::F32,
            Compute::F16 => DType::F16,
        }
    }
}

/// The type in which a transformer's joint attention multiplies and sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionMath {
    /// That in which the graph computes.
    #[default]
    Compute,
    F32,
}

/// How the residual stream of a transformer is carried when the graph computes in f16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residual {
    /// The stream itself is f32: no clamps, no saturation; more bytes per step.
    #[default]
    F32,
    /// The stream is f16, clamped to ±65504; each addition and norm is an f32 island.
    Islands,
}

/// How weights are stored and in which type the graphs compute: a profile of a recipe, or one component of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Precision {
    pub compute: Compute,
    pub weights: WeightFormat,
    /// Weights per scale in the q formats.
    #[serde(default = "default_block")]
    pub block: usize,
    /// Symmetric codes have no zero points.
    #[serde(default = "default_true")]
    pub symmetric: bool,
    /// MatMulNBits' attribute: 0 computes in the activations' type, 4 may use 8-bit integer products.
    #[serde(default)]
    pub accuracy_level: i64,
    /// How the q formats choose scales and codes.
    #[serde(default, skip_serializing_if = "Fit::is_nearest")]
    pub fit: Fit,
    #[serde(default)]
    pub residual: Residual,
    #[serde(default)]
    pub attention: AttentionMath,
    /// First match decides the format of a weight, by its checkpoint name.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Changes for single components, by component name.
    #[serde(default)]
    pub components: BTreeMap<String, PrecisionChange>,
}

fn default_block() -> usize {
    32
}

fn default_true() -> bool {
    true
}

/// A per-layer exception: weights whose name matches are stored in another format.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    #[serde(rename = "match")]
    pub pattern: String,
    pub weights: WeightFormat,
}

/// Values of [`Precision`] that a component changes; see there.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionChange {
    pub compute: Option<Compute>,
    pub weights: Option<WeightFormat>,
    pub block: Option<usize>,
    pub symmetric: Option<bool>,
    pub accuracy_level: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
    pub residual: Option<Residual>,
    pub attention: Option<AttentionMath>,
    pub rules: Option<Vec<Rule>>,
}

impl Precision {
    /// Everything in f32. Takes every weight as it is in the checkpoint, and no statistics.
    pub fn exact() -> Precision {
        Precision {
            compute: Compute::F32,
            weights: WeightFormat::F32,
            block: default_block(),
            symmetric: default_true(),
            accuracy_level: 0,
            fit: Fit::Nearest,
            residual: Residual::F32,
            attention: AttentionMath::Compute,
            rules: Vec::new(),
            components: BTreeMap::new(),
        }
    }

    /// The storage format of the weight with that checkpoint name.
    pub fn format_of(&self, weight: &str) -> WeightFormat {
        let matches = |rule: &&Rule| Regex::new(&rule.pattern).is_ok_and(|r| r.is_match(weight));
        self.rules.iter().find(matches).map_or(self.weights, |rule| rule.weights)
    }

    /// The precision of one component.
    pub fn component(&self, name: &str) -> Precision {
        self.components.get(name).map_or_else(|| self.clone(), |change| self.changed(change))
    }

    /// How the weights of the components are fitted.
    pub fn fits(&self) -> impl Iterator<Item = Fit> {
        iter::once(self.fit).chain(self.components.values().filter_map(|component| component.fit))
    }

    fn changed(&self, change: &PrecisionChange) -> Precision {
        Precision {
            compute: change.compute.unwrap_or(self.compute),
            weights: change.weights.unwrap_or(self.weights),
            block: change.block.unwrap_or(self.block),
            symmetric: change.symmetric.unwrap_or(self.symmetric),
            accuracy_level: change.accuracy_level.unwrap_or(self.accuracy_level),
            fit: change.fit.unwrap_or(self.fit),
            residual: change.residual.unwrap_or(self.residual),
            attention: change.attention.unwrap_or(self.attention),
            rules: change.rules.clone().unwrap_or_else(|| self.rules.clone()),
            components: BTreeMap::new(),
        }
    }
}

/// Which recipe was taken and why, for the user.
#[derive(Clone, Debug)]
pub struct Chosen {
    pub recipe: Recipe,
    /// `--recipe`, the checkpoint's own file, or the family's default.
    pub origin: String,
}

impl Recipe {
    /// Chooses and resolves: `--recipe` if given, else the checkpoint folder's `recipe.toml`, else the family's default.
    pub fn choose(
        asked: Option<&str>,
        checkpoint: &Path,
        family_default: &str,
        set: &[(String, String)],
    ) -> Result<Chosen, RecipeError> {
        let own = checkpoint.join(RECIPE_FILE);
        let (origin, table) = match asked {
            Some(name) if name.ends_with(".toml") => (name.to_owned(), named_table(name)?),
            Some(name) => (format!("'{name}' (--recipe)"), named_table(name)?),
            None if own.symlink_metadata().is_ok() => (own.display().to_string(), read_table(&own)?),
            None => {
                let mut table = shipped_table(family_default)?;
                // The family's default fits this checkpoint, but does not know where it comes from.
                table.remove("source");
                (format!("'{family_default}' (the family's default)"), table)
            }
        };
        let mut table = with_base(table)?;
        // The checkpoint's own config files count.
        table.remove(CONFIGS);
        Ok(Chosen { recipe: finish(table, &origin, set)?, origin })
    }

    /// A shipped recipe or a `.toml` file, with the configs that it carries: for plans that are made without a
    /// checkpoint.
    pub fn with_configs(name: &str, set: &[(String, String)]) -> Result<Recipe, RecipeError> {
        let recipe = finish(with_base(named_table(name)?)?, &format!("'{name}'"), set)?;
        if recipe.sections.contains_key(CONFIGS) {
            return Ok(recipe);
        }
        let known = RECIPES.iter().filter(|(_, text)| text.contains("\n[configs."));
        Err(RecipeError::NoConfigs { name: name.to_owned(), known: join(known.map(|r| r.0)) })
    }

    /// A shipped recipe or a `.toml` file, without the configs that it may carry.
    pub fn named(name: &str, set: &[(String, String)]) -> Result<Recipe, RecipeError> {
        let mut table = with_base(named_table(name)?)?;
        table.remove(CONFIGS);
        finish(table, &format!("'{name}'"), set)
    }

    /// What of the recipe holds for graphs that others exported: its name, and the bars and controls of `verify`. How they store
    /// weights, and where these come from, is not the recipe's to say.
    pub fn of_imported(self) -> Recipe {
        Recipe {
            license: None,
            source: SourceRef::default(),
            profiles: BTreeMap::new(),
            sections: toml::Table::new(),
            ..self
        }
    }

    /// The licence of the weights, where it is known.
    pub fn weights_license(&self) -> Option<&str> {
        self.source.license.as_deref().or(self.license.as_deref())
    }

    pub fn profile(&self, name: &str) -> Result<&Precision, RecipeError> {
        self.profiles.get(name).ok_or_else(|| RecipeError::UnknownProfile {
            name: name.to_owned(),
            recipe: self.name.clone(),
            known: join(self.profiles.keys()),
        })
    }

    /// A section that belongs to the recipe's family, for example `text_encoder`.
    pub fn section<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, RecipeError> {
        let invalid = |message| RecipeError::Invalid { origin: format!("'{}'", self.name), message };
        let section =
            self.sections.get(name).ok_or_else(|| invalid(format!("section [{name}] is missing")))?;
        section.clone().try_into().map_err(|e| invalid(format!("[{name}]: {e}")))
    }

    /// Refuses sections that the family does not know: a misspelt one would be ignored.
    pub fn check_sections(&self, known: &[&str]) -> Result<(), RecipeError> {
        let Some(unknown) = self.sections.keys().find(|key| !known.contains(&key.as_str())) else {
            return Ok(());
        };
        let message = format!("unknown key '{unknown}'; family '{}' knows {}", self.family, known.join(", "));
        Err(RecipeError::Invalid { origin: format!("'{}'", self.name), message })
    }

    fn check_gates(&self) -> Result<(), String> {
        for (name, gates) in &self.gates {
            gates.check().map_err(|problem| format!("gates.{name}: {problem}"))?;
        }
        for (name, control) in &self.controls {
            control.check().map_err(|problem| format!("controls.{name}: {problem}"))?;
        }
        Ok(())
    }

    fn check_rules(&self) -> Result<(), String> {
        for (name, profile) in &self.profiles {
            let changed = profile.components.values().flat_map(|c| c.rules.iter().flatten());
            for rule in profile.rules.iter().chain(changed) {
                Regex::new(&rule.pattern)
                    .map_err(|e| format!("profile {name}, rule '{}': {e}", rule.pattern))?;
            }
            let blocks = profile.components.values().filter_map(|c| c.block).chain([profile.block]);
            for block in blocks {
                if ![16, 32, 64, 128, 256].contains(&block) {
                    return Err(format!("profile {name}: block {block} is not one of 16, 32, 64, 128, 256"));
                }
            }
        }
        Ok(())
    }
}

/// Resolves a recipe whose base is laid under it.
fn finish(mut table: toml::Table, origin: &str, set: &[(String, String)]) -> Result<Recipe, RecipeError> {
    let invalid = |message: String| RecipeError::Invalid { origin: origin.to_owned(), message };
    state_defaults(&mut table);
    let name = table.get("name").and_then(|n| n.as_str()).unwrap_or("unnamed").to_owned();
    // What is wrong before anything is set is the file's fault, what is wrong after it the setting's.
    let recipe = resolve(table.clone()).map_err(invalid)?;
    if set.is_empty() {
        return Ok(recipe);
    }
    for (key, value) in set {
        set_value(&mut table, &name, key, value)?;
    }
    resolve(table).map_err(|message| RecipeError::BadSet { message })
}

fn resolve(table: toml::Table) -> Result<Recipe, String> {
    // The message, and on a second line where.
    let words = |e: toml::de::Error| e.to_string().trim().replace('\n', " ");
    let recipe: Recipe = table.try_into().map_err(words)?;
    recipe.check_rules()?;
    recipe.check_gates()?;
    Ok(recipe)
}

fn named_table(name: &str) -> Result<toml::Table, RecipeError> {
    if name.ends_with(".toml") { read_table(Path::new(name)) } else { shipped_table(name) }
}

fn shipped_table(name: &str) -> Result<toml::Table, RecipeError> {
    let text = RECIPES.iter().find(|r| r.0 == name).ok_or_else(|| RecipeError::UnknownRecipe {
        name: name.to_owned(),
        known: join(RECIPES.iter().map(|r| r.0)),
    })?;
    parse(text.1, &format!("'{name}'"))
}

fn read_table(path: &Path) -> Result<toml::Table, RecipeError> {
    let read = |source| RecipeError::Read { path: path.to_owned(), source };
    let bytes = read_limited(path, MAX_RECIPE_BYTES).map_err(read)?;
    let text = String::from_utf8(bytes).map_err(|e| read(io::Error::new(io::ErrorKind::InvalidData, e)))?;
    parse(&text, &path.display().to_string())
}

fn parse(text: &str, origin: &str) -> Result<toml::Table, RecipeError> {
    toml::from_str(text).map_err(|e: toml::de::Error| {
        let before = e.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = 1 + before.matches('\n').count();
        RecipeError::Invalid { origin: origin.to_owned(), message: format!("line {line}: {}", e.message()) }
    })
}

/// Lays a recipe over the shipped one that its `base` names.
fn with_base(mut table: toml::Table) -> Result<toml::Table, RecipeError> {
    match table.remove("base") {
        Some(toml::Value::String(base)) => {
            let mut result = with_base(shipped_table(&base)?)?;
            // Another model's recipe says nothing of where this one's weights come from.
            result.remove("source");
            overlay(&mut result, table);
            Ok(result)
        }
        Some(other) => Err(RecipeError::Invalid {
            origin: "'base'".to_owned(),
            message: format!("expected the name of a shipped recipe, found {other}"),
        }),
        None => Ok(table),
    }
}

/// Writes out what profiles leave at its default, so that `--set` finds it.
fn state_defaults(table: &mut toml::Table) {
    let Some(toml::Value::Table(profiles)) = table.get_mut("profiles") else { return };
    for profile in profiles.iter_mut().filter_map(|(_, profile)| profile.as_table_mut()) {
        let defaults: [(&str, toml::Value); 5] = [
            ("block", (default_block() as i64).into()),
            ("symmetric", default_true().into()),
            ("accuracy_level", 0.into()),
            ("fit", "nearest".into()),
            ("residual", "f32".into()),
        ];
        for (key, value) in defaults {
            profile.entry(key).or_insert(value);
        }
    }
}

fn overlay(under: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(toml::Value::Table(under)), toml::Value::Table(over)) => overlay(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

/// Changes one value that exists, keeping its type: `text_encoder.taps=3,5,7`.
fn set_value(table: &mut toml::Table, recipe: &str, key: &str, text: &str) -> Result<(), RecipeError> {
    let (section, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    let mut place = &mut *table;
    for part in section.split('.').filter(|p| !p.is_empty()) {
        let near = join(place.keys());
        place = place.get_mut(part).and_then(|v| v.as_table_mut()).ok_or_else(|| {
            RecipeError::UnknownKey { key: key.to_owned(), recipe: recipe.to_owned(), near }
        })?;
    }
    let near = join(place.keys());
    let old = place.get_mut(leaf).ok_or_else(|| RecipeError::UnknownKey {
        key: key.to_owned(),
        recipe: recipe.to_owned(),
        near,
    })?;
    let bad = |expected| RecipeError::BadValue { key: key.to_owned(), value: text.to_owned(), expected };
    *old = match old {
        toml::Value::Integer(_) => {
            whole(text).map(toml::Value::Integer).ok_or_else(|| bad("a whole number from 0 to 4294967295"))?
        }
        toml::Value::Float(_) => text.parse().map(toml::Value::Float).map_err(|_| bad("a number"))?,
        toml::Value::Boolean(_) => {
            text.parse().map(toml::Value::Boolean).map_err(|_| bad("true or false"))?
        }
        toml::Value::String(_) => toml::Value::String(text.to_owned()),
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            return Err(bad("no list of tables: write a recipe file with `base` and pass it with --recipe"));
        }
        toml::Value::Array(_) => toml::Value::Array(
            text.split(',')
                .filter(|part| !part.trim().is_empty())
                .map(|part| whole(part.trim()).map(toml::Value::Integer))
                .collect::<Option<_>>()
                .ok_or_else(|| bad("whole numbers from 0 to 4294967295 with commas between them"))?,
        ),
        toml::Value::Table(_) | toml::Value::Datetime(_) => return Err(bad("the name of a single value")),
    };
    Ok(())
}

/// No recipe has a negative number.
fn whole(text: &str) -> Option<i64> {
    text.parse::<u32>().ok().map(i64::from)
}

fn join<S: AsRef<str>>(names: impl Iterator<Item = S>) -> String {
    names.map(|n| n.as_ref().to_owned()).collect::<Vec<_>>().join(", ")
}
