"""The scaled product by ``torch._scaled_mm``: cuBLASLt, or CUTLASS kernels in PyTorch.

It takes b with K contiguous (a copy is made of another order). Scales of blocks have an order of their own
there: those of a column by column, those of b with K contiguous in columns of a multiple of four.
``use_fast_accum`` stays False: sums are added up in float32 every 128 of K.
"""

from __future__ import annotations

import torch

from weft import machine
from weft.core import YES, Case, Implementation, Support, no
from weft.ops.scaled_matmul.spec import BLOCKS, E5M2, ROWS, TENSOR, has_blocks, sizes

FP8_CAPABILITY = (8, 9)  # the first with fp8 tensor cores
BLOCKS_CAPABILITY = (9, 0)  # the only one with scales of blocks
MULTIPLE = 16  # of K and N
SCALES_PADDING = 4  # columns of b's scales begin at multiples of 16 bytes


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    dtype = getattr(torch, out_dtype)
    if 0 in (m, n, k):
        return a.new_zeros(m, n, dtype=dtype)
    if has_blocks(a, b, scale_a, scale_b):
        scale_a, scale_b = in_library_order(scale_a, scale_b)
    elif scale_a.dim() or scale_b.dim():
        # One recipe for both factors: a single scale is repeated. By way of one dimension: torch asks for the
        # stride of a dimension of size 1 as well, which `contiguous` leaves as it is.
        scale_a = scale_a.expand(m, 1).reshape(m).contiguous()[:, None]
        scale_b = scale_b.expand(1, n).reshape(n).contiguous()[None]
    return torch._scaled_mm(
        a.contiguous(), b.t().contiguous().t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=False
    )


def in_library_order(scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks, (M, K / 128) and (K / 128, N / 128), stored as the library reads them."""
    return scale_a.t().contiguous().t(), _padded_columns(scale_b)


def _padded_columns(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale (K / 128, N / 128) with K contiguous, its columns a multiple of four apart."""
    rows, columns = scale.shape
    if rows % SCALES_PADDING == 0:
        return scale.t().contiguous().t()
    padded = scale.new_zeros(columns, -(-rows // SCALES_PADDING) * SCALES_PADDING)
    padded[:, :rows] = scale.t()
    return padded[:, :rows].t()


def mode_of(case: Case) -> str:
    """Return ``tensor``, ``rows`` or ``blocks``, by the shapes of a case's scales."""
    if has_blocks(*case.inputs):
        return BLOCKS
    return ROWS if any(i.shape for i in case.inputs[2:]) else TENSOR


def supports(case: Case, device: str) -> Support:
    m, n, k = sizes(case)
    if 0 in (m, n, k):
        return YES
    mode = mode_of(case)
    if device == "cpu":
        return YES if mode != BLOCKS else no("torch._scaled_mm has no scales of blocks on a CPU; use eager")
    # Without a GPU these questions are those of a GPU that has all.
    capability = torch.cuda.get_device_capability() if machine.has_gpu() else BLOCKS_CAPABILITY
    if capability < FP8_CAPABILITY:
        return no("torch._scaled_mm needs fp8 tensor cores, compute capability 8.9 or later; use eager")
    if k % MULTIPLE or n % MULTIPLE:
        return no(f"torch._scaled_mm takes multiples of {MULTIPLE} for K and N; use eager")
    if {i.dtype for i in case.inputs[:2]} == {E5M2}:
        return no("torch._scaled_mm multiplies no two e5m2 factors on a GPU; use cuda or eager")
    if mode != TENSOR and case.params.get("out_dtype") != "bfloat16":
        return no("torch._scaled_mm returns bfloat16 alone for scales of rows and blocks; use cuda or eager")
    if mode == BLOCKS and capability != BLOCKS_CAPABILITY:
        return no("torch._scaled_mm has scales of blocks on compute capability 9.0 alone; use eager")
    if mode == BLOCKS and (k % 128 or n % 128 or m % SCALES_PADDING):
        return no("torch._scaled_mm takes whole blocks of 128 and M a multiple of 4; use cuda or eager")
    return YES


IMPLEMENTATION = Implementation(
    operator="scaled_matmul",
    backend="torch",
    forward=forward,
    supports=supports,
    directions=("forward",),
    idea="torch._scaled_mm: cuBLASLt, sums added up in float32 every 128 of K",
)
