"""The matrix product in numba: shared-memory tiles on a GPU, blocked loops over a CPU's cores."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from weft.backends.numba_jit import SIMULATED, NumbaAotKernel, array, cuda, launch, numba
from weft.core import YES, Case, Implementation, Support, no
from weft.ops._common.numba_parallel import parallel_implementation
from weft.ops.matmul.spec import backward_by, sizes

# Threads per side of a block, which is the tile's side. The simulator runs each as a thread of the host.
SIDE = 8 if SIMULATED else 16
MAX_SIMULATED = 1 << 12  # multiply-adds: the simulator computes a few thousand per second
DEPTH = 128  # rows of b packed at once; a multiple of 4


@cuda.jit
def matmul_tiles(a, b, c):
    # a: (M, K), b: (K, N), c: (M, N), float32, any strides. A block loads 16 x 16 of a and of b into shared
    # memory for its 16 x 16 of c: each factor is read from global memory 16 times less often.
    a_tile = cuda.shared.array((SIDE, SIDE), numba.float32)
    b_tile = cuda.shared.array((SIDE, SIDE), numba.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * SIDE + y, cuda.blockIdx.x * SIDE + x
    total = numba.float32(0)
    for start in range(0, a.shape[1], SIDE):
        inside_a = row < a.shape[0] and start + x < a.shape[1]
        inside_b = start + y < b.shape[0] and column < b.shape[1]
        a_tile[y, x] = a[row, start + x] if inside_a else numba.float32(0)
        b_tile[y, x] = b[start + y, column] if inside_b else numba.float32(0)
        cuda.syncthreads()
        for k in range(SIDE):
            total += a_tile[y, k] * b_tile[k, x]
        cuda.syncthreads()  # the next step overwrites both tiles
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


def _array(x: torch.Tensor) -> Any:
    """Return an operand as it is stored. Only the simulator needs a copy of one with gaps in memory."""
    return array(x.contiguous() if SIMULATED and 1 not in x.stride() else x)


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    # x runs along the columns of c, so that neighbouring threads read neighbouring elements of b.
    grid = (-(-n // SIDE), -(-m // SIDE))
    launch(matmul_tiles, grid, (SIDE, SIDE), _array(a), _array(b), array(c))
    return c


def supports(case: Case, device: str) -> Support:
    if case.dtype != "float32" or case.params.get("precision") == "tf32":
        return no("numba.cuda reaches no tensor core and is written for float32; use triton or cuda")
    m, n, k = sizes(case)
    if device == "cpu" and SIMULATED and m * n * k > MAX_SIMULATED:
        return no(f"{m * n * k} multiply-adds are too many to simulate (limit {MAX_SIMULATED}); needs a GPU")
    return YES


@cache
def _parallel() -> Any:
    """Compile matmul_parallel once for every stride order: packing handles any strides."""
    signature = "void(float32[:, :], float32[:, :], float32[:, ::1])"
    # "contract" alone allows fused multiply-adds. Full fastmath would assume that there are no NaN.
    return numba.njit(signature, parallel=True, fastmath={"contract"})(matmul_parallel)


def matmul_parallel(a, b, c):
    # a: (M, K), b: (K, N), any strides; c: (M, N) of zeros; float32. DEPTH rows of b at a time are
    # packed, with 0 beyond K. Each strip of 4 rows of c sums their products separately and then adds them:
    # errors grow with DEPTH and with the number of packs, not with K.
    m, k = a.shape
    n = b.shape[1]
    for start in range(0, k, DEPTH):
        stop = min(start + DEPTH, k)
        # Packing makes the inner loop contiguous for any strides of b; zeros beyond K add nothing.
        panel = np.zeros((DEPTH, n), np.float32)
        panel[: stop - start] = b[start:stop]
        for strip in numba.prange((m + 3) // 4):
            first = strip * 4
            rows = min(4, m - first)
            factors = np.zeros((4, DEPTH), np.float32)
            factors[:rows, : stop - start] = a[first : first + rows, start:stop]
            total = np.zeros((4, n), np.float32)
            add_products(total, factors, panel)
            for r in range(rows):
                for j in range(n):
                    c[first + r, j] += total[r, j]


@numba.njit(fastmath={"contract"}, cache=False)
def add_products(total, a, b):
    """Add a (4, DEPTH) @ b (DEPTH, N) to total (4, N): 16 multiply-adds per 4 + 4 vectors read."""
    for k in range(0, DEPTH, 4):
        # Four rows of c share the four rows of b that were just loaded, in order of k within each element.
        for r in range(4):
            a0, a1, a2, a3 = a[r, k], a[r, k + 1], a[r, k + 2], a[r, k + 3]
            for j in range(total.shape[1]):
                s = total[r, j] + a0 * b[k, j]
                s += a1 * b[k + 1, j]
                s += a2 * b[k + 2, j]
                total[r, j] = s + a3 * b[k + 3, j]


def forward_parallel(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    c = a.new_zeros(a.shape[0], b.shape[1])
    _parallel()(*(x.detach().numpy() for x in (a, b, c)))
    return c


IMPLEMENTATION = Implementation(
    operator="matmul",
    backend="numba",
    forward=forward,
    backward=backward_by(forward),
    supports=supports,
    aot_kernels=(
        NumbaAotKernel(
            label="matmul_tiles-float32",
            kernel=matmul_tiles,
            signature=", ".join(["float32[:, :]"] * 3),
        ),
    ),
    idea="16 x 16 tiles in shared memory",
)
PARALLEL = parallel_implementation(
    "matmul",
    forward_parallel,
    backward_by(forward_parallel),
    "njit(parallel=True): strips of 4 rows, packed rows of b",
)
