"""Sparse products by the library: ``torch.sparse_csr_tensor @ dense``, which is cuSPARSE or MKL.

PyTorch's own gradient of this product refuses a matrix in which a column occurs twice in a row, and its
tracing knows no sparse tensors. Where a gradient or a trace is wanted, the product is one operator of its own
with the gradient of transpose.py.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from weft.core import YES, Case, Implementation, Support, no
from weft.dispatch.operator import Schema, can_skip_dispatcher, register
from weft.ops.sparse.spec import MAX_INT32, check_indices
from weft.ops.sparse.transpose import backward_by

FOUR = "Tensor values, Tensor columns, Tensor offsets, Tensor dense"


def product(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Return the product by the library. It checks no index: one out of range reads other memory.

    On a CPU they are read here too: a call under vmap comes without the check of the public function.
    """
    if columns.is_cpu:
        check_indices("spmv" if dense.dim() == 1 else "spmm", columns, offsets, dense.shape[0])
    rows, nonzeros = offsets.shape[0] - 1, values.shape[0]
    if rows == 0 or nonzeros == 0 or dense.numel() == 0:
        return dense.new_zeros((rows, *dense.shape[1:]))
    dtype = dense.dtype
    if dense.is_cuda and dense.dim() == 2 and dtype.itemsize == 2:
        # cuSPARSE adds the parts of a long row in the half type: its errors were 2.02 times what the check
        # allows in bfloat16.
        values, dense = values.float(), dense.float()
    if nonzeros <= MAX_INT32:
        offsets = offsets.int()  # the library takes both indices in one dtype
    else:
        columns = columns.long()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Sparse (CSR|invariant)", category=UserWarning)
        matrix = torch.sparse_csr_tensor(
            offsets.contiguous(),
            columns.contiguous(),
            values.contiguous(),
            (rows, dense.shape[0]),
            check_invariants=False,
        )
        return (matrix @ dense.contiguous()).to(dtype)


BACKWARD = backward_by(product)


def _fake(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    return dense.new_empty((offsets.shape[0] - 1, *dense.shape[1:]))


register(
    "sparse_by_library",
    Schema(
        inputs=FOUR,
        saved=FOUR,
        gradients=2,
        fake=_fake,
        fake_backward=lambda grad, values, columns, offsets, dense: (
            values.new_empty(values.shape),
            dense.new_empty(dense.shape),
        ),
        forward=lambda impl, *inputs: product(*inputs),
        backward=lambda impl, *saved: BACKWARD(*saved),
        save=lambda inputs, output: inputs,
        differentiable=("values", "dense"),
    ),
)


def forward(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    needs_grad = torch.is_grad_enabled() and (values.requires_grad or dense.requires_grad)
    inputs = (values, columns, offsets, dense)
    if needs_grad or torch.compiler.is_compiling() or not can_skip_dispatcher(inputs):
        return torch.ops.weft.sparse_by_library(*inputs, "torch")  # type: ignore[no-any-return]
    return product(*inputs)


def supports(case: Case, device: str) -> Support:
    if device == "cpu" and case.dtype not in ("float32", "float64"):
        return no("torch's sparse products on a CPU take float32 and float64; use impl='eager'")
    return YES


def _implementation(operator: str) -> Implementation:
    return Implementation(
        operator=operator,
        backend="torch",
        forward=forward,
        backward=BACKWARD,
        supports=supports,
        deterministic=False,  # the library's default algorithms promise no fixed order of additions
        idea="torch.sparse_csr_tensor @ dense",
    )


SPMV = _implementation("spmv")
SPMM = _implementation("spmm")
