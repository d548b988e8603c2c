"""Every picture that a caption can ask for, encoded once: a training step never runs the VAE."""

import math

import torch

from .config import PALETTE, TOKENS, VAE

# Splits a standard normal into three parts of equal weight.
TERCILE = 0.43


class LatentTable:
    """x0[concept, mirrored, background] as fp16 [concepts * 2 * 34, TOKENS, channels], normalised and packed.

    All 1,032 concepts are 70,176 rows of 8 KiB. A concept that must not be mirrored has the same picture twice.
    """

    @torch.no_grad()
    def __init__(self, vae, pictures, concepts):
        device = pictures.device
        colour_of = [colour for colour, _ in pictures.background_names]
        self.first = torch.tensor([colour_of.index(c) for c in range(len(PALETTE))], device=device)
        self.shades = torch.tensor([colour_of.count(c) for c in range(len(PALETTE))], device=device)
        self.count = count = len(colour_of)
        self.rows = torch.empty(concepts * 2 * count, TOKENS, VAE.packed, dtype=torch.float16, device=device)
        batch = 340 if device == "cuda" else 17
        for start in range(0, len(self.rows), batch):
            row = torch.arange(start, min(start + batch, len(self.rows)), device=device)
            concept, flip, background = row // (2 * count), row // count % 2, row % count
            flip = (flip == 1) & pictures.can_flip[concept]
            picture = pictures.render(concept, flip, pictures.backgrounds[background])
            self.rows[start : start + len(row)] = vae.encode(picture).half()

    def pick(self, concept, colour, noise):
        """concept [B], colour [B], noise [B, TOKENS, channels] -> x0 [B, TOKENS, channels]

        The noise makes the choices that the caption leaves open: the mean of channel 0 the mirror image, that of
        channel 1 the shade. So each noise leads to one picture, the paths are nearly straight and few steps suffice.
        """
        scale = math.sqrt(noise.shape[1])  # brings a mean over tokens back to variance 1
        mirror, shade = noise[:, :, 0].mean(1) * scale, noise[:, :, 1].mean(1) * scale
        shade = (shade > -TERCILE).long() + (shade > TERCILE).long()
        shade = shade.clamp(max=self.shades[colour] - 1)
        return self.rows[(concept * 2 + (mirror > 0).long()) * self.count + self.first[colour] + shade].float()
