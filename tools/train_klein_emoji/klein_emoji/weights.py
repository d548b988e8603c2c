"""Weights between the stages: one fp32 safetensors file per network in the work folder."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .text_encoder import TextEncoder
from .transformer import Transformer
from .vae import Autoencoder

NETWORKS = {"vae": Autoencoder, "text_encoder": TextEncoder, "transformer": Transformer}


def path_of(work, name):
    return str(Path(work, f"{name}.safetensors"))


def save_weights(module, work, name):
    save_file({k: v.detach().cpu().contiguous() for k, v in module.state_dict().items()}, path_of(work, name))


def load_weights(module, work, name):
    """Loads WORK/NAME.safetensors of any float type into MODULE as fp32; every name must match."""
    state = load_file(path_of(work, name))
    module.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})


def load_network(work, name, device="cpu"):
    """Builds one of NETWORKS and loads its weights."""
    module = NETWORKS[name]().to(device)
    load_weights(module, work, name)
    return module


@torch.no_grad()
def round_to_bf16(module):
    """Rounds weights and statistics in place to the values that the exported bf16 checkpoint will hold."""
    for p in (*module.parameters(), *module.buffers()):
        if p.is_floating_point():
            p.copy_(p.bfloat16().float())
