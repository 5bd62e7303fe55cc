"""External operator whose kernels have one fault each for compute-sanitizer to find; see the .cu file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import weft
from weft.backends.nvrtc import CudaSource

KERNELS = ("clean", "past_the_end", "no_barrier", "unwritten", "divergent")
SOURCE = CudaSource(
    file=Path(__file__).with_name("sanitize_toys.cu"),
    kernels=tuple(f"doubled_{name}" for name in KERNELS),
)
CASES = [
    weft.case(weft.Input(name="x", shape=(n,)), tags=tags)
    for n, tags in ((1000, "check"), (1 << 20, "bench"))
]


def _bytes(case: weft.Case, direction: str) -> weft.Cost:
    return weft.Cost(read=case.inputs[0].nbytes, written=case.inputs[0].nbytes)


@weft.operator("doubled", cases=CASES, cost=_bytes)
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return twice the input."""
    return 2 * x


def _forward(kernel: str) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y, scratch = torch.empty_like(x), torch.empty_like(x)
        grid = -(-x.numel() // 64)
        SOURCE[f"doubled_{kernel}"](grid, 64, x, y, scratch, x.numel())
        return y

    return forward


clean, past_the_end, no_barrier, unwritten, divergent = (
    weft.implementation("doubled", backend="cuda", name=name)(_forward(name)) for name in KERNELS
)


@weft.implementation("doubled", backend="eager")
def by_hand(x: torch.Tensor) -> torch.Tensor:
    return x + x


@weft.implementation("doubled", backend="eager")
def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no\nsuch luck")


@weft.implementation("doubled", backend="eager")
def leaves(x: torch.Tensor) -> torch.Tensor:
    import os

    os._exit(0)


@weft.implementation("doubled", backend="eager")
def hangs(x: torch.Tensor) -> torch.Tensor:
    import time

    time.sleep(600)
    return x
