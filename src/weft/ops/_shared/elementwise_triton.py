"""Elementwise kernels in Triton: how they are laid on programs, and activations in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.backends.triton_jit import TritonSpecimen, tl, triton

KINDS = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Config:
    """``block`` elements a program, computed by ``warps`` warps."""

    block: int
    warps: int


CANDIDATES = tuple(Config(b, w) for b in (1024, 2048, 4096) for w in (2, 4, 8))
# By item size: one 16-byte vector a thread and tensor, many small programs, which gelu found best.
SHIPPED = {2: Config(block=1024, warps=4), 4: Config(block=1024, warps=8)}


@triton.jit
def silu(x):
    """(x s, its slope) with s = sigmoid(x), by one exponential; x is float32."""
    e = tl.exp(-x)
    s = 1.0 / (1.0 + e)
    # 1 - s loses its digits where s nears 1; there e s has them all.
    rest = tl.where(s < 0.5, 1.0 - s, e * s)
    return x * s, s * (1.0 + x * rest)


@triton.jit
def gelu(x):
    """(x s, its slope) with s = sigmoid(2u): GELU's tanh form, with nothing that overflows."""
    e = tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    s = 1.0 / (1.0 + e)
    rest = tl.where(s < 0.5, 1.0 - s, e * s)
    # x^2 is held finite so that 0 * inf makes no NaN of a gradient that is plainly 0 or 1.
    inner = 1.5957691216057308 * (1.0 + 0.134145 * tl.minimum(x * x, 1e30))
    return x * s, s + x * s * rest * inner


def specimens(
    kernels: Mapping[Any, tuple[str, ...]], scalars: Mapping[str, Any] | None = None
) -> tuple[TritonSpecimen, ...]:
    """What ships of elementwise kernels, each with its pointers: in float32 and bfloat16."""
    return tuple(
        TritonSpecimen(
            label=f"{kernel.__name__}-{kind}",
            kernel=kernel,
            signature={
                **dict.fromkeys(pointers, f"*{kind}"),
                "n": "i32:16",
                **(scalars or {}),
                "BLOCK": SHIPPED[size].block,
            },
            num_warps=SHIPPED[size].warps,
        )
        for kernel, pointers in kernels.items()
        for kind, size in KINDS.items()
    )
