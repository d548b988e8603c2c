//! What the runner must know about an exported FLUX.2 model besides its graphs; stored in `bundle.json`.

use serde::{Deserialize, Serialize};

use crate::{
    arch::{
        MAX_STEPS,
        parameters::{Embedding, TimeOrder},
        settings::check_base,
    },
    picture::Size,
    shapes::Sizes,
};

/// The most rows that a text may have: its mask is quadratic.
pub const MAX_TEXT_LENGTH: usize = 1 << 13;

/// Parameters of a FLUX.2 bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    pub text: Text,
    pub transformer: Transformer,
    pub vae: Vae,
    pub schedule: Schedule,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// Rows after padding.
    pub length: usize,
    pub pad_id: i64,
    pub taps: Vec<usize>,
    pub head_dim: usize,
    pub rope_theta: f64,
    /// Whether keys of padding rows are masked (they are; the other value is a test's planted fault).
    pub mask_padding: bool,
    pub embedding: Embedding,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transformer {
    /// Channels of a packed latent token.
    pub channels: usize,
    /// Blocks with two streams, blocks with one.
    pub blocks: [usize; 2],
    pub width: usize,
    /// Rotary dimensions of the axes time, row, column, text position.
    pub axes: Vec<usize>,
    pub rope_theta: f64,
    /// Width of the sinusoidal time embedding.
    pub time_channels: usize,
    pub time_order: TimeOrder,
    pub text_ids: TextIds,
}

/// The last coordinate of a text token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextIds {
    /// `(0, 0, 0, i)`: FLUX.2.
    Index,
    /// `(0, 0, 0, 0)`: FLUX.1, and a mistake easily made with FLUX.2.
    Zero,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vae {
    /// Pixels per latent token, per side.
    pub pixels_per_token: usize,
    /// Pixels per pixel of the middle block, per side.
    pub downscale: usize,
    /// Width and height of a picture when none are asked for: the size that the checkpoint states.
    pub default_side: usize,
    /// Query rows per run of the attention stage; `None` when the middle block has no attention.
    pub attention_rows: Option<usize>,
    /// Names of the stages after the attention, in order.
    pub post_stages: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    pub steps: usize,
}

impl Parameters {
    /// What the pipeline computes with before a graph could object: a manifest need not come from our exporter.
    pub fn check(&self) -> Result<(), String> {
        let (text, transformer, vae) = (&self.text, &self.transformer, &self.vae);
        let numbers = [
            ("text.length", text.length, MAX_TEXT_LENGTH),
            ("text.head_dim", text.head_dim, 1 << 16),
            ("transformer.channels", transformer.channels, 1 << 16),
            ("transformer.width", transformer.width, 1 << 24),
            ("transformer.time_channels", transformer.time_channels, 1 << 16),
            ("vae.pixels_per_token", vae.pixels_per_token, 1 << 10),
            ("vae.downscale", vae.downscale, 1 << 10),
            ("vae.default_side", vae.default_side, 1 << 14),
            ("vae.attention_rows", vae.attention_rows.unwrap_or(1), 1 << 24),
            ("schedule.steps", self.schedule.steps, MAX_STEPS),
        ];
        if let Some((key, value, most)) = numbers.iter().find(|(_, value, most)| *value == 0 || value > most)
        {
            return Err(format!("{key} is {value}; expected 1 to {most}"));
        }
        if let Some(axis) = transformer.axes.iter().find(|axis| **axis > 1 << 16) {
            return Err(format!("an axis of transformer.axes is {axis}"));
        }
        check_base("text.rope_theta", text.rope_theta)?;
        check_base("transformer.rope_theta", transformer.rope_theta)?;
        if !vae.pixels_per_token.is_multiple_of(vae.downscale) {
            let (pixels, downscale) = (vae.pixels_per_token, vae.downscale);
            return Err(format!("vae.pixels_per_token {pixels} is no multiple of vae.downscale {downscale}"));
        }
        Ok(())
    }

    /// Sizes of all symbols of all stages, for parameters that passed [`Parameters::check`] and a size that is legal
    /// for them. The query rows per run of the middle attention are halved `halvings` times.
    pub fn sizes(&self, size: Size, steps: usize, halvings: u32) -> Sizes {
        let (vae, grid) = (&self.vae, size.grid());
        // A legal size has at most 2^14 pixels a side and 2^26 in all, and no side below is longer: nothing overflows.
        let middle = grid.map(|tokens| tokens * (vae.pixels_per_token / vae.downscale));
        let mut sizes = Sizes::from([
            ("image_seq".to_owned(), size.tokens()),
            ("joint_seq".to_owned(), self.text.length + size.tokens()),
            ("steps".to_owned(), steps),
        ]);
        let mut sides = |place: &str, [height, width]: [usize; 2]| {
            sizes.insert(format!("{place}_height"), height);
            sizes.insert(format!("{place}_width"), width);
        };
        sides("latent", grid);
        sides("mid", middle);
        // Every up block but the last doubles the sides.
        for level in 0..vae.downscale.ilog2() {
            sides(&format!("up{level}"), middle.map(|side| side << (level + 1)));
        }
        sides("image", [size.height(), size.width()]);
        if let Some(own) = vae.attention_rows {
            let rows = middle[0] * middle[1];
            sizes.insert("kv_rows".to_owned(), rows);
            let chunk = own.checked_shr(halvings).unwrap_or(0).max(1);
            sizes.insert("chunk_rows".to_owned(), chunk.min(rows));
        }
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        serde_json::from_value(serde_json::json!({
            "text": {
                "length": 512, "pad_id": 0, "taps": [9], "head_dim": 128, "rope_theta": 1e6, "mask_padding": true,
                "embedding": { "file": "embedding.bin", "dtype": "f16", "rows": 9, "width": 4 },
            },
            "transformer": {
                "channels": 128, "blocks": [5, 20], "width": 3072, "axes": [32, 32, 32, 32], "rope_theta": 2000.0,
                "time_channels": 256, "time_order": "cos_first", "text_ids": "index",
            },
            "vae": {
                "pixels_per_token": 16, "downscale": 8, "default_side": 1024, "attention_rows": 1024,
                "post_stages": ["vae_post0"],
            },
            "schedule": { "steps": 4 },
        }))
        .unwrap()
    }

    #[test]
    fn every_symbol_has_its_size() {
        let size = Size::new(1024, 512, 16).unwrap();
        let expected = [
            ("chunk_rows", 1024),
            ("image_height", 512),
            ("image_seq", 2048),
            ("image_width", 1024),
            ("joint_seq", 2560),
            ("kv_rows", 8192),
            ("latent_height", 32),
            ("latent_width", 64),
            ("mid_height", 64),
            ("mid_width", 128),
            ("steps", 4),
            ("up0_height", 128),
            ("up0_width", 256),
            ("up1_height", 256),
            ("up1_width", 512),
            ("up2_height", 512),
            ("up2_width", 1024),
        ];
        let expected = Sizes::from(expected.map(|(name, size)| (name.to_owned(), size)));
        assert_eq!(parameters().sizes(size, 4, 0), expected);
    }

    #[test]
    fn rotary_bases_that_make_no_angles_are_refused() {
        parameters().check().unwrap();
        for theta in [0.0, -1e4, f64::NAN, f64::INFINITY] {
            let mut text = parameters();
            text.text.rope_theta = theta;
            let mut transformer = parameters();
            transformer.transformer.rope_theta = theta;
            for (key, parameters) in [("text", text), ("transformer", transformer)] {
                let problem = parameters.check().unwrap_err();
                let expected = format!("{key}.rope_theta is {theta}; expected a finite number above 0");
                assert_eq!(problem, expected);
            }
        }
    }

    #[test]
    fn no_chunk_has_more_rows_than_there_are() {
        let size = Size::new(16, 16, 16).unwrap();
        assert_eq!(parameters().sizes(size, 4, 0)["chunk_rows"], 4);
        assert_eq!(parameters().sizes(size, 4, 9)["chunk_rows"], 2);
        for many in [11, 64, u32::MAX] {
            assert_eq!(parameters().sizes(size, 4, many)["chunk_rows"], 1);
        }
        let mut bare = parameters();
        bare.vae.attention_rows = None;
        assert!(!bare.sizes(size, 4, 9).contains_key("chunk_rows"));
    }

    #[test]
    fn the_longest_sides_do_not_overflow() {
        let mut extreme = parameters();
        (extreme.vae.pixels_per_token, extreme.vae.downscale) = (1024, 1);
        extreme.check().unwrap();
        let size = Size::new(16384, 4096, 1024).unwrap();
        assert_eq!(extreme.sizes(size, 1000, 0)["kv_rows"], 1 << 26);
    }
}
