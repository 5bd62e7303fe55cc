"""CUDA C++ around the library's products of the linear operators; see linear.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource

GELU, RESIDUAL = 1, 2
SUM, SLOPE, COPY = range(3)
TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
THREADS, UNROLL, LANES, GROUPS = 128, 4, 32, 4  # as in linear.cu
# What a pass aims at: as many blocks as 132 multiprocessors hold at once, by its registers.
BLOCKS = {SUM: 132 * 7, SLOPE: 132 * 6, COPY: 132 * 8}


@cache
def source(dtype: torch.dtype, way: int, wide: bool) -> CudaSource:
    """linear.cu for one element type, one of its ways, and rows of 16-byte vectors or not."""
    named = str(dtype).removeprefix("torch.")
    passes = ("linear_columns", "linear_sum_partials")
    return CudaSource(
        file=Path(__file__).with_name("linear.cu"),
        kernels=passes if way == SUM else ("linear_epilogue", *passes),
        defines=(("WEFT_T", TYPES[dtype]), ("WAY", str(way)), ("WIDE", str(int(wide)))),
        label=f"{named}-{way}" + ("" if wide else "_any"),
    )


def _wide(n: int, *tensors: torch.Tensor) -> bool:
    """Whether rows of n elements are whole 16-byte vectors, each at an address of its size."""
    size = tensors[0].element_size()
    return n * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def epilogue(way: int, p: torch.Tensor, by: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """y of p, both (M, N) contiguous and possibly one: by GELU, or plus a residual.

    ``by`` is the residual (M, N), contiguous; None for GELU.
    """
    m, n = p.shape
    if m == 0 or n == 0:
        return y
    wide = _wide(n, *(t for t in (p, by, y) if t is not None))
    columns = THREADS * (16 // p.element_size() if wide else 1)
    across = -(-n // columns)
    program = source(p.dtype, way, wide)["linear_epilogue"]
    program(across * -(-m // UNROLL), THREADS, p, 0 if by is None else by, y, m, n, across)
    return y


def column_sums(
    way: int, grad: torch.Tensor, pre: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of grad's columns, and what the pass wrote: nothing, grad times slope, or a copy.

    grad and pre: (M, N). With SLOPE the sums are of what is written, before it is rounded.
    """
    grad = grad.contiguous()
    m, n = grad.shape
    out = None if way == SUM else torch.empty_like(grad)
    if m == 0 or n == 0:
        return grad.new_zeros(n), out
    pre = None if pre is None else pre.contiguous()
    wide = _wide(n, *(t for t in (grad, pre, out) if t is not None))
    across = -(-n // (LANES * (16 // grad.element_size() if wide else 1)))
    each = -(-m * across // BLOCKS[way])
    each = -(-each // (GROUPS * UNROLL)) * GROUPS * UNROLL
    chunks = -(-m // each)
    partial = torch.empty(chunks, n, dtype=torch.float32, device=grad.device)
    total = grad.new_empty(n)
    program = source(grad.dtype, way, wide)
    pointers = (0 if pre is None else pre, 0 if out is None else out)
    program["linear_columns"](
        across * chunks, THREADS, grad, *pointers, partial, m, n, each, across
    )
    program["linear_sum_partials"](-(-n // LANES), THREADS, partial, total, chunks, n)
    return total, out


def specimens(way: int) -> tuple[CudaSource, ...]:
    """bfloat16 in 16-byte vectors and one by one, and float32 in vectors."""
    return (
        source(torch.bfloat16, way, True),
        source(torch.bfloat16, way, False),
        source(torch.float32, way, True),
    )
