"""Host code of matmul_wgmma.cu: the matrix product by Hopper's tensor cores and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name

ARCH = 90  # wgmma exists on sm_90a alone
DTYPES = (torch.bfloat16, torch.float16)
ROWS, K_STEP, THREADS = 128, 64, 384  # of a block: rows of c, elements of K in a stage
BLOCK_BYTES = 64 * 128  # 64 rows of 128 bytes
GROUPS = 2  # warp groups that compute
SUM_THREADS = 256  # of a block of the second kernel


class Arguments(ctypes.Structure):
    """``MatmulArguments`` of matmul_wgmma.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("partials", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("padding", ctypes.c_int * 8),  # the structure is aligned to 64 bytes
    )


class SumArguments(ctypes.Structure):
    """``MatmulSumArguments`` of matmul_wgmma.cu."""

    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("vectors", ctypes.c_longlong),
        ("splits", ctypes.c_longlong),
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


# Microseconds, fitted to results/nvidia-h200/matmul-wgmma-2026-11-23.txt; see estimated_us.
LAUNCH_US = 2.0
STEP_US = {256: 0.686, 192: 0.570, 128: 0.446, 64: 0.321}
STORE_US_PER_COLUMN = 0.51 / 256
# Not measured: the second launch, and bytes a microsecond of partial sums, to the L2 cache and back.
SUM_LAUNCH_US, PARTIAL_BYTES_PER_US = 2.0, 3e6
MAX_SPLITS, LEAST_STEPS = 8, 4  # parts of K, and steps of 64 in each
CANDIDATES = (
    Config(columns=256, stages=4, cluster=2),
    Config(columns=256, stages=4),
    Config(columns=192, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
    Config(columns=128, stages=6, cluster=2),
)
# Clusters are chosen once a record shows that they are faster.
CHOSEN_FROM = tuple(config for config in CANDIDATES if config.cluster == 1)


@cache
def source(
    dtype: torch.dtype, config: Config, a_is_k_major: bool, b_is_k_major: bool, is_split: bool = False
) -> CudaSource:
    """Return the program of a configuration for operands that are contiguous along K or across it.

    ``is_split``: for a K that is divided among blocks.
    """
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": config.columns,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "SPLIT": int(is_split),
        "A_MN": int(not a_is_k_major),
        "B_MN": int(not b_is_k_major),
    }
    majors = f"{'k' if a_is_k_major else 'm'}{'k' if b_is_k_major else 'n'}"
    return CudaSource(
        file=Path(__file__).with_name("matmul_wgmma.cu"),
        kernels=("matmul_wgmma", "matmul_wgmma_sum") if is_split else ("matmul_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{ROWS}x{config.columns}x{config.stages}-{config.cluster}-{majors}"
        + ("-split" if is_split else ""),
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


def estimated_us(m: int, n: int, k: int, config: Config, splits: int, sms: int) -> float:
    """Return the time in microseconds that a model gives for a product on ``sms`` SMs.

    An SM computes one tile of 128 x ``columns`` at a time, or one of the ``splits`` parts of K of a tile.
    The model is a launch, and for each wave of ceil(tiles * splits / sms) the steps of 64 along K and the
    store of a tile that nothing overlaps. The time of a step depends on the width alone: an SM reads 72 to
    77 bytes a ns from the L2 cache at every width, and a narrower tile has less work for the same bytes.
    Parts of K are written and read once in float32, and added by a second launch.

    The constants are a least-squares fit to one record; its times without splits are met to 9 % in the mean,
    and the configuration that the model prefers is at most 7 % slower than the record's fastest.
    """
    tiles = -(-m // (ROWS * config.cluster)) * config.cluster * -(-n // config.columns)
    k_steps = -(-k // K_STEP)
    steps = -(-k_steps // splits)
    waves = -(-tiles * splits // sms)
    us = LAUNCH_US + waves * (steps * STEP_US[config.columns] + STORE_US_PER_COLUMN * config.columns)
    if splits > 1:
        us += SUM_LAUNCH_US + 2 * 4 * splits * m * n / PARTIAL_BYTES_PER_US
    return us


def choose(a: torch.Tensor, b: torch.Tensor) -> tuple[Config, int]:
    """Return the configuration and number of parts of K that cost least by :func:`estimated_us`."""
    return _choose(a.shape[0], b.shape[1], a.shape[1], num_sms(a.device))


@lru_cache(maxsize=4096)
def _choose(m: int, n: int, k: int, sms: int) -> tuple[Config, int]:
    most = max(1, min(MAX_SPLITS, -(-k // K_STEP) // LEAST_STEPS))
    options = [(config, splits) for splits in range(1, most + 1) for config in CHOSEN_FROM]
    return min(options, key=lambda option: estimated_us(m, n, k, option[0], option[1], sms))


def forward_with(config: Config, a: torch.Tensor, b: torch.Tensor, splits: int = 1) -> torch.Tensor:
    """Return a (M, K) @ b (K, N) by one configuration and so many parts of K; see :func:`supports`.

    The same arguments give the same bits on any device: partial sums are added in the order of K.
    """
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    k_steps = -(-k // K_STEP)
    splits = min(splits, k_steps)
    c = a.new_empty(m, n)
    partials = torch.empty(splits if splits > 1 else 0, m, n, dtype=torch.float32, device=a.device)
    a_is_k_major = tensor_map.contiguous_dimension(a) == 1
    b_is_k_major = tensor_map.contiguous_dimension(b) == 0
    row_tiles, column_tiles = -(-m // (ROWS * config.cluster)), -(-n // config.columns)
    arguments = Arguments(
        a=tensor_map.encode(a, ROWS if a_is_k_major else K_STEP),
        b=tensor_map.encode(b, config.columns // config.cluster if b_is_k_major else K_STEP),
        c=tensor_map.encode(c, 64),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        k_steps=k_steps,
        splits=splits,
        partials=partials.data_ptr(),
        rows=m,
        columns=n,
    )
    program = source(a.dtype, config, a_is_k_major, b_is_k_major, splits > 1)
    kernel = program["matmul_wgmma"]
    clusters = min(row_tiles * column_tiles * splits, max_clusters(kernel, config, a.device))
    kernel(clusters * config.cluster, THREADS, arguments, shared=config.smem_bytes)
    if splits > 1:
        vectors = m * n // 8
        addends = SumArguments(partials=partials.data_ptr(), c=c.data_ptr(), vectors=vectors, splits=splits)
        program["matmul_wgmma_sum"](-(-vectors // SUM_THREADS), SUM_THREADS, addends, overlap=True)
    return c


def max_clusters(kernel: Any, config: Config, device: torch.device) -> int:
    """Return how many clusters run at once on the device; without clusters, its number of SMs.

    Each block takes a fixed share of the tiles: clusters beyond this number would start when the others
    have ended, and double the time.
    """
    if config.cluster == 1 or not isinstance(kernel, Kernel):
        return num_sms(device) // config.cluster
    return _max_clusters(kernel, config) or num_sms(device) // config.cluster


@cache
def _max_clusters(kernel: Kernel, config: Config) -> int:
    return kernel.max_active_clusters(THREADS, shared=config.smem_bytes, cluster=config.cluster)


def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    config, splits = choose(a, b)
    return forward_with(config, a, b, splits)


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the forward's program of each width, both products of a backward, and one with a divided K."""
    sources = []
    for dtype in DTYPES:
        sources += [source(dtype, config, True, False) for config in CANDIDATES]
        widest = next(c for c in CANDIDATES if c.cluster == 1)  # which most products get
        sources += [source(dtype, widest, *majors) for majors in ((True, True), (False, False))]
        # A gradient of weights: few tiles, and K is the number of tokens.
        sources += [source(dtype, widest, False, False, True)]
    return tuple(sources)
