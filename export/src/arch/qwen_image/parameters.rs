//! What the runner must know about an exported Qwen-Image-2.1 model besides its graphs; stored in `bundle.json`.

use serde::{
    Deserialize, Serialize,
    de::{
        IntoDeserializer,
        value::{self, StrDeserializer},
    },
};

use super::config::{is_grid, is_shift};
use crate::{
    arch::{
        MAX_STEPS, SizesRequest,
        parameters::{Embedding, TimeOrder},
        settings::check_base,
    },
    picture::{Size, SizeError},
    shapes::Sizes,
};

/// The most rows that a text may have: its mask is quadratic.
pub const MAX_TEXT_LENGTH: usize = 1 << 13;

/// The most tokens by which the noise levels are shifted.
pub const MAX_SHIFT_TOKENS: usize = 1 << 30;

/// Parameters of a Qwen-Image-2.1 bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    pub text: Text,
    pub transformer: Transformer,
    pub vae: Vae,
    pub schedule: Schedule,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// The most tokens of a prompt with all that is around it. Shorter ones are not filled up.
    pub length: usize,
    pub template: Template,
    pub head_dim: usize,
    pub rope_theta: f64,
    pub embedding: Embedding,
}

/// The text around a prompt, tokenised in one piece with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// Encoded, and not passed on: the transformer reads what comes after its tokens.
    pub system: String,
    pub before: String,
    pub after: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transformer {
    /// Channels of a latent token.
    pub channels: usize,
    pub layers: usize,
    pub width: usize,
    /// Rotary dimensions of the axes frame, row, column.
    pub axes: Vec<usize>,
    pub rope_theta: f64,
    /// Width of the sinusoidal time embedding.
    pub time_channels: usize,
    pub time_order: TimeOrder,
    pub graphs: Graphs,
    /// Whether rows and columns count from the picture's middle (they do; the other value is a test's planted fault).
    pub centred: bool,
    /// The noise level that modulates text rows: 0, whatever the step (none, which is the step's, is a planted fault).
    pub text_sigma: Option<f32>,
}

/// How the transformer is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Graphs {
    /// `prefix` computes keys and values of the text once, `transformer` the rows of the picture at each step.
    Prefix,
    /// `transformer` computes both at each step.
    Single,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vae {
    /// Pixels per latent token, per side: those of a pixel of the middle block, too.
    pub pixels_per_token: usize,
    /// Sides of a picture are cut to multiples of this.
    pub multiple: usize,
    /// Width and height of a picture when none are asked for.
    pub default_side: usize,
    /// Query rows per run of the attention stage.
    pub attention_rows: usize,
    /// The stages after the attention, in order.
    pub post_stages: Vec<PostStage>,
}

/// A stage of the decoder behind its middle block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostStage {
    pub name: String,
    /// Rows of its input per row of the latents.
    pub scale: usize,
    /// Rows of its output per row of its input.
    pub growth: usize,
    /// Rows of the input on either side that a row of the output depends on, where the stage may go over its input in strips:
    /// norms are of single pixels, so that nothing reaches further than the convolutions.
    pub halo: Option<usize>,
}

impl Graphs {
    /// As recipes and bundles spell it.
    pub fn named(name: &str) -> Option<Graphs> {
        let name: StrDeserializer<'_, value::Error> = name.into_deserializer();
        Graphs::deserialize(name).ok()
    }
}

impl PostStage {
    /// The symbols of the rows of its input and of its output, where it may go in strips.
    pub fn row_symbols(&self) -> [String; 2] {
        [format!("{}_rows", self.name), format!("{}_out", self.name)]
    }

    /// Rows of the input that it takes at a time, if there are so many and strips are halved so often.
    fn strip(&self, rows: usize, halvings: u32) -> usize {
        match (self.halo, halvings) {
            (None, _) | (_, 0) => rows,
            (Some(halo), _) => {
                let own = rows.div_ceil(1usize.checked_shl(halvings).unwrap_or(usize::MAX));
                own.saturating_add(2 * halo).min(rows)
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        let PostStage { name, scale, growth, halo } = self;
        let limits = [(*scale, 1 << 10), (*growth, 1 << 10), (halo.unwrap_or(1), 1 << 12)];
        match limits.iter().all(|(value, most)| (1..=*most).contains(value)) {
            true => Ok(()),
            false => {
                let halo = halo.map_or("none".to_owned(), |halo| halo.to_string());
                Err(format!("vae.post_stages: {name}: scale {scale}, growth {growth}, halo {halo}"))
            }
        }
    }
}

/// The noise levels of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Steps when none are asked for.
    pub steps: usize,
    /// The levels themselves, without the last 0, taken as they are at every size and number of steps (Turbo).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<Vec<f32>>,
    pub shift: Shift,
}

/// A shift of the noise levels that grows with the picture, and a stretch that ends them above 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shift {
    pub base_tokens: usize,
    pub max_tokens: usize,
    pub base: f64,
    pub max: f64,
    /// The last level before 0; none where levels are not stretched.
    pub terminal: Option<f64>,
}

impl Schedule {
    /// Steps when none are asked for: as many as there are levels, where these are given.
    pub fn default_steps(&self) -> usize {
        self.sigmas.as_ref().map_or(self.steps, Vec::len)
    }

    fn check(&self) -> Result<(), String> {
        let Shift { base_tokens, max_tokens, base, max, terminal } = self.shift;
        if self.sigmas.as_deref().is_some_and(|sigmas| !is_grid(sigmas)) {
            return Err("schedule.sigmas are not falling numbers from at most 1 to above 0".to_owned());
        }
        if max_tokens <= base_tokens || max_tokens > MAX_SHIFT_TOKENS {
            return Err(format!("schedule.shift.max_tokens is {max_tokens}; base_tokens is {base_tokens}"));
        }
        if ![base, max].into_iter().all(is_shift) {
            return Err(format!("schedule.shift goes from {base} to {max}"));
        }
        if let Some(terminal) = terminal.filter(|terminal| !(0.0..1.0).contains(terminal)) {
            return Err(format!("schedule.shift.terminal is {terminal}; expected 0 to less than 1"));
        }
        Ok(())
    }
}

impl Parameters {
    /// What the pipeline computes with before a graph could object: a manifest need not come from our exporter.
    pub fn check(&self) -> Result<(), String> {
        let (text, transformer, vae) = (&self.text, &self.transformer, &self.vae);
        let numbers = [
            ("text.length", text.length, MAX_TEXT_LENGTH),
            ("text.head_dim", text.head_dim, 1 << 16),
            ("transformer.channels", transformer.channels, 1 << 16),
            ("transformer.layers", transformer.layers, 1 << 10),
            ("transformer.width", transformer.width, 1 << 24),
            ("transformer.time_channels", transformer.time_channels, 1 << 16),
            ("vae.pixels_per_token", vae.pixels_per_token, 1 << 10),
            ("vae.multiple", vae.multiple, 1 << 12),
            ("vae.default_side", vae.default_side, 1 << 14),
            ("vae.attention_rows", vae.attention_rows, 1 << 24),
            ("schedule.steps", self.schedule.steps, MAX_STEPS),
        ];
        if let Some((key, value, most)) = numbers.iter().find(|(_, value, most)| *value == 0 || value > most)
        {
            return Err(format!("{key} is {value}; expected 1 to {most}"));
        }
        if transformer.axes.len() != 3 || transformer.axes.iter().any(|axis| *axis > 1 << 16) {
            return Err(format!("transformer.axes is {:?}; expected three sizes", transformer.axes));
        }
        check_base("text.rope_theta", text.rope_theta)?;
        check_base("transformer.rope_theta", transformer.rope_theta)?;
        if let Some(sigma) = transformer.text_sigma.filter(|sigma| !(0.0..=1.0).contains(sigma)) {
            return Err(format!("transformer.text_sigma is {sigma}; expected 0 to 1"));
        }
        if !vae.multiple.is_multiple_of(vae.pixels_per_token) || !vae.pixels_per_token.is_power_of_two() {
            let (multiple, pixels) = (vae.multiple, vae.pixels_per_token);
            return Err(format!("vae.multiple {multiple} and vae.pixels_per_token {pixels} do not fit"));
        }
        vae.post_stages.iter().try_for_each(PostStage::check)?;
        self.schedule.check()
    }

    /// The largest size up to that asked for that the model can draw.
    pub fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        Size::floored(width, height, self.vae.multiple, self.vae.pixels_per_token)
    }

    /// Sizes of all symbols of all stages, for parameters that passed [`Parameters::check`], a size that is legal for
    /// them, and a request whose text and steps are within their limits.
    pub fn sizes(&self, size: Size, request: &SizesRequest) -> Sizes {
        let (vae, text, grid) = (&self.vae, request.text, size.grid());
        // A legal size has at most 2^14 pixels a side and 2^26 in all, and no side below is longer: nothing overflows.
        let rows = size.tokens();
        let mut sizes = Sizes::from([
            ("encoded_seq".to_owned(), text.encoded),
            ("text_seq".to_owned(), text.read),
            ("image_seq".to_owned(), rows),
            ("joint_seq".to_owned(), text.read + rows),
            ("levels".to_owned(), request.steps + 1),
            ("kv_rows".to_owned(), rows),
            (
                "chunk_rows".to_owned(),
                vae.attention_rows.checked_shr(request.halvings).unwrap_or(0).clamp(1, rows),
            ),
        ]);
        let mut sides = |place: &str, [height, width]: [usize; 2]| {
            sizes.insert(format!("{place}_height"), height);
            sizes.insert(format!("{place}_width"), width);
        };
        sides("latent", grid);
        // Every up block but the last doubles the sides.
        for level in 0..vae.pixels_per_token.ilog2() {
            sides(&format!("up{level}"), grid.map(|side| side << (level + 1)));
        }
        sides("image", [size.height(), size.width()]);
        for stage in vae.post_stages.iter().filter(|stage| stage.halo.is_some()) {
            let strip = stage.strip(grid[0].saturating_mul(stage.scale), request.halvings);
            let [rows, out] = stage.row_symbols();
            sizes.insert(rows, strip);
            sizes.insert(out, strip.saturating_mul(stage.growth));
        }
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::TextRows;

    fn parameters() -> Parameters {
        serde_json::from_value(serde_json::json!({
            "text": {
                "length": 640, "head_dim": 128, "rope_theta": 5e6,
                "template": { "system": "s", "before": "b", "after": "a" },
                "embedding": { "file": "embedding.bin", "dtype": "f16", "rows": 9, "width": 4 },
            },
            "transformer": {
                "channels": 64, "layers": 32, "width": 4096, "axes": [16, 56, 56], "rope_theta": 10000.0,
                "time_channels": 256, "time_order": "cos_first", "graphs": "prefix", "centred": true, "text_sigma": 0.0,
            },
            "vae": {
                "pixels_per_token": 16, "multiple": 32, "default_side": 1024, "attention_rows": 1024,
                "post_stages": [
                    { "name": "vae_post0", "scale": 1, "growth": 2, "halo": null },
                    { "name": "vae_post1", "scale": 2, "growth": 8, "halo": 10 },
                ],
            },
            "schedule": {
                "steps": 40,
                "shift": { "base_tokens": 256, "max_tokens": 8192, "base": 0.5, "max": 0.9, "terminal": 0.02 },
            },
        }))
        .unwrap()
    }

    fn request(steps: usize, halvings: u32) -> SizesRequest {
        let text = TextRows { encoded: 40, read: 26 };
        SizesRequest { width: 1030, height: 540, steps, halvings, text }
    }

    #[test]
    fn every_symbol_has_its_size() {
        let parameters = parameters();
        parameters.check().unwrap();
        let size = parameters.size(1030, 540).unwrap();
        let expected = [
            ("chunk_rows", 512),
            ("encoded_seq", 40),
            ("image_height", 512),
            ("image_seq", 2048),
            ("image_width", 1024),
            ("joint_seq", 2074),
            ("kv_rows", 2048),
            ("latent_height", 32),
            ("latent_width", 64),
            ("levels", 41),
            ("text_seq", 26),
            ("up0_height", 64),
            ("up0_width", 128),
            ("up1_height", 128),
            ("up1_width", 256),
            ("up2_height", 256),
            ("up2_width", 512),
            ("up3_height", 512),
            ("up3_width", 1024),
            // Half of its 64 rows, and 10 on either side.
            ("vae_post1_out", 416),
            ("vae_post1_rows", 52),
        ];
        let expected = Sizes::from(expected.map(|(name, size)| (name.to_owned(), size)));
        assert_eq!(parameters.sizes(size, &request(40, 1)), expected);
        assert_eq!(parameters.sizes(size, &request(40, u32::MAX))["chunk_rows"], 1);
        let smallest = parameters.size(32, 32).unwrap();
        assert_eq!(parameters.sizes(smallest, &request(1, 0))["chunk_rows"], 4);
    }

    #[test]
    fn numbers_beyond_their_limits_are_refused() {
        type Change = fn(&mut Parameters);
        let changes: [(&str, Change); 11] = [
            ("text.length", |p| p.text.length = MAX_TEXT_LENGTH + 1),
            ("transformer.layers", |p| p.transformer.layers = 0),
            ("transformer.axes", |p| p.transformer.axes = vec![16, 1 << 17, 56]),
            ("text.rope_theta", |p| p.text.rope_theta = 0.0),
            ("transformer.rope_theta", |p| p.transformer.rope_theta = f64::NAN),
            ("transformer.text_sigma", |p| p.transformer.text_sigma = Some(f32::NAN)),
            ("vae.multiple", |p| p.vae.multiple = 40),
            ("vae.post_stages", |p| p.vae.post_stages[1].growth = 0),
            ("schedule.sigmas", |p| p.schedule.sigmas = Some(vec![1.0, 0.5, 0.5])),
            ("schedule.shift", |p| p.schedule.shift.base = f64::INFINITY),
            ("schedule.shift", |p| p.schedule.shift.max_tokens = 256),
        ];
        for (key, change) in changes {
            let mut parameters = parameters();
            change(&mut parameters);
            let problem = parameters.check().unwrap_err();
            assert!(problem.starts_with(key), "{key}: {problem}");
        }
    }

    #[test]
    fn noise_levels_of_a_checkpoint_say_how_many_steps_there_are() {
        let mut schedule = parameters().schedule;
        assert_eq!(schedule.default_steps(), 40);
        schedule.sigmas = Some(vec![1.0, 0.5]);
        assert_eq!(schedule.default_steps(), 2);
    }
}
