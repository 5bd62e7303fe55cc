"""Quantisation to fp8 with scales per tensor, row, column or block of 128, in plain torch calls."""

from __future__ import annotations

import torch

from weft.core import WeftError
from weft.core.cases import FLOAT8
from weft.ops._common import validate
from weft.ops.scaled_matmul.spec import BLOCK

# Rows and columns of x that share a scale; None: all of them.
BLOCK_SHAPES: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "column": (None, 1),
    "1x128": (1, BLOCK),
    "128x128": (BLOCK, BLOCK),
}
DTYPES = {name: getattr(torch, name) for name in FLOAT8}


def quantize_fp8(
    x: torch.Tensor, block: str = "tensor", *, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, scale) with ``values * scale`` close to ``x``: the inputs of :func:`scaled_matmul`.

    A block's scale is its largest finite magnitude divided by the dtype's largest number, and 1 for a block
    without any. It is never below float32's smallest normal number, so that nothing is divided by zero.
    NaN stays NaN; an infinity stays one in e5m2 and becomes NaN in e4m3fn, which has none. Neither changes
    the scale of its block. Round trip: ``|values * scale - x|`` is at most 2^-4 (e5m2: 2^-3) of ``|x|``
    plus 2^-10 (e5m2: 2^-17) of the scale.

    Args:
        x: (R, C); float32, float16 or bfloat16; CPU or CUDA; any strides.
        block: elements that share a scale: ``tensor``, ``row``, ``column``, ``1x128`` (for a of a product)
            or ``128x128`` (for b of a product). Blocks at the end may be shorter.
        dtype: ``torch.float8_e4m3fn`` (largest number 448) or ``torch.float8_e5m2`` (57344).

    Returns:
        values: (R, C) of ``dtype``, with the strides of ``x`` if it is dense: quantise the view ``w.t()``
            of a weight (N, K), and K stays contiguous, as kernels need it.
        scale: float32; () for ``tensor``, (R, 1), (1, C), (R, C / 128) or (R / 128, C / 128), rounded up.

    Raises:
        WeftError: ``x`` is no matrix of these dtypes, or ``block`` or ``dtype`` is unknown.

    Source: arXiv:2209.05433 (the formats); arXiv:2412.19437 (blocks of 128).
    """
    validate.tensor("quantize_fp8", "x", x, ("float32", "float16", "bfloat16"), dims=range(2, 3))
    validate.one_of("quantize_fp8: block", block, tuple(BLOCK_SHAPES))
    if dtype not in DTYPES.values():
        raise WeftError("quantize_fp8: dtype", expected=" or ".join(DTYPES), got=repr(dtype))
    rows, columns = BLOCK_SHAPES[block]
    shape = x.shape[0] if rows is None else rows, x.shape[1] if columns is None else columns
    wide = x.detach().float()
    scale = _scale(wide, *shape, torch.finfo(dtype).max)
    divided = wide / _expanded(scale, *shape, *x.shape)
    if dtype == torch.float8_e4m3fn:  # versions of torch convert an infinity to NaN or to 448
        divided = torch.where(divided.isinf(), torch.nan, divided)
    values = torch.empty_like(x, dtype=dtype, requires_grad=False).copy_(divided)
    return values, scale.reshape(()) if block == "tensor" else scale


def _scale(wide: torch.Tensor, rows: int, columns: int, largest: float) -> torch.Tensor:
    """Return the scale of each block of ``rows`` x ``columns``; blocks at the end may be shorter."""
    down, across = (-(-size // max(step, 1)) for size, step in zip(wide.shape, (rows, columns), strict=True))
    if wide.numel() == 0:
        return torch.ones(max(down, int(rows == 0)), max(across, int(columns == 0)), device=wide.device)
    finite = torch.where(wide.isfinite(), wide, 0.0).abs()
    padding = (0, across * columns - wide.shape[1], 0, down * rows - wide.shape[0])
    padded = torch.nn.functional.pad(finite, padding)
    amax = padded.reshape(down, rows, across, columns).amax((1, 3))
    scale = (amax / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, 1.0, scale)


def _expanded(scale: torch.Tensor, rows: int, columns: int, height: int, width: int) -> torch.Tensor:
    """Return the scale of each element of a (height, width) matrix."""
    down = scale.repeat_interleave(max(rows, 1), 0)[:height]
    return down.repeat_interleave(max(columns, 1), 1)[:, :width]
