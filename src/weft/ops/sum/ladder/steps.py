"""CUDA ladder of sum, steps one to five; step six is the implementation ``cuda`` (with_cuda.py).

A step's kernel reduces n elements to one double for each block. The host runs the same kernel, compiled for
double, on these sums until one is left, and rounds it to the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import YES, Case, Implementation, Support, no
from weft.core.implementation import anywhere
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, dense, dtype_name
from weft.ops.sum.spec import spread

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
STRIDING = 8  # blocks of 256 threads on each SM in a striding grid: the 2048 threads that an SM can have
LONGEST = 64  # vectors that a striding thread adds one after another: the error grows with their number
FEW = 1 << 14  # elements up to which one block is faster than several blocks and a second launch


@dataclass(frozen=True, kw_only=True)
class Step:
    """Configuration of a step: its file, threads per block, and elements per thread.

    With ``per_thread`` None the grid strides: as many blocks as fill the GPU, or more if a thread would have
    more than LONGEST vectors to add. ``dynamic`` shared memory is one Short (4 bytes; 8 for double) for each
    thread.
    """

    file: str
    threads: int
    per_thread: int | None = 1
    dynamic: bool = False

    @cached_property
    def sources(self) -> dict[torch.dtype, CudaSource]:
        """Return the step's program for each dtype."""
        return {
            dtype: CudaSource(
                file=Path(__file__).with_name(self.file),
                kernels=("sum_step",),
                defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(self.threads))),
                label=dtype_name(dtype),
            )
            for dtype in DTYPES
        }

    def blocks(self, x: torch.Tensor) -> int:
        """Return the number of blocks for x: at least one, so that an empty tensor's sum is written as 0."""
        n = x.numel()
        if self.per_thread is not None:
            return max(1, -(-n // (self.threads * self.per_thread)))
        if n <= FEW:
            return 1
        rounds = -(-n * x.element_size() // (16 * self.threads))  # of all threads of one block
        return min(rounds, max(STRIDING * num_sms(x.device), -(-rounds // LONGEST)))

    def launch(self, x: torch.Tensor, sums: torch.Tensor, blocks: int) -> None:
        """Launch the kernel once: x (n,) to sums (blocks,)."""
        short = 8 if x.dtype == torch.float64 else 4
        shared = short * self.threads if self.dynamic else 0
        kernel = self.sources[x.dtype]["sum_step"]
        kernel(blocks, self.threads, x, sums, x.numel(), shared=shared)


def _atomically(step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = dense(x)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        step.launch(x, total, step.blocks(x))
        return total.to(x.dtype)

    return forward


def _by_levels(step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        level = dense(x)
        while True:
            blocks = step.blocks(level)
            sums = torch.empty(blocks, dtype=torch.float64, device=x.device)
            step.launch(level, sums, blocks)
            if blocks == 1:
                return sums.view(()).to(x.dtype)
            level = sums

    return forward


def _not_double(case: Case, device: str) -> Support:
    if case.dtype == "float64":
        return no("one double accumulates all float64 elements: the error grows with their number")
    return YES


def _implementation(name: str, idea: str, step: Step, *, atomic: bool = False) -> Implementation:
    return Implementation(
        operator="sum",
        name=name,
        backend="cuda",
        forward=_atomically(step) if atomic else _by_levels(step),
        backward=spread,
        supports=_not_double if atomic else anywhere,
        deterministic=not atomic,
        aot_kernels=tuple(step.sources.values()),
        idea=idea,
    )


GLOBAL_ATOMICS = _implementation(
    "cuda/01-global-atomics",
    "every thread adds its element to one double",
    Step(file="01_global_atomics.cu", threads=256),
    atomic=True,
)
SHARED_TREE = _implementation(
    "cuda/02-shared-tree",
    "a tree in shared memory, one sum a block",
    Step(file="02_shared_tree.cu", threads=256),
)
DYNAMIC_SHARED = _implementation(
    "cuda/03-dynamic-shared",
    "shared memory sized at launch, the first addition on the way in",
    Step(file="03_dynamic_shared.cu", threads=512, per_thread=2, dynamic=True),
)
WARP_SHUFFLE = _implementation(
    "cuda/04-warp-shuffle",
    "register to register within a warp, one barrier",
    Step(file="04_warp_shuffle.cu", threads=512, per_thread=2),
)
VECTORISED_GRID_STRIDE = _implementation(
    "cuda/05-vectorised-grid-stride",
    "16-byte loads, a grid that fills the GPU and strides",
    Step(file="05_vectorised_grid_stride.cu", threads=256, per_thread=None),
)
