"""The norms in Triton: launch configurations, host code and one implementation for each norm.

A program reads whole rows once. The gradients of weight and bias come from persistent programs that keep
column sums in registers. Rows too long for a program are read several times; see triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.machine.device_limits import num_sms
from weft.ops._common.elementwise_triton import SHIPPED as ELEMENTWISE_CONFIGS
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.layout import contiguous_like, view_2d
from weft.ops._common.philox import seed_words
from weft.ops._common.philox_dropout import drops_all, keep_scale, threshold_int32
from weft.ops._common.philox_dropout_triton import dropout
from weft.ops.norms import spec
from weft.ops.norms import triton_kernels as kernels
from weft.ops.norms.repeated import RepeatedNorms

MAX_PERSISTENT_COLUMNS = 8192  # up to which a program of the backward keeps the weights' gradients
# In the interpreter: few programs, so that each takes several tiles.
INTERPRETED_PROGRAMS = 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """Layout of rows on programs.

    A program holds ``block`` columns at once, a power of two; a longer row takes several passes. A program
    takes ``rows`` rows at a time. In the backward an SM holds ``programs`` persistent programs with
    ``stages`` tiles in flight; 0 launches one program for each row.
    """

    block: int
    rows: int = 1
    warps: int = 4
    programs: int = 0
    stages: int = 1


@cache
def configure(columns: int) -> Config:
    """Return the forward's configuration: 32 elements a thread, which was best for softmax on an H200."""
    block = max(16, triton.next_power_of_2(columns))
    if block <= 2048:
        return Config(block=block, rows=max(1, 1024 // block), warps=max(1, block // 1024))
    if block <= 32768:
        return Config(block=block, warps=min(32, block // 1024))
    return Config(block=16384, warps=32)


@cache
def configure_backward(columns: int) -> Config:
    """Return the backward's configuration: 16 or 32 elements a thread of one row, and their columns' sums.

    Of the configurations timed on an H200 it is the fastest for rows of 1024 and of 4096.
    """
    block = max(16, triton.next_power_of_2(columns))
    if block <= MAX_PERSISTENT_COLUMNS:
        warps = max(1, block // 512 if block <= 1024 else max(2, block // 1024))
        rows = max(1, 512 * warps // block)
        return Config(block=block, rows=rows, warps=warps, programs=16 // warps, stages=3)
    if block <= 16384:
        return Config(block=block, warps=16)
    return Config(block=8192, warps=16)


@cache
def configure_dropout_backward(columns: int) -> Config:
    """Return the configuration of the backward with dropout; ``programs`` is 0 for rows too long for it.

    A thread has half the elements that it has without dropout, because random words take registers too: with
    128 registers 16 warps fit an SM, and all persistent programs must be resident at once.
    """
    block = max(16, triton.next_power_of_2(columns))
    warps = max(1, block // 256)
    if warps > 16:
        return Config(block=block)
    rows = max(1, 256 * warps // block)
    return Config(block=block, rows=rows, warps=warps, programs=16 // warps, stages=3)


def forward_candidates(columns: int) -> list[Config]:
    """Return the forward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    configs = [
        Config(block=block, rows=rows, warps=warps)
        for warps in (1, 2, 4, 8, 16, 32)
        for rows in (1, 2, 4)
        if 4 <= block * rows // (32 * warps) <= 64 and (rows == 1 or block <= 4096)
    ]
    return configs + [Config(block=b, warps=b // 512) for b in (4096, 8192, 16384) if b < columns]


def backward_candidates(columns: int) -> list[Config]:
    """Return the backward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    if block > MAX_PERSISTENT_COLUMNS:
        one_pass = [Config(block=block, warps=w) for w in (16, 32)] if block <= 16384 else []
        return one_pass + [Config(block=8192, warps=w) for w in (8, 16)]
    return [
        Config(block=block, rows=rows, warps=warps, programs=programs, stages=stages)
        for warps in (1, 2, 4, 8, 16)
        for rows in (1, 2, 4, 8)
        for programs in (1, 2, 3, 4, 6, 8, 12)
        for stages in (1, 2, 3)
        if 8 <= block // (32 * warps) <= 32
        and 1024 <= block * rows <= 8192
        and 12 <= programs * warps <= 48
        and programs * stages * block * rows * 4 <= 200 * 1024
    ]


REPEATED = RepeatedNorms()


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s). Without ``residual`` s is x; without ``bias`` the norm is RMS norm."""
    key = None
    if config is None:
        outputs = REPEATED.forward(x, residual, weight, bias, eps)
        if outputs is not None:
            return outputs
        key = REPEATED.forward_key(x, residual, weight, bias, eps)
    y = contiguous_like(x)
    s = torch.empty_like(y) if residual is not None else x
    if x.numel() == 0:
        return y, s
    x2d = view_2d(x)
    rows, columns = x2d.shape
    residual2d = x2d if residual is None else view_2d(residual)
    weight = weight.contiguous()
    config = config or configure(columns)
    options: dict[str, Any] = {"BLOCK": config.block, "num_warps": config.warps}
    options |= {"CENTRED": bias is not None, "RESIDUAL": residual is not None}
    tensors = (x2d, residual2d, weight, weight if bias is None else bias.contiguous(), y, s)
    strides = (x2d.stride(0), residual2d.stride(0))
    if config.block < columns:
        tail: tuple[Any, ...] = (columns, *strides, eps)
        launch = launch_and_prepare(kernels.norm_multi_pass, (rows,), *tensors, *tail, **options)
    else:
        grid, tail = (triton.cdiv(rows, config.rows),), (rows, columns, *strides, eps)
        launch = launch_and_prepare(kernels.norm_tile, grid, *tensors, *tail, ROWS=config.rows, **options)
    REPEATED.store_forward(key, launch)
    return y, s


def launch_backward(
    grad: torch.Tensor,
    grad_s: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool,
    config: Config | None = None,
    shares: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx, dresidual, dweight, dbias); ``x`` is the normalised tensor, which is s with a residual.

    With ``grad_s``, the gradient of s, dresidual is a copy of dx in memory of its own; otherwise, and if it
    ``shares`` that memory, it is dx.
    dbias is dweight unless ``centred``.
    """
    key = None
    if config is None:
        key = REPEATED.backward_key(grad, grad_s, x, weight, eps, centred, shares)
    gradients = REPEATED.backward(key, grad, grad_s, x, weight, centred, shares)
    if gradients is not None:
        return gradients
    rows_launch = None
    dx = contiguous_like(x)
    dr = torch.empty_like(dx) if grad_s is not None and not shares else dx
    dw = contiguous_like(weight)
    db = torch.empty_like(dw) if centred else dw
    if x.numel() == 0:
        return dx, dr, dw.zero_(), db.zero_()
    x2d, grad2d = view_2d(x), view_2d(grad)
    grad_s2d = grad2d if grad_s is None else view_2d(grad_s)
    rows, columns = x2d.shape
    config = config or configure_backward(columns)
    tensors = (grad2d, grad_s2d, x2d, weight.contiguous(), dx, dr)
    strides = (grad2d.stride(0), grad_s2d.stride(0), x2d.stride(0))
    options: dict[str, Any] = {"BLOCK": config.block, "num_warps": config.warps}
    residual = kernels.SHARED.value if shares else 1
    options |= {"CENTRED": centred, "RESIDUAL": 0 if grad_s is None else residual}
    if config.programs:
        parts = min(triton.cdiv(rows, config.rows), _resident_programs(config, x.device))
        partials = _float32((1 + centred, parts, columns), x.device)
        rows_launch = launch_and_prepare(
            kernels.norm_backward_persistent, (parts,), *tensors, partials, rows, columns, *strides, eps,
            ROWS=config.rows, STAGES=config.stages, **options,
        )  # fmt: skip
    else:
        statistics = _float32((rows, 2), x.device)
        one_pass = config.block >= columns
        kernel = kernels.norm_backward_row if one_pass else kernels.norm_backward_multi_pass
        kernel[(rows,)](*tensors, statistics, columns, *strides, eps, **options)
        blocks = triton.cdiv(columns, 512)
        parts = min(triton.cdiv(rows, 8), max(1, 8 * num_sms(x.device) // blocks))
        partials = _float32((1 + centred, parts, columns), x.device)
        kernels.norm_weight_partials[(blocks, parts)](
            grad2d, x2d, statistics, partials, rows, columns, strides[0], strides[2],
            BLOCK=512, ROWS=8, CENTRED=centred,
        )  # fmt: skip
    sum_launch = launch_and_prepare(
        kernels.norm_sum_partials, (triton.cdiv(columns, 32), 1 + centred),
        partials, dw, db, parts, columns, BLOCK=32, TILE_ROWS=64, num_warps=8,
    )  # fmt: skip
    REPEATED.store_backward(key, rows_launch, sum_launch, partials)
    return dx, dr, dw, db


def _float32(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _resident_programs(config: Config, device: torch.device) -> int:
    return INTERPRETED_PROGRAMS if device.type == "cpu" else config.programs * num_sms(device)


def dropout_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s). Rows above 32768 columns take two kernels, dropout and the norm."""
    columns = x.shape[-1]
    config = configure(columns)
    if config.block < columns or drops_all(p):
        dropped = dropout(ELEMENTWISE_CONFIGS[x.element_size()], x, p, seed)
        return launch_forward(dropped, residual, weight, bias, eps)
    y, s = contiguous_like(x), contiguous_like(x)
    if not x.numel():
        return y, s
    x2d, residual2d = view_2d(x), view_2d(residual)
    rows = x2d.shape[0]
    kernels.dropout_norm_tile[(triton.cdiv(rows, config.rows),)](
        x2d, residual2d, weight.contiguous(), bias.contiguous(), y, s, rows, columns,
        x2d.stride(0), residual2d.stride(0), eps, *seed_words(seed), threshold_int32(p), keep_scale(p),
        BLOCK=config.block, ROWS=config.rows, EIGHT=columns % 8 == 0, num_warps=config.warps,
    )  # fmt: skip
    return y, s


def dropout_backward(
    grad: torch.Tensor,
    grad_s: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
    config: Config | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (dx, dresidual, dweight, dbias). Rows above 4096 columns take the norm and then dropout."""
    columns = s.shape[-1]
    config = config or configure_dropout_backward(columns)
    if not s.numel() or not config.programs or drops_all(p):
        _, dr, dw, db = launch_backward(grad, grad_s, s, weight, eps, centred=True)
        return dropout(ELEMENTWISE_CONFIGS[s.element_size()], dr, p, seed), dr, dw, db
    s, weight = s.contiguous(), weight.contiguous()
    dx, dr = torch.empty_like(s), torch.empty_like(s)
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    grad2d, grad_s2d = view_2d(grad), view_2d(grad_s)
    rows, columns = grad2d.shape
    parts = min(triton.cdiv(rows, config.rows), config.programs * num_sms(s.device))
    partials = _float32((2, parts, columns), s.device)
    kernels.dropout_norm_backward[(parts,)](
        grad2d, grad_s2d, s, weight, dx, dr, partials, rows, columns, grad2d.stride(0),
        grad_s2d.stride(0), eps, *seed_words(seed), threshold_int32(p), keep_scale(p),
        BLOCK=config.block, ROWS=config.rows, STAGES=config.stages, EIGHT=columns % 8 == 0,
        num_warps=config.warps,
    )  # fmt: skip
    sum_columns = 16 if columns <= 2048 else 32  # narrower blocks, so that short rows fill the SMs
    kernels.norm_sum_partials[(triton.cdiv(columns, sum_columns), 2)](
        partials, dw, db, parts, columns, BLOCK=sum_columns, TILE_ROWS=64, num_warps=8
    )
    return dx, dr, dw, db


def _aot_kernel(kernel: Any, config: Config, dtype: str, label: int, **constants: Any) -> TritonAotKernel:
    types: dict[str, Any] = {"eps": "fp32", "partials_ptr": "*fp32", "statistics_ptr": "*fp32"}
    types |= {"keep_scale": "fp32", **dict.fromkeys(("low", "high", "limit"), "i32")}
    types["rows"] = "i32"
    integers = ("columns", "x_stride", "r_stride", "g_stride", "grad_s_stride")
    types |= dict.fromkeys(integers, "i32:16")
    types |= {"BLOCK": config.block, "ROWS": config.rows, "STAGES": config.stages, **constants}
    return TritonAotKernel(
        label=f"{kernel.__name__}-{dtype}-{label}",
        kernel=kernel,
        signature={name: types.get(name, f"*{dtype}") for name in kernel.arg_names},
        num_warps=config.warps,
    )


def _aot_kernels(norm: spec.NormVariant) -> tuple[TritonAotKernel, ...]:
    """Return what ships for rows of 1024 and 4096 in bf16, of 4096 in fp32, and the last kernel."""
    constants = {"CENTRED": norm.centred, "RESIDUAL": norm.residual}
    aot_kernels = []
    for dtype, columns in (("bf16", 1024), ("bf16", 4096), ("fp32", 4096)):
        for kernel, config in (
            (kernels.norm_tile, configure(columns)),
            (kernels.norm_backward_persistent, configure_backward(columns)),
        ):
            aot_kernels.append(_aot_kernel(kernel, config, dtype, config.block, **constants))
    sum_partials = TritonAotKernel(
        label="norm_sum_partials-bf16",
        kernel=kernels.norm_sum_partials,
        signature={
            **dict.fromkeys(("partials_ptr", "dw_ptr", "db_ptr"), "*bf16"), "partials_ptr": "*fp32",
            "parts": "i32:16", "columns": "i32:16", "BLOCK": 32, "TILE_ROWS": 64,
        },
        num_warps=8,
    )  # fmt: skip
    return (*aot_kernels, sum_partials)


def _dropout_aot_kernels() -> tuple[TritonAotKernel, ...]:
    """Return what ships for rows of 1024 and 4096 in bf16 and of 1024 in fp32."""
    shapes = (("bf16", 1024), ("bf16", 4096), ("fp32", 1024))
    choices = (
        (kernels.dropout_norm_tile, configure),
        (kernels.dropout_norm_backward, configure_dropout_backward),
    )
    return tuple(
        _aot_kernel(kernel, choose(columns), dtype, columns, EIGHT=True)
        for kernel, choose in choices
        for dtype, columns in shapes
    )


def _implementation(norm: spec.NormVariant) -> Implementation:
    def forward(*inputs: torch.Tensor, eps: float) -> Any:
        y, s = launch_forward(*norm.unpack_inputs(inputs), eps)
        return (y, s) if norm.residual else y

    def backward(*tensors: torch.Tensor, eps: float, shares: bool = False) -> tuple[torch.Tensor, ...]:
        gradients = launch_backward(*norm.unpack_backward(tensors), eps, norm.centred, shares=shares)
        return norm.select_gradients(*gradients)

    def forward_invariant(*inputs: torch.Tensor, eps: float) -> Any:
        x, residual, weight, bias = norm.unpack_inputs(inputs)
        y, s = launch_forward(aligned_rows(x), aligned_rows(residual), weight, bias, eps)
        return (y, s) if norm.residual else y

    def backward_invariant(
        *tensors: torch.Tensor, eps: float, shares: bool = False
    ) -> tuple[torch.Tensor, ...]:
        grad, grad_s, x, weight = norm.unpack_backward(tensors)
        rows = (aligned_rows(grad), aligned_rows(grad_s), aligned_rows(x))
        gradients = launch_backward(*rows, weight, eps, norm.centred, shares=shares)
        return norm.select_gradients(*gradients)

    implementation = Implementation(
        operator=norm.name,
        backend="triton",
        forward=dropout_forward if norm.dropout else forward,
        backward=dropout_backward if norm.dropout else norm.add_shared(backward),
        aot_kernels=_dropout_aot_kernels() if norm.dropout else _aot_kernels(norm),
        idea="whole rows in one program, read once; the weights' gradients by persistent programs",
    )
    # Dropout keeps an element by its position in the batch: no row of it is invariant.
    if norm.dropout:
        return implementation
    return with_invariant(
        implementation, forward=forward_invariant, backward=norm.add_shared(backward_invariant)
    )


LAYER_NORM = _implementation(spec.LAYER_NORM_VARIANT)
RMS_NORM = _implementation(spec.RMS_NORM_VARIANT)
ADD_LAYER_NORM = _implementation(spec.ADD_LAYER_NORM_VARIANT)
ADD_RMS_NORM = _implementation(spec.ADD_RMS_NORM_VARIANT)
DROPOUT_ADD_LAYER_NORM = _implementation(spec.DROPOUT_VARIANT)
