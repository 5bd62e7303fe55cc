"""Host code of wgmma.cu: products with an epilogue by Hopper's tensor cores and copy engine.

One family of kernels serves the operators ``matmul``, ``linear``, ``linear_gelu`` and ``linear_residual``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
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
STORED_ROWS = 64  # of a box of c
SUM_THREADS = 256  # of a block of the second kernel


class Epilogue(IntEnum):
    """Function of the float32 sums that is rounded and stored, as in epilogue.cuh."""

    PLAIN = 0
    BIAS = 1  # + bias
    GELU = 2  # gelu(sums + bias), tanh form
    GELU_PRE = 3  # the same, and its input as a second output
    RESIDUAL = 4  # + bias + residual


class Arguments(ctypes.Structure):
    """``MatmulArguments`` of wgmma.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("extra", TensorMap),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("partials", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("padding", ctypes.c_int * 6),  # the structure is aligned to 64 bytes
    )


class SumArguments(ctypes.Structure):
    """``MatmulSumArguments`` of wgmma.cu."""

    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("vectors", ctypes.c_longlong),
        ("splits", ctypes.c_longlong),
        ("column_vectors", ctypes.c_longlong),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """``columns`` of c in a tile, ``stages`` of the pipeline, and blocks in a ``cluster``.

    The blocks of a cluster share tiles of b, or with ``share_a`` tiles of a. With ``pingpong`` the two warp
    groups that multiply take tiles alternately; otherwise they share each tile.
    """

    columns: int
    stages: int
    cluster: int = 1
    share_a: bool = False
    pingpong: bool = False

    @property
    def smem_bytes(self) -> int:
        # Stages, two boxes of c for each group, and barriers: of the stages, and two for each group.
        return self.stages * ((ROWS + self.columns) * 128 + 16) + GROUPS * (2 * BLOCK_BYTES + 16)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of a cluster that share a tile of a, and those that share a tile of b."""
        return (self.cluster, 1) if self.share_a else (1, self.cluster)

    @property
    def label(self) -> str:
        """Tile, stages, and cluster, with what differs from a plain cooperative kernel."""
        shared = "a" if self.share_a else ""
        return f"{ROWS}x{self.columns}x{self.stages}-{self.cluster}{shared}" + "-pingpong" * self.pingpong


# Constants of estimated_us, fitted to results/nvidia-h200/products-2026-11-24b.txt.
LAUNCH_US = 1.29
FLOP_PER_CYCLE = 4096  # of an SM's tensor cores
CLOCK_GHZ = (1.94, 1.31)  # with no SM at work, and with all: power limits the clock
# Of a tile's steps: products of 64 columns are bound by shared memory.
COLUMNS_FACTOR = {256: 1.0, 192: 1.015, 128: 1.01, 64: 1.31}
L2_BYTES_PER_NS = 77.5  # to each SM, with all at work
CLUSTER_FACTOR = 1.01
# Of a tile of 128 x 256: storing it, with the filling of the pipeline; GELU; a second output or a residual.
STORE_US, GELU_US, EXTRA_US = 2.01, 0.88, 2.50
SUM_LAUNCH_US, PARTIAL_BYTES_PER_US = 0.5, 4.3e6
MAX_SPLITS, LEAST_STEPS = 8, 4  # parts of K, and steps of 64 in each
CANDIDATES = (
    Config(columns=256, stages=4, cluster=2),
    Config(columns=256, stages=4),
    Config(columns=192, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
    Config(columns=128, stages=6, cluster=2),
    Config(columns=64, stages=8, cluster=2, share_a=True),
    Config(columns=128, stages=6, pingpong=True),
    Config(columns=128, stages=6, cluster=2, pingpong=True),
    Config(columns=192, stages=4, pingpong=True),
)
# Tiles beside each other that share a were nowhere the fastest.
CHOSEN_FROM = tuple(c for c in CANDIDATES if not c.share_a)


@cache
def source(
    dtype: torch.dtype,
    config: Config,
    a_is_k_major: bool,
    b_is_k_major: bool,
    is_split: bool = False,
    epilogue: Epilogue = Epilogue.PLAIN,
) -> CudaSource:
    """Return the program of a configuration for operands that are contiguous along K or across it.

    ``is_split``: for a K that is divided among blocks.
    """
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": config.columns,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "SHARE_A": int(config.share_a),
        "PINGPONG": int(config.pingpong),
        "SPLIT": int(is_split),
        "A_MN": int(not a_is_k_major),
        "B_MN": int(not b_is_k_major),
        "EPILOGUE": int(epilogue),
    }
    majors = f"{'k' if a_is_k_major else 'm'}{'k' if b_is_k_major else 'n'}"
    return CudaSource(
        file=Path(__file__).with_name("wgmma.cu"),
        kernels=("matmul_wgmma", "matmul_wgmma_sum") if is_split else ("matmul_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{config.label}-{majors}"
        + "-split" * is_split
        + (f"-{epilogue.name.lower()}" if epilogue else ""),
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


def estimated_us(
    m: int, n: int, k: int, config: Config, splits: int, sms: int, epilogue: Epilogue = Epilogue.PLAIN
) -> float:
    """Return the time in microseconds that a model gives for a product of bfloat16 on ``sms`` SMs.

    An SM computes one tile of 128 x ``columns`` at a time, or one of the ``splits`` parts of K of a tile.
    The model is a launch, and for each wave of tiles the steps of 64 along K and the tile's epilogue, which
    nothing overlaps; with ``pingpong`` all but the last one are hidden behind the other group's steps, if
    those are longer. A step takes the longer of two times: that of the tensor cores, at a clock that falls
    with the SMs at work, and that of its bytes from the L2 cache, of which a cluster reads the shared operand
    once. Parts of K are written and read once in float32, and added by a second launch.

    The constants are a least-squares fit to a record of 13 sizes, with and without epilogues, clusters,
    alternating groups and parts of K. It has 276 times of the configurations that are chosen from: 8 %
    root-mean-square error. The configuration that the model prefers is at most 7 % slower than the record's
    fastest, and 1 % on average.
    """
    a_blocks, b_blocks = config.blocks
    tiles = -(-m // (ROWS * b_blocks)) * -(-n // (config.columns * a_blocks))  # of a cluster
    at_once = max(1, sms // config.cluster)
    waves = -(-tiles * splits // at_once)
    k_steps = -(-k // K_STEP)
    steps = -(-k_steps // splits)
    at_work = min(1.0, tiles * splits / at_once)
    clock = CLOCK_GHZ[0] + (CLOCK_GHZ[1] - CLOCK_GHZ[0]) * at_work
    tensor_ns = COLUMNS_FACTOR[config.columns] * 2 * ROWS * config.columns * K_STEP / FLOP_PER_CYCLE / clock
    l2_ns = (ROWS / a_blocks + config.columns / b_blocks) * 128 * at_work / L2_BYTES_PER_NS
    steps_us = steps * max(tensor_ns, l2_ns) * 1e-3 * (CLUSTER_FACTOR if config.cluster > 1 else 1.0)
    end_us = STORE_US + GELU_US * (epilogue in (Epilogue.GELU, Epilogue.GELU_PRE))
    end_us += EXTRA_US * (epilogue in (Epilogue.GELU_PRE, Epilogue.RESIDUAL))
    end_us *= config.columns / 256
    if config.pingpong:
        end_us *= GROUPS  # of one group, which has the whole tile
        us = LAUNCH_US + waves * max(steps_us, (steps_us + end_us) / GROUPS) + end_us
    else:
        us = LAUNCH_US + waves * (steps_us + end_us)
    if splits > 1:
        us += SUM_LAUNCH_US + 2 * 4 * splits * m * n / PARTIAL_BYTES_PER_US
    return us


def choose(
    a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue = Epilogue.PLAIN, *, may_split: bool = True
) -> tuple[Config, int]:
    """Return the configuration and number of parts of K that cost least by :func:`estimated_us`.

    Without ``may_split`` K is one part.
    """
    return _choose(a.shape[0], b.shape[1], a.shape[1], num_sms(a.device), epilogue, may_split)


@lru_cache(maxsize=4096)
def _choose(
    m: int, n: int, k: int, sms: int, epilogue: Epilogue, may_split: bool = True
) -> tuple[Config, int]:
    most = max(1, min(MAX_SPLITS, -(-k // K_STEP) // LEAST_STEPS)) if may_split else 1
    options = [
        (c, splits) for splits in range(1, most + 1) for c in CHOSEN_FROM if splits == 1 or not c.pingpong
    ]
    return min(options, key=lambda o: estimated_us(m, n, k, o[0], o[1], sms, epilogue))


def forward_with(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    splits: int = 1,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)) by one configuration and so many parts of K; see :func:`forward`.

    The same arguments give the same bits on any device: partial sums are added in the order of K.
    """
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    k_steps = -(-k // K_STEP)
    splits = min(splits, k_steps)
    c = a.new_empty(m, n)
    extra = _extra(c, epilogue, residual)
    bias = None if bias is None else _aligned(bias)
    partials = torch.empty(splits if splits > 1 else 0, m, n, dtype=torch.float32, device=a.device)
    a_is_k_major = tensor_map.contiguous_dimension(a) == 1
    b_is_k_major = tensor_map.contiguous_dimension(b) == 0
    a_blocks, b_blocks = config.blocks
    row_tiles, column_tiles = -(-m // (ROWS * b_blocks)), -(-n // (config.columns * a_blocks))
    arguments = Arguments(
        a=tensor_map.encode(a, ROWS // a_blocks if a_is_k_major else K_STEP),
        b=tensor_map.encode(b, config.columns // b_blocks if b_is_k_major else K_STEP),
        c=tensor_map.encode(c, STORED_ROWS),
        extra=TensorMap() if extra is None else tensor_map.encode(extra, STORED_ROWS),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        k_steps=k_steps,
        splits=splits,
        partials=partials.data_ptr(),
        rows=m,
        columns=n,
        bias=0 if bias is None else bias.data_ptr(),
    )
    program = source(a.dtype, config, a_is_k_major, b_is_k_major, splits > 1, epilogue)
    kernel = program["matmul_wgmma"]
    clusters = min(row_tiles * column_tiles * splits, max_clusters(kernel, config, a.device))
    kernel(clusters * config.cluster, THREADS, arguments, shared=config.smem_bytes)
    if splits > 1:
        vectors = m * n // 8
        addends = SumArguments(
            partials=partials.data_ptr(),
            c=c.data_ptr(),
            extra=0 if extra is None else extra.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            vectors=vectors,
            splits=splits,
            column_vectors=n // 8,
        )
        program["matmul_wgmma_sum"](-(-vectors // SUM_THREADS), SUM_THREADS, addends, overlap=True)
    return (c, extra) if epilogue == Epilogue.GELU_PRE else c


def _extra(c: torch.Tensor, epilogue: Epilogue, residual: torch.Tensor | None) -> torch.Tensor | None:
    """Return the second matrix of an epilogue: an output for the pre-activation, or the residual."""
    if epilogue == Epilogue.GELU_PRE:
        return torch.empty_like(c)
    return None if residual is None else _aligned(residual)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a contiguous copy at a multiple of 16 bytes."""
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


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


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    may_split: bool = True,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)), (M, N); see :func:`supports`.

    ``bias`` (N,) belongs to each epilogue but PLAIN, ``residual`` (M, N) to RESIDUAL. GELU_PRE returns
    ``(y, pre)``. Without ``may_split`` each element is one sum over K, whatever the number of rows.
    """
    config, splits = choose(a, b, epilogue, may_split=may_split)
    return forward_with(config, a, b, splits, epilogue, bias, residual)


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


def aot_kernels_of(epilogue: Epilogue) -> tuple[CudaSource, ...]:
    """Return programs with an epilogue, for a linear layer's storage order, and one with a divided K."""
    widest = next(c for c in CANDIDATES if c.cluster == 1)
    sources = [source(dtype, c, True, True, False, epilogue) for dtype in DTYPES for c in CANDIDATES]
    return (*sources, *(source(dtype, widest, True, True, True, epilogue) for dtype in DTYPES))
