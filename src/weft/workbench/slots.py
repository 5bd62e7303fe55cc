"""Slots: the k distinct inputs that every candidate of a case is timed on, and their refilling.

A slot keeps its addresses for good, since a captured graph reads them; only its contents change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Slot:
    """One call's inputs, and the gradient of its output where the direction is backward."""

    inputs: list[torch.Tensor]
    grad: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind the slot: an expanded tensor's row counts once."""
        return sum(stored_bytes(x) for x in self.all_tensors)

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        return self.inputs if self.grad is None else [*self.inputs, self.grad]


MakeSlot = Callable[[int], Slot]


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor."""
    sizes = (n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0 or n == 0)
    count = 1
    for n in sizes:
        count *= n
    return count * tensor.element_size()


def tensors_of(result: Result) -> list[torch.Tensor]:
    """The tensors of a result, be it an output or a tuple of gradients."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view of each stored element once: an expanded dimension is cut to one of its repeats."""
    for d in range(tensor.dim()):
        if tensor.stride(d) == 0 and tensor.size(d) > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def refill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``target`` the contents of ``source`` in place, whatever its strides.

    Through ``.data``, so that autograd's version counter stands still: a candidate that keeps its
    answer by address and version is asked again without a warning.
    """
    cut = _distinct(target)
    cut.data.copy_(source[tuple(slice(0, n) for n in cut.shape)])


def storages(slots: Sequence[Slot]) -> frozenset[int]:
    """The addresses of the memory behind these slots."""
    return frozenset(t.untyped_storage().data_ptr() for s in slots for t in s.all_tensors)


def poison(result: Result, protected: frozenset[int] = frozenset()) -> None:
    """Overwrite a result with NaN (the largest value for an integer dtype), to betray a call
    that writes nothing. ``protected`` memory, an input's that a result is a view of, is left."""
    for tensor in tensors_of(result):
        if tensor.untyped_storage().data_ptr() in protected:
            continue
        floating = tensor.dtype.is_floating_point
        bad = float("nan") if floating else torch.iinfo(tensor.dtype).max
        _distinct(tensor).data.fill_(bad)


def has_nan(result: Result) -> bool:
    return any(bool(torch.isnan(t).any()) for t in tensors_of(result) if t.is_floating_point())


def same_bits(one: Result, other: Result) -> bool:
    """Whether two results are equal element by element (NaN equals NaN)."""
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    return all(_same(a, b) for a, b in pairs)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def shares_memory(results: Sequence[Result]) -> bool:
    """Whether two of these results lie at the same address (nothing, of size 0, lies nowhere)."""
    seen: set[int] = set()
    for result in results:
        starts = {t.data_ptr() for t in tensors_of(result) if t.numel()}
        if starts & seen:
            return True
        seen |= starts
    return False
