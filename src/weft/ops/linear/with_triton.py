"""The linear family in Triton: one product kernel per launch method, one descriptor per member.

The epilogue (bias, GELU, residual) runs on the float32 sums, so that the result is rounded once. A backward
is one pass over the gradient (column_sums.py) and two products of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, triton
from weft.core import Implementation
from weft.machine.device_limits import has_tma, num_sms
from weft.ops._common import gelu_triton
from weft.ops._common.column_sums import aot_column_kernels, column_sums, gelu_math
from weft.ops.linear import triton_kernels as kernels
from weft.ops.linear.configs import (
    BIAS,
    FLOAT32,
    GELU,
    GELU_KEEP,
    INTERPRETED_DESCRIPTORS,
    MATHS,
    RESIDUAL,
    SHIPPED,
    WITHOUT_DESCRIPTORS,
    Config,
)
from weft.ops.linear.products import Operands, backward_products, row_pitch, to_2d

GLUON_VERSION = (3, 6)  # the Triton whose Gluon pingpong.py is written for; the next may rename things
DESCRIPTOR_ARCH = 90  # the first with TMA, which reads tensor descriptors


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return product(BIAS, x, weight, bias)[0]


def linear_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad2d = to_2d(grad)
    dbias, _ = column_sums(grad2d)
    return (*backward_products(grad2d, x, weight), dbias)


def linear_gelu_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    y, pre = product(GELU_KEEP if keep else GELU, x, weight, bias)
    return (y, pre) if keep else y


def linear_gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pre_or_bias: torch.Tensor, *, keep: bool = True
) -> tuple[torch.Tensor, ...]:
    """``pre_or_bias`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = pre_or_bias if keep else product(BIAS, x, weight, pre_or_bias)[0]
    dbias, dpre = column_sums(to_2d(grad), to_2d(pre))
    assert dpre is not None
    return (*backward_products(dpre, x, weight), dbias)


def linear_residual_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return product(RESIDUAL, x, weight, bias, residual)[0]


def linear_residual_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """One pass over the gradient computes dbias and the copy that is returned as dresidual."""
    grad2d = to_2d(grad)
    dbias, dresidual = column_sums(grad2d, copy=True)
    assert dresidual is not None
    return (*backward_products(grad2d, x, weight), dbias, dresidual.view(grad.shape))


def product(
    epilogue: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return y (..., N) of x (..., K), weight (N, K) and bias (N,), and with GELU_KEEP the pre-activation.

    Any size may be 0. ``config`` None is the configuration shipped for these sizes.
    """
    # Leading dimensions are flattened to rows; only strides that no 2-D view has need a copy.
    shape = (*x.shape[:-1], weight.shape[0])
    x2d = to_2d(x)
    y = x.new_empty(shape)
    pre = x.new_empty(shape) if epilogue == GELU_KEEP else None
    if y.numel() == 0:
        return y, pre
    residual2d = None if residual is None else to_2d(residual)
    config = config or choose(epilogue, x2d, weight, residual2d)
    math = _epilogue_math(config, x.dtype)
    launch = _launcher(config)
    launch(config, epilogue, math, Operands(x2d, weight, bias.contiguous(), residual2d, y, pre))
    return y, pre


def choose(epilogue: int, x2d: torch.Tensor, weight: torch.Tensor, residual2d: torch.Tensor | None) -> Config:
    """Return the configuration shipped for a product of this size, dtype and memory layout."""
    descriptors_fit = _descriptors_fit(x2d, weight, residual2d)
    # Small tiles: the interpreter executes every program of the grid in Python.
    if INTERPRETED and descriptors_fit:
        return INTERPRETED_DESCRIPTORS
    if x2d.dtype == torch.float32:
        return FLOAT32
    tiles = triton.cdiv(x2d.shape[0], 128) * triton.cdiv(weight.shape[0], 128)
    chosen = next(
        config
        for least, config in SHIPPED[epilogue]
        if tiles >= least and (not config.pingpong or _runs_pingpong(x2d.device))
    )
    if chosen.descriptors and not descriptors_fit:
        chosen = next(config for least, config in WITHOUT_DESCRIPTORS if tiles >= least)
    return chosen


def _descriptors_fit(x2d: torch.Tensor, weight: torch.Tensor, residual2d: torch.Tensor | None) -> bool:
    """True if device, addresses and strides let TMA move all tensors but the bias."""
    if weight.shape[0] * weight.element_size() % 16 or 0 in x2d.shape:
        return False
    if not all(_has_aligned_rows(t) for t in (x2d, weight, residual2d) if t is not None):
        return False
    return INTERPRETED or has_tma(x2d.device)


def _has_aligned_rows(x2d: torch.Tensor) -> bool:
    """True if rows have adjacent elements, start at multiples of 16 bytes, and do not overlap."""
    row_stride, column_stride = x2d.stride()
    aligned = x2d.data_ptr() % 16 == 0 and row_stride * x2d.element_size() % 16 == 0
    return column_stride == 1 and row_stride >= x2d.shape[1] and aligned


@cache
def _has_gluon() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) == GLUON_VERSION


@cache
def _runs_pingpong(device: torch.device) -> bool:
    """True if the device has the instructions of pingpong.py, and this Triton the Gluon it needs."""
    return _has_gluon() and not INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


def _launcher(config: Config) -> Callable[..., None]:
    if config.pingpong:
        from weft.ops.linear.pingpong import launch

        return launch
    return _launch_by_descriptors if config.descriptors else _launch_by_pointers


def _epilogue_math(config: Config, dtype: torch.dtype) -> int:
    """Return the arithmetic of GELU: the configuration's, where the special-function unit is accurate enough.

    Its tanh errs by 2^-11: less than half of bfloat16's last place, and as much as float16's.
    """
    default = gelu_math(dtype)
    if default != gelu_triton.UNIT.value or (config.math == "tanh" and dtype == torch.float16):
        return default
    return MATHS[config.math]


def _launch_by_descriptors(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    x2d, weight, bias, residual2d, y, pre = operands
    (m, k), n = x2d.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    # Persistent: one wave of programs, each of which takes tile after tile.
    programs = min(tiles, config.programs_per_sm * num_sms(x2d.device))
    part_columns = config.bn // config.parts
    kernels.linear_descriptors[(programs,)](
        _descriptor(x2d, m, config.bm, config.bk),
        _descriptor(weight, n, config.bn, config.bk),
        bias,
        None if residual2d is None else _descriptor(residual2d, m, config.bm, part_columns),
        _descriptor(y, m, config.bm, part_columns),
        pre if pre is None or config.pre_by_pointers else _descriptor(pre, m, config.bm, part_columns),
        m,
        n,
        k,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        PARTS=config.parts,
        FLATTEN=config.flatten,
        # Prefetching is inline assembly, which Triton's interpreter does not run.
        PREFETCH_BIAS=config.prefetch_bias and math != gelu_triton.PLAIN.value,
        PRE_BY_POINTERS=config.pre_by_pointers,
        EPILOGUE=epilogue,
        MATH=math,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _descriptor(x: torch.Tensor, rows: int, block_rows: int, block_columns: int) -> Any:
    """Return a descriptor of x (..., C), whose rows are one pitch apart, in blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [rows, x.shape[-1]], [row_pitch(x), 1], [block_rows, block_columns])


def _launch_by_pointers(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    x2d, weight, bias, residual2d, y, pre = operands
    (m, k), n = x2d.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    # Placeholders: without a residual the kernel does not read them.
    residual_strides = (0, 1) if residual2d is None else residual2d.stride()
    kernels.linear_pointers[(tiles,)](
        x2d,
        weight,
        bias,
        residual2d,
        y,
        pre,
        m,
        n,
        k,
        *x2d.stride(),
        *weight.stride(),
        *residual_strides,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        EPILOGUE=epilogue,
        MATH=math,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def aot_product_kernels(epilogue: int) -> tuple[TritonAotKernel, ...]:
    """Return the products as shipped: large and small half types, by pointers, and float32."""
    configs = list(dict.fromkeys(c for _, c in SHIPPED[epilogue] + WITHOUT_DESCRIPTORS))
    aot_kernels = [_aot_kernel(c, epilogue, "bf16") for c in configs if not c.pingpong]
    if any(c.pingpong for c in configs) and _has_gluon():
        from weft.ops.linear.pingpong import aot_kernel

        pingpong = [c for c in configs if c.pingpong]
        aot_kernels += [aot_kernel(c, epilogue, _epilogue_math(c, torch.bfloat16)) for c in pingpong]
    return (*aot_kernels, _aot_kernel(FLOAT32, epilogue, "fp32"))


def _aot_kernel(config: Config, epilogue: int, dtype: str) -> TritonAotKernel:
    """Return the kernel that a product with sizes divisible by 16 compiles."""
    bm, bn, bk = config.bm, config.bn, config.bk
    has_residual, has_pre = epilogue == RESIDUAL, epilogue == GELU_KEEP
    signature: dict[str, object]
    if config.descriptors:

        def block_type(rows: int, columns: int) -> str:
            return f"tensordesc<{dtype}[{rows}, {columns}]>"

        part_type = block_type(bm, bn // config.parts)
        signature = {
            "x_desc": block_type(bm, bk),
            "weight_desc": block_type(bn, bk),
            "residual_desc": part_type if has_residual else None,
            "y_desc": part_type,
            "pre": (f"*{dtype}" if config.pre_by_pointers else part_type) if has_pre else None,
            "PARTS": config.parts,
            "FLATTEN": config.flatten,
            "PREFETCH_BIAS": config.prefetch_bias,
            "PRE_BY_POINTERS": config.pre_by_pointers,
        }
        kernel = kernels.linear_descriptors
    else:
        pointer = f"*{dtype}"
        signature = {f"{name}_ptr": pointer for name in ("x", "weight", "y")}
        signature |= {"residual_ptr": pointer if has_residual else None}
        signature |= {"pre_ptr": pointer if has_pre else None}
        signature |= {"x_row": "i32:16", "x_column": 1, "w_row": "i32:16", "w_column": 1}
        signature |= {"r_row": "i32:16", "r_column": 1}
        kernel = kernels.linear_pointers
    signature |= {"bias_ptr": f"*{dtype}", **dict.fromkeys("mnk", "i32:16")}
    signature |= {"BM": bm, "BN": bn, "BK": bk, "GROUP": config.group, "EPILOGUE": epilogue}
    signature["MATH"] = _epilogue_math(config, torch.float32 if dtype == "fp32" else torch.bfloat16)
    method = "descriptors" if config.descriptors else "pointers"
    return TritonAotKernel(
        label=f"{dtype}-{bm}x{bn}x{config.stages}-{config.warps}-{method}-{epilogue}",
        kernel=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=DESCRIPTOR_ARCH if config.descriptors else 80,
    )


LINEAR = Implementation(
    operator="linear",
    backend="triton",
    forward=linear_forward,
    backward=linear_backward,
    aot_kernels=(*aot_product_kernels(BIAS), *aot_column_kernels("sum")),
    wraps_library="cublas",
    idea="tensor cores fed by the copy engine, the bias in the epilogue",
)

LINEAR_GELU = Implementation(
    operator="linear_gelu",
    backend="triton",
    forward=linear_gelu_forward,
    backward=linear_gelu_backward,
    aot_kernels=(*aot_product_kernels(GELU_KEEP), *aot_column_kernels("slope")),
    wraps_library="cublas",
    idea="tensor cores fed by the copy engine; bias and GELU while the next tile is multiplied",
)

LINEAR_RESIDUAL = Implementation(
    operator="linear_residual",
    backend="triton",
    forward=linear_residual_forward,
    backward=linear_residual_backward,
    aot_kernels=(*aot_product_kernels(RESIDUAL), *aot_column_kernels("copy")),
    wraps_library="cublas",
    idea="tensor cores fed by the copy engine; bias and residual in the epilogue",
)
