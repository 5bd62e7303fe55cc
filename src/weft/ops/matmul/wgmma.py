"""Host code of matmul_wgmma.cu: the matrix product by Hopper's tensor cores and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name

ARCH = 90  # wgmma exists on sm_90a alone
DTYPES = (torch.bfloat16, torch.float16)
ROWS, K_STEP, THREADS = 128, 64, 384  # of a block: rows of c, elements of K in a stage
BLOCK_BYTES = 64 * 128  # 64 rows of 128 bytes
GROUPS = 2  # warp groups that compute


class Arguments(ctypes.Structure):
    """``MatmulArguments`` of matmul_wgmma.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("padding", ctypes.c_int * 13),  # the structure is aligned to 64 bytes
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """``columns`` of c in a tile, ``stages`` of the pipeline, and blocks in a ``cluster``, which share b."""

    columns: int
    stages: int
    cluster: int = 1

    @property
    def smem_bytes(self) -> int:
        stages = self.stages * (ROWS + self.columns) * 128
        buffers = GROUPS * (2 if self.columns % 128 == 0 else 1) * BLOCK_BYTES
        return stages + buffers + 2 * 8 * self.stages


# Time of one step of K for a tile of so many columns, relative to 256 columns: measured on an H200 at sizes
# that fill it (results/nvidia-h200/matmul-wgmma-2026-11-23.txt). Narrower tiles read more of a for a product.
STEP_COST = {256: 1.0, 192: 0.84, 128: 0.70, 64: 0.52}
CANDIDATES = (
    Config(columns=256, stages=4, cluster=2),  # half as fast there: not chosen
    Config(columns=256, stages=4),
    Config(columns=192, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
)


@cache
def source(dtype: torch.dtype, config: Config, a_is_k_major: bool, b_is_k_major: bool) -> CudaSource:
    """Return the program of a configuration for operands that are contiguous along K or across it."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": config.columns,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "A_MN": int(not a_is_k_major),
        "B_MN": int(not b_is_k_major),
    }
    majors = f"{'k' if a_is_k_major else 'm'}{'k' if b_is_k_major else 'n'}"
    return CudaSource(
        file=Path(__file__).with_name("matmul_wgmma.cu"),
        kernels=("matmul_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{ROWS}x{config.columns}x{config.stages}-{config.cluster}-{majors}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


def supports(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the kernel takes a (M, K) @ b (K, N) as they are stored.

    Rows of ``a``, ``b`` and the product are multiples of 16 bytes, and there are elements to multiply.
    """
    return (
        a.dtype in DTYPES
        and 0 not in (*a.shape, *b.shape)
        and b.shape[1] * a.element_size() % 16 == 0
        and tensor_map.fits(a)
        and tensor_map.fits(b)
    )


def choose(a: torch.Tensor, b: torch.Tensor) -> Config:
    """Return the configuration whose waves of tiles cost least; the widest of equals."""
    sms = num_sms(a.device)

    def cost(config: Config) -> float:
        tiles = -(-a.shape[0] // ROWS) * -(-b.shape[1] // config.columns)
        return -(-tiles // sms) * STEP_COST[config.columns]

    return min((c for c in CANDIDATES if c.cluster == 1), key=cost)


def forward_with(config: Config, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a (M, K) @ b (K, N) by one configuration; see :func:`supports`."""
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    c = a.new_empty(m, n)
    a_is_k_major = tensor_map.contiguous_dimension(a) == 1
    b_is_k_major = tensor_map.contiguous_dimension(b) == 0
    row_tiles, column_tiles = -(-m // (ROWS * config.cluster)), -(-n // config.columns)
    arguments = Arguments(
        a=tensor_map.encode(a, ROWS if a_is_k_major else K_STEP),
        b=tensor_map.encode(b, config.columns // config.cluster if b_is_k_major else K_STEP),
        c=tensor_map.encode(c, 64),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        k_steps=-(-k // K_STEP),
    )
    program = source(a.dtype, config, a_is_k_major, b_is_k_major)
    clusters = min(row_tiles * column_tiles, num_sms(a.device) // config.cluster)
    program["matmul_wgmma"](clusters * config.cluster, THREADS, arguments, shared=config.smem_bytes)
    return c


def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return forward_with(choose(a, b), a, b)


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the forward's program of each width, and both products of a backward."""
    sources = []
    for dtype in DTYPES:
        sources += [source(dtype, config, True, False) for config in CANDIDATES]
        widest = next(c for c in CANDIDATES if c.cluster == 1)  # which most products get
        sources += [source(dtype, widest, *majors) for majors in ((True, True), (False, False))]
    return tuple(sources)
