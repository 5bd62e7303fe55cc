"""Softmax in numba: ``numba.cuda`` (one block for each row), and ``njit(parallel=True)`` on a CPU."""

from __future__ import annotations

import math

import torch

from weft.backends.numba_jit import NumbaAotKernel, array, cuda, launch, numba
from weft.core import Implementation
from weft.ops._common.layout import view_2d
from weft.ops._common.numba_parallel import parallel_implementation, support_without_bfloat16

THREADS = 64  # a power of two; numba's simulator runs each as a thread of the host
ZERO = numba.float32(0)
LOWEST = numba.float32(-math.inf)


@cuda.jit
def softmax_forward(x, y):
    # x, y: (rows, columns). One block for each row; maximum and sum by trees in shared memory.
    # Bytes: 3n read + n written, the second and third read mostly from the caches.
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
        cuda.syncthreads()
        if t < half and scratch[t + half] > scratch[t]:
            scratch[t] = scratch[t + half]
        half //= 2
    cuda.syncthreads()
    top = scratch[0]
    cuda.syncthreads()  # every thread has read the maximum before scratch is overwritten
    total = ZERO
    for j in range(t, x.shape[1], THREADS):
        total += numba.float32(math.exp(numba.float32(x[row, j]) - top))
    scratch[t] = total
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            scratch[t] += scratch[t + half]
        half //= 2
    cuda.syncthreads()
    total = scratch[0]
    for j in range(t, x.shape[1], THREADS):
        y[row, j] = numba.float32(math.exp(numba.float32(x[row, j]) - top)) / total


@cuda.jit
def softmax_backward(grad, y, dx):
    # grad, y, dx: (rows, columns). dx = y (g - sum(g y)). Bytes: 4n read + n written.
    scratch = cuda.shared.array(THREADS, numba.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    dot = ZERO
    for j in range(t, y.shape[1], THREADS):
        dot += numba.float32(grad[row, j]) * numba.float32(y[row, j])
    scratch[t] = dot
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            scratch[t] += scratch[t + half]
        half //= 2
    cuda.syncthreads()
    dot = scratch[0]
    for j in range(t, y.shape[1], THREADS):
        dx[row, j] = numba.float32(y[row, j]) * (numba.float32(grad[row, j]) - dot)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return view_2d(x).contiguous()


def forward(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        rows2d = _flat(x)
        launch(softmax_forward, rows2d.shape[0], THREADS, array(rows2d), array(view_2d(y)))
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if y.numel():
        arrays = [array(_flat(t)) for t in (grad, y)]
        launch(softmax_backward, arrays[0].shape[0], THREADS, *arrays, array(view_2d(dx)))
    return (dx,)


supports = support_without_bfloat16("float32, float16 or another backend")


@numba.njit(parallel=True, fastmath=False, cache=False)
def softmax_forward_parallel(x, y):
    for row in numba.prange(x.shape[0]):
        top = LOWEST
        for j in range(x.shape[1]):
            if x[row, j] > top:
                top = x[row, j]
        # A float64 sum costs nothing beside exp and makes the order of a long row irrelevant.
        total = 0.0
        for j in range(x.shape[1]):
            e = math.exp(x[row, j] - top)
            y[row, j] = e
            total += e
        # numba raises ZeroDivisionError in compiled code; a row of -inf alone gives NaN, as in torch.
        scale = numba.float32(1.0 / total) if total != 0.0 else numba.float32(math.nan)
        for j in range(x.shape[1]):
            y[row, j] *= scale


@numba.njit(parallel=True, fastmath=False, cache=False)
def softmax_backward_parallel(grad, y, dx):
    for row in numba.prange(y.shape[0]):
        # float64, as the forward's sum.
        dot = 0.0
        for j in range(y.shape[1]):
            dot += numba.float64(grad[row, j]) * y[row, j]
        row_dot = numba.float32(dot)
        for j in range(y.shape[1]):
            dx[row, j] = y[row, j] * (grad[row, j] - row_dot)


def forward_parallel(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        softmax_forward_parallel(_flat(x.detach()).numpy(), view_2d(y).numpy())
    return y


def backward_parallel(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if y.numel():
        rows2d = [_flat(t.detach()).numpy() for t in (grad, y)]
        softmax_backward_parallel(*rows2d, view_2d(dx).numpy())
    return (dx,)


IMPLEMENTATION = Implementation(
    operator="softmax",
    backend="numba",
    forward=forward,
    backward=backward,
    supports=supports,
    aot_kernels=tuple(
        NumbaAotKernel(label=f"{name}-{t}", kernel=kernel, signature=", ".join([f"{t}[:, ::1]"] * count))
        for name, kernel, count in (
            ("softmax_forward", softmax_forward, 2),
            ("softmax_backward", softmax_backward, 3),
        )
        for t in ("float32", "float16")
    ),
    idea="a block a row, trees in shared memory",
)
PARALLEL = parallel_implementation(
    "softmax", forward_parallel, backward_parallel, "njit(parallel=True): rows over all cores"
)
