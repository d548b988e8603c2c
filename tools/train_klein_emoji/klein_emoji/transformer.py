"""The diffusion transformer: Flux2Transformer2DModel with the names of diffusers, without reference tokens.

Double-stream blocks keep picture and text apart but for the attention; single-stream blocks run over text then picture
in one sequence. Modulation is shared by all blocks of a kind: [B, 1, hidden] shift, scale and gate per sublayer.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .config import DIT, EPS, TEXT, VAE
from .layers import Holder, RMSNorm, linear, merge_heads, split_heads


def modulate(x, shift, scale):
    """Layer norm without parameters in fp32, then scale and shift."""
    return F.layer_norm(x.float(), (x.shape[-1],), eps=EPS) * (1 + scale) + shift


def gated_silu(x):
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def rotate(x, cos, sin):
    """Rotary embedding of interleaved pairs in fp32: x [B, heads, T, head_dim], cos and sin [T, head_dim]."""
    f = x.float()
    turned = torch.stack([-f[..., 1::2], f[..., 0::2]], -1).flatten(-2)
    return (f * cos + turned * sin).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, d, ratio):
        super().__init__()
        self.linear_in, self.linear_out = linear(d, 2 * d * ratio), linear(d * ratio, d)

    def forward(self, x):
        return self.linear_out(gated_silu(self.linear_in(x)))


class JointAttention(nn.Module):
    """Attention over text and picture together, with projections of their own ("add" is the text's)."""

    def __init__(self, d, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.to_q, self.to_k, self.to_v = linear(d, d), linear(d, d), linear(d, d)
        self.to_out = nn.ModuleList([linear(d, d), nn.Identity()])
        self.add_q_proj, self.add_k_proj, self.add_v_proj = linear(d, d), linear(d, d), linear(d, d)
        self.to_add_out = linear(d, d)
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.norm_added_q, self.norm_added_k = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, img, txt, cos, sin):
        def heads(x):
            return split_heads(x, self.head_dim)

        q = torch.cat([self.norm_added_q(heads(self.add_q_proj(txt))), self.norm_q(heads(self.to_q(img)))], 2)
        k = torch.cat([self.norm_added_k(heads(self.add_k_proj(txt))), self.norm_k(heads(self.to_k(img)))], 2)
        v = torch.cat([heads(self.add_v_proj(txt)), heads(self.to_v(img))], 2)
        out = merge_heads(F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v))
        rows = txt.shape[1]
        return self.to_out[0](out[:, rows:]), self.to_add_out(out[:, :rows])


class DoubleBlock(nn.Module):
    def __init__(self, d, head_dim, ratio):
        super().__init__()
        self.attn = JointAttention(d, head_dim)
        self.ff, self.ff_context = FeedForward(d, ratio), FeedForward(d, ratio)

    def forward(self, img, txt, img_mod, txt_mod, cos, sin):
        """Each modulation is (shift, scale, gate) of the attention, then of the feed-forward."""
        shift_i, scale_i, gate_i, ff_shift_i, ff_scale_i, ff_gate_i = img_mod
        shift_t, scale_t, gate_t, ff_shift_t, ff_scale_t, ff_gate_t = txt_mod
        img_out, txt_out = self.attn(modulate(img, shift_i, scale_i), modulate(txt, shift_t, scale_t), cos, sin)
        img, txt = img + gate_i * img_out, txt + gate_t * txt_out
        img = img + ff_gate_i * self.ff(modulate(img, ff_shift_i, ff_scale_i))
        txt = txt + ff_gate_t * self.ff_context(modulate(txt, ff_shift_t, ff_scale_t))
        return img, txt


class ParallelAttention(nn.Module):
    """Attention and feed-forward side by side: one projection in (q, k, v, gate, value), one out."""

    def __init__(self, d, head_dim, ratio):
        super().__init__()
        self.head_dim, self.d = head_dim, d
        self.to_qkv_mlp_proj, self.to_out = linear(d, 3 * d + 2 * d * ratio), linear(d + d * ratio, d)
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, x, cos, sin):
        fused = self.to_qkv_mlp_proj(x)
        q, k, v, mlp = fused.split([self.d, self.d, self.d, fused.shape[-1] - 3 * self.d], -1)
        q = rotate(self.norm_q(split_heads(q, self.head_dim)), cos, sin)
        k = rotate(self.norm_k(split_heads(k, self.head_dim)), cos, sin)
        out = merge_heads(F.scaled_dot_product_attention(q, k, split_heads(v, self.head_dim)))
        return self.to_out(torch.cat([out, gated_silu(mlp)], -1))


class SingleBlock(nn.Module):
    def __init__(self, d, head_dim, ratio):
        super().__init__()
        self.attn = ParallelAttention(d, head_dim, ratio)

    def forward(self, x, mod, cos, sin):
        shift, scale, gate = mod
        return x + gate * self.attn(modulate(x, shift, scale), cos, sin)


class Transformer(nn.Module):
    """Noisy latents, prompt embedding and noise level -> velocity."""

    def __init__(self, c=DIT, channels=VAE.packed, context=TEXT.context):
        super().__init__()
        d = c.hidden
        self.c = c
        self.x_embedder, self.context_embedder = linear(channels, d), linear(context, d)
        embedder = Holder(linear_1=linear(c.time_channels, d), linear_2=linear(d, d))
        self.time_guidance_embed = Holder(timestep_embedder=embedder)
        self.double_stream_modulation_img = Holder(linear=linear(d, 6 * d))
        self.double_stream_modulation_txt = Holder(linear=linear(d, 6 * d))
        self.single_stream_modulation = Holder(linear=linear(d, 3 * d))
        self.norm_out, self.proj_out = Holder(linear=linear(d, 2 * d)), linear(d, channels)
        self.transformer_blocks = nn.ModuleList(DoubleBlock(d, c.head_dim, c.ratio) for _ in range(c.double))
        self.single_transformer_blocks = nn.ModuleList(SingleBlock(d, c.head_dim, c.ratio) for _ in range(c.single))
        for zero in (*self._modulations(), self.proj_out):  # every block starts as the identity
            nn.init.zeros_(zero.weight)
        self.tables = {}

    def _modulations(self):
        """Linear layers that turn the time embedding into modulation: picture, text, single blocks, output."""
        return (
            self.double_stream_modulation_img.linear,
            self.double_stream_modulation_txt.linear,
            self.single_stream_modulation.linear,
            self.norm_out.linear,
        )

    def rope_tables(self, rows, h, w, device):
        """cos and sin [rows + h*w, head_dim]. Axes are (time, y, x, text row): text uses the last, pictures y and x."""
        if (rows, h, w) not in self.tables:
            position = torch.zeros(rows + h * w, len(self.c.axes), dtype=torch.double)
            position[:rows, 3] = torch.arange(rows)
            position[rows:, 1] = torch.arange(h).repeat_interleave(w)
            position[rows:, 2] = torch.arange(w).repeat(h)
            angles = []
            for axis, size in enumerate(self.c.axes):
                frequency = self.c.theta ** (-torch.arange(0, size, 2).double() / size)
                angles.append((position[:, axis : axis + 1] * frequency).repeat_interleave(2, -1))
            angle = torch.cat(angles, -1)
            self.tables[rows, h, w] = angle.cos().float().to(device), angle.sin().float().to(device)
        return self.tables[rows, h, w]

    def modulation(self, sigma):
        """sigma [B] -> (6, 6, 3, 2) tensors [B, 1, hidden], in fp32 even under autocast."""
        with torch.autocast(sigma.device.type, enabled=False):
            half = self.c.time_channels // 2
            frequency = torch.exp(-math.log(10000) * torch.arange(half, device=sigma.device) / half)
            angle = sigma.float()[:, None] * 1000 * frequency
            embed = self.time_guidance_embed.timestep_embedder
            time = embed.linear_2(F.silu(embed.linear_1(torch.cat([angle.cos(), angle.sin()], -1))))
            time = F.silu(time)
            return [layer(time)[:, None].chunk(n, -1) for layer, n in zip(self._modulations(), (6, 6, 3, 2))]

    def forward(self, x, context, sigma, h, w):
        """x [B, h*w, channels] packed latents, context [B, T, context], sigma [B] in [0, 1] -> [B, h*w, channels]"""
        rows = context.shape[1]
        cos, sin = self.rope_tables(rows, h, w, x.device)
        img_mod, txt_mod, single_mod, (out_scale, out_shift) = self.modulation(sigma)
        img, txt = self.x_embedder(x), self.context_embedder(context)
        for block in self.transformer_blocks:
            img, txt = block(img, txt, img_mod, txt_mod, cos, sin)
        z = torch.cat([txt, img], 1)
        for block in self.single_transformer_blocks:
            z = block(z, single_mod, cos, sin)
        return self.proj_out(modulate(z[:, rows:], out_shift, out_scale))
