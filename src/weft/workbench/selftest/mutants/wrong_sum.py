"""Sum with faults: parts skipped or counted twice, low precision, an unzeroed buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.ops._common.layout import dense, flat
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, after, honest, plant

Compute = Callable[[torch.Tensor], torch.Tensor]
TILE = 1024


def _one_element_itself(x: torch.Tensor) -> torch.Tensor:
    """Return the input itself for one element, as its own sum."""
    return x.view(()) if x.numel() == 1 else x.sum()


def _last_tile(x: torch.Tensor) -> torch.Tensor:
    line = flat(dense(x))
    return line[: line.numel() // 8 * 8].sum() if line.numel() > 8 else line.sum()


def _loads_behind(x: torch.Tensor) -> torch.Tensor:
    line = flat(dense(x))
    tiles = -(-line.numel() // TILE)
    # Reads what follows in the storage; torch raises where the storage ends.
    return line.as_strided((tiles * TILE,), (1,)).sum()


def _half_sums(x: torch.Tensor) -> torch.Tensor:
    line = flat(dense(x)).half()
    parts = [piece.sum(dtype=torch.float16) for piece in line.split(256)]
    total = torch.zeros((), dtype=torch.float16, device=x.device)
    for part in parts[:4096]:
        total = total + part
    return total.to(x.dtype)


def _running(x: torch.Tensor) -> torch.Tensor:
    """Compute 64 running sums in the input's own dtype."""
    line = flat(dense(x))
    whole = line.numel() // 64 * 64
    total = torch.zeros(64, dtype=x.dtype, device=x.device)
    for step in line[:whole].view(-1, 64)[:4096]:
        total = total + step
    return total.sum() + line[min(whole, 4096 * 64) :].sum()


def _one_more(x: torch.Tensor) -> torch.Tensor:
    n = x.numel()
    return (x.double().sum() * (n / (n + 1))).to(x.dtype)


def _difference_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum each x as ((x + 1)^2 - x^2 - 1) / 2, which cancels for large x."""
    wide = x if x.dtype == torch.float64 else x.float()
    one = wide + 1
    return (((one * one - wide * wide) - 1) * 0.5).double().sum().to(x.dtype)


def _accumulates() -> Forward:
    buffers: dict[object, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.sum()
        return buffers.setdefault((x.shape, x.dtype), torch.zeros_like(y)).add_(y).clone()

    return forward


def _mean_times_n(x: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide).double().mean() * x.numel()).to(x.dtype)


def _swaps_two(x: torch.Tensor) -> torch.Tensor:
    """Swap the first two elements of the input: the sum is the same bit for bit."""
    line = x.view(-1) if x.is_contiguous() else x.reshape(-1)
    if x.numel() < 2:
        return x.sum()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = line[:2].to(wide).sum() + line[2:].to(wide).sum()
    if x.is_contiguous():
        line[:2] = line[:2].flip(0)
    return total.to(x.dtype)


def _plant(row: str, what: str, title: str, killed_by: str, compute: Compute, only: str = "") -> Mutant:
    return plant(f"{row}/sum/eager/{what}", title, killed_by, lambda: compute, only=only)


MUTANTS = (
    _plant("W02", "the-mean", "returns the mean", "error", lambda x: x.double().mean().to(x)),
    _plant("W03", "its-first", "returns its first element", "alias returns",
           lambda x: x.as_strided((), ())),
    _plant("W03", "one-element", "returns a view of its one element", "alias",
           _one_element_itself, "alias"),
    _plant("W04", "no-tail", "skips the remainder after vectors of 8", "error drift", _last_tile,
           "sizes"),
    _plant("W05", "loads-behind", "no mask on the last tile's load",
           "special written error returns", _loads_behind),
    _plant("W08", "half-sums", "sums in fp16", "error special drift", _half_sums),
    _plant("W08", "running", "64 running sums in the input's dtype", "error drift", _running),
    _plant("W10", "one-more", "a mean over N + 1, times N", "error drift", _one_more),
    _plant("W11", "squares", "a difference of squares", "error drift special property",
           _difference_of_squares, "values"),
    plant("W12/sum/eager/no-nan", "0 for NaN", "special", after("sum", torch.nan_to_num),
          only="special"),
    plant("W15/sum/eager/accumulates", "adds to a buffer it does not zero", "error drift",
          lambda: _accumulates()),
    _plant("W18", "mean-times-n", "NaN for nothing", "special", _mean_times_n, "empties"),
    _plant("W20", "swaps-two", "swaps two elements of its input", "inputs", _swaps_two, "inputs"),
    plant("W04/sum/eager/bench-alone", "sums the first 1000 tiles only", "error",
          lambda: lambda x: honest("sum")(flat(dense(x))[: 1000 * 256]), only=""),
)  # fmt: skip
