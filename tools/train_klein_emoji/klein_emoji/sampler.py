"""The 4-step Euler sampler, as diffusers runs it for FLUX.2 Klein."""

import math
from itertools import pairwise

import torch

from .config import GRID, STEPS


def shift_of(tokens, steps):
    """FLUX.2's empirical mu of the exponential time shift, for a picture of TOKENS latent tokens."""
    mu_10 = 8.73809524e-05 * tokens + 1.89833333
    mu_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return mu_200
    slope = (mu_200 - mu_10) / 190
    return slope * steps + mu_200 - 200 * slope


def sigmas_of(tokens, steps):
    """Noise levels of the sampler, 1 first, and the 0 at the end: steps + 1 numbers."""
    shift = math.exp(shift_of(tokens, steps))
    return [shift / (shift + 1 / (1 - i / steps) - 1) for i in range(steps)] + [0.0]


@torch.no_grad()
def generate(models, ids, mask, noise, steps=STEPS):
    """ids and mask [B, T], noise [B, TOKENS, channels] -> pictures [B, 3, 128, 128] in [-1, 1]"""
    sigmas = sigmas_of(noise.shape[1], steps)
    context, x = models["text_encoder"](ids, mask), noise
    for sigma, following in pairwise(sigmas):
        level = torch.full((len(x),), sigma, device=x.device)
        velocity = models["transformer"](x, context, level, GRID, GRID).float()
        x = x + (following - sigma) * velocity
    return models["vae"].decode(x, GRID, GRID).float().clamp(-1, 1)
