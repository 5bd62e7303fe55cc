"""Altered inputs: contents that a candidate has seen, of which a few elements changed.

A candidate that caches outputs by a part of its inputs (their first bytes, a sum of some elements) returns
the output of the old contents here, which the oracle shows to be wrong. This needs no clock, so it holds on a
busy machine too. The positions come from a seed that no candidate can predict, and every process alters the
same elements. A cache by all bytes of the inputs is not seen here, only by its time (``unseen_inputs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

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


def alter(buffers: InputBuffers, source: InputBuffers, seed: int, many: bool) -> list[ElementChanges]:
    """Replace elements of ``buffers`` in place by those of ``source`` at the same positions.

    In the backward only the gradient changes. One element of each input changes, or one in ``SPARSENESS``
    with ``many``. Inputs that are small, not floating-point, symmetric or sorted stay as they are: their
    elements depend on each other. Returns the changes that bring the former elements back.
    """
    pairs = list(zip(buffers.all_tensors, source.all_tensors, strict=True))
    first = len(buffers.inputs) if buffers.grad is not None else 0
    undo = []
    for index, (target, other) in enumerate(pairs[first:], first):
        stored = distinct_elements(target).data
        if not target.is_floating_point() or stored.numel() < LEAST_ELEMENTS or _has_order(stored):
            continue
        values = other[tuple(slice(0, n) for n in stored.shape)]
        where = _positions(stored, values, seed + index - first, many)
        undo.append(ElementChanges(index, where, indexed_elements(target)[where]))
        indexed_elements(target)[where] = indexed_elements(other)[where]
    return undo


@contextmanager
def altered(buffers: InputBuffers, source: InputBuffers, seed: int, many: bool) -> Iterator[InputBuffers]:
    """Alter the buffers inside, and restore them afterwards. What is yielded names its ``changes``."""
    undo = alter(buffers, source, seed, many)
    try:
        tensors = buffers.all_tensors
        changes = (replace(u, values=indexed_elements(tensors[u.index])[u.where]) for u in undo)
        yield replace(buffers, changes=tuple(changes))
    finally:
        apply_changes(buffers, undo)


def _positions(stored: torch.Tensor, values: torch.Tensor, seed: int, many: bool) -> tuple[torch.Tensor, ...]:
    """Return the indexes of the elements to replace, one tensor for each dimension."""
    # On the CPU, so that every process and every device takes the same positions.
    generator = torch.Generator().manual_seed(seed)
    count = 1 + (stored.numel() // SPARSENESS if many else 0)
    choices = CHOICES if count == 1 else 4 * count
    flat = torch.randint(0, stored.numel(), (choices,), generator=generator).to(stored.device)
    where = torch.unravel_index(flat, stored.shape)
    change = _take(values, where) - _take(stored, where)
    # The largest changes: a small one could hide in the tolerance.
    change = (change if many else change.abs()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = change.topk(count).indices
    return tuple(w[largest] for w in where)


def _take(tensor: torch.Tensor, where: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)[where].view(tensor.dtype).double()
    return tensor[where].double()


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
