"""Sizes of the model and of its pictures: every number that more than one module must agree on."""

from dataclasses import dataclass

SIZE = 128  # picture side in pixels; the model knows no other
GRID = SIZE // 16  # side of the packed latent grid: the VAE divides by 8, packing by 2
TOKENS = GRID * GRID  # latent tokens of one picture
TEXT_LENGTH = 64  # text rows, padding included; the model was trained with exactly this many
STEPS = 4  # sampler steps
EPS = 1e-6  # of every RMS, layer and group norm
BATCH_NORM_EPS = 1e-4  # of the latent statistics


@dataclass(frozen=True)
class VaeConfig:
    """AutoencoderKLFlux2."""

    channels: tuple = (32, 64, 80, 80)  # one entry per resolution, 128 px first
    latent: int = 16
    groups: int = 8
    layers: int = 2  # residual blocks per resolution of the encoder; the decoder has one more

    @property
    def packed(self):
        """Channels of a latent token: a 2x2 patch."""
        return 4 * self.latent


@dataclass(frozen=True)
class TextConfig:
    """Qwen3. heads * head_dim differs from hidden, as it does in Klein."""

    hidden: int = 128
    inter: int = 320
    layers: int = 7  # the last one lies past the last tap: present and unused, like Klein's last layers
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 2048
    taps: tuple = (2, 4, 6)
    theta: float = 1e6

    @property
    def context(self):
        """Width of the prompt embedding: the taps side by side."""
        return self.hidden * len(self.taps)


@dataclass(frozen=True)
class DitConfig:
    """Flux2Transformer2DModel."""

    hidden: int = 256
    heads: int = 4
    head_dim: int = 64
    axes: tuple = (16, 16, 16, 16)  # head dimensions turned by each of the four position axes
    theta: int = 2000
    double: int = 2
    single: int = 6
    ratio: int = 3
    time_channels: int = 256


VAE, TEXT, DIT = VaeConfig(), TextConfig(), DitConfig()

# Background colours a caption can name. White comes first and is what a caption without a colour means.
PALETTE = {
    "white": (255, 255, 255),
    "black": (22, 22, 26),
    "red": (216, 44, 44),
    "orange": (246, 140, 36),
    "yellow": (250, 214, 64),
    "green": (62, 168, 84),
    "blue": (52, 104, 216),
    "purple": (132, 74, 188),
    "pink": (244, 150, 190),
    "brown": (128, 84, 52),
    "gray": (140, 142, 148),
    "light blue": (132, 204, 242),
}
SHADES = (0.86, 1.0, 1.14)  # brightness of the three variants of every named colour but white
