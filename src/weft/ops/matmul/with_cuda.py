"""The matrix product in CUDA C++: float32 by fma, the rest by tensor cores; see the four .cu files.

Programs in ops/_common/products are shared with other operators. Products of half types of at most 64 rows
read the weight once (few_rows.py on Hopper, skinny.py). On Hopper the others, and tf32, go through the copy
engine and wgmma (wgmma.py).

Operands are read as they are stored, except tf32's across K on Hopper, which are transposed first. Each
order of strides is a variant of the program; further variants take any strides and alignment, one element at
a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.machine.device_limits import has_wgmma, smem_per_block
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name
from weft.ops._common.products import few_rows, invariant, skinny, wgmma
from weft.ops.matmul.spec import backward_by


@dataclass(frozen=True, kw_only=True)
class Config:
    """``warps_m x warps_n`` warps per block, each with ``wm x wn`` of c; ``stages`` tiles of K in flight.

    ``blocks`` is the intended number of blocks per SM, which limits the registers of a thread.
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
        """(rows, columns) of c per block."""
        return self.warps_m * self.wm, self.warps_n * self.wn


def _fma(warps_m: int, warps_n: int, stages: int, blocks: int) -> Config:
    return Config(warps_m=warps_m, warps_n=warps_n, stages=stages, blocks=blocks, wm=64, wn=32)


def _mma(warps_m: int, warps_n: int, stages: int, blocks: int, wm: int = 64, wn: int = 64) -> Config:
    return Config(warps_m=warps_m, warps_n=warps_n, stages=stages, blocks=blocks, wm=wm, wn=wn)


# Most promising first. SHIPPED: (least number of 128 x 128 tiles, configuration), the first that fits wins.
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
    """Return the configurations worth timing for a dtype and precision."""
    return FMA_CANDIDATES if _arithmetic(dtype, precision) == "ieee" else MMA_CANDIDATES


def _arithmetic(dtype: torch.dtype, precision: str) -> str:
    return precision if dtype == torch.float32 else "half"


@cache
def source(kind: str, dtype: torch.dtype, config: Config, a_mode: int, b_mode: int) -> CudaSource:
    """Return one program: a tile, an element type, and the storage orders of both operands."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "STAGES": config.stages,
        "BLOCKS": config.blocks,
        "A_MODE": a_mode,
        "B_MODE": b_mode,
    }
    if kind == "mma":
        defines |= {"WM": config.wm, "WN": config.wn}
    named = dtype_name(dtype)
    rows, columns = config.tile
    return CudaSource(
        file=Path(__file__).with_name("matmul_fp32.cu" if kind == "fma" else "matmul_mma.cu"),
        kernels=("matmul",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"{kind}-{named}-{rows}x{columns}x{config.stages}-{a_mode}{b_mode}",
    )


def _smem_bytes(kind: str, config: Config) -> int:
    rows, columns = config.tile
    if kind == "mma":
        return config.stages * 128 * (rows + columns)
    return config.stages * 16 * (rows + columns + 8) * 4


def _mode(kind: str, x: torch.Tensor, k_stride: int, stride: int) -> int:
    """Return how the kernel reads an operand: the numbers of ``Mode`` in its .cu file."""
    if kind == "mma":
        return skinny.storage_mode(x, k_stride, stride)
    across = stride == 1 and x.data_ptr() % 16 == 0 and k_stride * x.element_size() % 16 == 0
    # 0: K fastest, 1: the other dimension, 2: that in groups of 16 bytes
    return 2 if across else 0 if k_stride <= stride else 1


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
    store_width = 4 if kind == "fma" else 2  # elements
    wide = n % store_width == 0 and c.data_ptr() % (store_width * c.element_size()) == 0
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
        shared=_smem_bytes(kind, config),
    )
    return c


def choose(a: torch.Tensor, b: torch.Tensor, precision: str) -> Config:
    """Return the configuration shipped for a product of this size and dtype.

    Configurations that need more shared memory than a block may have are skipped: the widest tile takes
    192 KiB, and sm_80 gives a block 163 KiB.
    """
    tiles = -(-a.shape[0] // 128) * -(-b.shape[1] // 128)
    kind = "fma" if (arithmetic := _arithmetic(a.dtype, precision)) == "ieee" else "mma"
    max_smem = smem_per_block(a.device)
    return next(
        config
        for least, config in SHIPPED[arithmetic]
        if tiles >= least and _smem_bytes(kind, config) <= max_smem
    )


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    if few_rows.suits(a, b):
        return few_rows.forward(a, b)  # type: ignore[no-any-return]
    if skinny.supports(a, b):
        return skinny.forward(a, b)
    if wgmma.supports(a, b, precision) and has_wgmma(a.device) and wgmma.is_faster_than_mma(a, b):
        return wgmma.forward(a, b)  # type: ignore[no-any-return]
    return forward_with(choose(a, b, precision), a, b, precision=precision)


def forward_invariant(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return invariant.forward(a, b)  # type: ignore[no-any-return]


def backward_invariant(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return da, whose rows do not depend on the batch, and db, which adds them up."""
    return forward_invariant(grad, b.t()), forward(a.t(), grad)


def _aot_kernels() -> tuple[CudaSource, ...]:
    """Return forward, both products of a backward, and any strides, for each program shipped."""
    aot_kernels = []
    for dtype in FLOAT_DTYPES:
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
            kind = "fma" if _arithmetic(dtype, precision) == "ieee" else "mma"
            large, *rest = (config for _, config in SHIPPED[_arithmetic(dtype, precision)])
            row_major = (0, 2) if kind == "fma" else (0, 1)
            others = ((0, 0), (2, 2), (1, 1)) if kind == "fma" else ((0, 0), (1, 1), (2, 3))
            aot_kernels += [source(kind, dtype, large, *modes) for modes in (row_major, *others)]
            aot_kernels += [source(kind, dtype, config, *row_major) for config in rest]
    return (*aot_kernels, *skinny.aot_kernels(), *wgmma.aot_kernels(), *few_rows.aot_kernels())


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="matmul",
        backend="cuda",
        forward=forward,
        backward=backward_by(forward),
        aot_kernels=_aot_kernels(),
        idea="copy engine, pipeline and wgmma on Hopper; else 64 x 64 of c a warp (mma.sync); float32 by "
        "fma; up to 64 rows: b is read once, in equal stretches for all SMs",
    ),
    forward=forward_invariant,
    backward=backward_invariant,
    supports=invariant.supports,
)
