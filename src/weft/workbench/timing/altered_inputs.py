"""Altered inputs: contents that a candidate has seen, of which a few elements changed.

A candidate that caches outputs by a part of its inputs (their first bytes, a sum of some elements) returns
the output of the old contents here, which the oracle shows to be wrong. This needs no clock, so it holds on a
busy machine too. The positions come from a seed that no candidate can predict, and every process alters the
same elements. A cache by all bytes of the inputs is not seen here, only by its time (``unseen_inputs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weft.workbench.calls.buffers import InputBuffers, distinct_elements

LEAST_ELEMENTS = 256  # of an input: a smaller one is as quickly read as looked up
CHOICES = 64  # random positions from which the element with the largest change is taken
# With ``many``, one in so many elements changes, all upwards: a sum in low precision must show it.
SPARSENESS = 2048
CORNER = 32  # side of the corner that shows whether an input is symmetric or sorted

Undo = tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]


def alter(buffers: InputBuffers, source: InputBuffers, seed: int, many: bool) -> list[Undo]:
    """Replace elements of ``buffers`` in place by those of ``source`` at the same positions.

    In the backward only the gradient changes. One element of each input changes, or one in ``SPARSENESS``
    with ``many``. Inputs that are small, not floating-point, symmetric or sorted stay as they are: their
    elements depend on each other. Returns what :func:`restore` takes.
    """
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    if buffers.grad is not None and source.grad is not None:
        pairs = [(buffers.grad, source.grad)]
    else:
        pairs = list(zip(buffers.inputs, source.inputs, strict=True))
    undo = []
    for index, (target, other) in enumerate(pairs):
        stored = distinct_elements(target).data
        if not target.is_floating_point() or stored.numel() < LEAST_ELEMENTS or _has_order(stored):
            continue
        values = other[tuple(slice(0, n) for n in stored.shape)]
        where = _positions(stored, values, seed + index, many)
        if stored.dtype.itemsize == 1:  # indexing has no float8
            stored, values = stored.view(torch.uint8), values.view(torch.uint8)
        undo.append((stored, where, stored[where]))
        stored[where] = values[where]
    return undo


def restore(undo: Sequence[Undo]) -> None:
    """Write the elements back that :func:`alter` replaced."""
    for stored, where, before in undo:
        stored[where] = before


@contextmanager
def altered(buffers: InputBuffers, source: InputBuffers, seed: int, many: bool) -> Iterator[InputBuffers]:
    """Alter the buffers inside, and restore them afterwards."""
    undo = alter(buffers, source, seed, many)
    try:
        yield buffers
    finally:
        restore(undo)


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
