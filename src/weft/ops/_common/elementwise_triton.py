"""Elementwise kernels in Triton: launch configurations, and activations with their slopes in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.backends.triton_jit import TritonAotKernel, tl, triton

ITEM_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
AOT_DTYPES = ("fp32", "bf16")  # fp16 compiles to the code of bf16, apart from the conversions


@dataclass(frozen=True)
class Config:
    """``block`` elements for each program, computed by ``warps`` warps."""

    block: int
    warps: int


# By item size: one 16-byte vector a thread and tensor, in many small programs, as in GELU's sweep
# (docs/log.md, 2026-11-20).
SHIPPED = {2: Config(block=1024, warps=4), 4: Config(block=1024, warps=8)}


@triton.jit
def silu(x):
    """Return x s and its slope with s = sigmoid(x), from one exponential; x is float32."""
    e = tl.exp(-x)
    s = 1.0 / (1.0 + e)
    # 1 - s loses its digits where s is near 1; e s is exact there.
    one_minus_s = tl.where(s < 0.5, 1.0 - s, e * s)
    return x * s, s * (1.0 + x * one_minus_s)


@triton.jit
def gelu(x):
    """Return x s and its slope with s = sigmoid(2u): GELU's tanh form without an overflow."""
    e = tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    s = 1.0 / (1.0 + e)
    one_minus_s = tl.where(s < 0.5, 1.0 - s, e * s)
    # x^2 stays finite: where the slope is 0 or 1, inf would give 0 * inf = NaN.
    inner = 1.5957691216057308 * (1.0 + 0.134145 * tl.minimum(x * x, 1e30))
    return x * s, s + x * s * one_minus_s * inner


def elementwise_aot_kernels(
    kernels: Mapping[Any, tuple[str, ...]],
    scalars: Mapping[str, Any] | None = None,
    dtypes: tuple[str, ...] = AOT_DTYPES,
    configs: Mapping[int, Config] = SHIPPED,
) -> tuple[TritonAotKernel, ...]:
    """Return the shipped variants of elementwise kernels: each kernel, with its pointers, for each dtype."""
    return tuple(
        TritonAotKernel(
            label=f"{kernel.__name__}-{dtype}",
            kernel=kernel,
            signature={
                **dict.fromkeys(pointers, f"*{dtype}"),
                "n": "i32:16",
                **(scalars or {}),
                "BLOCK": configs[ITEM_SIZES[dtype]].block,
            },
            num_warps=configs[ITEM_SIZES[dtype]].warps,
        )
        for kernel, pointers in kernels.items()
        for dtype in dtypes
    )
