"""CUDA ladder of float32 products, naive to best: one idea for each step, each step an implementation.

The kernels of steps 1 to 9 are in this folder; the last step is the implementation ``cuda`` (matmul_fp32.cu).
The order of the ideas follows Simon Boehm, "How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance"
(2022), with asynchronous copies in place of loads to registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, no
from weft.ops.matmul.spec import sizes

HERE = Path(__file__).parent
VECTOR = 4  # elements of a 16-byte access


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy: contiguous, and at a multiple of 16 bytes for vectors and the copy engine."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@dataclass(frozen=True, kw_only=True)
class Step:
    """Configuration of a step: its file, threads per block, and the side of the block's square tile of c.

    ``vectors`` is True if it reads groups of four elements. ``shared`` is its dynamic shared memory in bytes.
    """

    file: str
    threads: int
    side: int
    vectors: bool = False
    shared: int = 0

    @cached_property
    def source(self) -> CudaSource:
        kernel = f"matmul_{self.file[3:]}"
        return CudaSource(
            file=HERE / f"{self.file}.cu", kernels=(kernel,), defines=(), label=f"fma-{self.file}"
        )

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
        """Return the float32 product of a (M, K) and b (K, N)."""
        (m, k), n = a.shape, b.shape[1]
        if 0 in (m, n, k):
            return a.new_zeros(m, n)
        c = a.new_empty(m, n)
        tiles = -(-m // self.side) * -(-n // self.side)
        kernel = self.source[self.source.kernels[0]]
        kernel(tiles, self.threads, aligned(a), aligned(b), c, m, n, k, shared=self.shared)
        return c

    def supports(self, case: Case, device: str) -> Support:
        if case.dtype != "float32" or case.params.get("precision") == "tf32":
            return no("a step of the ladder of float32 products; use impl='cuda'")
        _, n, k = sizes(case)
        if self.vectors and (n % VECTOR or k % VECTOR):
            return no(f"reads groups of {VECTOR} elements, so that N and K are multiples of {VECTOR}")
        return YES


def _implementation(idea: str, step: Step) -> Implementation:
    return Implementation(
        operator="matmul",
        name=f"cuda/{step.file.replace('_', '-')}",
        backend="cuda",
        forward=step.forward,
        directions=(FORWARD,),
        supports=step.supports,
        aot_kernels=(step.source,),
        idea=idea,
    )


NAIVE = _implementation(
    "a thread an element, neighbours in neighbouring rows", Step(file="01_naive", threads=1024, side=32)
)
COALESCED = _implementation(
    "neighbours in neighbouring columns: adjacent reads of b",
    Step(file="02_coalesced", threads=1024, side=32),
)
SHARED_TILE = _implementation(
    "32 x 32 of a and b in shared memory, each used 32 times",
    Step(file="03_shared_tile", threads=1024, side=32),
)
REGISTER_COLUMN = _implementation(
    "8 elements of a column a thread: a factor of b serves 8 fma",
    Step(file="04_register_column", threads=512, side=64),
)
REGISTER_SQUARE = _implementation(
    "8 x 8 elements a thread: 16 shared loads for 64 fma",
    Step(file="05_register_square", threads=256, side=128),
)
VECTORS = _implementation(
    "16-byte accesses to global and shared memory",
    Step(file="06_vectors", threads=256, side=128, vectors=True),
)
DOUBLE_BUFFER = _implementation(
    "asynchronous copies fill one buffer while the other is multiplied",
    Step(file="07_double_buffer", threads=256, side=128, vectors=True, shared=2 * 8 * (128 + 128) * 4),
)
CONFLICT_FREE = _implementation(
    "adjacent threads read adjacent 16 bytes, padding: no bank conflicts",
    Step(file="08_conflict_free", threads=256, side=128, vectors=True, shared=2 * 8 * (132 + 128) * 4),
)
WARP_TILE = _implementation(
    "64 x 32 of c a warp: fewer different factors for each fma",
    Step(file="09_warp_tile", threads=256, side=128, vectors=True, shared=2 * 8 * (132 + 128) * 4),
)
