"""Running average of the weights: what is evaluated and saved."""

import contextlib

import torch


class EMA:
    def __init__(self, modules):
        self.params = [p for module in modules for p in module.parameters()]
        self.average = [p.detach().clone() for p in self.params]
        self.updates = 0

    @torch.no_grad()
    def update(self, decay):
        """The first updates weigh more than DECAY says, so that the start is forgotten quickly."""
        self.updates += 1
        decay = min(decay, self.updates / (self.updates + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.params], 1 - decay)

    @torch.no_grad()
    def apply(self):
        """Overwrites the weights with their average."""
        torch._foreach_copy_(self.params, self.average)

    @contextlib.contextmanager
    def applied(self):
        """The average in place of the weights, for the length of a with block."""
        keep = [p.detach().clone() for p in self.params]
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, keep)
