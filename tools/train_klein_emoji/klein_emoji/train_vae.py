"""Stage 1: the autoencoder, on emoji of random size, place, turn and background."""

import math

import torch
import torch.nn.functional as F

from .budget import Budget, autocast
from .config import GRID, SIZE, VAE
from .ema import EMA
from .judge import psnr
from .layers import parameter_count
from .pictures import SCALE, Pictures
from .sheet import save_sheet
from .vae import Autoencoder, pack
from .weights import load_weights, round_to_bf16, save_weights

BATCH = 64
RATE = 1.5e-3
EMA_DECAY = 0.998


def draw_pictures(pictures, n):
    """N random training pictures [n, 3, 128, 128]; about a third are drawn as stage 2 will see them."""
    device = pictures.device

    def rand(*shape):
        return torch.rand(*shape, device=device)

    concept = torch.randint(len(pictures), (n,), device=device)
    plain = rand(n) < 0.35
    scale = torch.where(plain, SCALE, 0.45 + 0.9 * rand(n))
    shift = torch.where(plain[:, None], 0.0, (rand(n, 2) - 0.5) * 0.5)
    angle = torch.where(plain, 0.0, (rand(n) - 0.5) * 0.8)
    named = rand(n, 1) < 0.6
    named_colour = pictures.backgrounds[torch.randint(len(pictures.backgrounds), (n,), device=device)]
    background = torch.where(named, named_colour, rand(n, 3) * 2 - 1)
    background = torch.where(rand(n, 1) < 0.3, pictures.backgrounds[:1], background)
    return pictures.render(concept, rand(n) < 0.5, background, scale, shift, angle)


def loss_terms(net, x, noise, kl_weight):
    """Absolute error of pixels, edges and 4x4 means, squared error, and a weak pull of the latents to N(0, 1).

    x [B, 3, 128, 128], noise [B, latent, 16, 16] -> loss, absolute error, KL divergence, squared error
    """
    with autocast(x.device.type):
        mean, logvar = net.moments(x)
        mean, logvar = mean.float(), logvar.float().clamp(-12, 4)
        y = net.decode_latent(mean + (0.5 * logvar).exp() * noise).float()
    d = y - x
    absolute = d.abs().mean()
    edges = (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()
    coarse = F.avg_pool2d(d, 4).abs().mean()
    squared = d.square().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return absolute + 0.5 * edges + 0.5 * coarse + 2.0 * squared + kl_weight * kl, absolute, kl, squared


def rate_factor(step, progress):
    """Warm-up over 100 steps, flat for 30 % of the budget, then a cosine down to 2 %."""
    decay = 1.0 if progress < 0.3 else max(0.02, 0.5 + 0.5 * math.cos(math.pi * (progress - 0.3) / 0.7))
    return min(1, (step + 1) / 100) * decay


def train(args):
    """Writes WORK/vae.safetensors (averaged weights, rounded to bf16 values) and WORK/vae.png."""
    device, pictures = args.device, Pictures(args.work, args.device)
    torch.manual_seed(0)
    net = Autoencoder().to(device)
    if args.resume:
        load_weights(net, args.work, "vae")
    print("vae parameters", parameter_count(net))
    rate, batch = args.rate or RATE, args.batch or BATCH
    cuda = device == "cuda"
    adam = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=1e-4, fused=cuda)
    ema, loss_fn = EMA([net]), torch.compile(loss_terms) if args.compile else loss_terms
    budget = Budget(args.seconds, args.steps)
    for progress in budget.progress():
        step = budget.done
        for group in adam.param_groups:
            group["lr"] = rate * rate_factor(step, progress)
        x = draw_pictures(pictures, batch)
        noise = torch.randn(batch, VAE.latent, SIZE // 8, SIZE // 8, device=device)
        loss, absolute, kl, squared = loss_fn(net, x, noise, args.kl)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        adam.step()
        adam.zero_grad(set_to_none=True)
        ema.update(EMA_DECAY)
        if (step + 1) % args.log_every == 0 or step == 0:
            print(
                f"vae {step + 1} {budget.elapsed():.0f}s loss {loss.item():.4f} l1 {absolute.item():.4f}"
                f" kl {kl.item():.3f} psnr {10 * math.log10(4 / squared.item()):.2f}",
                flush=True,
            )
    print(f"vae done: {budget.done} steps of {batch}, {budget.elapsed():.0f} s")
    ema.apply()
    round_to_bf16(net)
    set_statistics(net, pictures, batches=40, batch=min(128, args.concepts))
    save_weights(net, args.work, "vae")
    report(net, pictures, args.concepts, f"{args.work}/vae.png")


@torch.no_grad()
def set_statistics(net, pictures, batches, batch):
    """Measures mean and variance of the packed latents (bn) on random stage 2 pictures; rounded to bf16 values."""
    net.bn.running_mean.zero_()
    net.bn.running_var.fill_(1.0)
    device = pictures.device
    total = squares = count = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        concept = torch.randint(len(pictures), (batch,), generator=generator).to(device)
        white = torch.rand(batch, generator=generator) < 0.45
        background = torch.where(white, 0, torch.randint(len(pictures.backgrounds), (batch,), generator=generator))
        flip = torch.rand(batch, generator=generator) < 0.5
        picture = pictures.render(concept, flip.to(device), pictures.backgrounds[background.to(device)])
        t = pack(net.moments(picture)[0]).double()
        total, squares = total + t.sum((0, 1)), squares + t.square().sum((0, 1))
        count += t.shape[0] * t.shape[1]
    mean = total / count
    net.bn.running_mean.copy_(mean)
    net.bn.running_var.copy_(squares / count - mean * mean)
    round_to_bf16(net.bn)


@torch.no_grad()
def report(net, pictures, concepts, sheet, batch=64):
    """Reconstruction of the canonical pictures: prints the PSNR, writes originals above reconstructions."""
    quality, shown = [], []
    for start in range(0, concepts, batch):
        concept = torch.arange(start, min(concepts, start + batch), device=pictures.device)
        x = pictures.canonical(concept)
        y = net.decode(net.encode(x), GRID, GRID).clamp(-1, 1)
        quality.append(psnr(y, x))
        if start % (4 * batch) == 0:
            shown += [x[:8], y[:8]]
    quality, spread = torch.cat(quality), net.bn.running_var.sqrt().mean()
    print(
        f"vae psnr on canonical pictures: mean {quality.mean():.2f} dB, worst {quality.min():.2f};"
        f" bn std mean {spread:.3f}"
    )
    save_sheet(torch.cat(shown)[:64], sheet, 8)
