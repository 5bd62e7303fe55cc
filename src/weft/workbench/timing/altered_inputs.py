"""Altered inputs: contents that a candidate has seen, of which a few elements changed.

A candidate that caches outputs by a part of its inputs (their first bytes, a sum of some elements) returns
the output of the old contents here, which the oracle shows to be wrong. This needs no clock, so it holds on a
busy machine too. The positions come from a seed that no candidate can predict, and every process alters the
same elements. A cache by all bytes of the inputs is not seen here, only by its time (``unseen_inputs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from weft.workbench.calls.buffers import (
    ElementChanges,
    InputBuffers,
    apply_changes,
    distinct_elements,
    indexed_elements,
)

LEAST_ELEMENTS = 256  # of an input: a smaller one is as quickly read as looked up
CHOICES = 64  # random positions from which the element with the largest change is taken
# With ``many``, one in so many elements changes, all upwards: a sum in low precision must show it.
SPARSENESS = 2048
CORNER = 32  # side of the corner that shows whether an input is symmetric or sorted


@dataclass(frozen=True)
class ElementChoices:
    """Elements of a tensor of other contents at random positions: (n,) indexes for each dimension, values.

    Of these the ``count`` with the largest change replace those of a tensor of the same shape.
    """

    index: int
    where: tuple[torch.Tensor, ...]
    values: torch.Tensor
    count: int


def choose(source: InputBuffers, seed: int, many: bool) -> list[ElementChoices]:
    """Choose elements of ``source`` to replace those of other contents of the same case.

    One element of each input, or one in ``SPARSENESS`` with ``many``; in the backward of the gradient alone.
    The source is not needed any more: two contents of a large problem need not be in memory together.
    """
    first = len(source.inputs) if source.grad is not None else 0
    choices = []
    for index, tensor in enumerate(source.all_tensors[first:], first):
        stored = distinct_elements(tensor).data
        if not tensor.is_floating_point() or stored.numel() < LEAST_ELEMENTS:
            continue
        # On the CPU, so that every process and every device takes the same positions.
        generator = torch.Generator().manual_seed(seed + index - first)
        count = 1 + (stored.numel() // SPARSENESS if many else 0)
        n_choices = CHOICES if count == 1 else 4 * count
        flat = torch.randint(0, stored.numel(), (n_choices,), generator=generator).to(stored.device)
        where = torch.unravel_index(flat, stored.shape)
        choices.append(ElementChoices(index, where, indexed_elements(tensor)[where], count))
    return choices


def alter(buffers: InputBuffers, choices: Sequence[ElementChoices]) -> list[ElementChanges]:
    """Replace elements of ``buffers`` in place by those chosen from other contents.

    Inputs that are symmetric or sorted stay as they are, as do those that are small or not floating-point:
    their elements depend on each other. Returns the changes that bring the former elements back.
    """
    undo = []
    for choice in choices:
        target = buffers.all_tensors[choice.index]
        if _has_order(distinct_elements(target).data):
            continue
        elements = indexed_elements(target)
        before = elements[choice.where]
        change = _as_double(choice.values, target.dtype) - _as_double(before, target.dtype)
        # The largest changes: a small one could hide in the tolerance.
        change = (change if choice.count > 1 else change.abs()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        largest = change.topk(choice.count).indices
        where = tuple(w[largest] for w in choice.where)
        undo.append(ElementChanges(choice.index, where, before[largest]))
        elements[where] = choice.values[largest]
    return undo


@contextmanager
def altered(buffers: InputBuffers, choices: Sequence[ElementChoices]) -> Iterator[InputBuffers]:
    """Alter the buffers inside, and restore them afterwards. What is yielded names its ``changes``."""
    undo = alter(buffers, choices)
    try:
        tensors = buffers.all_tensors
        changes = (replace(u, values=indexed_elements(tensors[u.index])[u.where]) for u in undo)
        yield replace(buffers, changes=tuple(changes))
    finally:
        apply_changes(buffers, undo)


def _as_double(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return elements in float64; those of one byte are bytes, since torch cannot index float8."""
    return values.view(dtype).double()


def _has_order(tensor: torch.Tensor) -> bool:
    """Return True if elements depend on each other: a symmetric matrix or sorted rows, by their corner."""
    # A corner of random numbers is never ordered by chance; of all elements the test would take long.
    row = tensor[(0,) * (tensor.dim() - 1)][:CORNER].double()
    if row.numel() > 2 and bool((row[1:] >= row[:-1]).all() | (row[1:] <= row[:-1]).all()):
        return True
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return False
    corner = tensor[(0,) * (tensor.dim() - 2)][:CORNER, :CORNER].double()
    return bool(torch.equal(corner, corner.T))
