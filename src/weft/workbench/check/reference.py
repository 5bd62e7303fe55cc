"""Answers of an operator's reference: its outputs and its gradients, in float64 or in another dtype.

Where the rows of a large input are independent, the reference gets some of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from weft.core import Case, Operator
from weft.workbench.calls.bind import split_gradients
from weft.workbench.calls.buffers import Outputs, tensors_of

# Elements of the first input that the reference gets at once, where rows are independent: float64
# temporaries of 1 GiB each.
PIECE = 1 << 27


def cast(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype, copy=True) if x.is_floating_point() else x for x in inputs]


def doubles(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def forward_in_float64(operator: Operator, x: list[torch.Tensor], case: Case) -> Outputs:
    """Compute the reference in float64, by rows of the first input where those are independent.

    ``x`` is emptied: the inputs in their own dtype are not in memory beside those in float64.
    """
    if x[0].numel() > PIECE and operator.draw is None:
        row_reference = _of_rows(operator, x, case)
        if row_reference is not None:
            return _by_rows(row_reference, x[0])
    # Copies: a reference that writes into an input must not change the caller's.
    copies = [d.clone() if d is v else d for d, v in zip(doubles(x), x, strict=True)]
    x.clear()
    with torch.no_grad():
        outputs: Outputs = operator.reference(*copies, **case.params)
    return outputs


def _of_rows(
    operator: Operator, x: Sequence[torch.Tensor], case: Case
) -> Callable[[slice], torch.Tensor] | None:
    """Return the reference on some rows of the first input; None where rows depend on each other.

    Other inputs of its shape are cut to the same rows if the reference needs that.
    """

    def reference(cut_others: bool, rows: slice) -> torch.Tensor:
        others = [v[rows] if cut_others and v.shape == x[0].shape else v for v in x[1:]]
        with torch.no_grad():
            output = operator.reference(*doubles([x[0][rows], *others]), **case.params)
        assert isinstance(output, torch.Tensor), "by rows there is one output"
        return output

    # First with the other inputs whole (a weight), then cut to the same rows (a residual).
    for cut_others in (False, True):
        candidate = partial(reference, cut_others)
        try:
            if _rows_are_independent(candidate):
                return candidate
        except RuntimeError as error:  # torch raises this where sizes do not match
            if "size" not in str(error):
                raise
    return None


def gradients_in_float64(
    operator: Operator, x: Sequence[torch.Tensor], grad: torch.Tensor, case: Case
) -> tuple[torch.Tensor, ...]:
    def gradient_of_rows(rows: slice) -> torch.Tensor:
        return gradients_in(torch.float64, operator, (x[0][rows],), grad[rows], case)[0]

    may_split = len(x) == 1 and x[0].shape == grad.shape and x[0].numel() > PIECE
    if may_split and _rows_are_independent(gradient_of_rows):
        return (_by_rows(gradient_of_rows, x[0]),)
    return gradients_in(torch.float64, operator, x, grad, case)


def gradients_in(
    dtype: torch.dtype, operator: Operator, x: Sequence[torch.Tensor], grad: torch.Tensor, case: Case
) -> tuple[torch.Tensor, ...]:
    """Return autograd's gradients of the reference with all floating tensors in ``dtype``."""
    inputs = doubles(x) if dtype == torch.float64 else cast(x, dtype)
    needs_grad = [spec.name in operator.differentiable for spec in case.inputs]
    arguments = [v.detach().requires_grad_(n) for v, n in zip(inputs, needs_grad, strict=True)]
    with torch.enable_grad():
        outputs = tensors_of(operator.reference(*arguments, **case.params))
    leaves = [v for v in arguments if v.requires_grad]
    grads = split_gradients(operator, grad.to(dtype))
    results = torch.autograd.grad(outputs[: len(grads)], leaves, grads, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if result is None else result
        for leaf, result in zip(leaves, results, strict=True)
    )


def _by_rows(compute: Callable[[slice], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the answers for a piece of the rows at a time, in float64."""
    rows = max(1, PIECE // (x.numel() // x.shape[0]))
    result: torch.Tensor | None = None
    for start in range(0, x.shape[0], rows):
        answer = compute(slice(start, start + rows))
        if result is None:
            result = answer.new_empty((x.shape[0], *answer.shape[1:]))
        result[start : start + rows] = answer
    assert result is not None
    return result


def _rows_are_independent(compute: Callable[[slice], torch.Tensor]) -> bool:
    """Return True if the answer for two rows is the answers for each row, one after another."""
    try:
        both, first, second = compute(slice(0, 2)), compute(slice(0, 1)), compute(slice(1, 2))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a square matrix transposed: two of its rows are no rows of the gradient
        return False
    if both.dim() == 0 or both.shape[0] != 2 or first.shape[0] != 1:
        return False
    separate = torch.cat((first, second))
    # Not bit for bit: float64 sums of another shape may be added in another order.
    return torch.allclose(both, separate, rtol=1e-12, atol=1e-300, equal_nan=True)
