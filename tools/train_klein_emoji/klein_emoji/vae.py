"""The autoencoder: AutoencoderKLFlux2 with the names of diffusers. Pictures [B, 3, H, W] in [-1, 1]."""

import torch
import torch.nn.functional as F
from torch import nn

from .config import BATCH_NORM_EPS, EPS, VAE
from .layers import Holder


def conv3(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, 1, 1)


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, groups=VAE.groups):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs, EPS), conv3(inputs, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs, EPS), conv3(outputs, outputs)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class PixelAttention(nn.Module):
    """Single-head attention over all pixels."""

    def __init__(self, c, groups=VAE.groups):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, c, EPS)
        self.to_q, self.to_k, self.to_v = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c)
        self.to_out = nn.ModuleList([nn.Linear(c, c), nn.Identity()])

    def forward(self, x):
        t = self.group_norm(x).flatten(2).transpose(1, 2)
        q, k, v = (project(t)[:, None] for project in (self.to_q, self.to_k, self.to_v))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.to_out[0](out).transpose(1, 2).reshape(x.shape)


class MidBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attentions = nn.ModuleList([PixelAttention(c)])
        self.resnets = nn.ModuleList([ResBlock(c, c), ResBlock(c, c)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


def level(inputs, outputs, depth):
    """Residual blocks of one resolution."""
    return Holder(resnets=nn.ModuleList(ResBlock(inputs if r == 0 else outputs, outputs) for r in range(depth)))


class Encoder(nn.Module):
    """[B, 3, H, W] -> [B, 2 * latent, H/8, W/8]: means and log variances before quant_conv."""

    def __init__(self, c=VAE):
        super().__init__()
        self.conv_in, self.down_blocks = conv3(3, c.channels[0]), nn.ModuleList()
        width = c.channels[0]
        for n, out in enumerate(c.channels):
            block = level(width, out, c.layers)
            if n < len(c.channels) - 1:
                block.downsamplers = nn.ModuleList([Holder(conv=nn.Conv2d(out, out, 3, 2, 0))])
            self.down_blocks.append(block)
            width = out
        self.mid_block, self.conv_norm_out = MidBlock(width), nn.GroupNorm(c.groups, width, EPS)
        self.conv_out = conv3(width, 2 * c.latent)

    def forward(self, x):
        x = self.conv_in(x)
        for block in self.down_blocks:
            for resnet in block.resnets:
                x = resnet(x)
            if hasattr(block, "downsamplers"):
                x = block.downsamplers[0].conv(F.pad(x, (0, 1, 0, 1)))
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nn.Module):
    """[B, latent, H/8, W/8] -> [B, 3, H, W]"""

    def __init__(self, c=VAE):
        super().__init__()
        channels = c.channels[::-1]
        width = channels[0]
        self.conv_in, self.mid_block, self.up_blocks = conv3(c.latent, width), MidBlock(width), nn.ModuleList()
        for n, out in enumerate(channels):
            block = level(width, out, c.layers + 1)
            if n < len(channels) - 1:
                block.upsamplers = nn.ModuleList([Holder(conv=conv3(out, out))])
            self.up_blocks.append(block)
            width = out
        self.conv_norm_out, self.conv_out = nn.GroupNorm(c.groups, width, EPS), conv3(width, 3)

    def forward(self, z):
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            for resnet in block.resnets:
                x = resnet(x)
            if hasattr(block, "upsamplers"):
                x = block.upsamplers[0].conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.conv_norm_out(x)))


def pack(z):
    """[B, C, H, W] -> [B, H/2 * W/2, 4C]: 2x2 patches as tokens, channel c*4 + dy*2 + dx."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(t, h, w):
    """Undoes pack: [B, h*w, 4C] -> [B, C, 2h, 2w]"""
    b, _, d = t.shape
    return t.view(b, h, w, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, d // 4, 2 * h, 2 * w)


class Autoencoder(nn.Module):
    """Encoder, decoder, and the statistics (bn) that bring packed latents to mean 0 and variance 1."""

    def __init__(self, c=VAE):
        super().__init__()
        self.encoder, self.decoder = Encoder(c), Decoder(c)
        self.quant_conv = nn.Conv2d(2 * c.latent, 2 * c.latent, 1)
        self.post_quant_conv = nn.Conv2d(c.latent, c.latent, 1)
        self.bn = nn.BatchNorm2d(c.packed, eps=BATCH_NORM_EPS, momentum=0.1, affine=False)

    def moments(self, x):
        """Picture -> mean and log variance, each [B, latent, H/8, W/8]"""
        return self.quant_conv(self.encoder(x)).chunk(2, 1)

    def decode_latent(self, z):
        """[B, latent, H/8, W/8] -> picture"""
        return self.decoder(self.post_quant_conv(z))

    def encode(self, x):
        """Picture -> normalised packed latents [B, H/16 * W/16, 4 * latent] (the mean: no sampling)."""
        t = pack(self.moments(x)[0].float())
        return (t - self.bn.running_mean) * torch.rsqrt(self.bn.running_var + BATCH_NORM_EPS)

    def decode(self, t, h, w):
        """Normalised packed latents [B, h*w, 4 * latent] -> picture"""
        return self.decode_latent(
            unpack(t * torch.sqrt(self.bn.running_var + BATCH_NORM_EPS) + self.bn.running_mean, h, w)
        )
