"""GELU in CUDA C++: 16-byte vectors, several in flight a thread; see gelu.cu."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.layout import aligned_with, dense

THREADS, UNROLL = 256, 4
KERNELS = ("gelu_forward_wide", "gelu_backward_wide", "gelu_forward_any", "gelu_backward_any")
TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
SOURCES = {
    dtype: CudaSource(
        file=Path(__file__).with_name("gelu.cu"),
        kernels=KERNELS,
        defines=(("WEFT_T", name), ("THREADS", str(THREADS)), ("UNROLL", str(UNROLL))),
        label=str(dtype).removeprefix("torch."),
    )
    for dtype, name in TYPES.items()
}


def _run(kernel: str, *tensors: torch.Tensor) -> None:
    n = tensors[0].numel()
    if n == 0:
        return
    source = SOURCES[tensors[0].dtype]
    if all(t.data_ptr() % 16 == 0 for t in tensors):
        per_block = THREADS * UNROLL * (16 // tensors[0].element_size())
        source[f"{kernel}_wide"](-(-n // per_block), THREADS, *tensors, n)
    else:
        source[f"{kernel}_any"](-(-n // THREADS), THREADS, *tensors, n)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    _run("gelu_forward", x, y)
    return y


def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    _run("gelu_backward", aligned_with(grad, x), x, dx)
    return (dx,)


IMPLEMENTATION = Implementation(
    operator="gelu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=tuple(SOURCES.values()),
    idea="16-byte vectors, four in flight",
)
