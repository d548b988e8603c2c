//! FLUX.2 models whose graphs others exported: what the runner must know about them, read off the graphs.

pub mod contract;
mod scale;
mod sigma;

use serde::{Deserialize, Serialize};

use self::contract::{ContractError, MIDDLE, Role, fixed_size};
use super::parameters::{MAX_TEXT_LENGTH, Schedule};
use crate::{
    arch::MAX_STEPS,
    onnx::{Graph, Model},
    picture::{Size, SizeError},
    shapes::{Shapes, Sizes, infer},
};

/// Parameters of a FLUX.2 bundle whose graphs were not authored here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Imported {
    /// Tells these parameters from those of an authored bundle.
    pub graphs: Origin,
    pub text: Text,
    pub transformer: Transformer,
    pub vae: Vae,
    pub schedule: Schedule,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    #[default]
    Imported,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// Rows after padding.
    pub length: usize,
    pub pad_id: i64,
    /// The largest magnitude of the text encoder's result, where it is cut; 0 for no limit.
    #[serde(default)]
    pub clip: f32,
    /// Whether the transformer is given zeros for rows of padding. The reference gives it what the encoder makes of them.
    #[serde(default)]
    pub zero_padding: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transformer {
    /// Channels of a packed latent token.
    pub channels: usize,
    /// Latent tokens of a picture, where the graph takes no other number.
    #[serde(default)]
    pub tokens: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vae {
    /// Pixels per latent token, per side.
    pub pixels_per_token: usize,
    /// Latent tokens down and across, where the graphs take no others.
    #[serde(default)]
    pub grid: Option<[usize; 2]>,
    /// Width and height of a picture when none are asked for.
    pub default_size: [usize; 2],
    /// None for a decoder that is one stage.
    pub attention: Option<Attention>,
    /// The stages after the attention, in order.
    pub post_stages: Vec<PostStage>,
}

/// The middle attention, which the host drives a chunk of query rows at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Query rows per run.
    pub rows: usize,
    /// Whether the graph takes no other number: the last chunk is filled up with zeros.
    pub fixed: bool,
    /// What the host multiplies q with, because no graph does.
    pub q_factor: f32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PostStage {
    pub name: String,
    /// Pixels of its input per latent token, per side; none where that does not follow from the graphs before it.
    pub input_scale: Option<usize>,
}

/// What graphs do not tell.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rows of text where the graphs leave them open.
    pub text_length: usize,
    pub pad_id: i64,
    pub clip: f32,
    pub zero_padding: bool,
    /// Query rows per run of the attention stage where its graph leaves them open.
    pub attention_rows: usize,
    pub default_size: [usize; 2],
    /// Where it does not follow from the decoder's graphs.
    pub pixels_per_token: usize,
    pub steps: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            text_length: 512,
            pad_id: 0,
            clip: 0.0,
            zero_padding: false,
            attention_rows: 1024,
            default_size: [1024, 1024],
            pixels_per_token: 16,
            steps: 4,
        }
    }
}

/// One adapted graph.
pub type RoleGraph<'a> = (Role, &'a Model);

/// Latent tokens down and across with which the graphs are tried: not alike, so that the sides are told apart.
const TRIED: [usize; 2] = [4, 6];

/// Reads the parameters off a model's adapted graphs, in the order in which they run, and checks that they belong together.
pub fn describe(graphs: &[RoleGraph<'_>], settings: &Settings) -> Result<Imported, ContractError> {
    let only = |role: Role| {
        let found = graphs.iter().find(|(of, _)| *of == role).map(|(_, model)| *model);
        found.ok_or_else(|| ContractError::Unclear { role, problem: "there is no such graph".to_owned() })
    };
    let (encoder, transformer) = (only(Role::TextEncoder)?, only(Role::Transformer)?);
    let length = agree(
        Role::Transformer,
        "rows of text",
        &[
            (&encoder.graph, "input_ids", 1),
            (&encoder.graph, "prompt_embeds", 1),
            (&transformer.graph, "prompt_embeds", 1),
            (&transformer.graph, "txt_ids", 1),
        ],
    )?;
    let width = [(&encoder.graph, "prompt_embeds", 2), (&transformer.graph, "prompt_embeds", 2)];
    agree(Role::Transformer, "columns of the text", &width)?;
    let decoder = graphs.iter().filter(|(role, _)| role.component() == Role::Decoder.component());
    let decoder: Vec<RoleGraph<'_>> = decoder.copied().collect();
    let channels = channels(transformer, &decoder)?;
    let vae = describe_decoder(&decoder, settings)?;
    let text = Text {
        length: length.unwrap_or(settings.text_length),
        pad_id: settings.pad_id,
        clip: settings.clip,
        zero_padding: settings.zero_padding,
    };
    let schedule = Schedule { steps: settings.steps };
    let transformer = Transformer { channels, tokens: tokens(transformer)? };
    let mut imported = Imported { graphs: Origin::Imported, text, transformer, vae, schedule };
    let wrong = |problem| ContractError::Unclear { role: Role::Transformer, problem };
    imported.check().map_err(wrong)?;
    let sizes = imported.drawn().filter(|sizes| !sizes.contains(&settings.default_size));
    if let Some(size) = sizes.and_then(|sizes| sizes.first().copied()) {
        imported.vae.default_size = size;
    }
    Ok(imported)
}

/// The one size that graphs fix for the same thing, if they do: each a graph, a port, an axis.
fn agree(role: Role, what: &str, places: &[(&Graph, &str, usize)]) -> Result<Option<usize>, ContractError> {
    let sizes =
        places.iter().filter_map(|(graph, name, axis)| Some((*name, fixed_size(graph, name, *axis)?)));
    let mut first = None;
    for (name, size) in sizes {
        let (other, expected) = *first.get_or_insert((name, size));
        if size != expected {
            let problem =
                format!("'{other}' has {expected} {what} in one graph, '{name}' has {size} in another");
            return Err(ContractError::Unclear { role, problem });
        }
    }
    Ok(first.map(|(_, size)| size))
}

fn channels(transformer: &Model, decoder: &[RoleGraph<'_>]) -> Result<usize, ContractError> {
    let mut places = vec![(&transformer.graph, "latents", 2), (&transformer.graph, "pred", 2)];
    places.extend(decoder.first().map(|(_, model)| (&model.graph, "latents", 1)));
    let unknown = || ContractError::Unclear {
        role: Role::Transformer,
        problem: "no graph fixes the channels of the latents".to_owned(),
    };
    agree(Role::Transformer, "channels", &places)?.ok_or_else(unknown)
}

/// The number of latent tokens that the transformer fixes, if it does.
fn tokens(transformer: &Model) -> Result<Option<usize>, ContractError> {
    let places = ["latents", "img_ids", "pred"].map(|name| (&transformer.graph, name, 1));
    agree(Role::Transformer, "latent tokens", &places)
}

/// Follows the picture through the decoder's stages.
fn describe_decoder(decoder: &[RoleGraph<'_>], settings: &Settings) -> Result<Vae, ContractError> {
    let unclear = |role, problem: String| ContractError::Unclear { role, problem };
    let (mut attention, mut post_stages) = (None, Vec::new());
    let grid = decoder.first().and_then(|(_, model)| {
        Some([fixed_size(&model.graph, "latents", 2)?, fixed_size(&model.graph, "latents", 3)?])
    });
    let tried = grid.unwrap_or(TRIED);
    let mut scale = Some(1);
    for (position, (role, model)) in decoder.iter().enumerate() {
        let sizes = sizes_of(*role, tried, scale);
        let shapes = infer(model, &sizes, &Default::default());
        let expected = match role {
            Role::Decoder => decoder.len() == 1,
            Role::DecoderStart => position == 0 && decoder.len() > 2,
            Role::Attention => position == 1 && decoder[0].0 == Role::DecoderStart,
            Role::DecoderEnd { index, last } => {
                position == index + 2
                    && decoder[0].0 == Role::DecoderStart
                    && *last == (position + 1 == decoder.len())
            }
            Role::TextEncoder | Role::Transformer => false,
        };
        if !expected {
            return Err(unclear(*role, "the decoder's stages are incomplete or in another order".to_owned()));
        }
        if *role == Role::Attention {
            attention = Some(describe_attention(decoder[0].1, model, tried, settings)?);
            continue;
        }
        if let Role::DecoderEnd { index, .. } = role {
            let (before, input) = match index {
                0 => (decoder[0].1, MIDDLE.to_owned()),
                _ => (decoder[position - 1].1, Role::DecoderEnd { index: index - 1, last: false }.stage()),
            };
            agree(*role, "channels", &[(&before.graph, &input, 1), (&model.graph, &input, 1)])?;
            post_stages.push(PostStage { name: role.stage(), input_scale: scale });
        }
        let output = if *role == Role::DecoderStart {
            MIDDLE
        } else {
            model.graph[model.graph.outputs[0]].name.as_str()
        };
        scale = output_scale(&model.graph, &shapes, tried, output);
    }
    match decoder.last() {
        Some((Role::Decoder | Role::DecoderEnd { last: true, .. }, _)) => {}
        _ => return Err(unclear(Role::Decoder, "there is no graph that gives the picture".to_owned())),
    }
    Ok(Vae {
        pixels_per_token: scale.unwrap_or(settings.pixels_per_token),
        grid,
        default_size: settings.default_size,
        attention,
        post_stages,
    })
}

/// Sizes of a stage's symbols for the picture that is tried; its input has so many pixels per latent token.
fn sizes_of(role: Role, [height, width]: [usize; 2], scale: Option<usize>) -> Sizes {
    let place = input_place(role);
    let side = |tokens: usize| scale?.checked_mul(tokens);
    let sides = side(height).zip(side(width));
    let Some((sides, rows)) = sides.and_then(|(h, w)| Some(([h, w], h.checked_mul(w)?))) else {
        return Sizes::new();
    };
    Sizes::from([
        (format!("{place}_height"), sides[0]),
        (format!("{place}_width"), sides[1]),
        ("kv_rows".to_owned(), rows),
    ])
}

/// What the symbols of a decoder stage's input begin with.
fn input_place(role: Role) -> String {
    match role {
        Role::DecoderEnd { index: 0, .. } => "mid".to_owned(),
        Role::DecoderEnd { index, .. } => Role::DecoderEnd { index: index - 1, last: false }.stage(),
        _ => "latent".to_owned(),
    }
}

/// Pixels per latent token of a map [1,C,h,w]; none if they are not known or not the same on both sides.
fn output_scale(graph: &Graph, shapes: &Shapes, tried: [usize; 2], name: &str) -> Option<usize> {
    let shape = shapes.shape(graph.find(name)?)?;
    let [_, _, height, width] = shape[..] else { return None };
    let scale = height / tried[0];
    let whole = [Some(height), Some(width)] == tried.map(|side| side.checked_mul(scale));
    (whole && (1..=MAX_SCALE).contains(&scale)).then_some(scale)
}

/// The most query rows per run of the attention: the host fills up a chunk to as many.
pub const MAX_ATTENTION_ROWS: usize = 1 << 16;
/// More latent tokens has no picture.
const MAX_TOKENS: usize = 1 << 26;
/// The most pixels per latent token.
const MAX_SCALE: usize = 1 << 10;

fn describe_attention(
    start: &Model,
    attention: &Model,
    tried: [usize; 2],
    settings: &Settings,
) -> Result<Attention, ContractError> {
    let unclear = |problem| ContractError::Unclear { role: Role::Attention, problem };
    let sizes = sizes_of(Role::DecoderStart, tried, Some(1));
    let shapes = infer(start, &sizes, &Default::default());
    let q = start.graph.find("q").and_then(|q| shapes.fact(q).shape.clone()).unwrap_or_default();
    let last = |graph: &Graph, name| fixed_size(graph, name, rank(graph, name)?.checked_sub(1)?);
    let d = last(&attention.graph, "q_chunk").or_else(|| q.last().copied().flatten());
    let d = d.ok_or_else(|| unclear("the length of a row of q is not known".to_owned()))?;
    let q_factor = scale::host_factor(start, attention, &sizes, d).map_err(unclear)?;
    let axis = rank(&attention.graph, "q_chunk").and_then(|rank| rank.checked_sub(2));
    let fixed = axis.and_then(|axis| fixed_size(&attention.graph, "q_chunk", axis));
    Ok(Attention { rows: fixed.unwrap_or(settings.attention_rows), fixed: fixed.is_some(), q_factor })
}

fn rank(graph: &Graph, name: &str) -> Option<usize> {
    match &graph[graph.find(name)?].ty {
        Some(crate::onnx::ValueType::Tensor { shape: Some(shape), .. }) => Some(shape.len()),
        _ => None,
    }
}

impl Imported {
    /// What the pipeline computes with before a graph could object.
    pub fn check(&self) -> Result<(), String> {
        let Imported { text, transformer, vae, schedule, .. } = self;
        let [width, height] = vae.default_size;
        let [rows, columns] = vae.grid.unwrap_or([1; 2]);
        let numbers = [
            ("text.length", text.length, MAX_TEXT_LENGTH),
            ("transformer.channels", transformer.channels, 1 << 16),
            ("vae.pixels_per_token", vae.pixels_per_token, MAX_SCALE),
            ("transformer.tokens", transformer.tokens.unwrap_or(1), MAX_TOKENS),
            ("the rows of vae.grid", rows, 1 << 14),
            ("the columns of vae.grid", columns, 1 << 14),
            ("the width of vae.default_size", width, 1 << 14),
            ("the height of vae.default_size", height, 1 << 14),
            ("vae.attention.rows", vae.attention.as_ref().map_or(1, |a| a.rows), MAX_ATTENTION_ROWS),
            ("schedule.steps", schedule.steps, MAX_STEPS),
        ];
        if let Some((key, value, most)) = numbers.iter().find(|(_, value, most)| *value == 0 || value > most)
        {
            return Err(format!("{key} is {value}; expected 1 to {most}"));
        }
        if self.drawn().is_some_and(|sizes| sizes.is_empty()) {
            return Err(
                "the transformer's number of latent tokens is that of no picture which the decoder draws"
                    .to_owned(),
            );
        }
        let scales = vae.post_stages.iter().filter_map(|stage| stage.input_scale);
        if let Some(scale) = scales.into_iter().find(|scale| !(1..=MAX_SCALE).contains(scale)) {
            return Err(format!("an input_scale of vae.post_stages is {scale}; expected 1 to {MAX_SCALE}"));
        }
        let factor = vae.attention.as_ref().map_or(1.0, |attention| attention.q_factor);
        if !factor.is_finite() || factor <= 0.0 {
            return Err(format!("vae.attention.q_factor is {factor}; expected a number above 0"));
        }
        if !text.clip.is_finite() || text.clip < 0.0 {
            return Err(format!("text.clip is {}; expected a number from 0", text.clip));
        }
        Ok(())
    }

    /// The size of a picture, if the graphs draw it.
    pub fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        match self.drawn() {
            Some(sizes) if !sizes.contains(&[width, height]) => {
                Err(SizeError::NotDrawn { width, height, sizes })
            }
            _ => Size::new(width, height, self.vae.pixels_per_token),
        }
    }

    /// Width and height of all pictures that the graphs draw, those that are most like squares first; none if they leave
    /// the size open.
    fn drawn(&self) -> Option<Vec<[usize; 2]>> {
        let (tokens, side) = (self.transformer.tokens, self.vae.pixels_per_token);
        let grids = match (self.vae.grid, tokens) {
            (Some(grid), _) => vec![grid],
            (None, Some(tokens)) => factors(tokens),
            (None, None) => return None,
        };
        let fits =
            |[rows, columns]: &[usize; 2]| tokens.is_none_or(|n| rows.checked_mul(*columns) == Some(n));
        let sizes = grids.into_iter().filter(fits).map(|[rows, columns]| {
            // A side has at most 2^26 tokens, a token at most 2^10 pixels.
            [columns * side, rows * side]
        });
        let mut sizes: Vec<_> = sizes.filter(|[w, h]| Size::new(*w, *h, side).is_ok()).collect();
        sizes.sort_by_key(|[width, height]| (width.abs_diff(*height), *height));
        Some(sizes)
    }

    /// Sizes of all symbols of all stages; see [`super::parameters::Parameters::sizes`].
    pub fn sizes(&self, size: Size, steps: usize, halvings: u32) -> Sizes {
        let grid = size.grid();
        let mut sizes = Sizes::from([
            ("image_seq".to_owned(), size.tokens()),
            ("text_seq".to_owned(), self.text.length),
            ("steps".to_owned(), steps),
        ]);
        let mut sides = |place: &str, [height, width]: [usize; 2]| {
            sizes.insert(format!("{place}_height"), height);
            sizes.insert(format!("{place}_width"), width);
        };
        sides("latent", grid);
        sides("image", [size.height(), size.width()]);
        // A side has at most 2^14 tokens, a scale is at most 2^10, and there are at most 2^26 pixels: 2^46 at most.
        let scaled = |stage: &PostStage| stage.input_scale.map(|scale| grid.map(|tokens| tokens * scale));
        for (index, stage) in self.vae.post_stages.iter().enumerate() {
            let Some(input) = scaled(stage) else { continue };
            sides(&input_place(Role::DecoderEnd { index, last: false }), input);
        }
        let middle = self.vae.post_stages.first().and_then(scaled);
        if let (Some(attention), Some([height, width])) = (&self.vae.attention, middle) {
            let rows = height * width;
            let halved = attention.rows.checked_shr(halvings).unwrap_or(0).max(1).min(rows);
            sizes.insert("kv_rows".to_owned(), rows);
            sizes.insert("chunk_rows".to_owned(), if attention.fixed { attention.rows } else { halved });
        }
        sizes
    }
}

/// All pairs of numbers whose product is `product`.
fn factors(product: usize) -> Vec<[usize; 2]> {
    let smaller = (1..=product.isqrt()).filter(|factor| product.is_multiple_of(*factor));
    let pairs: Vec<_> = smaller.map(|factor| [factor, product / factor]).collect();
    let turned = pairs.iter().filter(|[a, b]| a != b).map(|[a, b]| [*b, *a]).collect::<Vec<_>>();
    [pairs, turned].concat()
}
