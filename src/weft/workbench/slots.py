"""Slots: the k distinct inputs that every candidate of a case is timed on, and their refilling.

A slot keeps its addresses for good, since a captured graph reads them; only its contents change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.core import Case
from weft.workbench import inputs as drawing
from weft.workbench.memory import NAN, bits, pattern_of

Result = torch.Tensor | tuple[torch.Tensor, ...]


class Leading(tuple[torch.Tensor, ...]):
    """The first of an operator's outputs, by an implementation that says it returns no more.

    Weft's own hands put this around the answer: a stranger's is held to all outputs.
    """


@dataclass(frozen=True)
class Slot:
    """One call's inputs, and the gradient of its output where the direction is backward.

    The ``seed`` that they were drawn from is all that a rig in another process needs.
    """

    inputs: list[torch.Tensor]
    grad: torch.Tensor | None = None
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind the slot: an expanded tensor's row counts once."""
        return sum(stored_bytes(x) for x in self.all_tensors)

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        return self.inputs if self.grad is None else [*self.inputs, self.grad]


MakeSlot = Callable[[int], Slot]
Form = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of an output


def deal(case: Case, device: str, grad: Form | None, seed: int) -> Slot:
    """A case's inputs from a seed, and the gradient of its output where one of this form is due.

    In every process the same: what the judge needs of a slot that a guest was timed on, it draws.
    """
    inputs = drawing.make(case, device, seed)
    if grad is None:
        return Slot(inputs, seed=seed)
    output = torch.empty(grad[0], dtype=grad[1], device="meta")
    return Slot(inputs, drawing.gradient_like(output, seed, device=device), seed)


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


def refill_slot(slot: Slot, source: Slot) -> None:
    """Give a slot the contents of another: of its gradient alone in the backward, since what a
    forward saved belongs to the old inputs."""
    if slot.grad is not None and source.grad is not None:
        refill(slot.grad, source.grad)
        return
    for target, fresh in zip(slot.inputs, source.inputs, strict=True):
        refill(target, fresh)


def storages(slots: Sequence[Slot]) -> frozenset[int]:
    """The addresses of the memory behind these slots."""
    return frozenset(t.untyped_storage().data_ptr() for s in slots for t in s.all_tensors)


def poison(result: Result, protected: frozenset[int] = frozenset()) -> None:
    """Overwrite a result with a NaN that no hardware makes (the largest value for an integer
    dtype), to betray a call that writes nothing. ``protected`` memory, an input's that a result is
    a view of, is left."""
    for tensor in tensors_of(result):
        if tensor.untyped_storage().data_ptr() in protected:
            continue
        stored = _distinct(tensor).data
        if stored.is_complex():
            stored = torch.view_as_real(stored)
        if _marked(stored.dtype):
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.element_size()]
            stored.view(whole).fill_(pattern_of(NAN, stored.element_size()))
        elif stored.is_floating_point():
            stored.fill_(float("nan"))
        else:
            stored.fill_(True if stored.dtype is torch.bool else torch.iinfo(stored.dtype).max)


def _marked(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def unwritten(result: Result) -> bool:
    """Whether an element still holds the very NaN that :func:`poison` leaves; one that a kernel
    computed has other bits."""
    return any(
        bool((bits(t) == pattern_of(NAN, t.element_size())).any())
        for t in tensors_of(result)
        if _marked(t.dtype)
    )


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
