"""Product of two fp8 matrices with scales, and the quantisation to them; see README.md."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops.scaled_matmul.quantize import quantize_fp8
from weft.ops.scaled_matmul.spec import check_arguments

register(
    "scaled_matmul",
    Schema(
        repeats=True,
        inputs="Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str out_dtype",
        gradients=0,
        fake=lambda a, b, scale_a, scale_b, out_dtype: a.new_empty(
            a.shape[0], b.shape[1], dtype=getattr(torch, out_dtype)
        ),
        fake_gets_params=True,
        params=("out_dtype",),
    ),
)


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Return the product of two fp8 matrices, each element times its scale, summed in float32.

    Names and order of the arguments are those of ``torch._scaled_mm``; the kind of scales follows from their
    shapes, where ``torch.nn.functional.scaled_mm`` wants a recipe beside each. The scales decode: an
    element's value is its 8-bit number times its scale, as :func:`quantize_fp8` returns them.

    Args:
        a: (M, K); float8_e4m3fn or float8_e5m2; CPU or CUDA. Fastest with K contiguous; else it is copied.
        b: (K, N); float8_e4m3fn or float8_e5m2. Fastest as the view ``weight.t()`` of a contiguous (N, K).
        scale_a: float32; () for the tensor or (M, 1) for each row; or (M, K / 128) for blocks.
        scale_b: float32; () for the tensor or (1, N) for each column; or (K / 128, N / 128) for blocks of
            128 x 128, with scale_a of blocks. Any strides. Sizes of blocks are rounded up.
        out_dtype: ``torch.bfloat16`` or ``torch.float16``. The tensor cores of Hopper keep about 14 bits of
            a sum of fp8 products; ours are added up in float32 every 128 of K, and a float32 result would
            promise more than that.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (M, N), contiguous, of ``out_dtype``; zeros where K is 0. It has no gradient.

    Raises:
        WeftError: shapes, dtypes or devices that do not fit; an input requires a gradient; ``impl`` is
            unknown or does not run here.

    Source: arXiv:2209.05433 (the formats); arXiv:2412.19437 (blocks of 128, sums added up in float32).
    """
    # A call is remembered by options of plain types alone.
    name = "bfloat16" if out_dtype is torch.bfloat16 else str(out_dtype).removeprefix("torch.")
    return _scaled_matmul(a, b, scale_a, scale_b, out_dtype=name, impl=impl)


@repeated(of_operator("scaled_matmul", out_dtype="bfloat16"))
def _scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor | None = None,  # `repeated` drops a last None, which the check refuses
    *,
    out_dtype: str,
    impl: str | None,
) -> torch.Tensor:
    inputs, params = (a, b, scale_a, scale_b), {"out_dtype": out_dtype}
    return call("scaled_matmul", inputs, params, impl, lambda: check_arguments(*inputs, **params))  # type: ignore[no-any-return]


__all__ = ["quantize_fp8", "scaled_matmul"]
