"""Products of at most 64 rows, with the bits of those of many rows (few_rows.cu).

An element is one chain of wgmma over all of K, as in wgmma.py. The tile is what differs: few columns, so that
the columns of a weight make about as many tiles as the device has SMs, and the weight is read at the rate of
the memory without a division of K. Weights of too few columns for that are left to skinny.py, which divides K
(:func:`is_faster_than_skinny`); batch-invariant products always are these.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.machine.device_limits import has_wgmma, num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops._common.products.wgmma import ARCH, DTYPES, is_k_major
from weft.ops._common.products.wgmma_model import Epilogue

MAX_ROWS, K_BLOCK_BYTES = 64, 128
THREADS = 256
SMEM_BYTES = 227 << 10
OVERLAP = True  # a launch may begin before the kernel before it has ended; it waits before it reads
WIDTHS = (16, 32, 48, 64, 112, 128, 192, 224, 256)  # columns of a tile
BOXES = (8, 16, 32, 64)  # rows of a
WIDEST_OF_TWO_BLOCKS = 64  # columns
# Constants of estimated_us, from times on an H200 of 2026-11-28 (119 configurations at a Llama 8B's weights):
# the rate of the memory; of one SM where 86 of 132 read; from the L2 cache to one SM. Assumed are the cycles
# of a stage beside its products and their clock, and the end of a tile. Clusters were at best as fast.
MEMORY_BYTES_PER_NS, SM_BYTES_PER_NS, L2_BYTES_PER_NS = 4200.0, 38.0, 95.0
STAGE_CYCLES, CLOCK_GHZ, TILE_US = 40, 1.7, 0.3
LAUNCH_US, CLUSTER_FACTOR = 2.18, 1.013
# Time of skinny.py beside reading the weight at MEMORY_BYTES_PER_NS: two launches and partial sums. Fitted to
# 1 and 16 rows at eight weights of 8 MB to 1 GB, within 6 % (H200, products-2026-11-28.txt). 64 rows cost it
# 20 to 40 % more, and hardly more here, so that this kernel is preferred where both are about equal.
SKINNY_US, PREFERENCE = 4.5, 1.05


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of few_rows.cu.

    A tile has ``columns`` columns; ``a_rows`` rows of a are loaded, by the blocks of a ``cluster`` together.
    A stage has ``k_blocks`` blocks of 128 bytes of K.
    """

    columns: int
    a_rows: int
    k_blocks: int = 2
    cluster: int = 1

    @property
    def stages(self) -> int:
        """As many stages as fit the shared memory; each has two barriers of 8 bytes."""
        return SMEM_BYTES // (self._stage_bytes + 16)

    @property
    def _stage_bytes(self) -> int:
        return self.k_blocks * (MAX_ROWS + self.columns) * K_BLOCK_BYTES

    @property
    def smem_bytes(self) -> int:
        return self.stages * (self._stage_bytes + 16)

    @property
    def label(self) -> str:
        return f"{self.a_rows}x{self.columns}x{self.k_blocks}x{self.stages}-{self.cluster}"


class FewRowsArguments(ctypes.Structure):
    """``FewRowsArguments`` of few_rows.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("steps", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("c", "pre", "bias", "residual")),
        ("padding", ctypes.c_int * 4),  # the structure is aligned to 64 bytes
    )


_REPEATED = LaunchCache()  # RepeatedProduct by kind of call


@cache
def source(dtype: torch.dtype, config: Config, epilogue: Epilogue = Epilogue.PLAIN) -> CudaSource:
    """Return the program of a configuration."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": config.columns,
        "A_ROWS": config.a_rows,
        "K_BLOCKS": config.k_blocks,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "EPILOGUE": int(epilogue),
    }
    return CudaSource(
        file=Path(__file__).with_name("few_rows.cu"),
        kernels=("few_rows_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"few-rows-{dtype_name(dtype)}-{config.label}"
        + (f"-{epilogue.name.lower()}" if epilogue else ""),
        min_arch=ARCH,
        max_arch=ARCH,
    )


def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the kernel takes a (M, K) @ b (K, N), and by the models is faster than skinny.py."""
    if not (supports(a, b) and has_wgmma(a.device)):
        return False
    return is_faster_than_skinny(b.shape[1], b.shape[0], num_sms(a.device))


def supports(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the kernel takes a (M, K) @ b (K, N) of half types.

    M is at most 64, both operands are contiguous along K, and their rows begin at multiples of 16 bytes.
    """
    return (
        0 < a.shape[0] <= MAX_ROWS
        and a.dtype in DTYPES
        and 0 not in b.shape
        and b.shape[1] % 8 == 0
        and all(is_k_major(x, dim) and tensor_map.fits(x) for x, dim in ((a, 1), (b, 0)))
    )


def estimated_us(n: int, k: int, config: Config, sms: int) -> float:
    """Return the time in microseconds that a model gives for a product with a weight of N columns.

    A step of 128 bytes of K takes the longest of four times: the weight from memory, for all SMs at work or
    for one; weight and a's share from the L2 cache; the products.
    """
    tiles = -(-n // config.columns)
    at_once = sms // config.cluster * config.cluster
    waves = -(-tiles // at_once)
    at_work = min(tiles, at_once)
    b_bytes = config.columns * K_BLOCK_BYTES
    a_bytes = config.a_rows * K_BLOCK_BYTES / config.cluster
    # Of one product of 16 of K: the tensor cores' cycles, and those of reading a's 64 rows and b's columns.
    cycles = 4 * max(config.columns / 2, 16 + config.columns / 4) + STAGE_CYCLES / config.k_blocks
    step_ns = max(
        b_bytes * at_work / MEMORY_BYTES_PER_NS,
        b_bytes / SM_BYTES_PER_NS,
        (a_bytes + b_bytes) / L2_BYTES_PER_NS,
        cycles / CLOCK_GHZ,
    ) * (CLUSTER_FACTOR if config.cluster > 1 else 1.0)
    return LAUNCH_US + waves * (-(-k * 2 // K_BLOCK_BYTES) * step_ns * 1e-3 + TILE_US)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, sms: int) -> Config:
    """Return the configuration that costs least by :func:`estimated_us`."""
    a_rows = next(rows for rows in BOXES if rows >= m)
    # Two blocks in a stage need fewer barriers for the same bytes; with wide tiles such stages would be too
    # few. An odd number of blocks gets no empty one: adding products of zeros may change -0 to 0.
    is_even = -(-k * 2 // K_BLOCK_BYTES) % 2 == 0
    configs = [
        Config(
            columns=columns,
            a_rows=a_rows,
            k_blocks=2 if is_even and columns <= WIDEST_OF_TWO_BLOCKS else 1,
        )
        for columns in WIDTHS
    ]
    return min(configs, key=lambda config: estimated_us(n, k, config, sms))


@lru_cache(maxsize=4096)
def is_faster_than_skinny(n: int, k: int, sms: int) -> bool:
    """Return True if the models say so of a product with a weight (K, N).

    The number of rows has no influence, so that the bits of a row do not change between 1 and 64 rows.
    """
    skinny_us = SKINNY_US + 2 * n * k / MEMORY_BYTES_PER_NS * 1e-3
    return estimated_us(n, k, choose(1, n, k, sms), sms) <= PREFERENCE * skinny_us


def forward_with(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    key: Any = None,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)) by one configuration; see :func:`forward`.

    With ``key``, of the kind of call, the launch is kept for :func:`forward`.
    """
    (m, k), n = a.shape, b.shape[1]
    bias, residual = (_with_aligned_pairs(x) for x in (bias, residual))
    c = a.new_empty(m, n)
    pre = torch.empty_like(c) if epilogue == Epilogue.GELU_PRE else None
    a_box = config.a_rows // config.cluster
    arguments = FewRowsArguments(
        a=tensor_map.encode(a, a_box),
        b=tensor_map.encode(b, config.columns),
        steps=-(-k * a.element_size() // (K_BLOCK_BYTES * config.k_blocks)),
        column_tiles=-(-n // (config.columns * config.cluster)),
        rows=m,
        columns=n,
        c=c.data_ptr(),
        **{
            name: x.data_ptr()
            for name, x in {"pre": pre, "bias": bias, "residual": residual}.items()
            if x is not None
        },
    )
    kernel = source(a.dtype, config, epilogue)["few_rows_wgmma"]
    blocks = config.cluster * min(arguments.column_tiles, _max_clusters(kernel, config, a.device))
    kernel(blocks, THREADS, arguments, shared=config.smem_bytes, overlap=OVERLAP)
    if key is not None and isinstance(kernel, Kernel):
        launch = kernel.prepare_structure(blocks, THREADS, shared=config.smem_bytes, overlap=OVERLAP)
        maps = {"a": tensor_map.encoder(a, a_box), "b": tensor_map.encoder(b, config.columns)}
        addresses = {"c": c, "pre": pre, "bias": bias, "residual": residual}
        fields = [name for name, x in addresses.items() if x is not None]
        _REPEATED.store(key, RepeatedProduct(launch, arguments, maps, fields))
    return c if pre is None else (c, pre)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)), (M, N), as ``wgmma.forward`` does; see :func:`supports`."""
    key = (a.dtype, a.shape, b.shape, b.stride(), epilogue, a.get_device())
    repeated = _REPEATED.get(key)
    if repeated is not None and are_repeatable(a, bias, residual):
        c = a.new_empty((a.shape[0], b.shape[1]))
        pre = torch.empty_like(c) if epilogue == Epilogue.GELU_PRE else None
        pointers = [x.data_ptr() for x in (a, b, c, pre, bias, residual) if x is not None]
        repeated(*pointers)
        return c if pre is None else (c, pre)
    config = choose(a.shape[0], b.shape[1], a.shape[1], num_sms(a.device))
    return forward_with(
        config, a, b, epilogue, bias, residual, key if are_repeatable(a, bias, residual) else None
    )


def _with_aligned_pairs(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x``, or a contiguous copy whose pairs of elements can be read. None stays None."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 4 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _max_clusters(kernel: Any, config: Config, device: torch.device) -> int:
    """Return how many clusters (blocks) run at once: each has a fixed share of the tiles."""
    at_most = num_sms(device) // config.cluster
    if config.cluster == 1 or not isinstance(kernel, Kernel):
        return at_most
    return kernel.max_active_clusters(THREADS, shared=config.smem_bytes, cluster=config.cluster) or at_most


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the program of each width for one row, one for 16 rows, one of a cluster, and one of float16."""
    configs = [
        Config(columns=columns, a_rows=8, k_blocks=2 if columns <= WIDEST_OF_TWO_BLOCKS else 1)
        for columns in WIDTHS
    ]
    sixteen = Config(columns=112, a_rows=16, k_blocks=1)  # of matmul's case 16x14336x4096
    shared = Config(columns=32, a_rows=64, cluster=2)
    return (*(source(torch.bfloat16, c) for c in (*configs, sixteen, shared)), source(torch.float16, shared))
