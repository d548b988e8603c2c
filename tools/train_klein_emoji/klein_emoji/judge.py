"""Is it the picture that was asked for? Comparison with the training pictures."""

import torch
import torch.nn.functional as F

CORNER = 6  # side of the four corners that show the background, in pixels
BATCH = 128


def psnr(a, b):
    """Peak signal-to-noise ratio of pictures [B, 3, H, W] in [-1, 1] -> dB [B]"""
    return 10 * torch.log10(4 / (a - b).square().mean((1, 2, 3)))


class Judge:
    """Reference: every concept on white, plain and mirrored, at 32x32: [2 * concepts, 3 * 32 * 32]."""

    @torch.no_grad()
    def __init__(self, pictures):
        self.pictures, device = pictures, pictures.device
        reference = []
        for mirrored in (False, True):
            for start in range(0, len(pictures), BATCH):
                concept = torch.arange(start, min(len(pictures), start + BATCH), device=device)
                flip = torch.full((len(concept),), mirrored, device=device)
                reference.append(F.avg_pool2d(pictures.canonical(concept, flip), 4).flatten(1))
        self.reference = torch.cat(reference)

    def nearest(self, y):
        """Pictures [B, 3, 128, 128] -> the concept [B] of the nearest training picture."""
        return torch.cdist(F.avg_pool2d(y, 4).flatten(1), self.reference).argmin(1) % len(self.pictures)

    def fidelity(self, y, concept):
        """PSNR [B] to the training picture of CONCEPT on white, or to its mirror image if that is nearer."""
        flip = torch.zeros(len(concept), dtype=torch.bool, device=y.device)
        plain, mirrored = (self.pictures.canonical(concept, f) for f in (flip, ~flip))
        return torch.maximum(psnr(y, plain), psnr(y, mirrored))

    def colour(self, y):
        """The named colour [B] (index into the palette) whose nearest shade the four corners show."""
        top, bottom = y[..., :CORNER, :], y[..., -CORNER:, :]
        corners = torch.stack(
            [part[..., cut] for part in (top, bottom) for cut in (slice(CORNER), slice(-CORNER, None))]
        )
        distance = (corners.mean((0, 3, 4))[:, None] - self.pictures.backgrounds[None]).norm(dim=-1)
        names = torch.tensor([colour for colour, _ in self.pictures.background_names], device=y.device)
        return names[distance.argmin(1)]
