"""The linear family in CUDA C++: products with epilogues on tensor cores, and column sums of linear.cu.

Products of half types are Weft's own. On Hopper they are wgmma.py's, and few_rows.py's for at most 64 rows,
with bias, GELU and residual computed on the float32 sums. Other products of at most 64 rows are skinny.py's,
the rest cuBLAS's; GELU and the residual are then passes of linear.cu, 16 bytes at a time. A backward is one
pass over the gradient, for dbias, and two products. GELU's slope belongs to that pass: the gradient that it
multiplies is this operator's input, and no product of this call computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.machine.device_limits import has_wgmma
from weft.ops._common.cublas import call_at_precision
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops._common.products import few_rows, invariant, skinny, wgmma
from weft.ops._common.products.wgmma import Epilogue
from weft.ops.linear.products import library_linear, to_2d

# MODE of linear.cu: for the column sums what the pass writes, for the epilogue what it computes.
SUM, GELU, RESIDUAL = range(3)
SLOPE, COPY = GELU, RESIDUAL
THREADS, UNROLL, LANES, GROUPS = 128, 4, 32, 4  # as in linear.cu
# Blocks that one pass aims at: as many as the 132 SMs of an H200 hold at once, by registers. The number is
# the same on every device, and with it the order of the sums.
BLOCKS = {SUM: 132 * 7, SLOPE: 132 * 6, COPY: 132 * 8}
LAUNCHES = LaunchCache()
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (M, K), (K, N) -> (M, N)


def fused_product(x2d: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any] | None:
    """Return the function of one kernel that computes x W^T and its epilogue, or None if there is none.

    Its arguments are those of ``wgmma.forward``.
    """
    if x2d.shape[0] <= skinny.MAX_ROWS:
        return few_rows.forward if few_rows.suits(x2d, weight.t()) else None
    return wgmma.forward if wgmma.supports(x2d, weight.t()) and has_wgmma(x2d.device) else None


def product(x2d: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x W^T + b (M, N) for x (M, K), weight (N, K) and bias (N,)."""
    if fused := fused_product(x2d, weight):
        return fused(x2d, weight.t(), Epilogue.BIAS, bias)  # type: ignore[no-any-return]
    if x2d.is_cuda and skinny.supports(x2d, weight.t()):
        return skinny.forward(x2d, weight.t(), bias)
    return library_linear(x2d, weight, bias)


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a (M, K) @ b (K, N), of any strides."""
    if few_rows.suits(a, b):
        return few_rows.forward(a, b)  # type: ignore[no-any-return]
    if a.is_cuda and skinny.supports(a, b):
        return skinny.forward(a, b)
    if wgmma.supports(a, b) and has_wgmma(a.device):
        return wgmma.forward(a, b)  # type: ignore[no-any-return]
    return call_at_precision(torch.mm, a, "ieee", a, b)  # type: ignore[no-any-return]


def backward_products(
    grad2d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, multiply_rows: Product = multiply
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx = grad W, of x's shape, and dW = grad^T x, for grad (M, N), x (..., K), weight (N, K).

    ``multiply_rows`` computes dx.
    """
    return multiply_rows(grad2d, weight).view(x.shape), multiply(grad2d.t(), to_2d(x))


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2:
        return product(x, weight, bias)
    return product(to_2d(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, multiply_rows: Product = multiply
) -> tuple[torch.Tensor, ...]:
    grad2d = to_2d(grad)
    dbias, _ = column_sums(SUM, grad2d)
    return (*backward_products(grad2d, x, weight, multiply_rows), dbias)


def linear_gelu_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    """Return ``(y, pre)``, or without ``keep`` y alone."""
    shape = (*x.shape[:-1], weight.shape[0])
    x2d = to_2d(x)
    if fused := fused_product(x2d, weight):
        if not keep:
            return fused(x2d, weight.t(), Epilogue.GELU, bias).view(shape)
        y, pre = fused(x2d, weight.t(), Epilogue.GELU_PRE, bias)
        return y.view(shape), pre.view(shape)
    pre = product(x2d, weight, bias)
    y = epilogue(GELU, pre, None, torch.empty_like(pre) if keep else pre).view(shape)
    return (y, pre.view(shape)) if keep else y


def linear_gelu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    pre_or_bias: torch.Tensor,
    *,
    keep: bool = True,
    multiply_rows: Product = multiply,
) -> tuple[torch.Tensor, ...]:
    """``pre_or_bias`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = to_2d(pre_or_bias) if keep else product(to_2d(x), weight, pre_or_bias)
    dbias, dpre = column_sums(SLOPE, to_2d(grad), pre)
    assert dpre is not None
    return (*backward_products(dpre, x, weight, multiply_rows), dbias)


def linear_residual_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    x2d, residual2d = to_2d(x), to_2d(residual)
    if fused := fused_product(x2d, weight):
        y = fused(x2d, weight.t(), Epilogue.RESIDUAL, bias, residual2d)
    else:
        y = product(x2d, weight, bias)
        epilogue(RESIDUAL, y, residual2d.contiguous(), y)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def linear_residual_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, multiply_rows: Product = multiply
) -> tuple[torch.Tensor, ...]:
    """One pass over the gradient computes dbias and the copy that is returned as dresidual."""
    grad2d = to_2d(grad)
    dbias, dresidual = column_sums(COPY, grad2d)
    assert dresidual is not None
    products = backward_products(grad2d, x, weight, multiply_rows)
    return (*products, dbias, dresidual.view(grad.shape))


def linear_forward_invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = invariant.forward(to_2d(x), weight.t(), Epilogue.BIAS, bias)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def linear_gelu_forward_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    y, pre = invariant.forward(to_2d(x), weight.t(), Epilogue.GELU_PRE, bias)
    return y.view(shape), pre.view(shape)


def linear_residual_forward_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    y = invariant.forward(to_2d(x), weight.t(), Epilogue.RESIDUAL, bias, to_2d(residual))
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def with_invariant_dx(backward: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """Return a backward whose dx is batch invariant; dW and dbias add up the rows as before.

    The gradient of GELU's input is computed for each element, so that its bits do not depend on the batch.
    """

    def invariant_backward(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return backward(grad, x, weight, *saved, multiply_rows=invariant.forward)

    return invariant_backward


@cache
def source(dtype: torch.dtype, mode: int, wide: bool) -> CudaSource:
    """Return linear.cu for one element type and mode, with 16-byte vectors or element by element."""
    # Only the kernels that the mode needs are compiled.
    column_kernels = ("linear_columns", "linear_sum_partials")
    return CudaSource(
        file=Path(__file__).with_name("linear.cu"),
        kernels=column_kernels if mode == SUM else ("linear_epilogue", *column_kernels),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("MODE", str(mode)), ("WIDE", str(int(wide)))),
        label=f"{dtype_name(dtype)}-{mode}" + ("" if wide else "_any"),
    )


def _rows_are_vectors(n: int, *tensors: torch.Tensor) -> bool:
    """True if rows of n elements are whole 16-byte vectors at aligned addresses."""
    size = tensors[0].element_size()
    return n * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def epilogue(mode: int, p: torch.Tensor, residual2d: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """Write gelu(p), or p plus the residual, to ``y`` and return it.

    p, y and the residual are (M, N) contiguous; y may be p. ``residual2d`` is None for GELU.
    """
    m, n = p.shape
    if m == 0 or n == 0:
        return y
    key = ("epilogue", mode, m, n, p.dtype, p.get_device())
    tensors = (p, y) if residual2d is None else (p, residual2d, y)
    is_repeatable = are_repeatable(*tensors)
    repeated = LAUNCHES.get(key) if is_repeatable else None
    if repeated is not None:
        repeated(*[x.data_ptr() for x in tensors])
        return y
    wide = _rows_are_vectors(n, *(t for t in (p, residual2d, y) if t is not None))
    columns = THREADS * (16 // p.element_size() if wide else 1)
    column_blocks = -(-n // columns)
    kernel = source(p.dtype, mode, wide)["linear_epilogue"]
    blocks = column_blocks * -(-m // UNROLL)
    residual = 0 if residual2d is None else residual2d
    launch = launch_and_prepare(kernel, blocks, THREADS, p, residual, y, m, n, column_blocks)
    if is_repeatable:
        LAUNCHES.store(key, launch)
    return y


def column_sums(
    mode: int, grad: torch.Tensor, pre: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sums of a gradient's columns, (N,), and the tensor that the pass writes, (M, N).

    SUM writes nothing (None), COPY a copy of grad, and SLOPE grad times GELU's slope at ``pre``: then the
    sums are of those products, before they are rounded. grad and pre are (M, N).
    """
    grad = grad.contiguous()
    m, n = grad.shape
    out = None if mode == SUM else torch.empty_like(grad)
    if m == 0 or n == 0:
        return grad.new_zeros(n), out
    pre = None if pre is None else pre.contiguous()
    key = ("sums", mode, m, n, grad.dtype, grad.get_device())
    is_repeatable = are_repeatable(grad, pre)  # out is new, and aligned
    repeated = LAUNCHES.get(key) if is_repeatable else None
    if repeated is not None:
        launch_columns, launch_sums, chunks = repeated
        partial = torch.empty(chunks * n, dtype=torch.float32, device=grad.device)
        sums, partial_address = grad.new_empty(n), partial.data_ptr()
        pre_and_out_addresses = [x.data_ptr() for x in (pre, out) if x is not None]
        launch_columns(grad.data_ptr(), *pre_and_out_addresses, partial_address)
        launch_sums(partial_address, sums.data_ptr())
        return sums, out
    wide = _rows_are_vectors(n, *(t for t in (grad, pre, out) if t is not None))
    column_blocks = -(-n // (LANES * (16 // grad.element_size() if wide else 1)))
    # Whole trips of the kernel's loop: GROUPS warps with UNROLL rows each.
    # BLOCKS chunks times column blocks: one wave of resident blocks, so that no SM waits for a second one.
    rows_per_chunk = -(-m * column_blocks // BLOCKS[mode])
    rows_per_chunk = -(-rows_per_chunk // (GROUPS * UNROLL)) * GROUPS * UNROLL
    chunks = -(-m // rows_per_chunk)
    partial = torch.empty(chunks, n, dtype=torch.float32, device=grad.device)
    sums = grad.new_empty(n)
    program = source(grad.dtype, mode, wide)
    pre_and_out = (0 if pre is None else pre, 0 if out is None else out)
    sizes = (m, n, rows_per_chunk, column_blocks)
    blocks = column_blocks * chunks
    launch_columns = launch_and_prepare(
        program["linear_columns"], blocks, THREADS, grad, *pre_and_out, partial, *sizes
    )
    launch_sums = launch_and_prepare(
        program["linear_sum_partials"], -(-n // LANES), THREADS, partial, sums, chunks, n
    )
    if is_repeatable:
        LAUNCHES.store(key, (launch_columns, launch_sums, chunks))
    return sums, out


def aot_kernels(mode: int, *epilogues: Epilogue) -> tuple[CudaSource, ...]:
    """Return passes: bfloat16 in vectors and element by element, float32 in vectors; and fused products."""
    kernels_of_passes = (
        source(torch.bfloat16, mode, True),
        source(torch.bfloat16, mode, False),
        source(torch.float32, mode, True),
    )
    return (*kernels_of_passes, *(s for epilogue in epilogues for s in wgmma.aot_kernels_of(epilogue)))


_LINEAR = Implementation(
    operator="linear",
    backend="cuda",
    forward=linear_forward,
    backward=linear_backward,
    aot_kernels=aot_kernels(SUM, Epilogue.BIAS),
    wraps_library="cublas",
    idea="tensor cores on Hopper with the bias in the epilogue; up to 64 rows one read of the weight; "
    "else cuBLAS; dbias by one pass of vectors",
)

_LINEAR_GELU = Implementation(
    operator="linear_gelu",
    backend="cuda",
    forward=linear_gelu_forward,
    backward=linear_gelu_backward,
    aot_kernels=aot_kernels(GELU, Epilogue.GELU, Epilogue.GELU_PRE),
    wraps_library="cublas",
    idea="tensor cores on Hopper with bias and GELU in the epilogue; else GELU in 16-byte vectors",
)

_LINEAR_RESIDUAL = Implementation(
    operator="linear_residual",
    backend="cuda",
    forward=linear_residual_forward,
    backward=linear_residual_backward,
    aot_kernels=aot_kernels(RESIDUAL, Epilogue.RESIDUAL),
    wraps_library="cublas",
    idea="tensor cores on Hopper with bias and residual in the epilogue; else the sum in 16-byte vectors",
)


def _with_invariant(implementation: Implementation, forward: Callable[..., Any]) -> Implementation:
    assert implementation.backward is not None
    return with_invariant(
        implementation,
        forward=forward,
        backward=with_invariant_dx(implementation.backward),
        supports=invariant.supports,
    )


LINEAR = _with_invariant(_LINEAR, linear_forward_invariant)
LINEAR_GELU = _with_invariant(_LINEAR_GELU, linear_gelu_forward_invariant)
LINEAR_RESIDUAL = _with_invariant(_LINEAR_RESIDUAL, linear_residual_forward_invariant)
