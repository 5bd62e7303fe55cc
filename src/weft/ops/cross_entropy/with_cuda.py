"""Cross entropy in CUDA C++: a block a row, 16 bytes at a time; see cross_entropy.cu."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._shared.cross_entropy import gradient_like, supports
from weft.ops._shared.cross_entropy_cuda import Config, configure, configure_fused, source
from weft.ops._shared.rows import as_rows

FILE = Path(__file__).with_name("cross_entropy.cu")
KERNELS = ("cross_entropy_forward", "cross_entropy_backward")


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = configure(logits.shape[1], logits.dtype)
    return forward_with(config, logits, targets, ignore_index, label_smoothing, z_loss)


def forward_with(
    config: Config,
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward by one configuration."""
    rows, columns = logits.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        lines = as_rows(logits)
        program = source(FILE, KERNELS, logits.dtype, config, label_smoothing != 0)
        program[KERNELS[0]](
            rows,
            config.threads,
            lines,
            targets.contiguous(),
            losses,
            lse,
            columns,
            lines.stride(0),
            ignore_index,
            float(label_smoothing),
            float(z_loss),
        )
    return losses, lse


def backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor]:
    config, out = configure_fused(logits.shape[1], logits.dtype), gradient_like(logits)
    rest = (ignore_index, label_smoothing, z_loss)
    return (backward_with(config, out, grad, logits, targets, lse, *rest),)


def backward_into(
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    *rest: torch.Tensor,
    **params: float,
) -> torch.Tensor:
    """The backward into memory that is there: ``out`` may be ``logits`` itself."""
    config = configure_fused(logits.shape[1], logits.dtype)
    return backward_with(config, out, grad, logits, *rest, **params)  # type: ignore[arg-type]


def backward_with(
    config: Config,
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The backward by one configuration into ``out``, whose columns lie side by side."""
    rows, columns = logits.shape
    if rows:
        lines = as_rows(logits)
        # What smoothing adds is an argument; only the forward has a program of its own for it.
        program = source(FILE, KERNELS, logits.dtype, config, False)
        program[KERNELS[1]](
            rows,
            config.threads,
            grad,
            lines,
            targets.contiguous(),
            lse,
            out,
            columns,
            grad.stride(0),
            lines.stride(0),
            out.stride(0),
            ignore_index,
            float(label_smoothing),
            float(z_loss),
        )
    return out


def _specimens() -> tuple[object, ...]:
    shipped = ((torch.bfloat16, 50304, False), (torch.bfloat16, 50304, True))
    more = ((torch.float16, 50304, False), (torch.float32, 4096, False))
    found = [source(FILE, KERNELS, d, configure(n, d), s) for d, n, s in (*shipped, *more)]
    kind = torch.bfloat16
    return (*found, source(FILE, KERNELS, kind, configure_fused(50304, kind), False))


IMPLEMENTATION = Implementation(
    operator="cross_entropy",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=_specimens(),
    idea="a block a row, 16 bytes at a time wherever it starts",
)
