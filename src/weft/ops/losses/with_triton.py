"""The losses in Triton: one program per row; see triton_kernels.py.

``linear_cross_entropy`` takes chunks of rows (chunks.py), between whose products a kernel works in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.layout import view_2d
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops.losses import triton_kernels as kernels
from weft.ops.losses.chunks import ChunkPlan, Tensors, chunked_forward, plan_chunks
from weft.ops.losses.spec import (
    LossOptions,
    gradient_like,
    launch_key,
    mean_key,
    supports_cross_entropy,
    supports_linear_cross_entropy,
)

SCALE_BLOCK = 2048  # elements per program of the LM head's backward


@dataclass(frozen=True, kw_only=True)
class Config:
    """One program of ``warps`` warps per row; each thread has ``unroll`` 16-byte vectors in flight."""

    warps: int
    unroll: int

    def lanes(self, columns: int, itemsize: int) -> int:
        """Return the 16-byte vectors per step of the loop: a power of two, no more than the row needs."""
        # tl.arange takes powers of two only.
        needed = triton.next_power_of_2(max(1, columns * itemsize // 16))
        return int(min(32 * self.warps * self.unroll, needed))


@cache
def configure(columns: int, itemsize: int) -> Config:
    """Return the configuration for rows that are read once: about 4 vectors per thread, up to 8 warps."""
    vectors = columns * itemsize // 16
    return Config(warps=next((w for w in (1, 2, 4) if vectors <= 128 * w), 8), unroll=2)


@cache
def configure_fused(columns: int, itemsize: int) -> Config:
    """Return the configuration for rows that are read, read again and written.

    A long row takes 32 warps, so that the few rows in flight (two per SM) stay in the L2.
    """
    vectors = columns * itemsize // 16
    return Config(warps=next((w for w in (1, 2, 4, 8, 16) if vectors <= 128 * w), 32), unroll=2)


def candidates(columns: int, itemsize: int) -> list[Config]:
    """Return the configurations worth timing for rows of ``columns``."""
    vectors = columns * itemsize // 16
    configs = [Config(warps=w, unroll=u) for w in (1, 2, 4, 8, 16, 32) for u in (1, 2, 4)]
    return [c for c in configs if 32 * c.warps * c.unroll <= 2 * vectors] or [configure(1, 1)]


LAUNCHES = LaunchCache()


def cross_entropy_forward(
    logits: Tensor, targets: Tensor, *, config: Config | None = None, by_column: bool = False, **params: Any
) -> tuple[Tensor, Tensor]:
    """``config`` None is the configuration shipped for rows of this length.

    ``by_column``: the bits of a row do not depend on its address.
    """
    (rows, columns), size = logits.shape, logits.element_size()
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    key = launch_key(logits, targets, (by_column,), params) if config is None else None
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), lse.data_ptr())
    elif rows:
        options = LossOptions(**params)
        config = config or configure(columns, size)
        x2d = aligned_rows(logits) if by_column else view_2d(logits)
        launch = launch_and_prepare(
            kernels.cross_entropy_forward,
            (rows,),
            x2d,
            targets.contiguous(),
            losses,
            lse,
            columns,
            x2d.stride(0),
            *options.kernel_arguments,
            WIDTH=16 // size,
            LANES=config.lanes(columns, size),
            SMOOTH=options.label_smoothing != 0,
            BY_COLUMN=by_column,
            num_warps=config.warps,
        )
        LAUNCHES.store(key, launch)
    return losses, lse


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, **params: Any
) -> tuple[Tensor]:
    return (cross_entropy_backward_into(gradient_like(logits), grad, logits, targets, lse, **params),)


def cross_entropy_backward_into(
    out: Tensor,
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    *,
    config: Config | None = None,
    by_column: bool = False,
    **params: Any,
) -> Tensor:
    """Write the gradient to ``out``, which has adjacent columns and may be ``logits`` itself."""
    (rows, columns), size = logits.shape, logits.element_size()
    kind = (by_column, "backward", grad.stride(0), *out.stride())
    key = launch_key(logits, targets, kind, params) if config is None and are_repeatable(lse) else None
    # The gradient is one number for each row, or one for all of them.
    launch = LAUNCHES.get(key)
    if launch is not None and not (grad.data_ptr() | out.data_ptr()) & 15:
        addresses = (grad.data_ptr(), logits.data_ptr(), targets.data_ptr(), lse.data_ptr(), out.data_ptr())
        launch(*addresses)
    elif rows:
        options = LossOptions(**params)
        config = config or configure_fused(columns, size)
        x2d = aligned_rows(logits) if by_column else view_2d(logits)
        launch = launch_and_prepare(
            kernels.cross_entropy_backward,
            (rows,),
            grad,
            x2d,
            targets.contiguous(),
            lse,
            out,
            columns,
            grad.stride(0),
            x2d.stride(0),
            out.stride(0),
            *options.kernel_arguments,
            WIDTH=16 // size,
            LANES=config.lanes(columns, size),
            SAME_START=x2d.stride(0) == out.stride(0),
            BY_COLUMN=by_column,
            num_warps=config.warps,
        )
        if not (grad.data_ptr() | out.data_ptr()) & 15:
            LAUNCHES.store(key, launch)
    return out


MEAN_BLOCK = 1024  # rows per step of the one program


def mean_of_rows(losses: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the losses whose target is not ``ignore_index``, and their count, in float32."""
    mean, count = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    rows = losses.shape[0]
    key = mean_key(losses, targets, ignore_index)
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(losses.data_ptr(), targets.data_ptr(), mean.data_ptr(), count.data_ptr())
    else:
        arguments = (losses, targets.contiguous(), mean, count, rows, ignore_index)
        options = {"BLOCK": MEAN_BLOCK, "num_warps": 8}
        LAUNCHES.store(key, launch_and_prepare(kernels.mean_of_rows, (1,), *arguments, **options))
    return mean, count


def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    plan: ChunkPlan | None = None,
    config: Config | None = None,
    **params: Any,
) -> Tensors:
    """``plan`` and ``config`` are the shipped ones where they are None."""
    columns, size = weight.shape[0], x.element_size()
    plan = plan or plan_chunks(x.shape[0], x.shape[1], columns, size)
    config = config or configure_fused(columns, size)
    fused_rows = partial(_fused_rows, config, LossOptions(**params))
    return chunked_forward(fused_rows, plan, x, weight, targets.contiguous())


def _fused_rows(
    config: Config, options: LossOptions, logits: Tensor, targets: Tensor, losses: Tensor
) -> None:
    """Compute the losses of some rows, and write their gradient over their logits."""
    (rows, columns), size = logits.shape, logits.element_size()
    kernels.cross_entropy_fused[(rows,)](
        logits,
        targets,
        losses,
        columns,
        logits.stride(0),
        *options.kernel_arguments,
        WIDTH=16 // size,
        LANES=config.lanes(columns, size),
        SMOOTH=options.label_smoothing != 0,
        num_warps=config.warps,
    )


def linear_cross_entropy_backward(
    grad: Tensor, dx: Tensor, dweight: Tensor, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Multiply the forward's gradients by the incoming one, and round to the inputs' dtype."""
    scaled = torch.empty_like(dx), torch.empty_like(dweight, dtype=dx.dtype)
    for gradient, out in zip((dx, dweight), scaled, strict=True):
        if n := gradient.numel():
            grid = (triton.cdiv(n, SCALE_BLOCK),)
            kernels.scale_gradient[grid](gradient, grad, out, n, BLOCK=SCALE_BLOCK, num_warps=8)
    return scaled


def _aot_row_kernels(
    kernel: object, shapes: Iterable[tuple[str, int]], by_column: bool = False
) -> tuple[TritonAotKernel, ...]:
    """Return a row kernel as shipped, for pairs of (Triton's name of a dtype, columns)."""
    aot_kernels = []
    is_forward = kernel is kernels.cross_entropy_forward
    is_backward = kernel is kernels.cross_entropy_backward
    for dtype, columns in shapes:
        size = 4 if dtype == "fp32" else 2
        config = (configure if is_forward else configure_fused)(columns, size)
        i32 = "i32:16" if columns % 16 == 0 else "i32"
        signature: dict[str, object] = {}
        if is_backward:
            signature["grad_ptr"] = "*fp32"
        signature |= {"x_ptr": f"*{dtype}", "targets_ptr": "*i64"}
        if is_backward:
            signature |= {"lse_ptr": "*fp32", "dx_ptr": f"*{dtype}", "columns": i32}
            signature |= {"grad_stride": "i32", "stride": i32, "dx_stride": i32}
        else:
            signature["losses_ptr"] = "*fp32"
            if is_forward:
                signature["lse_ptr"] = "*fp32"
            signature |= {"columns": i32, "stride": i32}
        signature |= {"ignore_index": "i32", "smoothing": "fp32", "z_loss": "fp32"}
        signature |= {"WIDTH": 16 // size, "LANES": config.lanes(columns, size)}
        signature["SAME_START" if is_backward else "SMOOTH"] = is_backward
        if is_forward or is_backward:
            signature["BY_COLUMN"] = by_column
        aot_kernels.append(
            TritonAotKernel(
                label=f"{getattr(kernel, '__name__', kernel)}-{dtype}-{columns}" + "-by-column" * by_column,
                kernel=kernel,
                signature=signature,
                num_warps=config.warps,
            )
        )
    return tuple(aot_kernels)


_AOT_SHAPES = (("bf16", 50304), ("bf16", 50257), ("fp32", 4096))
_AOT_SCALE_GRADIENT = TritonAotKernel(
    label="scale_gradient-bf16",
    kernel=kernels.scale_gradient,
    signature={
        "x_ptr": "*fp32",
        "grad_ptr": "*fp32",
        "out_ptr": "*bf16",
        "n": "i32:16",
        "BLOCK": SCALE_BLOCK,
    },
    num_warps=8,
)

_AOT_MEAN = TritonAotKernel(
    label="mean_of_rows",
    kernel=kernels.mean_of_rows,
    signature={
        "losses_ptr": "*fp32",
        "targets_ptr": "*i64",
        "mean_ptr": "*fp32",
        "count_ptr": "*fp32",
        "rows": "i32:16",
        "ignore_index": "i32",
        "BLOCK": MEAN_BLOCK,
    },
    num_warps=8,
)

CROSS_ENTROPY = with_invariant(
    Implementation(
        operator="cross_entropy",
        backend="triton",
        forward=cross_entropy_forward,
        backward=cross_entropy_backward,
        supports=supports_cross_entropy,
        aot_kernels=(
            *_aot_row_kernels(kernels.cross_entropy_forward, _AOT_SHAPES),
            *_aot_row_kernels(kernels.cross_entropy_backward, _AOT_SHAPES),
            *_aot_row_kernels(kernels.cross_entropy_forward, _AOT_SHAPES[1:2], by_column=True),
            *_aot_row_kernels(kernels.cross_entropy_backward, _AOT_SHAPES[1:2], by_column=True),
            _AOT_MEAN,
        ),
        idea="a program a row, maxima and sums online",
    ),
    forward=partial(cross_entropy_forward, by_column=True),
    backward=partial(cross_entropy_backward, by_column=True),
)

LINEAR_CROSS_ENTROPY = Implementation(
    operator="linear_cross_entropy",
    backend="triton",
    forward=linear_cross_entropy_forward,
    backward=linear_cross_entropy_backward,
    supports=supports_linear_cross_entropy,
    aot_kernels=(*_aot_row_kernels(kernels.cross_entropy_fused, _AOT_SHAPES), _AOT_SCALE_GRADIENT),
    wraps_library="cublas",
    idea="chunks of rows; the loss and its gradient in place",
)
