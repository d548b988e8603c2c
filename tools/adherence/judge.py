"""Is it the picture that was asked for? Comparison with small copies of klein-emoji's training pictures."""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "train_klein_emoji"))
from klein_emoji.captions import on_background  # noqa: E402
from klein_emoji.config import PALETTE, SHADES  # noqa: E402

CORNER = 6  # side of the four corners that show the background, in pixels


def shades():
    """Every colour that a background may have. -> names, colours in 0..1 [n, 3]"""
    names, colours = [], []
    for name, colour in PALETTE.items():
        for shade in (1.0,) if name == "white" else SHADES:
            names.append(name)
            # The lift keeps the shades of black apart.
            colours.append(np.clip(np.array(colour) / 255 * shade + 0.02 * (shade - 1) / 0.14, 0, 1))
    return names, np.stack(colours)


class Judge:
    """References: every concept's drawing, plain and mirrored, with transparent ground: colours in 0..1 that are multiplied with
    their coverage [n, side, side, 3], and coverage [n, side, side, 1]."""

    def __init__(self):
        self.labels = (HERE / "labels.txt").read_text(encoding="utf-8").splitlines()
        rgba = np.load(HERE / "references.npz")["rgba"].astype(np.float32) / 255
        rgba = np.concatenate([rgba, rgba[:, :, ::-1]])
        self.colours, self.coverage = rgba[..., :3], rgba[..., 3:]
        self.shade_names, self.shades = shades()
        self.asked = {label: (label, "white") for label in self.labels}
        for label in self.labels:
            self.asked |= {on_background(label, colour): (label, colour) for colour in PALETTE}

    def asks(self, prompts):
        """The label and the background colour that each prompt names."""
        unknown = [prompt for prompt in prompts if prompt not in self.asked]
        if unknown:
            raise SystemExit(f"no picture is known for {unknown[0]!r}: a prompt is a label of labels.txt, with or without \"on a COLOUR background\"")
        return [self.asked[prompt] for prompt in prompts]

    def look(self, picture):
        """A picture in 0..1 [height, width, 3] -> the label and the background colour that it shows."""
        rows, columns = ([part, slice(-part.stop, None)] for part in (slice(CORNER), slice(CORNER)))
        ground = np.mean([picture[row, column].mean((0, 1)) for row in rows for column in columns], 0)
        side = self.colours.shape[1]
        height, width, _ = picture.shape
        small = picture.reshape(side, height // side, side, width // side, 3).mean((1, 3))
        drawn = self.colours + (1 - self.coverage) * ground
        nearest = ((drawn - small) ** 2).sum((1, 2, 3)).argmin() % len(self.labels)
        colour = ((self.shades - ground) ** 2).sum(1).argmin()
        return self.labels[nearest], self.shade_names[colour]

    def scores(self, prompts, pictures):
        """Shares of pictures that show the label, and the background colour, that their prompts name: a label of labels.txt, on white
        or with "on a COLOUR background"."""
        asked = np.array(self.asks(prompts))
        seen = np.array([self.look(picture) for picture in pictures])
        return (asked == seen).mean(0)
