"""The product with a weight in blocks by the library: ``torch.sparse_bsr_tensor @ x^T``.

In float32 it is MKL's or cuSPARSE's product; in 16-bit types on a GPU PyTorch has a Triton kernel of its own.
The gradient of x is the same product with the transposed blocks; that of the values takes the stored blocks
of a dense product. PyTorch has no gradient of this product on a CPU, and its tracing knows no sparse tensors:
where a gradient or a trace is wanted, the product is one operator of its own.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from weft.core import YES, Case, Implementation, Support, no
from weft.dispatch.operator import Schema, can_skip_dispatcher, register
from weft.ops._common.layout import as_matrix
from weft.ops._common.offsets import piece_numbers
from weft.ops.block_sparse import blocks
from weft.ops.block_sparse.spec import bias_gradient, check_indices, index_of, save

PATTERN = "Tensor x, Tensor values, Tensor crow, Tensor col, Tensor transposed"


def product(x2d: Tensor, values: Tensor, crow: Tensor, col: Tensor) -> Tensor:
    """Return x W^T, (M, N), of x (M, K)."""
    rows, block = crow.shape[0] - 1, values.shape[1]
    if 0 in (rows, values.shape[0], *x2d.shape):
        return x2d.new_zeros((x2d.shape[0], rows * block))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Sparse (BSR|invariant)", category=UserWarning)
        weight = torch.sparse_bsr_tensor(
            crow.contiguous(),
            col.contiguous(),
            values.contiguous(),
            (rows * block, x2d.shape[1]),
            check_invariants=False,
        )
        return (weight @ x2d.t().contiguous()).t()


def linear(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    if col.is_cpu:
        # The library checks no index, and a call under vmap comes without the check of the public function.
        check_indices(crow, col, transposed, x.shape[-1] // values.shape[1])
    y = product(as_matrix(x), values, crow, col) + bias
    return y.contiguous().view(*x.shape[:-1], bias.shape[0])


def backward(
    grad: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    count, block, _ = values.shape
    grad2d, x2d = as_matrix(grad), as_matrix(x)
    starts, rows, places = blocks.split_index(index_of(x, values, crow, col, transposed), count)
    dx = product(grad2d, values[places].transpose(1, 2), starts, rows)
    dense = (grad2d.t() @ x2d).view(crow.shape[0] - 1, block, x.shape[-1] // block, block)
    dvalues = dense.transpose(1, 2)[piece_numbers(crow, count), col.long()]
    return dx.reshape(x.shape), dvalues, bias_gradient(grad)


register(
    "block_sparse_by_library",
    Schema(
        inputs=f"{PATTERN}, Tensor bias",
        saved=PATTERN,
        gradients=3,
        fake=lambda x, values, crow, col, transposed, bias: x.new_empty((*x.shape[:-1], bias.shape[0])),
        fake_backward=lambda grad, x, values, crow, col, transposed: (
            x.new_empty(x.shape),
            values.new_empty(values.shape),
            grad.new_empty(grad.shape[-1]),
        ),
        forward=lambda impl, *inputs: linear(*inputs),
        backward=lambda impl, *arguments: backward(*arguments),
        save=save,
        differentiable=("x", "values", "bias"),
    ),
)


def forward(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    inputs = (x, values, crow, col, transposed, bias)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if needs_grad or torch.compiler.is_compiling() or not can_skip_dispatcher(inputs):
        return torch.ops.weft.block_sparse_by_library(*inputs, "torch")  # type: ignore[no-any-return]
    return linear(*inputs)


def supports(case: Case, device: str) -> Support:
    if device == "cpu" and case.dtype != "float32":
        return no("torch's products with blocks on a CPU take float32 and float64; use impl='eager'")
    if device == "cpu" and not torch.backends.mkl.is_available():
        return no("torch's products with blocks on a CPU need MKL; use impl='eager'")
    return YES


IMPLEMENTATION = Implementation(
    operator="block_sparse_linear",
    backend="torch",
    forward=forward,
    backward=backward,
    supports=supports,
    deterministic=False,  # the library's algorithms promise no fixed order of additions
    idea="torch.sparse_bsr_tensor @ x^T; the values' gradient is part of a dense product",
)
