"""How long a training loop runs, and in which arithmetic."""

import time

import torch


class Budget:
    """Ends a loop after SECONDS or STEPS, whichever comes first. The clock starts on creation."""

    def __init__(self, seconds, steps):
        self.seconds, self.limit, self.start, self.done = seconds, steps, time.time(), 0

    def elapsed(self):
        return time.time() - self.start

    def progress(self):
        """Yields the share of the budget that is used up, in [0, 1], before each step; `done` counts finished steps."""
        while True:
            elapsed = self.elapsed()
            if elapsed > self.seconds or self.done >= self.limit:
                return
            yield max(elapsed / self.seconds, self.done / self.limit)
            self.done += 1


def autocast(device):
    """bf16 on an accelerator; fp32 on the CPU, where bf16 would be slower."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
