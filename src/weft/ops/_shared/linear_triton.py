"""Launching the linear operators' Triton product: what is chosen, and what compiles with no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import INTERPRETED, TritonSpecimen, triton
from weft.ops._shared import linear_kernels as kernels
from weft.ops._shared.linear_columns import math_for, multiprocessors
from weft.ops._shared.linear_configs import (
    DIRECT,
    GELU_KEEP,
    INTERPRETED_DESCRIPTORS,
    MATHS,
    RESIDUAL,
    SHIPPED,
    SINGLE,
    Config,
)
from weft.ops._shared.linear_spec import Operands, pitch_of, rows_of

GLUON_KNOWN = (3, 6)  # experimental: its names may change with the next
DESCRIPTOR_ARCH = 90  # the first with the copy engine that reads tensor descriptors


def choose(
    epilogue: int, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> Config:
    """The configuration shipped for a product of this size, dtype and memory; x is (M, K)."""
    fits = _descriptors_fit(x, weight, residual)
    if INTERPRETED and fits:
        return INTERPRETED_DESCRIPTORS
    if x.dtype == torch.float32:
        return SINGLE
    tiles = triton.cdiv(x.shape[0], 128) * triton.cdiv(weight.shape[0], 128)
    chosen = next(
        config
        for least, config in SHIPPED[epilogue]
        if tiles >= least and (not config.turns or _takes_turns(x.device))
    )
    if chosen.descriptors and not fits:
        chosen = next(config for least, config in DIRECT if tiles >= least)
    return chosen


def _descriptors_fit(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether device, addresses and strides let the copy engine move all but the bias."""
    if weight.shape[0] * weight.element_size() % 16 or 0 in x.shape:
        return False
    if not all(_regular(t) for t in (x, weight, residual) if t is not None):
        return False
    return INTERPRETED or _copies_tiles(x.device)


def _regular(x: torch.Tensor) -> bool:
    """Rows of neighbouring elements, a multiple of 16 bytes apart, no two overlapping."""
    down, across = x.stride()
    aligned = x.data_ptr() % 16 == 0 and down * x.element_size() % 16 == 0
    return across == 1 and down >= x.shape[1] and aligned


@cache
def _gluon() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) == GLUON_KNOWN


@cache
def _takes_turns(device: torch.device) -> bool:
    """Whether the device has the instructions of linear_turns.py, and this Triton its Gluon."""
    return _gluon() and not INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _copies_tiles(device: torch.device) -> bool:
    """Whether the device has the copy engine, and room for the tiles in flight."""
    major, minor = torch.cuda.get_device_capability(device)
    held = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return major * 10 + minor >= DESCRIPTOR_ARCH and held["max_shared_mem"] >= 227 * 1024


def product(
    epilogue: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y (..., N) of x (..., K), weight (N, K), bias (N,), and what GELU_KEEP keeps; any may be 0.

    ``config`` None is the one shipped for these sizes.
    """
    shape = (*x.shape[:-1], weight.shape[0])
    lines = rows_of(x)
    y = x.new_empty(shape)
    pre = x.new_empty(shape) if epilogue == GELU_KEEP else None
    if y.numel() == 0:
        return y, pre
    if residual is not None:
        residual = rows_of(residual)
    config = config or choose(epilogue, lines, weight, residual)
    math = _math(config, x.dtype)
    launch = _launcher(config)
    launch(config, epilogue, math, Operands(lines, weight, bias.contiguous(), residual, y, pre))
    return y, pre


def _launcher(config: Config) -> Callable[..., None]:
    if config.turns:
        from weft.ops._shared.linear_turns import launch

        return launch
    return _by_descriptors if config.descriptors else _by_pointers


def _math(config: Config, dtype: torch.dtype) -> int:
    """The arithmetic of GELU: the configuration's where the special-function unit serves.

    The unit's tanh errs by 2^-11, under half of bfloat16's last place; float16's is as small.
    """
    usual = math_for(dtype)
    if usual != kernels.UNIT.value or (config.math == "tanh" and dtype == torch.float16):
        return usual
    return MATHS[config.math]


def _by_descriptors(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    x, weight, bias, residual, y, pre = operands
    (m, k), n = x.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    programs = min(tiles, config.resident * multiprocessors(x.device))
    part = config.bn // config.parts
    kernels.linear_descriptors[(programs,)](
        _descriptor(x, m, config.bm, config.bk),
        _descriptor(weight, n, config.bn, config.bk),
        bias,
        None if residual is None else _descriptor(residual, m, config.bm, part),
        _descriptor(y, m, config.bm, part),
        pre if pre is None or config.aside else _descriptor(pre, m, config.bm, part),
        m,
        n,
        k,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        PARTS=config.parts,
        FLATTEN=config.flatten,
        BRING=config.bring and math != kernels.PLAIN.value,
        ASIDE=config.aside,
        EPILOGUE=epilogue,
        MATH=math,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _descriptor(x: torch.Tensor, rows: int, block_rows: int, block_columns: int) -> Any:
    """A descriptor of x, (..., C) with rows a pitch apart, in blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [rows, x.shape[-1]], [pitch_of(x), 1], [block_rows, block_columns])


def _by_pointers(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    x, weight, bias, residual, y, pre = operands
    (m, k), n = x.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    strides = (0, 1) if residual is None else residual.stride()
    kernels.linear_pointers[(tiles,)](
        x,
        weight,
        bias,
        residual,
        y,
        pre,
        m,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        *strides,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        GROUP=config.group,
        EPILOGUE=epilogue,
        MATH=math,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def specimens(epilogue: int) -> tuple[TritonSpecimen, ...]:
    """The product as shipped for large and small half types, by pointers, and float32."""
    half = list(dict.fromkeys(c for _, c in SHIPPED[epilogue] + DIRECT))
    found = [_specimen(c, epilogue, "bf16") for c in half if not c.turns]
    if any(c.turns for c in half) and _gluon():
        from weft.ops._shared.linear_turns import specimen

        found += [specimen(c, epilogue, _math(c, torch.bfloat16)) for c in half if c.turns]
    return (*found, _specimen(SINGLE, epilogue, "fp32"))


def _specimen(config: Config, epilogue: int, dtype: str) -> TritonSpecimen:
    """What a product of sizes divisible by 16 compiles."""
    bm, bn, bk = config.bm, config.bn, config.bk
    residual, kept = epilogue == RESIDUAL, epilogue == GELU_KEEP
    signature: dict[str, object]
    if config.descriptors:

        def blocks(rows: int, columns: int) -> str:
            return f"tensordesc<{dtype}[{rows}, {columns}]>"

        part = blocks(bm, bn // config.parts)
        signature = {
            "x_desc": blocks(bm, bk),
            "weight_desc": blocks(bn, bk),
            "residual_desc": part if residual else None,
            "y_desc": part,
            "pre": (f"*{dtype}" if config.aside else part) if kept else None,
            "PARTS": config.parts,
            "FLATTEN": config.flatten,
            "BRING": config.bring,
            "ASIDE": config.aside,
        }
        kernel = kernels.linear_descriptors
    else:
        pointer = f"*{dtype}"
        signature = {f"{name}_ptr": pointer for name in ("x", "weight", "y")}
        signature |= {"residual_ptr": pointer if residual else None}
        signature |= {"pre_ptr": pointer if kept else None}
        signature |= {"x_row": "i32:16", "x_column": 1, "w_row": "i32:16", "w_column": 1}
        signature |= {"r_row": "i32:16", "r_column": 1}
        kernel = kernels.linear_pointers
    signature |= {"bias_ptr": f"*{dtype}", **dict.fromkeys("mnk", "i32:16")}
    signature |= {"BM": bm, "BN": bn, "BK": bk, "GROUP": config.group, "EPILOGUE": epilogue}
    signature["MATH"] = _math(config, torch.float32 if dtype == "fp32" else torch.bfloat16)
    way = "descriptors" if config.descriptors else "pointers"
    return TritonSpecimen(
        label=f"{dtype}-{bm}x{bn}x{config.stages}-{config.warps}-{way}-{epilogue}",
        kernel=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=DESCRIPTOR_ARCH if config.descriptors else 80,
    )
