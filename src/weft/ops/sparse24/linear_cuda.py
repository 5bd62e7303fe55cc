"""Host code of sparse_linear.cu: the product with a 2:4 sparse weight by Hopper's sparse tensor cores."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from weft import machine
from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import BACKWARD, YES, Case, Implementation, Support, no
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, HALF_DTYPES, dtype_name
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops._common.products.wgmma_model import CLOCK_GHZ
from weft.ops.sparse24.spec import linear_backward
from weft.ops.sparse24.with_cuda import compress, expand

ARCH = 90  # wgmma exists on sm_90a alone
CAPABILITY = (9, 0)
# Of an earlier fit of dense products' model (products-2026-11-28.txt), with which the choices were measured.
LAUNCH_US, STORE_US, L2_BYTES_PER_NS = 2.18, 1.26, 75.5
THREADS = 384
ROWS, K_STEP = 128, 64  # of a block: outputs; columns of x in a stage
VALUE_ROW_BYTES = 64  # of a stage
STORED_ROWS = 64  # of a box of y
CODE_BYTES = 1024  # of metadata in a stage
# Rows of the values have K bytes and those of y 2 N: whole 16 bytes.
K_MULTIPLE, N_MULTIPLE = 16, 8


class Arguments(ctypes.Structure):
    """``SparseArguments`` of sparse_linear.cu."""

    _fields_ = (
        ("values", TensorMap),
        ("x", TensorMap),
        ("y", TensorMap),
        ("metadata", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("padding", ctypes.c_int * 7),  # the structure is aligned to 64 bytes
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """``columns`` rows of x in a tile, ``stages`` of the pipeline, blocks in a ``cluster``, which share x.

    ``pingpong``: the groups take tiles alternately.
    """

    columns: int
    stages: int
    cluster: int = 1
    pingpong: bool = False

    @property
    def smem_bytes(self) -> int:
        stage = ROWS * VALUE_ROW_BYTES + self.columns * 2 * K_STEP + CODE_BYTES
        boxes = 2 if self.columns % 128 == 0 else 1
        return self.stages * stage + 2 * boxes * STORED_ROWS * 128 + 2 * 8 * (self.stages + 1)

    @property
    def label(self) -> str:
        return f"{ROWS}x{self.columns}x{self.stages}-{self.cluster}" + "-pingpong" * self.pingpong


_REPEATED = LaunchCache()  # RepeatedProduct by kind of call

CANDIDATES = (
    Config(columns=256, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
    Config(columns=256, stages=4, cluster=2),
    Config(columns=128, stages=6, cluster=2),
    Config(columns=128, stages=6, pingpong=True),
    Config(columns=128, stages=6, cluster=2, pingpong=True),
)

# Of the model of the time, which is not yet compared with measurements: shared memory's bytes in a clock.
SMEM_BYTES_A_CLOCK = 125.0


def step_clocks(columns: int) -> float:
    """Return the clocks that the four products of a step of 64 take, two of each group.

    A product of 32 columns takes half a clock for each row of x, if shared memory gives its operands so fast.
    """
    operand_bytes = 64 * 16 * 2 + columns * 32 * 2
    return 4 * max(columns / 2, operand_bytes / SMEM_BYTES_A_CLOCK)


@cache
def source(dtype: torch.dtype, config: Config) -> CudaSource:
    """Return the program of a configuration."""
    return CudaSource(
        file=Path(__file__).with_name("sparse_linear.cu"),
        kernels=("sparse_linear",),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("BN", str(config.columns)),
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("PINGPONG", str(int(config.pingpong))),
        ),
        label=f"sparse_linear-{dtype_name(dtype)}-{config.label}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


def estimated_us(batch: int, outputs: int, k: int, config: Config, sms: int) -> float:
    """Return the time in microseconds that a model gives for a product on ``sms`` SMs.

    The model and its constants are those of the dense product (ops/_common/products/wgmma_model.py): clocks
    fall with the SMs at work, the L2 cache gives each SM so many bytes, and a tile's end costs its columns.
    """
    tiles = -(-outputs // (ROWS * config.cluster)) * -(-batch // config.columns)
    at_once = max(1, sms // config.cluster)
    at_work = min(1.0, tiles / at_once)
    clock = CLOCK_GHZ[0] + (CLOCK_GHZ[1] - CLOCK_GHZ[0]) * at_work
    x_bytes = config.columns * 2 * K_STEP / config.cluster
    l2_ns = (ROWS * VALUE_ROW_BYTES + CODE_BYTES + x_bytes) * at_work / L2_BYTES_PER_NS
    step_ns = max(step_clocks(config.columns) / clock, l2_ns)
    steps_us, end_us = -(-k // K_STEP) * step_ns * 1e-3, STORE_US * config.columns / 256
    waves = -(-tiles // at_once)
    if config.pingpong:
        end_us *= 2  # of one group, which has the whole tile
        return LAUNCH_US + waves * max(steps_us, (steps_us + end_us) / 2) + end_us
    return LAUNCH_US + waves * (steps_us + end_us)


@lru_cache(maxsize=4096)
def choose(batch: int, outputs: int, k: int, sms: int) -> Config:
    """Return the configuration that costs least by :func:`estimated_us`.

    Without a cluster, tiles of x are more bytes than the L2 cache gives at the rate of the tensor cores.
    """
    return min(CANDIDATES, key=lambda c: estimated_us(batch, outputs, k, c, sms))


def _readable(x: Tensor) -> Tensor:
    """Return a matrix that the copy engine reads with its columns adjacent; copy it if needed."""
    is_row_major = tensor_map.contiguous_dimension(x) == 1 and tensor_map.fits(x)
    return x if is_row_major else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _aligned(x: Tensor) -> Tensor:
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def forward_with(
    config: Config, x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor, key: Hashable = None
) -> Tensor:
    """Return the product by one configuration; no size is 0.

    With ``key``, of the kind of call, its launch is kept for :func:`linear`, if only addresses may change.
    """
    outputs, k, originals = values.shape[0], x.shape[-1], (x, values, metadata, bias)
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    x2d, values = _readable(x.reshape(-1, k)), _readable(values)
    metadata, bias = _aligned(metadata), bias.contiguous()
    batch = x2d.shape[0]
    row_tiles, column_tiles = -(-outputs // (ROWS * config.cluster)), -(-batch // config.columns)
    arguments = Arguments(
        values=tensor_map.encode(values, ROWS, VALUE_ROW_BYTES),
        x=tensor_map.encode(x2d, config.columns // config.cluster),
        y=tensor_map.encode(y.view(batch, outputs), STORED_ROWS),
        metadata=metadata.data_ptr(),
        bias=bias.data_ptr(),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        k_steps=-(-k // K_STEP),
        row_blocks=metadata.shape[1],
        outputs=outputs,
    )
    kernel = source(x.dtype, config)["sparse_linear"]
    clusters = min(row_tiles * column_tiles, max_clusters(kernel, config, x.device))
    grid = clusters * config.cluster
    kernel(grid, THREADS, arguments, shared=config.smem_bytes)
    used = (x2d, values, metadata, bias)
    are_same = all(a.data_ptr() == b.data_ptr() for a, b in zip(originals, used, strict=True))
    if key is not None and are_same and isinstance(kernel, Kernel):
        launch = kernel.prepare_structure(grid, THREADS, shared=config.smem_bytes)
        maps = {
            "values": tensor_map.encoder(values, ROWS, VALUE_ROW_BYTES),
            "x": tensor_map.encoder(x2d, config.columns // config.cluster),
            "y": tensor_map.encoder(y.view(batch, outputs), STORED_ROWS),
        }
        _REPEATED.store(key, RepeatedProduct(launch, arguments, maps, ("metadata", "bias")))
    return y


def max_clusters(kernel: object, config: Config, device: torch.device) -> int:
    """Return how many clusters run at once on the device; without clusters, its number of SMs."""
    if config.cluster > 1 and isinstance(kernel, Kernel):
        return _max_clusters(kernel, config) or num_sms(device) // config.cluster
    return num_sms(device) // config.cluster


@cache
def _max_clusters(kernel: Kernel, config: Config) -> int:
    return kernel.max_active_clusters(THREADS, shared=config.smem_bytes, cluster=config.cluster)


def linear(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    outputs, k = values.shape[0], x.shape[-1]
    if 0 in (*x.shape, outputs):
        # Without columns each row is the bias; without rows or outputs there is nothing to write.
        y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
        return y.copy_(bias)
    key = (x.dtype, x.shape, x.stride(), values.shape, values.stride(), x.get_device())
    repeated = _REPEATED.get(key)
    if repeated is not None and are_repeatable(metadata, bias):
        x_at, values_at = x.data_ptr(), values.data_ptr()
        if not (x_at | values_at) & 15:
            y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
            repeated(values_at, x_at, y.data_ptr(), metadata.data_ptr(), bias.data_ptr())
            return y
    config = choose(x.numel() // k, outputs, k, num_sms(x.device))
    return forward_with(config, x, values, metadata, bias, key)


def supports(case: Case, device: str) -> Support:
    x, values = case.inputs[:2]
    if case.dtype == "float32":
        return no("Hopper's sparse tensor cores keep one of two float32; use impl='triton'")
    if device == "cuda" and machine.has_gpu() and torch.cuda.get_device_capability() != CAPABILITY:
        return no("wgmma.sp exists on compute capability 9.0 alone; use impl='triton'")
    n, k = values.shape[0], x.shape[-1]
    if k % K_MULTIPLE or n % N_MULTIPLE:
        sizes = f"inputs a multiple of {K_MULTIPLE} and outputs of {N_MULTIPLE}"
        return no(f"rows must be whole 16 bytes: {sizes}; use impl='triton'")
    return YES


SPARSE_LINEAR = Implementation(
    operator="sparse_linear",
    backend="cuda",
    forward=linear,
    backward=partial(linear_backward, expand=expand, compress=compress),
    supports=supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=tuple(source(dtype, config) for dtype in HALF_DTYPES for config in CANDIDATES),
    idea="y^T = W x^T by wgmma.sp: persistent tiles, codes beside each stage",
)
