"""The contracts of 2:4 sparsity: pruning, expansion, and the linear layer with a pruned weight.

Of each four adjacent elements of a row two stay. pattern.py describes the format: values and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.core import FORWARD, Case, Cost, Operator, Property, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.layout import as_matrix
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.cases import (
    DTYPES,
    draw_linear,
    draw_pair,
    expand_cases,
    linear_cases,
    prune_cases,
    transposable_cases,
)
from weft.ops.sparse24.pattern import GROUP, NONZEROS


def places_by_sorting(w: Tensor) -> Tensor:
    """Return the places of the two largest of each four, (rows, columns / 4, 2): NaN first, ties by place."""
    # A stable sort keeps the order of equal magnitudes, and torch sorts NaN above infinity.
    order = torch.sort(pattern.groups(w).abs(), dim=-1, descending=True, stable=True).indices
    return order[..., :NONZEROS].sort(-1).values


def packed(places: Tensor) -> Tensor:
    """Return the metadata of places, code by code at its word and shift as the format defines them."""
    rows, count = places.shape[:2]
    shape = pattern.metadata_shape(rows, count * GROUP)
    words = torch.full(shape, 0x44444444, dtype=torch.int64, device=places.device).flatten()
    row = torch.arange(rows, device=places.device)[:, None]
    column = torch.arange(count, device=places.device)[None] * GROUP
    block = column // 64 * shape[1] + row // 16
    word = block * 32 + row % 8 * 4 + column % 64 // 16
    shift = row % 16 // 8 * 16 + column % 16
    codes = places[..., 0] + 4 * places[..., 1]
    # Codes have bits of their own in a word: a sum of differences from the filler replaces them.
    words.index_add_(0, word.flatten(), ((codes - pattern.FILLER) << shift).flatten())
    return words.view(shape).to(torch.int32)


def prune_reference(w: Tensor) -> tuple[Tensor, Tensor]:
    places = places_by_sorting(w)
    rows, columns = w.shape
    return pattern.groups(w).gather(-1, places).view(rows, columns // NONZEROS), packed(places)


def expand_reference(values: Tensor, metadata: Tensor) -> Tensor:
    return pattern.expand(values, metadata)


def greedy_mask(w: Tensor) -> Tensor:
    """Return which elements of each tile of 4 x 4 stay: by falling magnitude, two of a row and a column."""
    rows, columns = w.shape
    tiles = w.view(rows // GROUP, GROUP, columns // GROUP, GROUP).transpose(1, 2).reshape(-1, GROUP * GROUP)
    order = torch.sort(tiles.abs(), dim=-1, descending=True, stable=True).indices
    mask = torch.zeros(len(tiles), GROUP, GROUP, dtype=torch.bool, device=w.device)
    every = torch.arange(len(tiles), device=w.device)
    for turn in range(GROUP * GROUP):
        row, column = order[:, turn] // GROUP, order[:, turn] % GROUP
        is_free = (mask[every, row].sum(-1) < NONZEROS) & (mask[every, :, column].sum(-1) < NONZEROS)
        mask[every, row, column] = is_free
    shape = (rows // GROUP, columns // GROUP, GROUP, GROUP)
    return mask.view(shape).transpose(1, 2).reshape(rows, columns)


def masked_pair(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and metadata of the elements that a mask keeps, at most two of a group.

    A place that fills up a group has the value 0.
    """
    places = pattern.places_of(pattern.groups(mask))
    zeroed = torch.where(mask, w, 0.0)
    values = pattern.groups(zeroed).gather(-1, places)
    return values.view(w.shape[0], w.shape[1] // NONZEROS), packed(places)


def transposable_reference(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = greedy_mask(w)
    return *masked_pair(w, mask), *masked_pair(w.t(), mask.t())


def linear_reference(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    return x @ pattern.expand(values, metadata).t() + bias


# ---- Validation


def check_weight(name: str, w: Any, both: bool = False) -> None:
    """Raise :class:`WeftError` unless ``w`` is a matrix of whole groups; ``both``: also of its columns."""
    validate.tensor(name, "w", w, DTYPES, dims=range(2, 3))
    if w.shape[1] % GROUP or (both and w.shape[0] % GROUP):
        sizes = "rows and columns" if both else "columns"
        padding = "(0, -w.shape[1] % 4, 0, -w.shape[0] % 4)" if both else "(0, -w.shape[1] % 4)"
        hint = f"torch.nn.functional.pad(w, {padding})"
        raise WeftError(f"{name}: w.shape", expected=f"{sizes} in fours", got=tuple(w.shape), hint=hint)


def check_pair(name: str, values: Any, metadata: Any) -> None:
    """Raise :class:`WeftError` unless values and metadata are of one matrix; the codes are not read."""
    validate.tensor(name, "values", values, DTYPES, dims=range(2, 3))
    validate.tensor(name, "metadata", metadata, ("int32",), dims=range(3, 4))
    validate.same_device(name, "values and metadata", values, metadata)
    rows, half = values.shape
    if half % NONZEROS:
        raise WeftError(f"{name}: values.shape", expected="an even number of columns", got=(rows, half))
    shape = pattern.metadata_shape(rows, half * GROUP // NONZEROS)
    if tuple(metadata.shape) != shape:
        hint = "weft.ops.prune_2_4 returns both"
        raise WeftError(f"{name}: metadata.shape", expected=shape, got=tuple(metadata.shape), hint=hint)


def check_prune(w: Any) -> None:
    check_weight("prune_2_4", w)


def check_transposable(w: Any) -> None:
    check_weight("prune_2_4_transposable", w, both=True)
    if torch.is_grad_enabled() and w.requires_grad:
        raise WeftError(
            "prune_2_4_transposable has no gradient",
            expected="w without requires_grad",
            got="requires_grad=True",
            hint="w.detach(); sparse_linear has the gradient of the values",
        )


def check_expand(values: Any, metadata: Any) -> None:
    check_pair("expand_2_4", values, metadata)


def check_linear(x: Any, values: Any, metadata: Any, bias: Any) -> None:
    name = "sparse_linear"
    validate.tensor(name, "x", x, DTYPES, dims=range(1, 65))
    check_pair(name, values, metadata)
    validate.tensor(name, "bias", bias, DTYPES, dims=range(1, 2))
    validate.same(name, "x and values", x, values)
    validate.same(name, "x and bias", x, bias)
    columns = values.shape[1] * GROUP // NONZEROS
    if x.shape[-1] != columns:
        raise WeftError(
            f"{name}: the inner sizes",
            expected=f"x (..., {columns}), twice the columns of values",
            got=tuple(x.shape),
        )
    if bias.shape[0] != values.shape[0]:
        raise WeftError(f"{name}: bias.shape", expected=f"({values.shape[0]},)", got=tuple(bias.shape))


# ---- Gradients, in torch calls


def save_metadata(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return (output[1],)


def save_second(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return (inputs[1],)


def expand_backward(grad: Tensor, metadata: Tensor) -> tuple[Tensor]:
    """Return the gradient of the values: the elements of the matrix's gradient that stay."""
    return (pattern.compress(grad, metadata),)


def save_factors(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs[:3]


def linear_backward(
    grad: Tensor,
    x: Tensor,
    values: Tensor,
    metadata: Tensor,
    *,
    expand: Callable[[Tensor, Tensor], Tensor] = pattern.expand,
    compress: Callable[[Tensor, Tensor], Tensor] = pattern.compress,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the values and the bias, by dense products of the library.

    ``expand`` returns the dense weight, ``compress`` the elements of its gradient that are stored.
    """
    weight = expand(values, metadata)
    grad2d, x2d = as_matrix(grad), as_matrix(x)
    dense_gradient = grad2d.t() @ x2d
    dx = (grad2d @ weight).view(x.shape)
    return dx, compress(dense_gradient, metadata), grad2d.sum(0, dtype=torch.float32).to(grad.dtype)


# ---- Cost and properties


def _nbytes(c: Case, name: str) -> int:
    return next(i.nbytes for i in c.inputs if i.name == name)


def _pruned_bytes(c: Case, rows: int, columns: int) -> int:
    return rows * columns // NONZEROS * ITEMSIZE[c.dtype] + 4 * math.prod(
        pattern.metadata_shape(rows, columns)
    )


def prune_cost(c: Case, direction: str) -> Cost:
    """Forward: w once, values and metadata. Backward: these, and the whole gradient is written."""
    rows, columns = c.inputs[0].shape
    dense, pruned = c.inputs[0].nbytes, _pruned_bytes(c, rows, columns)
    return Cost(read=dense, written=pruned) if direction == FORWARD else Cost(read=pruned, written=dense)


def transposable_cost(c: Case, direction: str) -> Cost:
    rows, columns = c.inputs[0].shape
    both = _pruned_bytes(c, rows, columns) + _pruned_bytes(c, columns, rows)
    return Cost(read=c.inputs[0].nbytes, written=both)


def expand_cost(c: Case, direction: str) -> Cost:
    values, metadata = (i.nbytes for i in c.inputs)
    if direction == FORWARD:
        return Cost(read=values + metadata, written=2 * values)
    return Cost(read=2 * values + metadata, written=values)


def linear_cost(c: Case, direction: str) -> Cost:
    """Count the products with kept elements alone: 2 M N K / 2 FLOPs forward.

    Backward: as many for the gradient of x, and again for that of the values.
    """
    x, values = c.inputs[:2]
    m, (n, half) = math.prod(x.shape[:-1]), values.shape
    factors = x.nbytes + values.nbytes + _nbytes(c, "metadata")
    item, output = ITEMSIZE[c.dtype], m * n * ITEMSIZE[c.dtype]
    if direction == FORWARD:
        flops = 2.0 * m * n * half
        return Cost(read=factors + n * item, written=output, flops=flops, rate=SHORT[c.dtype])
    written = x.nbytes + values.nbytes + n * item
    return Cost(read=factors + output, written=written, flops=4.0 * m * n * half, rate=SHORT[c.dtype])


def _largest_two(values: Tensor, w: Tensor) -> float:
    """Return infinity unless each two values have the largest magnitudes of their four elements."""
    pairs = values.view(w.shape[0], w.shape[1] // GROUP, NONZEROS).abs().nan_to_num(math.inf, math.inf)
    fours = pattern.groups(w).abs().nan_to_num(math.inf, math.inf)
    largest = fours.sort(-1, descending=True).values[..., :NONZEROS]
    return 0.0 if torch.equal(pairs.sort(-1, descending=True).values.to(w.dtype), largest) else math.inf


def _of_its_group(values: Tensor, w: Tensor) -> float:
    """Return infinity unless each value is an element of its four or 0."""
    pairs = values.view(w.shape[0], w.shape[1] // GROUP, NONZEROS, 1).to(w.dtype)
    fours = pattern.groups(w)[:, :, None]
    is_element = ((pairs == fours) | (pairs.isnan() & fours.isnan())).any(-1) | (pairs[..., 0] == 0)
    return 0.0 if bool(is_element.all()) else math.inf


def _is_kept(output: Tensor, values: Tensor, metadata: Tensor) -> float:
    """Return infinity unless the matrix has its values, unrounded, and zeros beside them."""
    again = pattern.compress(output, metadata)
    same = (again == values) | (again.isnan() & values.isnan())
    is_whole = int((output != 0).sum()) == int((values != 0).sum())
    return 0.0 if bool(same.all()) and is_whole else math.inf


PRUNE_2_4 = Operator(
    name="prune_2_4",
    summary="the two largest of each four adjacent elements of a row, and their places",
    formula="values, metadata = the 2 of 4 with the largest |w|",
    signature="prune_2_4(w)",
    reference=prune_reference,
    cases=prune_cases(),
    cost=prune_cost,
    validate=check_prune,
    dtypes=DTYPES,
    differentiable=("w",),
    save=save_metadata,
    output_names=("values", "metadata"),
    properties=(Property(name="values have the largest magnitudes", holds=_largest_two),),
    backward_note="the gradient of each value goes to its element",
)
PRUNE_2_4_TRANSPOSABLE = Operator(
    name="prune_2_4_transposable",
    summary="a matrix and its transpose with one mask that is 2:4 in both",
    formula="values, metadata, values_t, metadata_t = w and w^T, greedy in tiles of 4 x 4",
    signature="prune_2_4_transposable(w)",
    reference=transposable_reference,
    cases=transposable_cases(),
    cost=transposable_cost,
    validate=check_transposable,
    dtypes=DTYPES,
    output_names=("values", "metadata", "values_t", "metadata_t"),
    properties=(Property(name="values are elements of their group", holds=_of_its_group),),
)
EXPAND_2_4 = Operator(
    name="expand_2_4",
    summary="the dense matrix of values and metadata of 2:4 sparsity",
    formula="w = values at their places, 0 elsewhere",
    signature="expand_2_4(values, metadata)",
    reference=expand_reference,
    cases=expand_cases(),
    cost=expand_cost,
    validate=check_expand,
    dtypes=DTYPES,
    differentiable=("values",),
    save=save_second,
    draw=draw_pair,
    properties=(Property(name="values are at their places", holds=_is_kept),),
    backward_note="the elements of the gradient at the places of the values",
)
SPARSE_LINEAR = Operator(
    name="sparse_linear",
    summary="linear layer whose weight is 2:4 sparse",
    formula="y = x W^T + b, W = expand_2_4(values, metadata)",
    signature="sparse_linear(x, values, metadata, bias=None)",
    reference=linear_reference,
    cases=linear_cases(),
    cost=linear_cost,
    validate=check_linear,
    dtypes=DTYPES,
    differentiable=("x", "values", "bias"),
    save=save_factors,
    draw=draw_linear,
    rows=("x",),
    backward_note="two dense products by the library; the values get the elements at their places",
)
