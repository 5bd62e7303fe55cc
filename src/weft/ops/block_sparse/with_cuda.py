"""Host code of block_linear.cu and block_gradient.cu: products with a weight in blocks on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from weft import machine
from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import YES, Case, Implementation, Support, no
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, HALF_DTYPES, as_matrix, dtype_name
from weft.ops._common.prepared import LaunchCache
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops._common.products.wgmma_model import CLOCK_GHZ
from weft.ops.block_sparse import blocks
from weft.ops.block_sparse.spec import bias_gradient, index_of

ARCH = 90  # wgmma exists on sm_90a alone
CAPABILITY = (9, 0)
# Of an earlier fit of dense products' model (products-2026-11-28.txt), with which the choices were measured.
LAUNCH_US, STORE_US, L2_BYTES_PER_NS = 2.18, 1.26, 75.5
SIDES = (64, 128)
THREADS, GROUPS, K_STEP = 384, 2, 64
STORED_ROWS, BOX_BYTES = 64, 64 * 128  # of a box of y, of grad and of x
GRADIENT_STAGES = 6
SMEM_BYTES_A_CLOCK = 125.0
HERE = Path(__file__).parent


class Arguments(ctypes.Structure):
    """``BlockArguments`` of block_linear.cu."""

    _fields_ = (
        ("values", TensorMap),
        ("x", TensorMap),
        ("y", TensorMap),
        ("starts", ctypes.c_void_p),
        ("across", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("count", ctypes.c_int),
        ("column_blocks", ctypes.c_int),
        ("padding", ctypes.c_int * 4),  # the structure is aligned to 64 bytes
    )


class GradientArguments(ctypes.Structure):
    """``GradientArguments`` of block_gradient.cu."""

    _fields_ = (
        ("grad", TensorMap),
        ("x", TensorMap),
        ("output", TensorMap),
        ("rows", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("col", ctypes.c_void_p),
        ("tiles", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("count", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("column_blocks", ctypes.c_int),
        ("padding", ctypes.c_int * 5),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """``columns`` rows of x of a group, ``stages`` of the ring, blocks in a ``cluster``, which share W."""

    block: int
    columns: int
    stages: int
    cluster: int = 1

    @property
    def tile_columns(self) -> int:
        """Rows of x in a tile: of blocks of 64 each group has its own."""
        return self.columns * (1 if self.block == 128 else GROUPS)

    @property
    def smem_bytes(self) -> int:
        stage = (self.block + self.tile_columns) * 2 * K_STEP
        boxes = 2 if self.columns % 128 == 0 else 1
        return self.stages * stage + GROUPS * boxes * BOX_BYTES + 2 * 8 * self.stages

    @property
    def label(self) -> str:
        return f"{self.block}x{self.columns}x{self.stages}-{self.cluster}"


CANDIDATES = {
    64: (
        Config(block=64, columns=128, stages=4),
        Config(block=64, columns=64, stages=8),
        Config(block=64, columns=128, stages=4, cluster=2),
    ),
    128: (
        Config(block=128, columns=256, stages=4),
        Config(block=128, columns=128, stages=6),
        Config(block=128, columns=64, stages=8),
        Config(block=128, columns=256, stages=4, cluster=2),
    ),
}
_REPEATED = LaunchCache()  # RepeatedProduct by kind of call


@cache
def source(dtype: torch.dtype, config: Config, transposed: bool) -> CudaSource:
    """Return the program of a configuration."""
    label = f"block_linear-{dtype_name(dtype)}-{config.label}" + "-transposed" * transposed
    return CudaSource(
        file=HERE / "block_linear.cu",
        kernels=("block_linear",),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("BN", str(config.columns)),
            ("SIDE", str(config.block)),
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("TRANSPOSED", str(int(transposed))),
        ),
        label=label,
        min_arch=ARCH,
        max_arch=ARCH,
    )


@cache
def gradient_source(dtype: torch.dtype, block: int) -> CudaSource:
    """Return the program of the gradient of the values."""
    return CudaSource(
        file=HERE / "block_gradient.cu",
        kernels=("block_gradient",),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("SIDE", str(block)),
            ("STAGES", str(GRADIENT_STAGES)),
        ),
        label=f"block_gradient-{dtype_name(dtype)}-{block}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


def step_ns(config: Config, at_work: float) -> float:
    """Return the nanoseconds of a step of 64 columns, if a share ``at_work`` of the SMs is.

    The four products of each group take half a clock for each row of x, if shared memory gives their factors
    so fast; the L2 cache gives each SM so many bytes. The model and its constants are those of the dense
    product (ops/_common/products/wgmma_model.py).
    """
    operand_bytes = 64 * 16 * 2 + config.columns * 16 * 2
    clocks = 4 * GROUPS * max(config.columns / 2, operand_bytes / SMEM_BYTES_A_CLOCK)
    clock = CLOCK_GHZ[0] + (CLOCK_GHZ[1] - CLOCK_GHZ[0]) * at_work
    loaded = (config.block / config.cluster + config.tile_columns) * 2 * K_STEP
    return max(clocks / clock, loaded * at_work / L2_BYTES_PER_NS)


def estimated_us(batch: int, rows: int, count: int, config: Config, sms: int) -> float:
    """Return the time in microseconds that a model gives: ``rows`` rows of blocks that have ``count``."""
    tiles = rows * -(-batch // (config.tile_columns * config.cluster))
    at_once = max(1, sms // config.cluster)
    steps = count / rows * config.block / K_STEP
    one = steps * step_ns(config, min(1.0, tiles / at_once)) * 1e-3 + STORE_US * config.columns / 256
    return LAUNCH_US + -(-tiles // at_once) * one


@lru_cache(maxsize=4096)
def choose(batch: int, rows: int, count: int, block: int, sms: int) -> Config:
    """Return the configuration that costs least by :func:`estimated_us`."""
    return min(CANDIDATES[block], key=lambda c: estimated_us(batch, rows, count, c, sms))


def _readable(x: Tensor) -> Tensor:
    """Return a matrix that the copy engine reads with its columns adjacent; copy it if needed."""
    is_row_major = tensor_map.contiguous_dimension(x) == 1 and tensor_map.fits(x)
    return x if is_row_major else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _stacked(values: Tensor) -> Tensor:
    """Return the blocks below each other, (count b, b), contiguous and aligned to 16 bytes."""
    is_readable = values.is_contiguous() and values.data_ptr() % 16 == 0
    aligned = values if is_readable else values.clone(memory_format=torch.contiguous_format)
    return aligned.view(values.shape[0] * values.shape[1], values.shape[1])


def product(
    x2d: Tensor,
    values: Tensor,
    starts: Tensor,
    across: Tensor,
    places: Tensor | None,
    bias: Tensor | None,
    config: Config | None = None,
) -> Tensor:
    """Return x W^T + bias (M, N), or with ``places`` x W for the index of W^T; one configuration or the best.

    The launch of a kind of call is kept, if only addresses may change.
    """
    (count, block, _), m = values.shape, x2d.shape[0]
    outputs, transposed = (starts.shape[0] - 1) * block, places is not None
    y = torch.empty((m, outputs), dtype=x2d.dtype, device=x2d.device)
    if not y.numel():
        return y
    if not (count and x2d.shape[1]):
        return y.zero_() if bias is None else y.copy_(bias)
    index = (starts, across, across if places is None else places)
    addends = y if bias is None else bias
    are_contiguous = all(t.is_contiguous() for t in (*index, addends, values))
    key: Hashable = None
    if are_contiguous and config is None and not (x2d.data_ptr() | values.data_ptr()) & 15:
        key = (transposed, x2d.dtype, x2d.shape, x2d.stride(), values.shape, outputs, x2d.get_device())
        repeated = _REPEATED.get(key)
        if repeated is not None:
            pointers = (t.data_ptr() for t in (values, x2d, y, *index, addends))
            repeated(*pointers)
            return y
    config = config or choose(m, outputs // block, count, block, num_sms(x2d.device))
    _launch(config, x2d, values, index, addends, y, transposed, key)
    return y


def _launch(
    config: Config,
    x2d: Tensor,
    values: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    addends: Tensor,
    y: Tensor,
    transposed: bool,
    key: Hashable,
) -> None:
    """Launch the kernel; with ``key``, keep the launch for calls of the kind."""
    address = x2d.data_ptr()
    x2d, stacked = _readable(x2d), _stacked(values)
    index = (index[0].contiguous(), index[1].contiguous(), index[2].contiguous())
    addends = addends.contiguous()
    count, block, _ = values.shape
    # A box of W is the part of one block of a cluster: rows of W, or with `transposed` of its K.
    box_rows = (K_STEP if transposed else block) // config.cluster
    row_tiles = y.shape[1] // block
    column_tiles = -(-y.shape[0] // (config.tile_columns * config.cluster))
    arguments = Arguments(
        values=tensor_map.encode(stacked, box_rows),
        x=tensor_map.encode(x2d, config.columns),
        y=tensor_map.encode(y, STORED_ROWS),
        starts=index[0].data_ptr(),
        across=index[1].data_ptr(),
        places=index[2].data_ptr(),
        bias=addends.data_ptr(),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        count=count,
        column_blocks=x2d.shape[1] // block,
    )
    kernel = source(y.dtype, config, transposed)["block_linear"]
    clusters = min(row_tiles * column_tiles, max_clusters(kernel, config, y.device))
    grid = clusters * config.cluster
    kernel(grid, THREADS, arguments, shared=config.smem_bytes)
    if key is None or not isinstance(kernel, Kernel) or x2d.data_ptr() != address:
        return
    launch = kernel.prepare_structure(grid, THREADS, shared=config.smem_bytes)
    maps = {
        "values": tensor_map.encoder(stacked, box_rows),
        "x": tensor_map.encoder(x2d, config.columns),
        "y": tensor_map.encoder(y, STORED_ROWS),
    }
    _REPEATED.store(key, RepeatedProduct(launch, arguments, maps, ("starts", "across", "places", "bias")))


def max_clusters(kernel: object, config: Config, device: torch.device) -> int:
    """Return how many clusters run at once on the device; without clusters, its number of SMs."""
    if config.cluster > 1 and isinstance(kernel, Kernel):
        return _max_clusters(kernel, config) or num_sms(device) // config.cluster
    return num_sms(device) // config.cluster


@cache
def _max_clusters(kernel: Kernel, config: Config) -> int:
    return kernel.max_active_clusters(THREADS, shared=config.smem_bytes, cluster=config.cluster)


def gradient_of_values(
    grad2d: Tensor, x2d: Tensor, values: Tensor, col: Tensor, rows: Tensor, places: Tensor
) -> Tensor:
    """Return for each stored block the product of its rows of the gradient and its columns of x."""
    count, block, _ = values.shape
    output = torch.empty((count, block, block), dtype=values.dtype, device=values.device)
    if not (count and x2d.shape[0]):
        return output.zero_()
    grad2d, x2d, col = _readable(grad2d), _readable(x2d), col.contiguous()
    rows, places = rows.contiguous(), places.contiguous()
    tiles = -(-count // (1 if block == 128 else GROUPS))
    arguments = GradientArguments(
        grad=tensor_map.encode(grad2d, K_STEP),
        x=tensor_map.encode(x2d, K_STEP),
        output=tensor_map.encode(output.view(count * block, block), STORED_ROWS),
        rows=rows.data_ptr(),
        places=places.data_ptr(),
        col=col.data_ptr(),
        tiles=tiles,
        steps=-(-x2d.shape[0] // K_STEP),
        count=count,
        row_blocks=grad2d.shape[1] // block,
        column_blocks=x2d.shape[1] // block,
    )
    shared = GRADIENT_STAGES * (4 * BOX_BYTES + 16) + GROUPS * (block // 64) * BOX_BYTES
    kernel = gradient_source(values.dtype, block)["block_gradient"]
    kernel(min(tiles, num_sms(x2d.device)), THREADS, arguments, shared=shared)
    return output


def forward(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    y = product(as_matrix(x), values, crow, col, None, bias)
    return y.view(*x.shape[:-1], bias.shape[0])


def backward(
    grad: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    starts, rows, places = blocks.split_index(index_of(x, values, crow, col, transposed), values.shape[0])
    grad2d, x2d = as_matrix(grad), as_matrix(x)
    dx = product(grad2d, values, starts, rows, places, None).view(x.shape)
    return dx, gradient_of_values(grad2d, x2d, values, col, rows, places), bias_gradient(grad)


def supports(case: Case, device: str) -> Support:
    if case.dtype == "float32":
        return no("the tensor cores would round float32 to tf32; use impl='triton'")
    if case.inputs[1].shape[1] not in SIDES:
        return no("the kernel takes blocks of 64 and 128; use impl='triton'")
    if device == "cuda" and machine.has_gpu() and torch.cuda.get_device_capability() != CAPABILITY:
        return no("wgmma exists on compute capability 9.0 alone; use impl='triton'")
    return YES


IMPLEMENTATION = Implementation(
    operator="block_sparse_linear",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    aot_kernels=tuple(
        [source(d, c, t) for d in HALF_DTYPES for b in SIDES for c in CANDIDATES[b] for t in (False, True)]
        + [gradient_source(d, b) for d in HALF_DTYPES for b in SIDES]
    ),
    idea="y^T = W x^T by wgmma: persistent tiles, a producer that walks the row's blocks",
)
