//! The two forms of a FLUX.2 bundle: graphs that were authored here, and graphs that others exported.

use serde::Deserialize;
use serde_json::Value;

use super::{imported::Imported, parameters::Parameters};
use crate::{
    arch::parameters::{ChunkedAttention, DecoderChain},
    picture::{Size, SizeError},
    shapes::Sizes,
};

/// A bundle's parameters, by the form of its graphs.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    Authored(Parameters),
    Imported(Imported),
}

impl Form {
    /// Reads a manifest's `parameters`.
    pub fn read(parameters: &Value) -> Result<Form, serde_json::Error> {
        match parameters.get("graphs") {
            Some(_) => Ok(Form::Imported(Imported::deserialize(parameters)?)),
            None => Ok(Form::Authored(Parameters::deserialize(parameters)?)),
        }
    }

    /// See [`Parameters::check`].
    pub fn check(&self) -> Result<(), String> {
        match self {
            Form::Authored(parameters) => parameters.check(),
            Form::Imported(parameters) => parameters.check(),
        }
    }

    /// See [`Parameters::sizes`].
    pub fn sizes(&self, size: Size, steps: usize, halvings: u32) -> Sizes {
        match self {
            Form::Authored(parameters) => parameters.sizes(size, steps, halvings),
            Form::Imported(parameters) => parameters.sizes(size, steps, halvings),
        }
    }

    /// Rows of text after padding.
    pub fn text_length(&self) -> usize {
        match self {
            Form::Authored(parameters) => parameters.text.length,
            Form::Imported(parameters) => parameters.text.length,
        }
    }

    pub fn pad_id(&self) -> i64 {
        match self {
            Form::Authored(parameters) => parameters.text.pad_id,
            Form::Imported(parameters) => parameters.text.pad_id,
        }
    }

    /// Layers of the text encoder whose output is kept, where that is known.
    pub fn taps(&self) -> Option<&[usize]> {
        match self {
            Form::Authored(parameters) => Some(&parameters.text.taps),
            Form::Imported(_) => None,
        }
    }

    /// Channels of a packed latent token.
    pub fn channels(&self) -> usize {
        match self {
            Form::Authored(parameters) => parameters.transformer.channels,
            Form::Imported(parameters) => parameters.transformer.channels,
        }
    }

    /// Width and height are multiples of this.
    pub fn pixels_per_token(&self) -> usize {
        match self {
            Form::Authored(parameters) => parameters.vae.pixels_per_token,
            Form::Imported(parameters) => parameters.vae.pixels_per_token,
        }
    }

    /// The size of a picture, if the graphs can draw it.
    pub fn size(&self, width: usize, height: usize) -> Result<Size, SizeError> {
        match self {
            Form::Authored(parameters) => Size::new(width, height, parameters.vae.pixels_per_token),
            Form::Imported(parameters) => parameters.size(width, height),
        }
    }

    /// Width and height of a picture when none are asked for.
    pub fn default_size(&self) -> [usize; 2] {
        match self {
            Form::Authored(parameters) => [parameters.vae.default_side; 2],
            Form::Imported(parameters) => parameters.vae.default_size,
        }
    }

    /// Steps when none are asked for.
    pub fn steps(&self) -> usize {
        match self {
            Form::Authored(parameters) => parameters.schedule.steps,
            Form::Imported(parameters) => parameters.schedule.steps,
        }
    }

    pub fn decoder(&self) -> DecoderChain {
        const IN_STAGES: [&str; 2] = ["vae_pre", "vae_mid_res0"];
        const WHOLE: [&str; 2] = ["vae_decoder", "image_raw"];
        let in_stages = |attention| DecoderChain { first: IN_STAGES, attention };
        match self {
            Form::Authored(parameters) => {
                in_stages(parameters.vae.attention_rows.map(|rows| ChunkedAttention {
                    rows,
                    fixed: false,
                    q_factor: 1.0,
                }))
            }
            Form::Imported(parameters) => match &parameters.vae.attention {
                Some(attention) => in_stages(Some(ChunkedAttention {
                    rows: attention.rows,
                    fixed: attention.fixed,
                    q_factor: attention.q_factor,
                })),
                None => DecoderChain { first: WHOLE, attention: None },
            },
        }
    }

    /// The decoder's stages after its middle, in order.
    pub fn post_stages(&self) -> Vec<&str> {
        match self {
            Form::Authored(parameters) => parameters.vae.post_stages.iter().map(String::as_str).collect(),
            Form::Imported(parameters) => {
                parameters.vae.post_stages.iter().map(|stage| stage.name.as_str()).collect()
            }
        }
    }
}
