"""Products whose rows have the same bits in every batch, by Hopper's tensor cores (wgmma.py).

An element of such a product is one sum over all of K, which the tensor cores add in the same order in every
configuration. So the tile may depend on the number of rows: few rows have tiles of few columns (few_rows.py).
The instruction may not, and K is not divided: skinny.py and products with ``splits`` have other sums.
tests/dispatch/test_batch_invariance.py compares the bits on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import machine
from weft.core import YES, Case, Support, no
from weft.machine.device_limits import has_wgmma
from weft.ops._common.hopper import tensor_map
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.products import few_rows, wgmma
from weft.ops._common.products.wgmma import Epilogue

MULTIPLE = 8  # elements in 16 bytes


def supports(case: Case, device: str) -> Support:
    """Return yes for a product of half types on Hopper whose K and N are multiples of 16 bytes.

    The first two inputs are the factors: (..., K) with (K, N), or with a weight (N, K).
    """
    if case.dtype not in ("float16", "bfloat16"):
        return no("batch-invariant products multiply float16 and bfloat16; convert the operands")
    if device == "cuda" and machine.has_gpu() and not has_wgmma(torch.device(device)):
        return no("batch-invariant products need wgmma, compute capability 9.0")
    sizes = (*case.inputs[1].shape, case.inputs[0].shape[-1])
    if 0 in sizes or any(size % MULTIPLE for size in sizes):
        return no(f"batch-invariant products take K and N that are multiples of {MULTIPLE}; pad with zeros")
    return YES


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)) as ``wgmma.forward`` does; M may be 0.

    A part of a batch may begin anywhere and have any strides: ``a`` is copied unless its rows are contiguous
    and begin at a multiple of 16 bytes. ``b`` belongs to every batch alike.
    """
    if a.shape[0] == 0:
        c = a.new_empty(0, b.shape[1])
        return (c, torch.empty_like(c)) if epilogue == Epilogue.GELU_PRE else c
    if not tensor_map.fits(b):
        b = b.clone(memory_format=torch.contiguous_format)
    a = aligned_rows(a)
    if few_rows.supports(a, b):
        return few_rows.forward(a, b, epilogue, bias, residual)
    return wgmma.forward(a, b, epilogue, bias, residual, may_split=False)
