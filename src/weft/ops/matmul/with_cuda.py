"""The matrix product in CUDA C++: float32 by fma, all else by tensor cores; see the two .cu files.

Operands are read as they are stored: each order of strides is a variant of its program, and a third
and fourth take any strides and alignment, one element at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft import machine
from weft.backends.nvrtc import CudaSource
from weft.core import Implementation

TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """``warps_m x warps_n`` warps a block, each with ``wm x wn`` of c; ``stages`` tiles of K.

    ``blocks`` is how many blocks a multiprocessor is meant to hold, which bounds the registers.
    """

    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    wm: int = 64
    wn: int = 64

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) of c a block."""
        return self.warps_m * self.wm, self.warps_n * self.wn


def _fma(warps_m: int, warps_n: int, stages: int, blocks: int) -> Config:
    return Config(warps_m=warps_m, warps_n=warps_n, stages=stages, blocks=blocks, wm=64, wn=32)


def _mma(
    warps_m: int, warps_n: int, stages: int, blocks: int, wm: int = 64, wn: int = 64
) -> Config:
    return Config(warps_m=warps_m, warps_n=warps_n, stages=stages, blocks=blocks, wm=wm, wn=wn)


# In the order of promise. SHIPPED: the first whose least count of 128 x 128 tiles a product has.
FMA_CANDIDATES = (
    _fma(2, 4, 3, 2),
    _fma(2, 4, 4, 2),
    _fma(4, 4, 3, 1),
    _fma(2, 2, 3, 4),
    _fma(4, 2, 3, 2),
    _fma(1, 2, 3, 6),
)
MMA_CANDIDATES = (
    _mma(2, 2, 3, 2),
    _mma(2, 4, 4, 1),
    _mma(4, 2, 4, 1),
    _mma(2, 4, 3, 1),
    _mma(2, 4, 3, 1, 64, 32),
    _mma(2, 4, 4, 1, 64, 32),
    _mma(2, 4, 4, 1, 32, 64),
    _mma(2, 2, 4, 2, 64, 32),
    _mma(2, 2, 3, 3, 32, 32),
)
SHIPPED = {
    "ieee": ((64, _fma(2, 4, 3, 2)), (0, _fma(1, 2, 3, 6))),
    "tf32": ((32, _mma(2, 4, 3, 1, 64, 32)), (0, _mma(2, 2, 3, 3, 32, 32))),
    "half": ((128, _mma(4, 2, 4, 1)), (32, _mma(2, 2, 3, 2)), (0, _mma(2, 2, 3, 3, 32, 32))),
}


def CANDIDATES(dtype: torch.dtype, precision: str = "ieee") -> tuple[Config, ...]:
    """The configurations worth timing for a dtype and precision."""
    return FMA_CANDIDATES if _arithmetic(dtype, precision) == "ieee" else MMA_CANDIDATES


def _arithmetic(dtype: torch.dtype, precision: str) -> str:
    return precision if dtype == torch.float32 else "half"


@cache
def source(kind: str, dtype: torch.dtype, config: Config, a_mode: int, b_mode: int) -> CudaSource:
    """One program: its tile, element type and the order in which its operands are stored."""
    defines = {
        "WEFT_T": TYPES[dtype],
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "STAGES": config.stages,
        "BLOCKS": config.blocks,
        "A_MODE": a_mode,
        "B_MODE": b_mode,
    }
    if kind == "mma":
        defines |= {"WM": config.wm, "WN": config.wn}
    named = str(dtype).removeprefix("torch.")
    rows, columns = config.tile
    return CudaSource(
        file=Path(__file__).with_name("matmul_fp32.cu" if kind == "fma" else "matmul_mma.cu"),
        kernels=("matmul",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"{kind}-{named}-{rows}x{columns}x{config.stages}-{a_mode}{b_mode}",
    )


def _shared_bytes(kind: str, config: Config) -> int:
    rows, columns = config.tile
    if kind == "mma":
        return config.stages * 128 * (rows + columns)
    return config.stages * 16 * (rows + columns + 8) * 4


def _mode(kind: str, x: torch.Tensor, k_stride: int, stride: int) -> int:
    """How the kernel reads an operand: the numbers of ``Mode`` in its .cu file."""
    aligned = x.data_ptr() % 16 == 0
    by_k = k_stride == 1 and aligned and stride * x.element_size() % 16 == 0
    across = stride == 1 and aligned and k_stride * x.element_size() % 16 == 0
    if kind == "fma":  # 0: K fastest, 1: the other dimension, 2: that in groups of 16 bytes
        return 2 if across else 0 if k_stride <= stride else 1
    return 0 if by_k else 1 if across else 2 if k_stride <= stride else 3


def forward_with(
    config: Config, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    """a (M, K) @ b (K, N) by one configuration; M, N and K may be 0."""
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    kind = "fma" if _arithmetic(a.dtype, precision) == "ieee" else "mma"
    a_mode = _mode(kind, a, a.stride(1), a.stride(0))
    b_mode = _mode(kind, b, b.stride(0), b.stride(1))
    rows, columns = config.tile
    together = 4 if kind == "fma" else 2
    wide = n % together == 0 and c.data_ptr() % (together * c.element_size()) == 0
    source(kind, a.dtype, config, a_mode, b_mode)["matmul"](
        -(-m // rows) * -(-n // columns),
        config.threads,
        a,
        b,
        c,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        int(wide),
        shared=_shared_bytes(kind, config),
    )
    return c


@cache
def _room(kind: str) -> float:
    """Bytes of shared memory that a block may have; no limit where nothing is launched (meta)."""
    known = machine.query("cuda").shared_per_block_optin if kind == "cuda" else None
    return known or float("inf")


def choose(a: torch.Tensor, b: torch.Tensor, precision: str) -> Config:
    """The configuration shipped for a product of this size and dtype, of those that the device has
    the shared memory for: the widest tile takes 192 KiB, and an sm_80 gives a block 163."""
    tiles = -(-a.shape[0] // 128) * -(-b.shape[1] // 128)
    kind = "fma" if (arithmetic := _arithmetic(a.dtype, precision)) == "ieee" else "mma"
    room = _room(a.device.type)
    return next(
        config
        for least, config in SHIPPED[arithmetic]
        if tiles >= least and _shared_bytes(kind, config) <= room
    )


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return forward_with(choose(a, b, precision), a, b, precision=precision)


def backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    """da = grad @ b^T and db = a^T @ grad: views, read by the kernels as they are stored."""
    return (
        forward(grad, b.t(), precision=precision),
        forward(a.t(), grad, precision=precision),
    )


def _specimens() -> tuple[CudaSource, ...]:
    """Forward, both products of a backward, and any strides, for each program shipped."""
    found = []
    for dtype in TYPES:
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
            kind = "fma" if _arithmetic(dtype, precision) == "ieee" else "mma"
            large, *rest = (config for _, config in SHIPPED[_arithmetic(dtype, precision)])
            row_major = (0, 2) if kind == "fma" else (0, 1)
            others = ((0, 0), (2, 2), (1, 1)) if kind == "fma" else ((0, 0), (1, 1), (2, 3))
            found += [source(kind, dtype, large, *modes) for modes in (row_major, *others)]
            found += [source(kind, dtype, config, *row_major) for config in rest]
    return tuple(found)


IMPLEMENTATION = Implementation(
    operator="matmul",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=_specimens(),
    idea="asynchronous copies ahead, 8 x 8 of c a thread (fma) or 64 x 64 a warp (mma.sync)",
)
