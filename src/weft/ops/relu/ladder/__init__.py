"""The CUDA ladder of ReLU: one element a thread; ``cuda`` beside it moves 16 bytes a thread."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.elementwise import TYPES
from weft.ops._shared.layout import aligned_with, dense

THREADS = 256
SOURCES = {
    dtype: CudaSource(
        file=Path(__file__).with_name("01_scalar.cu"),
        kernels=("relu_forward_scalar", "relu_backward_scalar"),
        defines=(("WEFT_T", name),),
        label=f"01-scalar-{str(dtype).removeprefix('torch.')}",
    )
    for dtype, name in TYPES.items()
}


def _run(kernel: str, *tensors: torch.Tensor) -> None:
    if n := tensors[0].numel():
        SOURCES[tensors[0].dtype][kernel](-(-n // THREADS), THREADS, *tensors, n)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    _run("relu_forward_scalar", x, y)
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    _run("relu_backward_scalar", aligned_with(grad, y), y, dx)
    return (dx,)


SCALAR = Implementation(
    operator="relu",
    name="cuda/01-scalar",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=tuple(SOURCES.values()),
    idea="one element a thread",
)
