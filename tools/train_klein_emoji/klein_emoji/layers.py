"""Pieces that more than one of the three networks uses."""

import torch
from torch import nn

from .config import EPS


def linear(inputs, outputs):
    """A linear layer without bias: the only kind in the text encoder and the transformer."""
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * self.weight).to(x.dtype)


class Holder(nn.Module):
    """Submodules under given names: an inner node of the checkpoint's name tree without a forward of its own."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def split_heads(x, head_dim):
    """[B, T, heads * head_dim] -> [B, heads, T, head_dim]"""
    return x.reshape(x.shape[0], x.shape[1], -1, head_dim).transpose(1, 2)


def merge_heads(x):
    """[B, heads, T, head_dim] -> [B, T, heads * head_dim]"""
    return x.transpose(1, 2).flatten(2)


def parameter_count(module):
    return sum(p.numel() for p in module.parameters())
