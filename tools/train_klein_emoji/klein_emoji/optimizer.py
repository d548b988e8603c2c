"""Muon for the matrices of the blocks, AdamW for everything else."""

import math

import torch

MOMENTUM = 0.95
WEIGHT_DECAY = 0.02  # of the matrices only


def orthogonalise(g):
    """Newton-Schulz iteration: matrices [N, rows, columns] -> about U V^T of their singular value decomposition."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def row_ranges(name, p):
    """Row ranges of the matrices in a weight: a fused projection is several, and each is orthogonalised alone."""
    rows, d = p.shape
    if "to_qkv_mlp_proj" in name:
        sizes = [d] * 3 + [(rows - 3 * d) // 2] * 2
    elif "linear_in" in name:
        sizes = [rows // 2] * 2
    else:
        sizes = [rows]
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def is_block_matrix(name, p):
    return p.ndim == 2 and ("blocks." in name or "layers." in name)


class MuonAdamW:
    """Matrices of one shape are stacked, so that a step costs a few batched products.

    Muon's update has unit singular values; 0.2 * sqrt(larger side) brings its size to that of an AdamW update.
    """

    def __init__(self, modules, adam_rate, muon_rate):
        by_shape, rest = {}, []
        for module in modules:
            for name, p in module.named_parameters():
                if not p.requires_grad:
                    continue
                if not is_block_matrix(name, p):
                    rest.append(p)
                    continue
                for start, end in row_ranges(name, p):
                    by_shape.setdefault((end - start, p.shape[1]), []).append((p, start, end))
        self.groups = [
            (slices, torch.zeros(len(slices), *shape, device=slices[0][0].device)) for shape, slices in by_shape.items()
        ]
        self.adam_rate, self.muon_rate = adam_rate, muon_rate
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
        matrices = {id(p): p for slices, _ in self.groups for p, _, _ in slices}
        self.params = rest + list(matrices.values())

    @torch.no_grad()
    def step(self, factor):
        """Clips, updates with both rates times FACTOR, and drops the gradients."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for slices, momentum in self.groups:
            self._muon_step(slices, momentum, factor)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        for p in self.params:
            p.grad = None

    def _muon_step(self, slices, momentum, factor):
        grad = torch.stack([p.grad[start:end] for p, start, end in slices])
        momentum.lerp_(grad, 1 - MOMENTUM)
        update = orthogonalise(grad.lerp(momentum, MOMENTUM)).float()  # Nesterov
        update.mul_(-factor * self.muon_rate * 0.2 * math.sqrt(max(update.shape[-2:])))
        weights = [p.data[start:end] for p, start, end in slices]
        torch._foreach_mul_(weights, 1 - factor * self.muon_rate * WEIGHT_DECAY)
        torch._foreach_add_(weights, list(update.unbind(0)))
