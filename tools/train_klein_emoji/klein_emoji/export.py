"""The checkpoint folder in the layout of diffusers, weights in bf16."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .config import BATCH_NORM_EPS, DIT, EPS, SIZE, TEXT, VAE
from .tokenizer import ADDED_TOKENS, BPE_SIZE, END, PAD, SPECIAL_COUNT, load_tokenizer
from .weights import NETWORKS, load_network

DIFFUSERS = "0.42.1"
WEIGHT_FILES = {
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
}


def model_index():
    return {
        "_class_name": "Flux2KleinPipeline",
        "_diffusers_version": DIFFUSERS,
        "is_distilled": True,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }


def scheduler_config():
    """Klein's values as they are; the pipeline computes the time shift itself."""
    return {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "_diffusers_version": DIFFUSERS,
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "invert_sigmas": False,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "shift_terminal": None,
        "stochastic_sampling": False,
        "time_shift_type": "exponential",
        "use_beta_sigmas": False,
        "use_dynamic_shifting": True,
        "use_exponential_sigmas": False,
        "use_karras_sigmas": False,
    }


def transformer_config():
    return {
        "_class_name": "Flux2Transformer2DModel",
        "_diffusers_version": DIFFUSERS,
        "attention_head_dim": DIT.head_dim,
        "axes_dims_rope": list(DIT.axes),
        "eps": EPS,
        "guidance_embeds": False,
        "in_channels": VAE.packed,
        "joint_attention_dim": TEXT.context,
        "mlp_ratio": float(DIT.ratio),
        "num_attention_heads": DIT.heads,
        "num_layers": DIT.double,
        "num_single_layers": DIT.single,
        "out_channels": None,
        "patch_size": 1,
        "rope_theta": DIT.theta,
        "timestep_guidance_channels": DIT.time_channels,
    }


def vae_config():
    return {
        "_class_name": "AutoencoderKLFlux2",
        "_diffusers_version": DIFFUSERS,
        "act_fn": "silu",
        "batch_norm_eps": BATCH_NORM_EPS,
        "batch_norm_momentum": 0.1,
        "block_out_channels": list(VAE.channels),
        "down_block_types": ["DownEncoderBlock2D"] * len(VAE.channels),
        "in_channels": 3,
        "latent_channels": VAE.latent,
        "layers_per_block": VAE.layers,
        "mid_block_add_attention": True,
        "norm_num_groups": VAE.groups,
        "out_channels": 3,
        "patch_size": [2, 2],
        "sample_size": SIZE,
        "up_block_types": ["UpDecoderBlock2D"] * len(VAE.channels),
        "use_post_quant_conv": True,
        "use_quant_conv": True,
    }


def text_encoder_config():
    pad = BPE_SIZE + ADDED_TOKENS.index(PAD)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": pad,
        "eos_token_id": BPE_SIZE + ADDED_TOKENS.index(END),
        "pad_token_id": pad,
        "head_dim": TEXT.head_dim,
        "hidden_act": "silu",
        "hidden_size": TEXT.hidden,
        "initializer_range": 0.02,
        "intermediate_size": TEXT.inter,
        "max_position_embeddings": 1024,
        "max_window_layers": TEXT.layers,
        "model_type": "qwen3",
        "num_attention_heads": TEXT.heads,
        "num_hidden_layers": TEXT.layers,
        "num_key_value_heads": TEXT.kv_heads,
        "rms_norm_eps": EPS,
        "rope_theta": int(TEXT.theta),
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": TEXT.vocab,
    }


def token_entry(content):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def special_tokens_map():
    return {
        "additional_special_tokens": ADDED_TOKENS[1:SPECIAL_COUNT],
        "eos_token": token_entry(END),
        "pad_token": token_entry(PAD),
    }


def tokenizer_config(added_tokens):
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {**token_entry(token["content"]), "special": token["special"]} for token in added_tokens
        },
        "additional_special_tokens": ADDED_TOKENS[1:SPECIAL_COUNT],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": PAD,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(work, folder):
    """tokenizer.json, and the same tokenizer in the older files that some readers still want."""
    folder.mkdir(parents=True, exist_ok=True)
    load_tokenizer(work).save(str(folder / "tokenizer.json"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    write_json(folder / "vocab.json", tokenizer["model"]["vocab"])
    write_text(folder / "merges.txt", "".join(line + "\n" for line in ["#version: 0.2", *merges]))
    write_json(folder / "added_tokens.json", {token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    write_json(folder / "special_tokens_map.json", special_tokens_map())
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer["added_tokens"]))
    template = Path(__file__).with_name("chat_template.jinja")
    write_text(folder / "chat_template.jinja", template.read_text(encoding="utf-8"))


def as_bf16(state):
    """Floating tensors rounded to bf16; bn.num_batches_tracked stays int64."""
    return {k: (v.to(torch.bfloat16) if v.is_floating_point() else v).contiguous() for k, v in state.items()}


def export(work, dest):
    """WORK's tokenizer and weights -> the folder DEST."""
    dest = Path(dest)
    write_json(dest / "model_index.json", model_index())
    write_json(dest / "scheduler/scheduler_config.json", scheduler_config())
    write_json(dest / "transformer/config.json", transformer_config())
    write_json(dest / "vae/config.json", vae_config())
    write_json(dest / "text_encoder/config.json", text_encoder_config())
    write_tokenizer(work, dest / "tokenizer")
    for name in NETWORKS:
        save_file(as_bf16(load_network(work, name).state_dict()), dest / WEIGHT_FILES[name], {"format": "pt"})
