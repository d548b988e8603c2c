//! A tiny Qwen-Image-2.1 checkpoint, and the forms in which such checkpoints are repacked.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;
use viaduct_export::weights::Checkpoint;

const COMPONENTS: [&str; 3] = ["text_encoder", "transformer", "vae"];

/// f32 values by name, with their shape.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Config files and weights, to be changed before they are written.
pub struct QwenCheckpoint {
    pub configs: BTreeMap<&'static str, Value>,
    pub tensors: BTreeMap<&'static str, Tensors>,
}

const LAYERS: usize = 2;

impl QwenCheckpoint {
    pub fn tiny() -> QwenCheckpoint {
        let configs = [
            ("text_encoder/config.json", text_config()),
            ("transformer/config.json", transformer_config()),
            ("vae/config.json", vae_config()),
            ("scheduler/scheduler_config.json", scheduler_config()),
            ("model_index.json", json!({ "_class_name": "QwenImage21Pipeline" })),
            ("processor/tokenizer.json", tokenizer()),
            ("processor/tokenizer_config.json", json!({})),
        ];
        let tensors =
            [("text_encoder", text_shapes()), ("transformer", transformer_shapes()), ("vae", vae_shapes())];
        let tensors = tensors.map(|(component, shapes)| {
            let with_values = |(name, shape): (String, Vec<usize>)| {
                let values = values(&name, shape.iter().product());
                (name, (shape, values))
            };
            (component, shapes.into_iter().map(with_values).collect())
        });
        QwenCheckpoint { configs: configs.into(), tensors: tensors.into() }
    }

    pub fn of(&mut self, component: &str) -> &mut Tensors {
        self.tensors.get_mut(component).unwrap()
    }

    /// Puts a prefix before all names of a component.
    pub fn prefix(&mut self, component: &str, prefix: &str) {
        let tensors = self.of(component);
        *tensors =
            std::mem::take(tensors).into_iter().map(|(name, t)| (format!("{prefix}{name}"), t)).collect();
    }

    /// Lays the two linears of each gated feed-forward below each other, the gate first.
    pub fn fuse_gates(&mut self) {
        let tensors = self.of("transformer");
        for block in 0..LAYERS {
            let name = |layer: &str| format!("transformer_blocks.{block}.img_mlp.{layer}.weight");
            let (mut shape, mut values) = tensors.remove(&name("gate_layer")).unwrap();
            values.extend(tensors.remove(&name("proj")).unwrap().1);
            shape[0] *= 2;
            tensors.insert(name("gate_up"), (shape, values));
        }
    }

    /// Gives the decoder's kernels an axis of time whose earlier slices are no numbers.
    pub fn spread_over_time(&mut self, frames: usize) {
        for (name, (shape, values)) in self.of("vae") {
            let [outputs, inputs, height, width] = shape[..] else { continue };
            if !name.ends_with(".weight") {
                continue;
            }
            let slice = height * width;
            let earlier = vec![f32::NAN; (frames - 1) * slice];
            *values = values.chunks(slice).flat_map(|last| [&earlier, last].concat()).collect();
            *shape = vec![outputs, inputs, frames, height, width];
        }
    }

    /// Adds weights that no picture needs, which are no numbers.
    pub fn add_unread(&mut self) {
        let unread = [
            ("text_encoder", "norm.weight", vec![32]),
            ("text_encoder", "lm_head.weight", vec![40, 32]),
            ("text_encoder", "visual.blocks.0.attn.qkv.weight", vec![24, 8]),
            ("vae", "decoder.up_blocks.0.upsampler.time_conv.weight", vec![64, 32, 1, 1]),
            ("vae", "encoder.conv_in.weight", vec![4, 4, 3, 3]),
            ("vae", "quant_conv.weight", vec![8, 8, 1, 1]),
        ];
        for (component, name, shape) in unread {
            let count = shape.iter().product();
            self.of(component).insert(name.to_owned(), (shape, vec![f32::NAN; count]));
        }
    }

    /// A folder with everything.
    pub fn written(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for (path, config) in &self.configs {
            write(&root.join(path), config.to_string().as_bytes());
        }
        for component in COMPONENTS {
            let path = root.join(component).join("model.safetensors");
            write(&path, &safetensors(&self.tensors[component]));
            Checkpoint::open(&path).unwrap();
        }
        folder
    }
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in tensors {
        let begin = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes(), &header[..], &data[..]].concat()
}

/// Numbers about 0 that follow from the name.
fn values(name: &str, count: usize) -> Vec<f32> {
    let seed = name.bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn tokenizer() -> Value {
    let tokens = ["<|im_start|>", "<|im_end|>"].into_iter().enumerate();
    let tokens = tokens.map(|(id, content)| json!({ "id": id, "content": content }));
    json!({ "added_tokens": tokens.collect::<Vec<_>>(), "model": {} })
}

fn text_config() -> Value {
    json!({
        "model_type": "qwen3_vl",
        "text_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "attention_bias": false,
            "rope_parameters": { "rope_theta": 5e6, "rope_type": "default", "mrope_section": [2, 1, 1] },
        },
        "vision_config": { "depth": 1 },
    })
}

fn transformer_config() -> Value {
    json!({
        "_class_name": "QwenImage21Transformer2DModel", "in_channels": 8, "out_channels": 8, "num_layers": LAYERS,
        "attention_head_dim": 16, "num_attention_heads": 2, "context_in_dim": 32, "mlp_ratio": 3,
        "axes_dims_rope": [4, 6, 6], "eps": 1e-6, "causal_condition": true, "patch_size": 1,
    })
}

fn vae_config() -> Value {
    json!({
        "base_dim": 4, "decoder_base_dim": 4, "z_dim": 8, "dim_mult": [1, 2, 4, 8, 8], "num_res_blocks": 1,
        "temperal_downsample": [false, true, true, true], "is_residual": true, "in_channels": 4, "out_channels": 4,
        "attn_scales": [], "patch_size": null, "latents_mean": vec![0.5; 8], "latents_std": vec![3.0; 8],
    })
}

fn scheduler_config() -> Value {
    json!({
        "base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9,
        "shift_terminal": 0.02, "use_dynamic_shifting": true, "time_shift_type": "exponential",
    })
}

fn text_shapes() -> Vec<(String, Vec<usize>)> {
    let layer = [
        ("input_layernorm", vec![32]),
        ("post_attention_layernorm", vec![32]),
        ("self_attn.q_proj", vec![32, 32]),
        ("self_attn.k_proj", vec![16, 32]),
        ("self_attn.v_proj", vec![16, 32]),
        ("self_attn.o_proj", vec![32, 32]),
        ("self_attn.q_norm", vec![8]),
        ("self_attn.k_norm", vec![8]),
        ("mlp.gate_proj", vec![48, 32]),
        ("mlp.up_proj", vec![48, 32]),
        ("mlp.down_proj", vec![32, 48]),
    ];
    repeated("layers", &layer, &[("embed_tokens.weight", vec![40, 32])])
}

fn transformer_shapes() -> Vec<(String, Vec<usize>)> {
    let block = [
        ("attn.to_q", vec![32, 32]),
        ("attn.to_k", vec![32, 32]),
        ("attn.to_v", vec![32, 32]),
        ("attn.to_out.0", vec![32, 32]),
        ("attn.norm_q", vec![16]),
        ("attn.norm_k", vec![16]),
        ("img_mlp.gate_layer", vec![96, 32]),
        ("img_mlp.proj", vec![96, 32]),
        ("img_mlp.out", vec![32, 96]),
    ];
    let once = [
        ("img_in.weight", vec![32, 8]),
        ("txt_in.text_norm.weight", vec![32]),
        ("txt_in.in_layer.weight", vec![32, 32]),
        ("txt_in.out_layer.weight", vec![32, 32]),
        ("time_text_embed.timestep_embedder.linear_1.weight", vec![32, 256]),
        ("time_text_embed.timestep_embedder.linear_2.weight", vec![32, 32]),
        ("modulation.1.weight", vec![128, 32]),
        ("norm_out.linear.weight", vec![32, 32]),
        ("proj_out.weight", vec![8, 32]),
    ];
    repeated("transformer_blocks", &block, &once)
}

/// Weights of layers, by the name of each in its layer, and weights that are there once.
fn repeated(
    layers: &str,
    layer: &[(&str, Vec<usize>)],
    once: &[(&str, Vec<usize>)],
) -> Vec<(String, Vec<usize>)> {
    let in_layers = (0..LAYERS).flat_map(|i| {
        layer.iter().map(move |(name, shape)| (format!("{layers}.{i}.{name}.weight"), shape.clone()))
    });
    in_layers.chain(once.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone()))).collect()
}

fn vae_shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes = Vec::new();
    let mut conv = |name: &str, inputs: usize, outputs: usize, kernel: usize| {
        shapes.push((format!("{name}.weight"), vec![outputs, inputs, kernel, kernel]));
        shapes.push((format!("{name}.bias"), vec![outputs]));
    };
    let mut gammas = Vec::new();
    let mut resnet = |conv: &mut dyn FnMut(&str, usize, usize, usize), name: &str, inputs, outputs| {
        conv(&format!("{name}.conv1"), inputs, outputs, 3);
        conv(&format!("{name}.conv2"), outputs, outputs, 3);
        if inputs != outputs {
            conv(&format!("{name}.conv_shortcut"), inputs, outputs, 1);
        }
        gammas.push((format!("{name}.norm1.gamma"), vec![inputs, 1, 1, 1]));
        gammas.push((format!("{name}.norm2.gamma"), vec![outputs, 1, 1, 1]));
    };
    conv("post_quant_conv", 8, 8, 1);
    conv("decoder.conv_in", 8, 32, 3);
    for index in 0..2 {
        resnet(&mut conv, &format!("decoder.mid_block.resnets.{index}"), 32, 32);
    }
    let levels = [(32, 32), (32, 32), (32, 16), (16, 8), (8, 4)];
    for (level, (inputs, outputs)) in levels.into_iter().enumerate() {
        let name = format!("decoder.up_blocks.{level}");
        resnet(&mut conv, &format!("{name}.resnets.0"), inputs, outputs);
        resnet(&mut conv, &format!("{name}.resnets.1"), outputs, outputs);
        if level + 1 < levels.len() {
            conv(&format!("{name}.upsampler.resample.1"), outputs, outputs, 3);
        }
    }
    conv("decoder.mid_block.attentions.0.to_qkv", 32, 96, 1);
    conv("decoder.mid_block.attentions.0.proj", 32, 32, 1);
    conv("decoder.conv_out", 4, 4, 3);
    gammas.push(("decoder.mid_block.attentions.0.norm.gamma".to_owned(), vec![32, 1, 1]));
    gammas.push(("decoder.norm_out.gamma".to_owned(), vec![4, 1, 1, 1]));
    shapes.extend(gammas);
    shapes
}
