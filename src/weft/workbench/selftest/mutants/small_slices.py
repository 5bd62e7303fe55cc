"""Operators of which one row, column, head or batch element is small, with kernels that are wrong there.

Like ``small_parts``, with parts as kernels have them: the error is far below the RMS of the whole answer,
so that only the rule ``local`` can see it.
"""

from __future__ import annotations

import torch

import weft
from weft.workbench.selftest.mutants.small_parts import _cost, mutants_of

SMALL = 2.0**-30  # scale of the part that is small
BLOCK = 32  # rows and columns of the small block


def _cases(*shapes: tuple[int, ...]) -> list[weft.Case]:
    """Return cases of these shapes, the last one to be timed."""
    *checked, timed = [weft.Input(name="x", shape=s) for s in shapes]
    return [*map(weft.case, checked), weft.case(timed, tags="bench")]


def _last(x: torch.Tensor, dim: int, count: int = 1) -> torch.Tensor:
    """Return factors: 1, and ``SMALL`` for the last ``count`` indexes of one dimension."""
    factors = torch.ones(x.shape[dim], dtype=x.dtype, device=x.device)
    factors[-count:] = SMALL
    return factors.view([-1 if d == dim else 1 for d in range(x.dim())])


# -- x: (batch B, head H, row T, column D) ---------------------------------------------------------


@weft.operator("last_head", cases=_cases((2, 4, 9, 16), (1, 3, 33, 8), (8, 4, 64, 128)), cost=_cost)
def last_head(x: torch.Tensor) -> torch.Tensor:
    """Compute the softmax of each head, the last one at a small scale."""
    return torch.softmax(x, -1) * _last(x, 1)


@weft.implementation("last_head", backend="eager", name="eager", directions=("forward",))
def _last_head(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * _last(x, 1)


@weft.implementation("last_head", backend="eager", name="scaled", directions=("forward",))
def _head_scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale the last head wrongly."""
    y = _last_head(x)
    y[:, -1] *= 1.125
    return y


@weft.implementation("last_head", backend="eager", name="uniform", directions=("forward",))
def _head_uniform(x: torch.Tensor) -> torch.Tensor:
    """Write the mean of a softmax for the last head."""
    y = _last_head(x)
    y[:, -1] = SMALL / x.shape[-1]
    return y


@weft.implementation("last_head", backend="eager", name="other-head", directions=("forward",))
def _head_of_another(x: torch.Tensor) -> torch.Tensor:
    """Compute the first head again in the last one's place."""
    y = _last_head(x)
    y[:, -1] = y[:, 0] * SMALL
    return y


@weft.implementation("last_head", backend="eager", name="flat", directions=("forward",))
def _head_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Compute all heads as rows of one matrix: honest."""
    y = torch.softmax(x.reshape(-1, x.shape[-1]), -1).view(x.shape)
    return y.mul_(_last(x, 1))


@weft.operator("last_batch", cases=_cases((3, 8, 17), (2, 40), (64, 64, 64)), cost=_cost)
def last_batch(x: torch.Tensor) -> torch.Tensor:
    """Compute tanh(x), of the last batch element at a small scale."""
    return torch.tanh(x) * _last(x, 0)


@weft.implementation("last_batch", backend="eager", name="eager", directions=("forward",))
def _last_batch(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * _last(x, 0)


@weft.implementation("last_batch", backend="eager", name="scaled", directions=("forward",))
def _batch_scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale the last batch element by a half."""
    y = _last_batch(x)
    y[-1] *= 0.5
    return y


@weft.implementation("last_batch", backend="eager", name="stale", directions=("forward",))
def _batch_stale(x: torch.Tensor) -> torch.Tensor:
    """Write the batch element before it, at the small scale."""
    y = _last_batch(x)
    y[-1] = y[-2] * SMALL
    return y


# -- x: (row M, column N) --------------------------------------------------------------------------


@weft.operator("last_block", cases=_cases((65, 96), (48, 70), (512, 512)), cost=_cost)
def last_block(x: torch.Tensor) -> torch.Tensor:
    """Compute x^2 + x, with the last 32 rows and the last 32 columns at a small scale."""
    return (x * x + x) * _last(x, 0, BLOCK) * _last(x, 1, BLOCK)


@weft.implementation("last_block", backend="eager", name="eager", directions=("forward",))
def _last_block(x: torch.Tensor) -> torch.Tensor:
    return (x * x + x) * _last(x, 0, BLOCK) * _last(x, 1, BLOCK)


@weft.implementation("last_block", backend="eager", name="last-row", directions=("forward",))
def _block_without_row(x: torch.Tensor) -> torch.Tensor:
    """Leave zeros in the last row."""
    y = _last_block(x)
    y[-1] = 0.0
    return y


@weft.implementation("last_block", backend="eager", name="last-column", directions=("forward",))
def _block_without_column(x: torch.Tensor) -> torch.Tensor:
    """Write x in the last column, without its square."""
    y = _last_block(x)
    y[:, -1] = (x * _last(x, 0, BLOCK))[:, -1] * SMALL
    return y


@weft.implementation("last_block", backend="eager", name="corner", directions=("forward",))
def _block_without_corner(x: torch.Tensor) -> torch.Tensor:
    """Leave zeros where the small rows and the small columns cross."""
    y = _last_block(x)
    y[-BLOCK:, -BLOCK:] = 0.0
    return y


@weft.implementation("last_block", backend="eager", name="factored", directions=("forward",))
def _block_factored(x: torch.Tensor) -> torch.Tensor:
    """Compute x (x + 1): honest, with other roundings."""
    return (x * _last(x, 0, BLOCK)) * ((x + 1) * _last(x, 1, BLOCK))


FAULTS = {
    _head_scaled: "one head scaled by 9/8, which is small",
    _head_uniform: "a mean in place of one head, which is small",
    _head_of_another: "another head's answer in one head, which is small",
    _batch_scaled: "half of one batch element, which is small",
    _batch_stale: "the batch element before in one that is small",
    _block_without_row: "zeros in the last row, which is small",
    _block_without_column: "another function in the last column, which is small",
    _block_without_corner: "zeros where small rows and columns cross",
}
CONTROLS = {
    _head_by_rows: "all heads as rows of one matrix",
    _block_factored: "small rows and columns with other roundings",
}


MUTANTS = tuple(mutants_of(FAULTS, CONTROLS))
