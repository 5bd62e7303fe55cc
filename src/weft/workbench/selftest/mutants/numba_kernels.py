"""numba.cuda kernels with faults selected by a number; with 0 they are correct.

The simulator runs each thread of a block as a thread of the host, so a missing barrier may go
unnoticed: those faults need a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from weft.backends.numba_jit import SIMULATED, NumbaAotKernel, array, cuda, launch, numba
from weft.ops._common.layout import dense, flat, view_2d

THREADS = 32 if SIMULATED else 256
SIDE = 8
ZERO, HALF, ONE = numba.float32(0), numba.float32(0.5), numba.float32(1)
K, CUBIC = numba.float32(math.sqrt(2 / math.pi)), numba.float32(0.044715)
LOWEST = numba.float32(-math.inf)

FAULTS = {
    "": 0,
    "W01/nothing": 1,
    "W04/last-block": 2,
    "W05/no-mask": 3,
    "W09/no-maximum": 4,
    "W10/no-scale": 5,
    "W12/no-nan": 6,
    "W14/no-barrier": 7,
    "W15/adds": 8,
    "W18/grid-of-0": 9,
    "W23/default-stream": 10,
}


@cuda.jit
def gelu(x, y, fault):
    # x, y: (n,) storage order. Bytes moved: n read + n written.
    i = cuda.grid(1)
    if i < x.size or fault == 3:
        v = numba.float32(x[i])
        if fault == 6 and v != v:
            v = ZERO
        t = numba.float32(math.tanh(K * v * (ONE + CUBIC * v * v)))
        scale = ONE if fault == 5 else HALF
        if fault != 1:
            y[i] = scale * v * (ONE + t)


@cuda.jit
def softmax(x, y, fault):
    # x, y: (rows, columns). A block a row, trees in shared memory. Bytes: 3n read + n written.
    scratch = cuda.shared.array(THREADS, numba.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    top = LOWEST
    for j in range(t, x.shape[1], THREADS):
        v = numba.float32(x[row, j])
        if v > top:
            top = v
    scratch[t] = top
    half = THREADS // 2
    while half > 0:
        if fault != 7:
            cuda.syncthreads()
        if t < half and scratch[t + half] > scratch[t]:
            scratch[t] = scratch[t + half]
        half //= 2
    cuda.syncthreads()
    # All threads read the maximum before the next barrier; after it scratch is written again.
    top = scratch[0] if fault != 4 else ZERO
    cuda.syncthreads()
    total = ZERO
    for j in range(t, x.shape[1], THREADS):
        v = numba.float32(x[row, j])
        if fault != 6 or v == v:
            total += numba.float32(math.exp(v - top))
    scratch[t] = total
    half = THREADS // 2
    while half > 0:
        if fault != 7:
            cuda.syncthreads()
        if t < half:
            scratch[t] += scratch[t + half]
        half //= 2
    cuda.syncthreads()
    for j in range(t, x.shape[1], THREADS):
        if fault != 1:
            y[row, j] = numba.float32(math.exp(numba.float32(x[row, j]) - top)) / scratch[0]


@cuda.jit
def total(x, y, fault):
    # x: (n,); y: (1,) float64, which is zeroed before. One block. Bytes: n read.
    scratch = cuda.shared.array(THREADS, numba.float64)
    t = cuda.threadIdx.x
    mine = numba.float64(0)
    past = x.size // THREADS * THREADS if fault == 2 else x.size
    for i in range(t, past, THREADS):
        v = numba.float64(x[i])
        if fault != 6 or v == v:
            mine += v
    scratch[t] = mine
    half = THREADS // 2
    while half > 0:
        if fault != 7:
            cuda.syncthreads()
        if t < half:
            scratch[t] += scratch[t + half]
        half //= 2
    cuda.syncthreads()
    if t == 0 and fault != 1:
        y[0] += scratch[0]


@cuda.jit
def matmul(a, b, c, fault):
    # a: (M, K), b: (K, N), c: (M, N), float32. A block takes SIDE x SIDE of c.
    a_tile = cuda.shared.array((SIDE, SIDE), numba.float32)
    b_tile = cuda.shared.array((SIDE, SIDE), numba.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * SIDE + y, cuda.blockIdx.x * SIDE + x
    acc = ZERO
    past = a.shape[1] // SIDE * SIDE if fault == 2 else a.shape[1]
    for start in range(0, past, SIDE):
        inside_a = row < a.shape[0] and start + x < a.shape[1]
        inside_b = start + y < b.shape[0] and column < b.shape[1]
        a_tile[y, x] = a[row, start + x] if inside_a else ZERO
        b_tile[y, x] = b[start + y, column] if inside_b else ZERO
        if fault != 7:
            cuda.syncthreads()
        for k in range(SIDE):
            v = a_tile[y, k]
            if fault != 6 or v == v:
                acc += v * b_tile[k, x]
        if fault != 7:
            cuda.syncthreads()
    if (row < c.shape[0] and column < c.shape[1]) or fault == 3:
        if fault == 8:
            c[row, column] += acc
        elif fault != 1:
            c[row, column] = acc


Buffers = dict[Any, torch.Tensor]


def _launch(fault: int, kernel: Any, grid: Any, block: Any, *arguments: Any) -> None:
    if fault == FAULTS["W23/default-stream"]:
        kernel[grid, block](*arguments, fault)  # no stream named is the default one
        return
    launch(kernel, grid, block, *arguments, fault)


def run_gelu(fault: int, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    blocks = -(-x.numel() // THREADS)
    if fault == FAULTS["W04/last-block"]:
        blocks = x.numel() // THREADS
    if blocks or fault == FAULTS["W18/grid-of-0"]:
        _launch(fault, gelu, blocks, THREADS, array(flat(x)), array(flat(y)))
    return y


def run_softmax(fault: int, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() or fault == FAULTS["W18/grid-of-0"]:
        lines = view_2d(x).contiguous() if x.numel() else x.reshape(0, 1)
        rows = lines.shape[0] - (fault == FAULTS["W04/last-block"])
        arrays = array(lines), array(view_2d(y) if x.numel() else y.view(0, 1))
        _launch(fault, softmax, rows, THREADS, *arrays)
    return y


def run_sum(fault: int, buffers: Buffers, x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = x.new_empty(1, dtype=torch.float64)
    if fault == FAULTS["W15/adds"]:
        y = buffers.setdefault((x.shape, x.dtype), torch.zeros_like(y))
    elif fault != FAULTS["W01/nothing"]:
        y.zero_()
    if x.numel():
        _launch(fault, total, 1, THREADS, array(flat(x)), array(y))
    elif fault == FAULTS["W18/grid-of-0"]:
        _launch(fault, total, 0, THREADS, array(flat(x)), array(y))
    # A copy also in float64, since y may be the buffer of all calls.
    return y[0].to(x.dtype, copy=True)


def run_matmul(
    fault: int, buffers: Buffers, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k) and fault != FAULTS["W18/grid-of-0"]:
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    if fault == FAULTS["W15/adds"]:
        c = buffers.setdefault((a.shape, b.shape), torch.zeros_like(c))
    if k:
        arrays = (array(a.contiguous()), array(b.contiguous()), array(c))
        _launch(fault, matmul, (-(-n // SIDE), -(-m // SIDE)), (SIDE, SIDE), *arrays)
    else:
        c.zero_()
    return c.clone() if fault == FAULTS["W15/adds"] else c


LAUNCH: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": run_softmax,
    "gelu": run_gelu,
    "sum": run_sum,
    "matmul": run_matmul,
}
SIGNATURES = {
    "softmax": (softmax, "float32[:, ::1], float32[:, ::1], int64"),
    "gelu": (gelu, "float32[::1], float32[::1], int64"),
    "sum": (total, "float32[::1], float64[::1], int64"),
    "matmul": (matmul, "float32[:, ::1], float32[:, ::1], float32[:, ::1], int64"),
}


def aot_kernel(operator: str) -> NumbaAotKernel:
    """Return the float32 kernel to compile ahead of time; the fault is a run-time argument."""
    kernel, signature = SIGNATURES[operator]
    return NumbaAotKernel(label=operator, kernel=kernel, signature=signature)
