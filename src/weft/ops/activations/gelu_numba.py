"""GELU in numba: ``numba.cuda`` with one element a thread, and ``njit(parallel=True)`` on a CPU."""

from __future__ import annotations

import math

import torch

from weft.backends.numba_jit import NumbaAotKernel, array, cuda, launch, numba
from weft.core import Implementation
from weft.ops._common.layout import dense, flat, match_strides
from weft.ops._common.numba_parallel import parallel_implementation, support_without_bfloat16

THREADS = 256
# float32 constants: a Python float would turn the arithmetic into float64.
K = numba.float32(math.sqrt(2 / math.pi))
CUBIC = numba.float32(0.044715)
ONE, THREE = numba.float32(1), numba.float32(3)


@cuda.jit
def gelu_forward(x, y):
    # x, y: (n,) storage order. Bytes moved: n read + n written.
    i = cuda.grid(1)
    if i < x.size:
        v = numba.float32(x[i])
        u = K * v * (ONE + CUBIC * v * v)
        y[i] = numba.float32(0.5) * v * (ONE + numba.float32(math.tanh(u)))


@cuda.jit
def gelu_backward(grad, x, dx):
    # grad, x, dx: (n,). dy/dx = (1 + t)/2 + x/2 (1 - t^2) u', with t = tanh(u).
    i = cuda.grid(1)
    if i < x.size:
        v = numba.float32(x[i])
        t = numba.float32(math.tanh(K * v * (ONE + CUBIC * v * v)))
        slope = K * (ONE + THREE * CUBIC * v * v)
        # Everything stays float32: one Python float in the expression would make the GPU compute in float64.
        half = numba.float32(0.5)
        dx[i] = numba.float32(grad[i]) * (half * (ONE + t) + half * v * (ONE - t * t) * slope)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        launch(gelu_forward, -(-n // THREADS), THREADS, array(flat(x)), array(flat(y)))
    return y


def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    if n := x.numel():
        arrays = [array(flat(t)) for t in (match_strides(grad, x), x, dx)]
        launch(gelu_backward, -(-n // THREADS), THREADS, *arrays)
    return (dx,)


supports = support_without_bfloat16("float32, float16 or another backend")


# fastmath stays off: it lets the compiler assume that there are no NaN, which the check plants.
@numba.njit(parallel=True, fastmath=False, cache=False)
def gelu_forward_parallel(x, y):
    for i in numba.prange(x.size):
        v = x[i]
        u = K * v * (ONE + CUBIC * v * v)
        y[i] = numba.float32(0.5) * v * (ONE + math.tanh(u))


@numba.njit(parallel=True, fastmath=False, cache=False)
def gelu_backward_parallel(grad, x, dx):
    for i in numba.prange(x.size):
        v = x[i]
        t = math.tanh(K * v * (ONE + CUBIC * v * v))
        slope = K * (ONE + THREE * CUBIC * v * v)
        dx[i] = grad[i] * numba.float32(0.5) * (ONE + t + v * (ONE - t * t) * slope)


def forward_parallel(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    gelu_forward_parallel(flat(x.detach()).numpy(), flat(y).numpy())
    return y


def backward_parallel(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    x = dense(x)
    dx = torch.empty_like(x)
    tensors = (match_strides(grad, x), x, dx)
    gelu_backward_parallel(*(flat(t.detach()).numpy() for t in tensors))
    return (dx,)


CUDA = Implementation(
    operator="gelu",
    backend="numba",
    forward=forward,
    backward=backward,
    supports=supports,
    aot_kernels=tuple(
        NumbaAotKernel(
            label=f"{k.py_func.__name__ if hasattr(k, 'py_func') else k.__name__}-{t}",
            kernel=k,
            signature=", ".join([f"{t}[::1]"] * pointers),
        )
        for k, pointers in ((gelu_forward, 2), (gelu_backward, 3))
        for t in ("float32", "float16")
    ),
    idea="one element a thread",
)
PARALLEL = parallel_implementation(
    "gelu", forward_parallel, backward_parallel, "njit(parallel=True): one fused loop over all cores"
)
