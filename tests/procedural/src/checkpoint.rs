//! Writes the checkpoint folder.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use crate::Error;
use crate::generator::{self, Fnv};
use crate::shapes::{self, Shapes};
use crate::spec::{Pad, RopeSpelling, Spec, TokenizerKind};
use crate::tokenizer::{CHAT_TEMPLATE, PAD_ID, tokenizer_config_json, tokenizer_json};

const DIFFUSERS_VERSION: &str = "0.42.1";

/// Write the checkpoint that the spec file describes into the folder `dest`, which is made if it is not there.
///
/// Fails with [`Error::Fingerprint`] if the weights are not those that the spec was made with; reference tensors
/// would be worth nothing then.
pub fn write_checkpoint(spec: &Path, dest: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(spec).map_err(|e| io(spec, e))?;
    let spec: Spec = serde_json::from_str(&text)
        .map_err(|source| Error::Json { what: spec.display().to_string(), source })?;

    write_component(&spec, dest, &TEXT_ENCODER, text_encoder_config(&spec), spec.text_encoder.shards)?;
    let config = diffusers_config("Flux2Transformer2DModel", &spec.transformer.config);
    write_component(&spec, dest, &TRANSFORMER, config, spec.transformer.shards)?;
    let config = diffusers_config("AutoencoderKLFlux2", &spec.vae.config);
    write_component(&spec, dest, &VAE, config, spec.vae.shards)?;

    let config = diffusers_config("FlowMatchEulerDiscreteScheduler", &spec.scheduler);
    write_json(&dest.join("scheduler/scheduler_config.json"), &config)?;
    match spec.tokenizer.kind {
        TokenizerKind::ByteLevel => {
            write_json(&dest.join("tokenizer/tokenizer.json"), &tokenizer_json())?;
            write_json(&dest.join("tokenizer/tokenizer_config.json"), &tokenizer_config_json())?;
            write(&dest.join("tokenizer/chat_template.jinja"), CHAT_TEMPLATE)?;
        }
    }
    let index = json!({
        "_class_name": "Flux2KleinPipeline",
        "_diffusers_version": DIFFUSERS_VERSION,
        "is_distilled": true,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "TokenizersBackend"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    });
    write_json(&dest.join("model_index.json"), &index)
}

/// A folder with weights.
struct Component {
    name: &'static str,
    /// Weight files are called after it.
    stem: &'static str,
    config: fn(&Spec) -> &Map<String, Value>,
    shapes: fn(&Map<String, Value>) -> Result<Shapes, Error>,
}

const TEXT_ENCODER: Component = Component {
    name: "text_encoder",
    stem: "model",
    config: |spec| &spec.text_encoder.config,
    shapes: shapes::text_encoder,
};
const TRANSFORMER: Component = Component {
    name: "transformer",
    stem: "diffusion_pytorch_model",
    config: |spec| &spec.transformer.config,
    shapes: shapes::transformer,
};
const VAE: Component = Component {
    name: "vae",
    stem: "diffusion_pytorch_model",
    config: |spec| &spec.vae.config,
    shapes: shapes::vae,
};

struct Tensor {
    name: String,
    shape: Vec<usize>,
    dtype: safetensors::Dtype,
    data: Vec<u8>,
}

fn write_component(
    spec: &Spec,
    dest: &Path,
    component: &Component,
    config: Value,
    shards: usize,
) -> Result<(), Error> {
    let mut shapes = (component.shapes)((component.config)(spec))?;
    shapes.sort();
    let tensors: Vec<Tensor> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let (dtype, data) = generator::tensor(spec.seed, spec.dtype, &name, &shape);
            Tensor { name, shape, dtype, data }
        })
        .collect();

    let found = tensors.iter().fold(Fnv::new(), |h, t| h.with(t.name.as_bytes()).with(&t.data)).finish();
    let found = format!("{found:016x}");
    if let Some(wanted) = spec.fingerprints.get(component.name).filter(|wanted| **wanted != found) {
        return Err(Error::Fingerprint { component: component.name, found, wanted: wanted.clone() });
    }
    let folder = dest.join(component.name);
    write_json(&folder.join("config.json"), &config)?;
    write_weights(&folder, component, shards, &tensors)
}

/// One safetensors file, or `shards` of them and an index. A tensor that starts at byte s of the component's total n
/// goes to shard floor(s * shards / n).
fn write_weights(
    folder: &Path,
    component: &Component,
    shards: usize,
    tensors: &[Tensor],
) -> Result<(), Error> {
    let file_name = |shard: usize| match shards {
        1 => format!("{}.safetensors", component.stem),
        _ => format!("{}-{:05}-of-{shards:05}.safetensors", component.stem, shard + 1),
    };
    let total: usize = tensors.iter().map(|t| t.data.len()).sum();
    let mut files: Vec<Vec<&Tensor>> = vec![Vec::new(); shards];
    let mut weight_map = Map::new();
    let mut start = 0;
    for tensor in tensors {
        let shard = start * shards / total;
        files[shard].push(tensor);
        weight_map.insert(tensor.name.clone(), json!(file_name(shard)));
        start += tensor.data.len();
    }
    for (i, content) in files.iter().enumerate() {
        if content.is_empty() {
            return Err(Error::EmptyShard { component: component.name, shard: i + 1, shards });
        }
        let path = folder.join(file_name(i));
        write_safetensors(&path, content).map_err(|source| Error::Safetensors { path, source })?;
    }
    if shards > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&folder.join(format!("{}.safetensors.index.json", component.stem)), &index)?;
    }
    Ok(())
}

fn write_safetensors(path: &Path, tensors: &[&Tensor]) -> Result<(), safetensors::SafeTensorError> {
    let views: Vec<(&str, TensorView)> = tensors
        .iter()
        .map(|t| Ok((t.name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.data)?)))
        .collect::<Result<_, safetensors::SafeTensorError>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), path)
}

fn text_encoder_config(spec: &Spec) -> Value {
    let dtype = spec.dtype.torch_name();
    let theta = spec.text_encoder.rope_theta;
    let mut config = spec.text_encoder.config.clone();
    config.insert("architectures".to_owned(), json!(["Qwen3ForCausalLM"]));
    config.insert("model_type".to_owned(), json!("qwen3"));
    let pad = match spec.tokenizer.pad {
        Pad::TextEncoder => json!(PAD_ID),
        Pad::Tokenizer => Value::Null,
    };
    config.insert("pad_token_id".to_owned(), pad);
    match spec.text_encoder.rope_spelling {
        RopeSpelling::Top => {
            config.insert("rope_theta".to_owned(), json!(theta));
            config.insert("torch_dtype".to_owned(), json!(dtype));
        }
        RopeSpelling::RopeParameters => {
            let nested = json!({ "rope_theta": theta, "rope_type": "default" });
            config.insert("rope_parameters".to_owned(), nested);
            config.insert("dtype".to_owned(), json!(dtype));
        }
    }
    Value::Object(config)
}

fn diffusers_config(class: &str, config: &Map<String, Value>) -> Value {
    let mut config = config.clone();
    config.insert("_class_name".to_owned(), json!(class));
    config.insert("_diffusers_version".to_owned(), json!(DIFFUSERS_VERSION));
    Value::Object(config)
}

fn write_json(path: &Path, value: &Value) -> Result<(), Error> {
    write(path, &format!("{value:#}\n"))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
    }
    fs::write(path, text).map_err(|e| io(path, e))
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), source }
}
