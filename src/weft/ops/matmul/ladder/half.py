"""CUDA ladder of products of half types on Hopper: from mma.sync to the copy engine and wgmma, step by step.

Step 11 is matmul_mma.cu, steps 12 to 16 are in this folder on the device library ``hopper/``, and steps 17
and 18 are configurations of ops/_common/products/wgmma.cu. The last step is the implementation ``cuda``,
which chooses its tile and divides K. The order of the ideas follows NVIDIA's CUTLASS 3 (its kernels for
sm_90).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, no
from weft.machine.device_limits import has_wgmma, num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.products import wgmma
from weft.ops.matmul import with_cuda
from weft.ops.matmul.ladder import aligned
from weft.ops.matmul.spec import sizes

COLUMNS, K_STEP = 256, 64  # of c in a tile; elements of K in a step
ROW_ELEMENTS = 8  # the copy engine reads rows whose size is a multiple of 16 bytes
GROUP_THREADS, GROUP_ROWS = 128, 64
WIDEST = wgmma.Config(columns=COLUMNS, stages=4)
MULTICAST = wgmma.Config(columns=COLUMNS, stages=4, cluster=2)


class Arguments(ctypes.Structure):
    """``LadderArguments`` of wgmma_tiles.cuh."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("padding", ctypes.c_int * 9),  # the structure is aligned to 64 bytes
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """Configuration of a step: its file, number of warp groups that multiply, and stages.

    With ``has_producer`` one more group only copies. A ``persistent`` step has one block an SM.
    """

    file: str
    consumers: int = 1
    stages: int = 4
    has_producer: bool = True
    persistent: bool = False

    def source(self, dtype: torch.dtype) -> CudaSource:
        return CudaSource(
            file=Path(__file__).with_name(f"{self.file}.cu"),
            kernels=(f"matmul_{self.file[3:]}",),
            defines=(("WEFT_T", CUDA_TYPES[dtype]),),
            label=f"wgmma-{self.file}-{dtype_name(dtype)}",
            min_arch=wgmma.ARCH,
            max_arch=wgmma.ARCH,
        )

    @property
    def smem_bytes(self) -> int:
        stage = (self.consumers * GROUP_ROWS + COLUMNS) * 128
        return self.stages * stage + 2 * 8 * self.stages

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a (M, K) @ b (K, N), both contiguous, with N and K multiples of 8."""
        (m, k), n = a.shape, b.shape[1]
        c = a.new_empty(m, n)
        rows = self.consumers * GROUP_ROWS
        row_tiles, column_tiles = -(-m // rows), -(-n // COLUMNS)
        arguments = Arguments(
            a=tensor_map.encode(a, rows),
            b=tensor_map.encode(b, K_STEP),
            c=c.data_ptr(),
            rows=m,
            columns=n,
            k_steps=-(-k // K_STEP),
            row_tiles=row_tiles,
            column_tiles=column_tiles,
        )
        source = self.source(a.dtype)
        tiles = row_tiles * column_tiles
        blocks = min(tiles, num_sms(a.device)) if self.persistent else tiles
        threads = GROUP_THREADS * (self.consumers + self.has_producer)
        source[source.kernels[0]](blocks, threads, arguments, shared=self.smem_bytes)
        return c


def _forward(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    precision: str = "ieee",
) -> torch.Tensor:
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(a.shape[0], b.shape[1])
    return product(aligned(a), aligned(b))


def _supports(case: Case, device: str) -> Support:
    if case.dtype == "float32":
        return no("a step of the ladder of products of half types; use impl='cuda'")
    _, n, k = sizes(case)
    if n % ROW_ELEMENTS or k % ROW_ELEMENTS:
        return no(f"the copy engine reads whole 16 bytes: N and K are multiples of {ROW_ELEMENTS}")
    if device == "cuda" and torch.cuda.is_available() and not has_wgmma(torch.device(device)):
        return no("wgmma and its copy engine exist on compute capability 9.0 alone")
    return YES


def _implementation(
    name: str,
    idea: str,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    aot_kernels: tuple[CudaSource, ...] = (),
) -> Implementation:
    return Implementation(
        operator="matmul",
        name=f"cuda/{name}",
        backend="cuda",
        forward=partial(_forward, product),
        directions=(FORWARD,),
        supports=_supports,
        aot_kernels=aot_kernels,
        idea=idea,
    )


def _own_kernel(step: Step, idea: str) -> Implementation:
    sources = tuple(step.source(dtype) for dtype in wgmma.DTYPES)
    return _implementation(step.file.replace("_", "-"), idea, step.forward, sources)


def _mma_sync(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return with_cuda.forward_with(with_cuda.choose(a, b, "ieee"), a, b)


def _mma_sync_kernels() -> tuple[CudaSource, ...]:
    """Return the program of large products of contiguous operands for each half type."""
    _, config = with_cuda.SHIPPED["half"][0]
    return tuple(with_cuda.source("mma", dtype, config, 0, 1) for dtype in wgmma.DTYPES)


def _wgmma_kernels(config: wgmma.Config) -> tuple[CudaSource, ...]:
    return tuple(wgmma.source(dtype, config, True, False) for dtype in wgmma.DTYPES)


MMA_SYNC = _implementation(
    "11-mma-sync", "tensor cores by a warp's instruction, from registers", _mma_sync, _mma_sync_kernels()
)
WGMMA = _own_kernel(
    Step(file="12_wgmma", stages=1, has_producer=False),
    "copy engine and wgmma, from shared memory, one after the other",
)
PIPELINE = _own_kernel(
    Step(file="13_pipeline", has_producer=False), "a ring of four stages: copies run ahead of the products"
)
WARP_ROLES = _own_kernel(
    Step(file="14_warp_roles"), "one warp group copies, another multiplies: no common barrier"
)
TWO_CONSUMERS = _own_kernel(
    Step(file="15_two_consumers", consumers=2),
    "two groups multiply with one tile of b: 128 x 256 a block",
)
PERSISTENT = _own_kernel(
    Step(file="16_persistent", consumers=2, persistent=True),
    "one block an SM takes tile after tile, in bands: copies run across tiles",
)
TMA_STORE = _implementation(
    "17-tma-store",
    "c through shared memory and the copy engine",
    partial(wgmma.forward_with, WIDEST),
    _wgmma_kernels(WIDEST),
)
MULTICAST_PAIR = _implementation(
    "18-multicast",
    "two blocks share each tile of b",
    partial(wgmma.forward_with, MULTICAST),
    _wgmma_kernels(MULTICAST),
)
