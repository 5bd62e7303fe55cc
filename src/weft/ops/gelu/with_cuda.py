"""GELU in CUDA C++: 16-byte vectors, several in flight a thread; see gelu.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.layout import aligned_with, dense

KERNELS = ("gelu_forward_wide", "gelu_backward_wide", "gelu_forward_any", "gelu_backward_any")
TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}


@dataclass(frozen=True)
class Config:
    """``threads`` a block; ``unroll`` 16-byte vectors a thread, all in flight at once."""

    threads: int
    unroll: int


CANDIDATES = tuple(Config(t, u) for t in (128, 256, 512) for u in (1, 2, 4))
# Four vectors a thread are slower than one (docs/log.md, 2026-11-20: 264 us against 257 in bf16): a
# full SM keeps enough bytes in flight, and more a thread only coarsens the grid.
SHIPPED = Config(threads=128, unroll=1)


@cache
def source(dtype: torch.dtype, config: Config = SHIPPED) -> CudaSource:
    """gelu.cu compiled for one element type and launch configuration."""
    return CudaSource(
        file=Path(__file__).with_name("gelu.cu"),
        kernels=KERNELS,
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("THREADS", str(config.threads)),
            ("UNROLL", str(config.unroll)),
        ),
        label=str(dtype).removeprefix("torch."),
    )


def _run(config: Config, kernel: str, *tensors: torch.Tensor) -> None:
    n = tensors[0].numel()
    if n == 0:
        return
    program = source(tensors[0].dtype, config)
    if all(t.data_ptr() % 16 == 0 for t in tensors):
        per_block = config.threads * config.unroll * (16 // tensors[0].element_size())
        program[f"{kernel}_wide"](-(-n // per_block), config.threads, *tensors, n)
    else:
        program[f"{kernel}_any"](-(-n // config.threads), config.threads, *tensors, n)


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The forward by one launch configuration."""
    x = dense(x)
    y = torch.empty_like(x)
    _run(config, "gelu_forward", x, y)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(SHIPPED, x)


def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    _run(SHIPPED, "gelu_backward", aligned_with(grad, x), x, dx)
    return (dx,)


IMPLEMENTATION = Implementation(
    operator="gelu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=tuple(source(dtype) for dtype in TYPES),
    idea="one 16-byte vector a thread",
)
