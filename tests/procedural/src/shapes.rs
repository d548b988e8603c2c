//! Names and shapes of every tensor, from the configs.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Error;

pub type Shapes = Vec<(String, Vec<usize>)>;

fn parse<T: for<'de> Deserialize<'de>>(what: &str, config: &Map<String, Value>) -> Result<T, Error> {
    serde_json::from_value(Value::Object(config.clone()))
        .map_err(|source| Error::Json { what: format!("{what} config"), source })
}

#[derive(Deserialize)]
struct Qwen3 {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    vocab_size: usize,
    tie_word_embeddings: bool,
    attention_bias: bool,
}

/// Qwen3ForCausalLM; `lm_head.weight` only if the embedding is not tied.
pub fn text_encoder(config: &Map<String, Value>) -> Result<Shapes, Error> {
    let c: Qwen3 = parse("text_encoder", config)?;
    if c.attention_bias {
        return Err(Error::Unsupported { what: "attention_bias" });
    }
    let (hidden, inner, head) = (c.hidden_size, c.intermediate_size, c.head_dim);
    let (q, kv) = (c.num_attention_heads * head, c.num_key_value_heads * head);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![c.vocab_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !c.tie_word_embeddings {
        shapes.push(("lm_head.weight".to_owned(), vec![c.vocab_size, hidden]));
    }
    for i in 0..c.num_hidden_layers {
        let mut add = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{i}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[hidden]);
        add("self_attn.q_proj", &[q, hidden]);
        add("self_attn.k_proj", &[kv, hidden]);
        add("self_attn.v_proj", &[kv, hidden]);
        add("self_attn.o_proj", &[hidden, q]);
        add("self_attn.q_norm", &[head]);
        add("self_attn.k_norm", &[head]);
        add("post_attention_layernorm", &[hidden]);
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
    }
    Ok(shapes)
}

#[derive(Deserialize)]
struct Flux2 {
    attention_head_dim: usize,
    num_attention_heads: usize,
    num_layers: usize,
    num_single_layers: usize,
    mlp_ratio: f64,
    in_channels: usize,
    out_channels: Option<usize>,
    patch_size: usize,
    joint_attention_dim: usize,
    timestep_guidance_channels: usize,
    guidance_embeds: bool,
}

/// Flux2Transformer2DModel without guidance embedding.
pub fn transformer(config: &Map<String, Value>) -> Result<Shapes, Error> {
    let c: Flux2 = parse("transformer", config)?;
    if c.guidance_embeds {
        return Err(Error::Unsupported { what: "guidance_embeds" });
    }
    let head = c.attention_head_dim;
    let hidden = c.num_attention_heads * head;
    let inner = (hidden as f64 * c.mlp_ratio) as usize;
    let out = c.patch_size * c.patch_size * c.out_channels.unwrap_or(c.in_channels);
    let mut shapes = Shapes::new();
    let mut add = |name: &str, shape: &[usize]| shapes.push((format!("{name}.weight"), shape.to_vec()));
    add("x_embedder", &[hidden, c.in_channels]);
    add("context_embedder", &[hidden, c.joint_attention_dim]);
    add("time_guidance_embed.timestep_embedder.linear_1", &[hidden, c.timestep_guidance_channels]);
    add("time_guidance_embed.timestep_embedder.linear_2", &[hidden, hidden]);
    add("double_stream_modulation_img.linear", &[6 * hidden, hidden]);
    add("double_stream_modulation_txt.linear", &[6 * hidden, hidden]);
    add("single_stream_modulation.linear", &[3 * hidden, hidden]);
    for i in 0..c.num_layers {
        let p = format!("transformer_blocks.{i}");
        for n in ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        {
            add(&format!("{p}.attn.{n}"), &[hidden, hidden]);
        }
        for n in ["norm_q", "norm_k", "norm_added_q", "norm_added_k"] {
            add(&format!("{p}.attn.{n}"), &[head]);
        }
        for n in ["ff", "ff_context"] {
            add(&format!("{p}.{n}.linear_in"), &[2 * inner, hidden]);
            add(&format!("{p}.{n}.linear_out"), &[hidden, inner]);
        }
    }
    for i in 0..c.num_single_layers {
        let p = format!("single_transformer_blocks.{i}.attn");
        add(&format!("{p}.to_qkv_mlp_proj"), &[3 * hidden + 2 * inner, hidden]);
        add(&format!("{p}.to_out"), &[hidden, hidden + inner]);
        add(&format!("{p}.norm_q"), &[head]);
        add(&format!("{p}.norm_k"), &[head]);
    }
    add("norm_out.linear", &[2 * hidden, hidden]);
    add("proj_out", &[out, hidden]);
    Ok(shapes)
}

#[derive(Deserialize)]
struct AutoencoderKl {
    in_channels: usize,
    out_channels: usize,
    latent_channels: usize,
    layers_per_block: usize,
    block_out_channels: Vec<usize>,
    decoder_block_out_channels: Option<Vec<usize>>,
    mid_block_add_attention: bool,
    use_quant_conv: bool,
    use_post_quant_conv: bool,
    patch_size: [usize; 2],
}

/// Shapes of layers that have a weight and a bias.
struct Affine {
    shapes: Shapes,
    mid_attention: bool,
}

impl Affine {
    fn layer(&mut self, name: &str, shape: &[usize]) {
        self.shapes.push((format!("{name}.weight"), shape.to_vec()));
        self.shapes.push((format!("{name}.bias"), vec![shape[0]]));
    }

    fn resnet(&mut self, p: &str, cin: usize, cout: usize) {
        self.layer(&format!("{p}.norm1"), &[cin]);
        self.layer(&format!("{p}.conv1"), &[cout, cin, 3, 3]);
        self.layer(&format!("{p}.norm2"), &[cout]);
        self.layer(&format!("{p}.conv2"), &[cout, cout, 3, 3]);
        if cin != cout {
            self.layer(&format!("{p}.conv_shortcut"), &[cout, cin, 1, 1]);
        }
    }

    fn mid_block(&mut self, p: &str, width: usize) {
        self.resnet(&format!("{p}.resnets.0"), width, width);
        if self.mid_attention {
            self.layer(&format!("{p}.attentions.0.group_norm"), &[width]);
            for n in ["to_q", "to_k", "to_v", "to_out.0"] {
                self.layer(&format!("{p}.attentions.0.{n}"), &[width, width]);
            }
        }
        self.resnet(&format!("{p}.resnets.1"), width, width);
    }

    /// `resnets` blocks per level, and a resampling convolution after each level but the last.
    fn levels(&mut self, p: &str, resampler: &str, resnets: usize, widths: &[usize], mut width: usize) {
        for (i, &cout) in widths.iter().enumerate() {
            for j in 0..resnets {
                self.resnet(&format!("{p}.{i}.resnets.{j}"), width, cout);
                width = cout;
            }
            if i + 1 < widths.len() {
                self.layer(&format!("{p}.{i}.{resampler}.0.conv"), &[cout, cout, 3, 3]);
            }
        }
    }
}

/// AutoencoderKLFlux2: encoder, decoder (with its own widths where the config has them), batch-norm statistics.
pub fn vae(config: &Map<String, Value>) -> Result<Shapes, Error> {
    let c: AutoencoderKl = parse("vae", config)?;
    let latent = c.latent_channels;
    let encoder = &c.block_out_channels;
    let decoder = c.decoder_block_out_channels.as_ref().unwrap_or(encoder);
    let (Some(&first), Some(&last)) = (encoder.first(), encoder.last()) else {
        return Err(Error::Unsupported { what: "a vae without levels" });
    };
    let (Some(&decoder_first), Some(&decoder_last)) = (decoder.first(), decoder.last()) else {
        return Err(Error::Unsupported { what: "a decoder without levels" });
    };
    let mut a = Affine { shapes: Shapes::new(), mid_attention: c.mid_block_add_attention };

    a.layer("encoder.conv_in", &[first, c.in_channels, 3, 3]);
    a.levels("encoder.down_blocks", "downsamplers", c.layers_per_block, encoder, first);
    a.mid_block("encoder.mid_block", last);
    a.layer("encoder.conv_norm_out", &[last]);
    a.layer("encoder.conv_out", &[2 * latent, last, 3, 3]);
    if c.use_quant_conv {
        a.layer("quant_conv", &[2 * latent, 2 * latent, 1, 1]);
    }

    if c.use_post_quant_conv {
        a.layer("post_quant_conv", &[latent, latent, 1, 1]);
    }
    let rising: Vec<usize> = decoder.iter().rev().copied().collect();
    a.layer("decoder.conv_in", &[decoder_last, latent, 3, 3]);
    a.mid_block("decoder.mid_block", decoder_last);
    a.levels("decoder.up_blocks", "upsamplers", c.layers_per_block + 1, &rising, decoder_last);
    a.layer("decoder.conv_norm_out", &[decoder_first]);
    a.layer("decoder.conv_out", &[c.out_channels, decoder_first, 3, 3]);

    let packed = latent * c.patch_size[0] * c.patch_size[1];
    a.shapes.push(("bn.running_mean".to_owned(), vec![packed]));
    a.shapes.push(("bn.running_var".to_owned(), vec![packed]));
    a.shapes.push(("bn.num_batches_tracked".to_owned(), vec![]));
    Ok(a.shapes)
}
