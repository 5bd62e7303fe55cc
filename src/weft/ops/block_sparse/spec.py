"""The linear layer whose weight is stored in blocks: y = x W^T + b, W of stored blocks (blocks.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.core import FORWARD, Case, Cost, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.layout import as_matrix
from weft.ops._common.offsets import check_range, piece_numbers
from weft.ops.block_sparse import blocks
from weft.ops.block_sparse.blocks import check_sizes
from weft.ops.block_sparse.cases import DTYPES, cases, draw, pattern_of

NAME = "block_sparse_linear"
MAX_INT32 = 2**31 - 1


def reference(
    x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> Tensor:
    """Add up the products with stored blocks alone, in float64: a NaN of x reaches no other output."""
    block, rows = values.shape[1], crow.shape[0] - 1
    x2d = as_matrix(x)
    strips = x2d.view(x2d.shape[0], x2d.shape[1] // block, block)
    # (blocks, M, b): the columns of x of each block, times its transpose.
    products = strips.transpose(0, 1)[col.long()] @ values.transpose(1, 2)
    y = x.new_zeros((rows, x2d.shape[0], block)).index_add(0, piece_numbers(crow, col.shape[0]), products)
    return y.transpose(0, 1).reshape(*x.shape[:-1], rows * block) + bias


# ---- Validation


def check_arguments(x: Any, values: Any, crow: Any, col: Any, transposed: Any, bias: Any) -> None:
    """Raise :class:`WeftError` if the arguments do not fit; :func:`check_indices` reads the indices."""
    validate.tensor(NAME, "x", x, DTYPES, dims=range(1, 65))
    validate.tensor(NAME, "values", values, DTYPES, dims=range(3, 4))
    for argument, index in (("crow", crow), ("col", col), ("transposed", transposed)):
        validate.tensor(NAME, argument, index, ("int32",), dims=range(1, 2))
        validate.same_device(NAME, f"values and {argument}", values, index)
    validate.tensor(NAME, "bias", bias, DTYPES, dims=range(1, 2))
    validate.same(NAME, "x and values", x, values)
    validate.same(NAME, "x and bias", x, bias)
    count, block, width = values.shape
    if block != width or block not in blocks.SIDES:
        expected = f"(blocks, b, b) with b of {', '.join(map(str, blocks.SIDES))}"
        hint = "weft.ops.block_sparse.to_blocks(w, block, density) returns values, crow and col"
        raise WeftError(f"{NAME}: values.shape", expected=expected, got=tuple(values.shape), hint=hint)
    check_sizes(NAME, block, **{"the last size of x": x.shape[-1]})
    if crow.shape[0] == 0:
        hint = "crow has one entry more than there are rows of blocks: 0 first, the number of blocks last"
        raise WeftError(f"{NAME}: crow", expected="at least one entry", got=0, hint=hint)
    if col.shape[0] != count:
        raise WeftError(f"{NAME}: col", expected=f"{count} entries, one of a block", got=col.shape[0])
    whole = x.shape[-1] // block + 1 + 2 * count
    if transposed.shape[0] not in (0, whole):
        expected = f"{whole} entries, or none"
        hint = "weft.ops.block_sparse.transposed_index(crow, col, x.shape[-1] // block)"
        raise WeftError(f"{NAME}: transposed", expected=expected, got=transposed.shape[0], hint=hint)
    outputs = (crow.shape[0] - 1) * block
    if bias.shape[0] != outputs:
        raise WeftError(f"{NAME}: bias.shape", expected=f"({outputs},)", got=tuple(bias.shape))
    if max(values.numel() // block, x.shape[-1], outputs) > MAX_INT32:
        expected = f"at most {MAX_INT32} rows of all blocks, and columns of x and y"
        raise WeftError(f"{NAME}: sizes", expected=expected, got=(count, x.shape[-1], outputs))


def check_indices(crow: Tensor, col: Tensor, transposed: Tensor, column_blocks: int) -> None:
    """Raise :class:`WeftError` if an index is out of range, falls, or is not the transposed one.

    It reads all indices: on a GPU it waits for the device.
    """
    count = col.shape[0]
    check_range(f"{NAME}: crow", crow, count, "row")
    if count:
        low, high = (int(v) for v in torch.aminmax(col))
        if low < 0 or high >= column_blocks:
            expected = f"at least 0 and below {column_blocks}, the columns of blocks"
            raise WeftError(f"{NAME}: col", expected=expected, got=low if low < 0 else high)
    if transposed.shape[0]:
        expected_index = blocks.transposed_index(crow, col, column_blocks)
        if not torch.equal(expected_index, transposed):
            at = int((expected_index != transposed).int().argmax())
            raise WeftError(
                f"{NAME}: transposed",
                expected=f"{int(expected_index[at])} at place {at}, the index of crow and col",
                got=int(transposed[at]),
                hint="compute it again: weft.ops.block_sparse.transposed_index(crow, col, column_blocks)",
            )


# ---- Gradients


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs[:5]


def index_of(x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor) -> Tensor:
    """Return the transposed index: the given one, or one that is computed now."""
    if transposed.shape[0]:
        return transposed
    return blocks.transposed_index(crow, col, x.shape[-1] // values.shape[1])


def bias_gradient(grad: Tensor) -> Tensor:
    return as_matrix(grad).sum(0, dtype=torch.float32).to(grad.dtype)


# ---- Cost and properties


def cost(c: Case, direction: str) -> Cost:
    """Count the products with stored blocks alone; of x the columns that a block may name.

    Backward: as many products for the gradient of x, and again for that of the values.
    """
    x, values = c.inputs[:2]
    m, n, item = math.prod(x.shape[:-1]), c.inputs[5].shape[0], ITEMSIZE[c.dtype]
    count, block, _ = values.shape
    indices = c.inputs[2].nbytes + c.inputs[3].nbytes
    named = min(x.shape[-1], count * block) * m * item
    output, products = m * n * item, 2.0 * m * values.numel
    if direction == FORWARD:
        read = named + values.nbytes + indices + n * item
        return Cost(read=read, written=output, flops=products, rate=SHORT[c.dtype])
    read = named + values.nbytes + indices + c.inputs[4].nbytes + output
    written = x.nbytes + values.nbytes + n * item
    return Cost(read=read, written=written, flops=2 * products, rate=SHORT[c.dtype])


def longest_sum(c: Case) -> int:
    """Return the number of terms of the longest sum: of a row of blocks, a column, or the rows of x."""
    pattern, block = pattern_of(c), c.inputs[1].shape[1]
    longest_row = max((0, *pattern.lengths()))
    rows = math.prod(c.inputs[0].shape[:-1])
    return max(longest_row * block, pattern.rows * block, rows)


def _empty_rows_are_the_bias(
    y: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, transposed: Tensor, bias: Tensor
) -> float:
    empty = (crow[1:] == crow[:-1]).repeat_interleave(values.shape[1])
    strips, expected = as_matrix(y)[:, empty], bias.to(y.dtype)[empty]
    return 0.0 if bool((strips == expected).all()) else math.inf


OPERATOR = Operator(
    name=NAME,
    summary="linear layer whose weight is stored in blocks (BSR)",
    formula="y = x W^T + b, W of stored blocks of 16, 32, 64 or 128",
    signature="block_sparse_linear(x, values, crow, col, transposed=None, bias=None)",
    reference=reference,
    cases=cases(),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "values", "bias"),
    save=save,
    draw=draw,
    tolerance=Tolerance(
        chain=8.0,
        sum_length=longest_sum,
        reason="the order of a sum over stored blocks is free",
    ),
    properties=(Property(name="rows without blocks are the bias", holds=_empty_rows_are_the_bias),),
    backward_note="x: the product with the transposed weight, whose blocks a transposed index names; the "
    "values: of each stored block, the product of its rows of the gradient and its columns of x",
)
