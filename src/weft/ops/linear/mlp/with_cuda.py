"""``mlp_gelu`` in CUDA C++: on Hopper GELU's slope and both column sums cost no pass over a gradient of pre.

The gradient of ``hidden`` is never stored: the product that computes it multiplies by GELU's slope and adds
up columns in its epilogue (``SLOPE`` of wgmma.cu). Two operators, one after the other, cannot do so: the
first one's gradient must be in memory when the second one's backward begins. ``hidden`` and ``pre`` are both
stored. Computing ``hidden`` again from ``pre`` would save M F elements, and cost a pass of 2 M F.

Elsewhere (float32, few rows, sizes that 16 bytes do not divide, other GPUs) the passes are those of the
linear family: see ../with_cuda.py.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Case, Implementation, Support, no
from weft.core.implementation import with_invariant
from weft.machine.device_limits import has_wgmma
from weft.ops._common.products import invariant, skinny, wgmma, wgmma_fused
from weft.ops._common.products.wgmma_model import CHOSEN_FROM, Epilogue, spills
from weft.ops.linear import with_cuda as linear
from weft.ops.linear.products import to_2d


def forward(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    hidden, pre = linear.linear_gelu_forward(x, fc_weight, fc_bias)
    return linear.linear_forward(hidden, proj_weight, proj_bias), hidden, pre


def is_fused(grad2d: torch.Tensor, proj_weight: torch.Tensor, pre2d: torch.Tensor) -> bool:
    """Return True if one kernel computes (grad W2) gelu'(pre) and partial sums of its columns."""
    if grad2d.shape[0] <= skinny.MAX_ROWS or not wgmma_fused.fits(grad2d, proj_weight, pre2d):
        return False
    return has_wgmma(grad2d.device)


def pre_gradient(
    grad2d: torch.Tensor, proj_weight: torch.Tensor, pre2d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dpre = (grad W2) gelu'(pre), (M, F), and the sums of its columns, (F,)."""
    if is_fused(grad2d, proj_weight, pre2d):
        return wgmma_fused.slope(grad2d, proj_weight, pre2d)
    dfc_bias, dpre = linear.column_sums(linear.SLOPE, linear.multiply(grad2d, proj_weight), pre2d)
    assert dpre is not None
    return dpre, dfc_bias


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    hidden: torch.Tensor,
    pre: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad2d, pre2d = to_2d(grad), to_2d(pre)
    dproj_bias, _ = linear.column_sums(linear.SUM, grad2d)
    dpre, dfc_bias = pre_gradient(grad2d, proj_weight, pre2d)
    dx, dfc_weight = linear.backward_products(dpre, x, fc_weight)
    return dx, dfc_weight, dfc_bias, linear.multiply(grad2d.t(), to_2d(hidden)), dproj_bias


def forward_invariant(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    hidden, pre = linear.linear_gelu_forward_invariant(x, fc_weight, fc_bias)
    return linear.linear_forward_invariant(hidden, proj_weight, proj_bias), hidden, pre


def backward_invariant(grad: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients; that of a row of x has the same bits in every batch.

    The kernel with the slope has no parts of K, but fewer rows than it takes have another one. So the slope
    is a pass here, which computes each element by itself.
    """
    x, fc_weight, proj_weight, hidden, pre = saved
    grad2d = to_2d(grad)
    dhidden = invariant.forward(grad2d, proj_weight)
    dfc_bias, dpre = linear.column_sums(linear.SLOPE, dhidden, to_2d(pre))
    assert dpre is not None
    dx, dfc_weight = linear.backward_products(dpre, x, fc_weight, invariant.forward)
    dproj_bias, _ = linear.column_sums(linear.SUM, grad2d)
    return dx, dfc_weight, dfc_bias, linear.multiply(grad2d.t(), to_2d(hidden)), dproj_bias


def supports_invariant(case: Case, device: str) -> Support:
    """Return yes where both products are batch invariant: half types on Hopper, sizes of whole 16 bytes."""
    answer, multiple = invariant.supports(case, device), invariant.MULTIPLE
    outputs = case.inputs[3].shape[0]
    if answer and (outputs == 0 or outputs % multiple):
        return no(f"batch-invariant products take N that is a multiple of {multiple}; pad with zeros")
    return answer


def _slope_kernels() -> tuple[Any, ...]:
    """Return the programs of the product with GELU's slope; both operands are as they are stored."""
    configs = [c for c in CHOSEN_FROM if not spills(c, Epilogue.SLOPE)]
    programs = [
        wgmma.source(dtype, c, True, False, False, Epilogue.SLOPE) for dtype in wgmma.DTYPES for c in configs
    ]
    return (*programs, *(wgmma_fused.columns_source(dtype) for dtype in wgmma.DTYPES))


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="mlp_gelu",
        backend="cuda",
        forward=forward,
        backward=backward,
        aot_kernels=_slope_kernels(),
        wraps_library="cublas",
        idea="tensor cores on Hopper with GELU in an epilogue, its slope and the bias gradient in another",
    ),
    forward=forward_invariant,
    backward=backward_invariant,
    supports=supports_invariant,
)
