"""The training pictures: emoji drawn on a coloured square, rendered on the device from 256 px sources."""

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from .captions import load_meta
from .config import PALETTE, SHADES, SIZE

SCALE = 0.92  # size of the emoji in the picture
# What a mirror would make wrong: clocks, writing, and labels that name a side.
FIXED_SUBGROUPS = ("time", "phone", "book-paper", "computer")
FIXED_WORDS = ("left", "right", "o’clock", "sign", "calendar", "ABC")


def mirrorable(m):
    words = m["label"].split()
    return m["sub"] not in FIXED_SUBGROUPS and not any(word in words for word in FIXED_WORDS)


def backgrounds():
    """All background colours -> ([(colour, shade index)], colours [34, 3] in [-1, 1]); white is first."""
    palette = torch.tensor(list(PALETTE.values()), dtype=torch.float) / 127.5 - 1
    names, rows = [], []
    for i, colour in enumerate(PALETTE):
        for k, shade in enumerate((1.0,) if colour == "white" else SHADES):
            lift = 0.04 * (shade - 1) / 0.14  # keeps the shades of black apart
            rows.append(((palette[i] + 1) * shade + lift).clamp(0, 2) - 1)
            names.append((i, k))
    return names, torch.stack(rows)


class Pictures:
    """WORK/emoji.zip on the device: rgba uint8 [N, 256, 256, 4], which may be mirrored [N], backgrounds [34, 3]."""

    def __init__(self, work, device):
        self.meta, self.device = load_meta(work), device
        with zipfile.ZipFile(Path(work, "emoji.zip")) as archive:
            images = [Image.open(io.BytesIO(archive.read(m["code"] + ".png"))) for m in self.meta]
            self.rgba = torch.from_numpy(np.stack([np.asarray(image) for image in images])).to(device)
        self.can_flip = torch.tensor([mirrorable(m) for m in self.meta], device=device)
        self.background_names, colours = backgrounds()
        self.backgrounds = colours.to(device)

    def __len__(self):
        return len(self.meta)

    def render(self, concept, flip, background, scale=None, shift=None, angle=None):
        """concept [B], flip [B] bool, background [B, 3], scale [B], shift [B, 2], angle [B] -> [B, 3, 128, 128]

        Drawn at twice the size and halved, with premultiplied alpha so that no fringe of the source's colour stays.
        """
        n, device = len(concept), self.device
        x = self.rgba[concept].permute(0, 3, 1, 2).float() / 255
        alpha = x[:, 3:]
        x = torch.cat([x[:, :3] * alpha, alpha], 1)
        scale = torch.full((n,), SCALE, device=device) if scale is None else scale
        angle = torch.zeros(n, device=device) if angle is None else angle
        shift = torch.zeros(n, 2, device=device) if shift is None else shift
        side = torch.where(flip, -1.0, 1.0)
        row_x = torch.stack([angle.cos() * side / scale, -angle.sin() / scale * side, shift[:, 0]], -1)
        row_y = torch.stack([angle.sin() / scale, angle.cos() / scale, shift[:, 1]], -1)
        grid = F.affine_grid(torch.stack([row_x, row_y], 1), (n, 4, 2 * SIZE, 2 * SIZE), align_corners=False)
        y = F.avg_pool2d(F.grid_sample(x, grid, padding_mode="zeros", align_corners=False), 2)
        # The emoji over the background: rgb * a goes from [0, 1] to [-1, 1] as 2 * rgb * a - a.
        return y[:, :3] * 2 + (1 - y[:, 3:]) * background[:, :, None, None] - y[:, 3:]

    def canonical(self, concept, flip=None):
        """The plain picture of each concept: white background, not mirrored unless FLIP [B] says so."""
        if flip is None:
            flip = torch.zeros(len(concept), dtype=torch.bool, device=self.device)
        return self.render(concept, flip, self.backgrounds[:1].expand(len(concept), 3))
