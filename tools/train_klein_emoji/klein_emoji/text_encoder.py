"""The text encoder: Qwen3 with the names of transformers, cut off after the last tap."""

import torch
import torch.nn.functional as F
from torch import nn

from .config import TEXT, TEXT_LENGTH
from .layers import RMSNorm, linear, merge_heads, split_heads


def rotate(x, cos, sin):
    """Split-half rotary embedding in fp32: x [B, heads, T, head_dim], cos and sin [T, head_dim]."""
    x = x.float()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalised per head before they are rotated."""

    def __init__(self, c):
        super().__init__()
        self.q_proj = linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim), RMSNorm(c.head_dim)
        self.head_dim, self.group = c.head_dim, c.heads // c.kv_heads

    def forward(self, x, mask, cos, sin):
        q = rotate(self.q_norm(split_heads(self.q_proj(x), self.head_dim)), cos, sin)
        k = rotate(self.k_norm(split_heads(self.k_proj(x), self.head_dim)), cos, sin)
        v = split_heads(self.v_proj(x), self.head_dim).repeat_interleave(self.group, 1)
        k = k.repeat_interleave(self.group, 1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.o_proj(merge_heads(out))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = linear(c.hidden, c.inter), linear(c.hidden, c.inter)
        self.down_proj = linear(c.inter, c.hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.hidden), RMSNorm(c.hidden)

    def forward(self, x, mask, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), mask, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(nn.Module):
    """Holds the weights under transformers' names; TextEncoder runs them."""

    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden)


class TextEncoder(nn.Module):
    """Token ids -> prompt embedding: the residual streams after TEXT.taps layers, side by side.

    Layers past the last tap and the final norm are in the checkpoint, as in Klein, and are never run.
    """

    def __init__(self, c=TEXT):
        super().__init__()
        self.model, self.taps = Qwen3Model(c), c.taps
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        frequency = 1.0 / c.theta ** (torch.arange(0, c.head_dim, 2).double() / c.head_dim)
        angle = torch.arange(TEXT_LENGTH).double()[:, None] * frequency
        angle = torch.cat([angle, angle], -1)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def unused(self):
        """Parameters that no tap depends on."""
        return [p for module in (self.model.norm, *self.model.layers[max(self.taps) :]) for p in module.parameters()]

    def forward(self, ids, mask):
        """ids [B, T], mask [B, T] (true for real tokens) -> [B, T, TEXT.context]; padding rows come out too."""
        rows = ids.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=ids.device).tril()
        allowed = causal[None, None] & mask[:, None, None, :]
        x, taps = self.model.embed_tokens(ids), []
        for i, layer in enumerate(self.model.layers[: max(self.taps)], start=1):
            x = layer(x, allowed, self.cos[:rows], self.sin[:rows])
            if i in self.taps:
                taps.append(x)
        return torch.cat(taps, -1)
