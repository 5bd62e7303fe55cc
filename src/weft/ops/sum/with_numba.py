"""Sum in numba: ``numba.cuda`` (a tree in shared memory), and ``njit(parallel=True)`` on a CPU."""

from __future__ import annotations

import torch

from weft.backends.numba_jit import SIMULATED, NumbaAotKernel, array, cuda, launch, numba
from weft.core import Implementation
from weft.ops._common.layout import dense, flat
from weft.ops._common.numba_parallel import parallel_implementation, support_without_bfloat16
from weft.ops.sum.spec import spread

THREADS = 32 if SIMULATED else 256  # the simulator runs each as a thread of the host
BLOCKS = 4096  # fills any GPU of today several times over
SPAN = 256  # elements that one iteration of the CPU's parallel loop sums


@cuda.jit
def sum_blocks(x, partials):
    # x: (n,); partials: (blocks,) float64. A thread sums every step-th element from its own index on, with
    # four loads in flight. Bytes: n read, 8 for each block written.
    shared = cuda.shared.array(THREADS, numba.float64)
    t = cuda.threadIdx.x
    total = numba.float64(0)
    i, step = cuda.grid(1), cuda.gridsize(1)
    while i + 3 * step < x.size:
        low = numba.float64(x[i]) + numba.float64(x[i + step])
        total += low + (numba.float64(x[i + 2 * step]) + numba.float64(x[i + 3 * step]))
        i += 4 * step
    while i < x.size:
        total += numba.float64(x[i])
        i += step
    shared[t] = total
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if t < half:
            shared[t] += shared[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        partials[cuda.blockIdx.x] = shared[0]


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    n = x.numel()
    if n == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    blocks = min(-(-n // THREADS), 2 if SIMULATED else BLOCKS)
    partials = torch.empty(blocks, dtype=torch.float64, device=x.device)
    # The same kernel with one block adds the partial sums: x is then an array of float64.
    total = torch.empty(1, dtype=torch.float64, device=x.device)
    launch(sum_blocks, blocks, THREADS, array(flat(x)), array(partials))
    launch(sum_blocks, 1, THREADS, array(partials), array(total))
    return total[0].to(x.dtype, copy=True)


supports = support_without_bfloat16("float32, float64 or another backend")


@numba.njit(parallel=True, fastmath=False, cache=False)
def sum_parallel(x, partials):
    # x: (n,); partials: (spans,) float64. A span has a fixed length and a fixed order, so that the result
    # does not depend on the number of cores. Eight independent sums hide the latency of an addition and let
    # LLVM vectorise the loop without fastmath, which would assume that there are no NaN.
    for span in numba.prange(partials.size):
        at = span * SPAN
        stop = min(at + SPAN, x.size)
        a = b = c = d = e = f = g = h = numba.float64(0)
        while at + 8 <= stop:
            a += x[at]
            b += x[at + 1]
            c += x[at + 2]
            d += x[at + 3]
            e += x[at + 4]
            f += x[at + 5]
            g += x[at + 6]
            h += x[at + 7]
            at += 8
        while at < stop:
            a += x[at]
            at += 1
        partials[span] = ((a + b) + (c + d)) + ((e + f) + (g + h))


def forward_parallel(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    partials = torch.empty(-(-x.numel() // SPAN), dtype=torch.float64)
    sum_parallel(flat(x.detach()).numpy(), partials.numpy())
    return partials.sum().to(x.dtype)


IMPLEMENTATION = Implementation(
    operator="sum",
    backend="numba",
    forward=forward,
    backward=spread,
    supports=supports,
    aot_kernels=tuple(
        NumbaAotKernel(
            label=f"sum_blocks-{dtype}",
            kernel=sum_blocks,
            signature=f"{dtype}[::1], float64[::1]",
        )
        for dtype in ("float32", "float64", "float16")
    ),
    idea="grid stride in float64, a tree in shared memory, twice",
)
PARALLEL = parallel_implementation(
    "sum",
    forward_parallel,
    spread,
    "njit(parallel=True): spans of 256 in float64, over all cores",
    ("float32", "float64"),
)
