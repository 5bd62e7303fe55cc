"""The ladder's first five steps; the sixth is the implementation ``cuda`` itself (with_cuda.py).

A step's kernel turns n elements into one double a block. The host runs the step's own kernel,
compiled for double, on those again, until one is left, and rounds that to the dtype.
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
from weft.ops._shared.layout import dense
from weft.ops.sum.spec import spread

TYPES = {
    torch.float32: "float",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
    torch.float16: "__half",
}
STRIDING = 8  # blocks on each multiprocessor where they stride: 2048 threads of 256
LONGEST = 64  # vectors that a striding thread adds up one by one: the error grows with their number
FEW = 1 << 14  # elements that one striding block sums faster than another launch would take


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its file, the threads of a block, and the elements that a thread is launched for.

    ``per_thread`` None is a grid that strides: as many blocks as fill the GPU, or more where a
    thread would have more than LONGEST vectors to add. ``dynamic`` shared memory is one Short
    (4 bytes; 8 for double) a thread.
    """

    file: str
    threads: int
    per_thread: int | None = 1
    dynamic: bool = False

    @cached_property
    def sources(self) -> dict[torch.dtype, CudaSource]:
        """The step's program for each dtype."""
        return {
            dtype: CudaSource(
                file=Path(__file__).with_name(self.file),
                kernels=("sum_step",),
                defines=(("WEFT_T", name), ("THREADS", str(self.threads))),
                label=str(dtype).removeprefix("torch."),
            )
            for dtype, name in TYPES.items()
        }

    def blocks(self, x: torch.Tensor) -> int:
        """The grid for x: at least one block, so that an empty sum is written too."""
        n = x.numel()
        if self.per_thread is not None:
            return max(1, -(-n // (self.threads * self.per_thread)))
        if n <= FEW:
            return 1
        rounds = -(-n * x.element_size() // (16 * self.threads))  # of all threads of one block
        units = torch.cuda.get_device_properties(x.device).multi_processor_count
        return min(rounds, max(STRIDING * units, -(-rounds // LONGEST)))

    def launch(self, x: torch.Tensor, sums: torch.Tensor, blocks: int) -> None:
        """Run the kernel once: x (n,) to sums (blocks,)."""
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
        return no(
            "one double takes all float64 elements in turn: the error grows with their number"
        )
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
        specimens=tuple(step.sources.values()),
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
