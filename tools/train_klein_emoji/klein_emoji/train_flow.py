"""Stage 2: text encoder and transformer together, by flow matching; and the optional tuning on the sampler's states."""

import math
from itertools import pairwise

import torch

from .budget import Budget, autocast
from .config import GRID, STEPS, TOKENS, VAE
from .ema import EMA
from .evaluate import evaluate
from .latents import LatentTable
from .layers import parameter_count
from .optimizer import MuonAdamW
from .pictures import Pictures
from .prompts import Prompts
from .sampler import shift_of, sigmas_of
from .text_encoder import TextEncoder
from .transformer import Transformer
from .weights import load_network, load_weights, round_to_bf16, save_weights

BATCH = 768
RATE = 1e-3
SIGMAS = sigmas_of(TOKENS, STEPS)
SHIFT = math.exp(shift_of(TOKENS, STEPS))
SAMPLER_SHARE = 0.4  # of the training noise levels are exactly those of the sampler


def draw_sigmas(n, device):
    """Noise levels [n]: the sampler's own ones, or uniform ones shifted as the sampler's are."""
    u = torch.rand(n, device=device)
    shifted = SHIFT * u / (1 + (SHIFT - 1) * u)
    own = torch.rand(n, device=device) < SAMPLER_SHARE
    levels = torch.tensor(SIGMAS[:STEPS], device=device)
    return torch.where(own, levels[torch.randint(STEPS, (n,), device=device)], shifted).clamp(min=0.02)


def flow_step(models, x0, noise, ids, mask):
    """One flow-matching step: accumulates gradients -> mean squared error of the velocity.

    x0 and noise [B, TOKENS, channels], ids and mask [B, T]
    """
    sigma = draw_sigmas(len(x0), x0.device)
    s = sigma[:, None, None]
    with autocast(x0.device.type):
        context = models["text_encoder"](ids, mask)
        velocity = models["transformer"]((1 - s) * x0 + s * noise, context, sigma, GRID, GRID)
    loss = (velocity.float() - (noise - x0)).square().mean()
    loss.backward()
    return loss.detach()


def rollout_step(models, x0, noise, ids, mask):
    """One step on the sampler's own path: each state's target is the velocity that leads straight to x0.

    Gradients do not run through the path. The last state, which makes the picture, weighs most. Shapes as in flow_step.
    -> mean squared error of the velocity at each sampler step [STEPS]
    """
    levels = torch.tensor(SIGMAS[:STEPS], device=x0.device)
    errors, x = [], noise
    with autocast(x0.device.type):
        encoded = models["text_encoder"](ids, mask)
        context = encoded.detach().requires_grad_(True)
        for i, (sigma, following) in enumerate(pairwise(SIGMAS)):
            velocity = models["transformer"](x, context, levels[i].expand(len(x)), GRID, GRID).float()
            error = (velocity - (x - x0) / sigma).square().mean()
            (error * sigma**2 * (2.0 if i == STEPS - 1 else 0.6)).backward()
            errors.append(error.detach())
            x = (x + (following - sigma) * velocity).detach()
        encoded.backward(context.grad)
    return torch.stack(errors)


STAGES = {"dit": flow_step, "tune": rollout_step}


def build(args):
    """-> the three networks by name; the VAE is trained already, the others start anew unless --resume."""
    torch.manual_seed(1)
    vae = load_network(args.work, "vae", args.device).eval()
    models = {"vae": vae, "text_encoder": TextEncoder().to(args.device), "transformer": Transformer().to(args.device)}
    if args.resume:
        for name in ("text_encoder", "transformer"):
            load_weights(models[name], args.work, name)
    counts = {name: parameter_count(module) for name, module in models.items()}
    print("parameters:", *(f"{name} {count}" for name, count in counts.items()), "total", sum(counts.values()))
    for p in models["text_encoder"].unused():
        p.requires_grad_(False)
    return models


def compile_blocks(models):
    """Compiles block by block: the blocks of a kind share one compilation."""
    transformer = models["transformer"]
    blocks = (
        *transformer.transformer_blocks,
        *transformer.single_transformer_blocks,
        *models["text_encoder"].model.layers,
    )
    for block in blocks:
        block.compile()


def rate_factor(args, step, progress):
    """Warm-up over --warm steps, then flat, then linear down over the last --decay of the budget."""
    return min(1.0, (step + 1) / args.warm) * min(1.0, max(0.0, (1 - progress) / args.decay) + 0.005)


def train(args):
    """Writes WORK/text_encoder.safetensors and WORK/transformer.safetensors (averaged weights) and a contact sheet."""
    device, stage = args.device, args.stage
    pictures, prompts = Pictures(args.work, device), Prompts(args.work, device)
    models = build(args)
    trained = [models["text_encoder"], models["transformer"]]
    table = LatentTable(models["vae"], pictures, args.concepts)
    print(f"latent table {tuple(table.rows.shape)} std {table.rows[:5000].float().std():.3f}", flush=True)
    prompts.only_concepts(args.concepts)
    if args.compile:
        compile_blocks(models)
    optimizer, ema = MuonAdamW(trained, args.rate or RATE, args.muon_rate), EMA(trained)
    batch, losses, budget = args.batch or BATCH, [], Budget(args.seconds, args.steps)
    for progress in budget.progress():
        step = budget.done
        factor = rate_factor(args, step, progress)
        concept, colour, ids, mask = prompts.batch(batch)
        noise = torch.randn(batch, TOKENS, VAE.packed, device=device)
        losses.append(STAGES[stage](models, table.pick(concept, colour, noise), noise, ids, mask))
        optimizer.step(factor)
        ema.update(args.ema if progress > 0.3 else 0.99)
        if (step + 1) % args.log_every == 0 or step in (0, 19):
            loss = torch.stack(losses).mean(0).cpu().numpy().round(5)
            print(f"{stage} {step + 1} {budget.elapsed():.0f}s rate {factor:.3f} loss {loss}", flush=True)
            losses = []
        if args.eval_every and (step + 1) % args.eval_every == 0:
            with ema.applied(), autocast(device):
                evaluate(models, pictures, prompts, args.count, f"step {step + 1}")
    print(f"{stage} done: {budget.done} steps of {batch} in {budget.elapsed():.0f} s", flush=True)
    ema.apply()
    finish(args, models, pictures, prompts)


def finish(args, models, pictures, prompts):
    """Saves, and evaluates the fp32 weights and what bf16 leaves of them."""
    for name in ("text_encoder", "transformer"):
        save_weights(models[name], args.work, name)
    evaluate(models, pictures, prompts, args.count, "fp32 weights", f"{args.work}/sheet.png")
    for name in ("text_encoder", "transformer"):
        round_to_bf16(models[name])
    evaluate(models, pictures, prompts, args.count, "bf16 weights")


def evaluate_saved(args):
    """Evaluates the weights in the work folder, rounded to bf16 values."""
    models = {
        name: load_network(args.work, name, args.device).eval() for name in ("vae", "text_encoder", "transformer")
    }
    for module in models.values():
        round_to_bf16(module)
    pictures, prompts = Pictures(args.work, args.device), Prompts(args.work, args.device)
    evaluate(models, pictures, prompts, args.count, "saved weights", f"{args.work}/sheet.png")
