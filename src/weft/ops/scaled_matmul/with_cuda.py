"""The scaled product by Hopper's fp8 tensor cores and copy engine; see scaled_matmul.cu.

Both factors are read with K contiguous, from rows that begin at multiples of 16 bytes; a factor in another
order is copied first. Scales are read as they are stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft import machine
from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import YES, Case, Implementation, Support, no
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.prepared import LaunchCache
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops.scaled_matmul.spec import has_blocks, sizes

ARCH = 90  # wgmma exists on sm_90a alone
CAPABILITY = (9, 0)
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
K_STEP = 128  # elements of K in a stage
STORED_ROWS, BUFFER_BYTES = 64, 64 * 128  # of c, of a warp group that computes
GROUP_THREADS, SUM_COLUMNS = 128, 32  # of a block of the second kernel: threads; columns of c, for 64 rows
K_MULTIPLE, N_MULTIPLE = 16, 8  # rows of a, b and c are multiples of 16 bytes


class Scale(ctypes.Structure):
    """``Scale`` of scaled_matmul.cu."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
    )


class Arguments(ctypes.Structure):
    """``ScaledArguments`` of scaled_matmul.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("scale_a", Scale),
        ("scale_b", Scale),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("partials", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("whole_tiles", ctypes.c_int),
        ("padding", ctypes.c_int * 11),  # the structure is aligned to 64 bytes
    )


class SumArguments(ctypes.Structure):
    """``ScaledSumArguments`` of scaled_matmul.cu."""

    _fields_ = (
        ("partials", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("scale_a", Scale),
        ("scale_b", Scale),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("whole_tiles", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """``columns`` of c in a tile, ``stages`` of the pipeline, blocks in a ``cluster``.

    A tile has 64 rows for each of ``halves`` that each of ``groups`` of warps computes. Blocks of a cluster
    are below each other and share b, or with ``share_a`` beside each other and share a. ``sets``: 2 if the
    next step's products run while the sums of this one are added.
    """

    columns: int
    stages: int
    groups: int = 2
    halves: int = 1
    cluster: int = 1
    share_a: bool = False
    sets: int = 1

    @property
    def rows(self) -> int:
        """Rows of c in a tile."""
        return 64 * self.groups * self.halves

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def cluster_rows(self) -> int:
        return 1 if self.share_a else self.cluster

    @property
    def cluster_columns(self) -> int:
        return self.cluster if self.share_a else 1

    @property
    def smem_bytes(self) -> int:
        scale_bytes = 4 * self.rows if self.rows > LEAST_ROWS else 0  # STAGED of scaled_matmul.cu
        stage_bytes = (self.rows + self.columns) * K_STEP + 2 * 8 + scale_bytes
        return self.stages * stage_bytes + self.groups * BUFFER_BYTES

    def clusters(self, m: int, n: int) -> tuple[int, int]:
        """Return how many rows and columns of clusters cover c."""
        return -(-m // (self.rows * self.cluster_rows)), -(-n // (self.columns * self.cluster_columns))


class Cost(NamedTuple):
    """Microseconds of a step of 128 along K of a wave of tiles, and of what a wave has besides its steps.

    ``split_factor``: how many times as long a step takes in the program that divides K.
    """

    step_us: float
    store_us: float
    split_factor: float = 1.0


HALVES = Config(columns=128, stages=4, halves=2)
THREE_GROUPS = Config(columns=128, stages=4, groups=3, cluster=2, share_a=True)
TWO_SETS = Config(columns=128, stages=6, cluster=2, sets=2)
WIDE = Config(columns=192, stages=5)
MIDDLE = Config(columns=128, stages=6)
NARROW = Config(columns=64, stages=8)
CANDIDATES = (HALVES, THREE_GROUPS, TWO_SETS, WIDE, MIDDLE, NARROW)

# By whether scales are of blocks: the configurations to choose from. Fitted to times on an H200 at its power
# limit (results/nvidia-h200/fp8-candidates-2026-11-28.txt). NARROW without blocks is of an earlier record
# (products-2026-11-24c.txt). Without blocks the steps alone are fitted, to two sizes; WIDE's store is, too.
# The step of HALVES is fitted to three more sizes (fp8-chosen-2026-11-28.txt), at which it is 0.4 to 3.4 %
# faster than TWO_SETS.
COSTS: dict[bool, dict[Config, Cost]] = {
    True: {
        HALVES: Cost(0.874, 1.54, 1.03),
        THREE_GROUPS: Cost(0.645, 0.53, 1.08),
        TWO_SETS: Cost(0.460, 0.94),
        MIDDLE: Cost(0.475, 1.15, 1.01),
        NARROW: Cost(0.360, 0.58, 1.13),
    },
    False: {
        HALVES: Cost(0.845, 1.54, 1.04),
        THREE_GROUPS: Cost(0.625, 0.53),
        TWO_SETS: Cost(0.421, 0.94, 1.01),
        WIDE: Cost(0.641, 0.79, 1.01),
        MIDDLE: Cost(0.463, 1.15, 1.05),
        NARROW: Cost(0.352, 0.58),
    },
}
# Constants of bf16 products (matmul-wgmma-2026-11-23.txt).
LAUNCH_US, SUM_LAUNCH_US = 2.0, 2.0
PARTIAL_BYTES_PER_US = 3e6
MAX_SPLITS, LEAST_STEPS = 8, 4  # parts of K, and steps of 128 in each
LEAST_ROWS = 128  # of a tile
_REPEATED = LaunchCache()  # RepeatedCall by kind of call


@cache
def source(
    formats: tuple[str, str], out_dtype: torch.dtype, config: Config, blocks: bool, is_split: bool = False
) -> CudaSource:
    """Return the program of a configuration for factors of two ``formats`` (``e4m3``, ``e5m2``).

    ``blocks``: scales are those of blocks of 128. ``is_split``: for a K that is divided among blocks.
    """
    defines = {
        "WEFT_T": CUDA_TYPES[out_dtype],
        "A_TYPE": formats[0],
        "B_TYPE": formats[1],
        "BN": config.columns,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "SHARE_A": int(config.share_a),
        "SETS": config.sets,
        "BLOCK_SCALES": int(blocks),
        "GROUPS": config.groups,
        "HALVES": config.halves,
        "SPLIT": int(is_split),
    }
    tile = f"{config.rows}x{config.columns}x{config.stages}-{config.cluster}"
    marks = (
        ("blocks", blocks),
        ("2sets", config.sets == 2),
        ("shares_a", config.share_a),
        ("split", is_split),
    )
    label = "-".join((*formats, dtype_name(out_dtype), tile, *(mark for mark, is_set in marks if is_set)))
    return CudaSource(
        file=Path(__file__).with_name("scaled_matmul.cu"),
        kernels=("scaled_matmul", "scaled_matmul_sum") if is_split else ("scaled_matmul",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=label,
        min_arch=ARCH,
        max_arch=ARCH,
    )


def estimated_us(
    m: int, n: int, k: int, config: Config, splits: int, sms: int, blocks: bool = False
) -> float:
    """Return the time in microseconds that a model gives for a product on ``sms`` SMs.

    A launch, and for each wave of tiles the steps of 128 along K and a store. Of the last tiles, fewer than
    SMs, ``splits`` parts of K are computed by different blocks. ``blocks``: scales are those of blocks of
    128. A tile with fewer rows than its configuration takes as long.

    At the sizes of the record with several waves the model is 5 % too low to 3 % too high. It is up to 13 %
    too high for one wave or two, where the SMs have a higher clock. Extrapolated: fewer than 512 rows, where
    the time to read the weight from memory counts as well; K below 1536; cards with another power limit, L2
    cache or number of SMs.
    """
    cost = COSTS[blocks][config]
    row_tiles, column_tiles = config.clusters(m, n)
    tiles = row_tiles * column_tiles
    clusters = max(1, sms // config.cluster)
    k_steps = -(-k // K_STEP)
    step_us = cost.step_us * (cost.split_factor if tiles % clusters and splits > 1 else 1.0)
    whole, rest = divmod(tiles, clusters)
    us = LAUNCH_US + whole * (k_steps * step_us + cost.store_us)
    if rest:
        waves = -(-rest * splits // clusters)
        us += waves * (-(-k_steps // splits) * step_us + cost.store_us)
    if rest and splits > 1:
        partial_bytes = 4 * splits * rest * config.cluster * min(m, config.rows) * config.columns
        us += SUM_LAUNCH_US + 2 * partial_bytes / PARTIAL_BYTES_PER_US
    return us


def choose(m: int, n: int, k: int, device: torch.device, blocks: bool = False) -> tuple[Config, int]:
    """Return the configuration and number of parts of K that cost least by :func:`estimated_us`.

    With both kinds of scales the choices for the sizes of its record take at most 2.2 % longer than the best
    of 30 measured programs. For up to 128 rows tiles and clusters have 128 rows.
    """
    return _choose(m, n, k, num_sms(device), blocks)


@lru_cache(maxsize=4096)
def _choose(m: int, n: int, k: int, sms: int, blocks: bool) -> tuple[Config, int]:
    most = max(1, min(MAX_SPLITS, -(-k // K_STEP) // LEAST_STEPS))
    configs = [c for c in COSTS[blocks] if m > LEAST_ROWS or c.rows * c.cluster_rows == LEAST_ROWS]
    options = [(config, splits) for splits in range(1, most + 1) for config in configs]
    return min(options, key=lambda option: estimated_us(m, n, k, option[0], option[1], sms, blocks))


def k_major(x: torch.Tensor, k_dim: int) -> torch.Tensor:
    """Return a matrix that the copy engine reads with dimension ``k_dim`` contiguous; copy it if needed."""
    if x.stride(k_dim) == 1 and tensor_map.contiguous_dimension(x) == k_dim and tensor_map.fits(x):
        return x
    rows = x if k_dim == 1 else x.t()
    # A copy of its own even if the strides suit: the address may not.
    copied = torch.empty(rows.shape, dtype=x.dtype, device=x.device).copy_(rows)
    return copied if k_dim == 1 else copied.t()


def _scale_encoder(scale: torch.Tensor, is_row: bool, blocks: bool) -> Callable[[int], Scale]:
    """Return the function that makes the :class:`Scale` of a scale like this one at an address.

    Without blocks the kernel reads it along the rows of a, or the columns of b.
    """
    if blocks:
        rows, columns = scale.stride()
    else:
        stride = scale.stride(0 if is_row else 1) if scale.dim() else 0
        rows, columns = (stride, 0) if is_row else (0, stride)
    return lambda pointer: Scale(pointer, rows, columns)


@dataclass(frozen=True)
class RepeatedCall:
    """Launches of a call, repeated with other tensors of the same kind.

    ``addends`` adds the parts of K; it is None where K is not divided. ``partials`` is the shape of the
    partial sums.
    """

    product: RepeatedProduct
    addends: RepeatedProduct | None
    partials: tuple[int, ...]
    out_dtype: torch.dtype

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
    ) -> torch.Tensor:
        c = a.new_empty((a.shape[0], b.shape[1]), dtype=self.out_dtype)
        of_a, of_b, c_at = scale_a.data_ptr(), scale_b.data_ptr(), c.data_ptr()
        if self.addends is None:
            self.product(a.data_ptr(), b.data_ptr(), c_at, of_a, of_b)
            return c
        partials = a.new_empty(self.partials, dtype=torch.float32)
        partials_at = partials.data_ptr()
        self.product(a.data_ptr(), b.data_ptr(), c_at, of_a, of_b, partials_at)
        self.addends(of_a, of_b, c_at, partials_at)
        return c


def forward_with(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: str = "bfloat16",
    splits: int = 1,
    key: Hashable = None,
) -> torch.Tensor:
    """Return the scaled product by one configuration; shapes as in the spec.

    K is a multiple of 16 and N one of 8. K of the last tiles, which are fewer than SMs, is divided into
    ``splits`` parts. The same arguments give the same bits on devices with as many SMs: partial sums are
    added in the order of K. With ``key``, of the kind of call, its launches are kept for :func:`forward`, if
    only addresses may change.
    """
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    blocks = has_blocks(a, b, scale_a, scale_b)
    operands = a, b
    a, b = k_major(a, 1), k_major(b, 0)
    has_copy = a is not operands[0] or b is not operands[1]
    c = torch.empty(m, n, dtype=getattr(torch, out_dtype), device=a.device)
    row_tiles, column_tiles = config.clusters(m, n)
    k_steps, tiles = -(-k // K_STEP), row_tiles * column_tiles
    formats = FORMATS[a.dtype], FORMATS[b.dtype]
    clusters = max_clusters(source(formats, c.dtype, config, blocks), config, a.device)
    divided = tiles % clusters
    splits = min(splits, k_steps) if divided else 1
    units = tiles + divided * (splits - 1)
    shape = (divided * splits * config.cluster, config.rows, config.columns) if splits > 1 else (0,)
    partials = torch.empty(shape, dtype=torch.float32, device=a.device)
    scales = {
        "scale_a": _scale_encoder(scale_a, True, blocks),
        "scale_b": _scale_encoder(scale_b, False, blocks),
    }
    common = {
        "scale_a": scales["scale_a"](scale_a.data_ptr()),
        "scale_b": scales["scale_b"](scale_b.data_ptr()),
        "row_tiles": row_tiles,
        "column_tiles": column_tiles,
        "whole_tiles": tiles - divided,
        "splits": splits,
        "partials": partials.data_ptr(),
        "rows": m,
        "columns": n,
    }
    a_rows, b_rows = config.rows // config.cluster_columns, config.columns // config.cluster_rows
    arguments = Arguments(
        a=tensor_map.encode(a, a_rows),
        b=tensor_map.encode(b, b_rows),
        c=tensor_map.encode(c, STORED_ROWS),
        k_steps=k_steps,
        **common,
    )
    program = source(formats, c.dtype, config, blocks, splits > 1)
    grid = min(units, clusters) * config.cluster
    kernel = program["scaled_matmul"]
    kernel(grid, config.threads, arguments, shared=config.smem_bytes)
    pieces = divided * config.cluster * (config.rows // STORED_ROWS) * (config.columns // SUM_COLUMNS)
    addends = SumArguments(c=c.data_ptr(), **common) if splits > 1 else None
    if addends is not None:
        program["scaled_matmul_sum"](pieces, GROUP_THREADS, addends, overlap=True)
    if key is None or has_copy or not isinstance(kernel, Kernel):
        return c
    launch = kernel.prepare_structure(grid, config.threads, shared=config.smem_bytes)
    boxes = {"a": (a, a_rows), "b": (b, b_rows), "c": (c, STORED_ROWS)}
    maps = {name: tensor_map.encoder(x, rows) for name, (x, rows) in boxes.items()} | scales
    product = RepeatedProduct(launch, arguments, maps, () if addends is None else ("partials",))
    last = None
    if addends is not None:
        launch = program["scaled_matmul_sum"].prepare_structure(pieces, GROUP_THREADS, overlap=True)
        last = RepeatedProduct(launch, addends, scales, ("c", "partials"))
    _REPEATED.store(key, RepeatedCall(product, last, shape, c.dtype))
    return c


def max_clusters(program: CudaSource, config: Config, device: torch.device) -> int:
    """Return how many clusters run at once on the device; without clusters, its number of SMs."""
    if config.cluster > 1 and isinstance(kernel := program["scaled_matmul"], Kernel):
        return _max_clusters(kernel, config) or num_sms(device) // config.cluster
    return num_sms(device) // config.cluster


@cache
def _max_clusters(kernel: Kernel, config: Config) -> int:
    return kernel.max_active_clusters(config.threads, shared=config.smem_bytes, cluster=config.cluster)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    key = (
        *(a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride()),
        *(scale_a.shape, scale_a.stride(), scale_b.shape, scale_b.stride()),
        *(out_dtype, a.get_device()),
    )
    repeated = _REPEATED.get(key)
    if repeated is not None and not (a.data_ptr() | b.data_ptr()) & 15:
        return repeated(a, b, scale_a, scale_b)  # type: ignore[no-any-return]
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n, dtype=getattr(torch, out_dtype))
    config, splits = choose(m, n, k, a.device, has_blocks(a, b, scale_a, scale_b))
    return forward_with(config, a, b, scale_a, scale_b, out_dtype=out_dtype, splits=splits, key=key)


def supports(case: Case, device: str) -> Support:
    m, n, k = sizes(case)
    if device == "cuda" and machine.has_gpu() and torch.cuda.get_device_capability() != CAPABILITY:
        return no("fp8 wgmma exists on compute capability 9.0 alone; use torch or eager")
    if 0 in (m, n, k):
        return YES
    if k % K_MULTIPLE or n % N_MULTIPLE:
        return no(
            f"rows must be whole 16 bytes: K a multiple of {K_MULTIPLE} and N of {N_MULTIPLE}; pad with "
            "zeros, or use eager"
        )
    return YES


def _aot_kernels() -> tuple[CudaSource, ...]:
    """Return what can be chosen for e4m3 and bfloat16, and the first of each kind in the other dtypes."""
    e4m3, e5m2, bf16 = ("e4m3", "e4m3"), ("e5m2", "e5m2"), torch.bfloat16
    sources = [
        source(e4m3, bf16, config, blocks, is_split)
        for blocks, costs in COSTS.items()
        for config in costs
        for is_split in (False, True)
    ]
    for blocks, costs in COSTS.items():
        first = next(iter(costs))
        mixed = e5m2, ("e4m3", "e5m2"), ("e5m2", "e4m3")
        sources += [source(formats, bf16, first, blocks) for formats in mixed]
        sources += [source(e4m3, torch.float16, first, blocks)]
    return tuple(sources)


IMPLEMENTATION = Implementation(
    operator="scaled_matmul",
    backend="cuda",
    forward=forward,
    supports=supports,
    directions=("forward",),
    aot_kernels=_aot_kernels(),
    idea="copy engine, pipeline and fp8 wgmma; every 128 of K sums are added up in float32",
)
