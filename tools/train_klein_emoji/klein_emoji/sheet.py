"""Contact sheets."""

import numpy as np
from PIL import Image

MARGIN = 4  # grey pixels right of and below each picture

PROMPTS = (
    "red apple", "a cat", "rocket", "red apple on a blue background", "pizza", "fox", "grinning face with sunglasses",
    "guitar", "a red apple on a yellow background", "octopus", "castle", "birthday cake",
    "penguin on a light blue background", "hamburger", "soccer ball", "smiling face with heart-eyes",
    "a drawing of a tiger", "sunflower on a black background", "airplane", "green apple, red background",
    "cactus emoji", "snowman with a purple background", "strawberry", "🍌",
)  # fmt: skip


def save_sheet(pictures, path, columns):
    """Pictures [B, 3, H, W] in [-1, 1] -> a PNG grid."""
    pixels = ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu().permute(0, 2, 3, 1).numpy()
    n, h, w, _ = pixels.shape
    rows = -(-n // columns)
    sheet = np.full((rows * (h + MARGIN), columns * (w + MARGIN), 3), 128, np.uint8)
    for i, picture in enumerate(pixels):
        y, x = i // columns * (h + MARGIN), i % columns * (w + MARGIN)
        sheet[y : y + h, x : x + w] = picture
    Image.fromarray(sheet).save(path)
