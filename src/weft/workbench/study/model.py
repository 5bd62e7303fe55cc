"""The MLP that is studied, and the two things that are timed: a forward alone, a training step.

One model serves every depth and batch at a width: a call goes through its first layers only, and
the optimizer passes over what has no gradient.
"""

from __future__ import annotations

import torch
from torch.nn import functional

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The learning rate times the width: an Adam's step moves a product in proportion to the width (Yang
# and others 2022), and thousands of timed steps on ever other batches must stay finite.
RATE = 3e-3


class Mlp(torch.nn.Module):
    """``depth`` layers of ``gelu(linear(x))``, x of shape (batch, width)."""

    def __init__(self, depth: int, width: int, dtype: str, device: str) -> None:
        super().__init__()
        self._each = tuple(
            torch.nn.Linear(width, width, dtype=DTYPES[dtype], device=device) for _ in range(depth)
        )
        self.layers = torch.nn.ModuleList(self._each)
        for layer in self._each:
            # He's initialisation keeps the activations' size from layer to layer (2015).
            torch.nn.init.kaiming_normal_(layer.weight)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """The first ``depth`` layers (all) of x: (batch, width) in, the same out."""
        for layer in self._each[:depth]:
            x = functional.gelu(layer(x))
        return x


class Trainer:
    """A model with its AdamW (Loshchilov and Hutter 2019), fused: one pass over each weight."""

    def __init__(self, depth: int, width: int, dtype: str, device: str) -> None:
        self.model = Mlp(depth, width, dtype, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE / width, fused=True, capturable=device == "cuda"
        )

    def forward(self, x: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """The forward alone, as in inference: no graph is kept."""
        with torch.no_grad():
            found: torch.Tensor = self.model(x, depth)
        return found

    def gradients(
        self, x: torch.Tensor, target: torch.Tensor, depth: int | None = None
    ) -> torch.Tensor:
        """Loss and its gradients, as new tensors: nothing is added to old ones."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.mse_loss(self.model(x, depth), target)
        torch.autograd.backward(loss)
        return loss.detach()

    def step(self, x: torch.Tensor, target: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Forward, backward and optimizer; the loss before it, a scalar."""
        loss = self.gradients(x, target, depth)
        self.optimizer.step()
        return loss


def draw(batch: int, width: int, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal inputs and targets, (batch, width) each: zeros draw less power and run faster."""
    x, target = (torch.randn(batch, width, device=device) for _ in range(2))
    return x.to(DTYPES[dtype]), target.to(DTYPES[dtype])
