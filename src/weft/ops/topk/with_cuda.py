"""The k largest elements in CUDA C++ by radix select, a block for each row; see topk.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, YES, Case, Implementation, Support, WeftError, no
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name, view_2d
from weft.ops.topk.spec import backward

THREADS = 256
MAX_K = 1024  # elements that a block sorts in shared memory, as in topk.cu
TOO_MANY = f"a block sorts at most {MAX_K} elements"


@cache
def source(dtype: torch.dtype, threads: int = THREADS) -> CudaSource:
    """Return the program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name("topk.cu"),
        kernels=("topk_rows",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(threads)), ("MAX_K", str(MAX_K))),
        label=dtype_name(dtype),
    )


def select(
    x: torch.Tensor, k: int, largest: bool, threads: int = THREADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and indices, by blocks of ``threads`` threads."""
    if k > MAX_K:
        raise WeftError("topk: k", expected=f"at most {MAX_K}", got=k, hint="use impl='torch'")
    values = x.new_empty((*x.shape[:-1], k))
    indices = torch.empty(values.shape, dtype=torch.int64, device=x.device)
    if values.numel():
        x2d = view_2d(x)
        rows, columns = x2d.shape
        stride = x2d.stride(0) if rows > 1 else columns
        program = source(x.dtype, threads)
        program["topk_rows"](rows, threads, x2d, values, indices, columns, stride, k, int(largest))
    return values, indices


def forward(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return select(x, k, largest)


def _supports(case: Case, device: str) -> Support:
    k = case.params["k"]
    assert isinstance(k, int)
    return no(f"{TOO_MANY}; use impl='torch'") if k > MAX_K else YES


IMPLEMENTATION = Implementation(
    operator="topk",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=_supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=tuple(source(dtype) for dtype in FLOAT_DTYPES),
    idea="radix select, 8 bits a pass, a block a row",
)
