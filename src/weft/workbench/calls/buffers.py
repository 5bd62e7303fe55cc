"""Input buffers: the sets of inputs that the candidates of a case are timed on, and their contents.

A captured CUDA graph reads fixed addresses, so a buffer keeps its address and only its contents change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weft.core import Case, Input
from weft.workbench.calls import inputs as case_inputs
from weft.workbench.calls.guarded_memory import NAN, bits, pattern_of

COMPARED_AT_ONCE = 1 << 24  # elements

MAX_SENT_BYTES = 1 << 28  # of contents for a GPU: larger ones are generated where they are used

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


class LeadingOutputs(tuple[torch.Tensor, ...]):
    """The leading outputs of an operator, from an implementation that declares fewer outputs.

    Only Weft's own caller wraps a result in this type: an external candidate must return all outputs.
    """


@dataclass(frozen=True)
class ElementChanges:
    """Elements of tensor ``index`` of a call that differ from what the seed generated.

    ``where`` has one (n,) index tensor for each dimension of its distinct elements, and ``values`` the (n,)
    new elements; those of a dtype of one byte are bytes, since torch cannot index float8.
    """

    index: int
    where: tuple[torch.Tensor, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class InputBuffers:
    """Inputs of one call and, in the backward, the gradient of its output.

    ``seed`` and then ``changes`` generated them: who has both can generate the same ones again.
    """

    inputs: list[torch.Tensor]
    grad: torch.Tensor | None = None
    seed: int = 0
    changes: tuple[ElementChanges, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind the buffers; an expanded tensor's row counts once."""
        return sum(stored_bytes(x) for x in self.all_tensors)

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        return self.inputs if self.grad is None else [*self.inputs, self.grad]


MakeBuffers = Callable[[int], InputBuffers]
ShapeDtype = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of an output


def allocate_buffers(case: Case, device: str, grad: ShapeDtype | None, seed: int) -> InputBuffers:
    """Generate a case's inputs from a seed, and a gradient of shape and dtype ``grad`` unless None.

    Every process generates the same bits from one seed, so the parent can judge a worker's outputs
    without receiving its inputs.
    """
    inputs = case_inputs.make(case, device, seed)
    if grad is None:
        return InputBuffers(inputs, seed=seed)
    output = torch.empty(grad[0], dtype=grad[1], device="meta")
    return InputBuffers(inputs, case_inputs.gradient_like(output, seed, device=device), seed)


def indexed_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's distinct elements in a form that an index can write; those of one byte as bytes."""
    stored = distinct_elements(tensor).data
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def apply_changes(buffers: InputBuffers, changes: Sequence[ElementChanges]) -> None:
    """Write changed elements into buffers that have the contents of the same seed."""
    for change in changes:
        indexed_elements(buffers.all_tensors[change.index])[change.where] = change.values


def allocate_empty(case: Case, device: str, grad: ShapeDtype | None) -> InputBuffers:
    """Allocate a case's inputs, and a gradient of shape and dtype ``grad`` unless None, without values."""
    inputs = [case_inputs.allocate(spec, device).tensor for spec in case.inputs]
    if grad is None:
        return InputBuffers(inputs)
    return InputBuffers(inputs, case_inputs.allocate(_grad_spec(*grad), device).tensor)


def regenerate(buffers: InputBuffers, case: Case, seed: int, positions: Sequence[int]) -> None:
    """Write a seed's contents over these tensors of a call, in place: a second set would not fit beside them.

    The contents are those of :func:`allocate_buffers`. A case with a generator of its own needs the memory of
    what that returns.
    """
    tensors, n_inputs = buffers.all_tensors, len(buffers.inputs)
    chosen = list(positions)
    if case.draw is not None and any(p < n_inputs for p in chosen):
        values = list(case.draw(seed, str(tensors[0].device)))
        for position in reversed(range(n_inputs)):
            source = values.pop()  # released as soon as it is copied
            if position in chosen:
                distinct_elements(tensors[position]).data.copy_(source)
        chosen = [p for p in chosen if p >= n_inputs]
    for position in chosen:
        tensor = tensors[position]
        is_input = position < n_inputs
        spec = case.inputs[position] if is_input else _grad_spec(tuple(tensor.shape), tensor.dtype)
        window = distinct_elements(tensor).data
        allocated = case_inputs.AllocatedInput(spec.name, spec, tensor, window, None)
        case_inputs.fill(allocated, seed, position if is_input else -1)


def _grad_spec(shape: tuple[int, ...], dtype: torch.dtype) -> Input:
    return Input(name="grad", shape=shape, dtype=str(dtype).removeprefix("torch."))


def release_unused_memory(most: int) -> None:
    """Give the GPU memory back that torch's allocator keeps unused, if that is more than ``most`` bytes.

    Other processes need it: the parent process and its workers share one GPU.
    """
    if not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most:
        torch.cuda.empty_cache()


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor."""
    sizes = (n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0 or n == 0)
    count = 1
    for n in sizes:
        count *= n
    return count * tensor.element_size()


def are_sent(nbytes: int, device: str) -> bool:
    """Return True if contents of so many bytes for a device are sent to a worker, not generated there."""
    return device == "cpu" or nbytes <= MAX_SENT_BYTES


def drop_values(buffers: InputBuffers, device: str) -> InputBuffers:
    """Return buffers of the same form without memory, if a worker generates their contents itself."""
    if are_sent(buffers.nbytes, device):
        return buffers
    inputs = [_without_memory(x) for x in buffers.inputs]
    return replace(
        buffers, inputs=inputs, grad=None if buffers.grad is None else _without_memory(buffers.grad)
    )


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def tensors_of(result: Outputs) -> list[torch.Tensor]:
    """Return the tensors of a result: one output, or a tuple of outputs or gradients."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each stored element once; an expanded dimension is cut to size 1."""
    for d in range(tensor.dim()):
        if tensor.stride(d) == 0 and tensor.size(d) > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` in place; any strides are allowed."""
    # Writing through `.data` leaves autograd's version counter unchanged. A candidate that caches
    # its output by address and version then cannot notice the new contents and returns a stale one.
    distinct = distinct_elements(target)
    distinct.data.copy_(source[tuple(slice(0, n) for n in distinct.shape)])


def overwrite_buffers(buffers: InputBuffers, source: InputBuffers) -> None:
    """Copy the contents of ``source`` into ``buffers``; in the backward, of the gradient alone."""
    for position in changing_tensors(source):
        overwrite(buffers.all_tensors[position], source.all_tensors[position])


def changing_tensors(buffers: InputBuffers) -> list[int]:
    """Return which of all tensors get other contents between calls: in the backward, the gradient alone."""
    # The forward ran while binding: what it saved belongs to the old inputs, which must stay.
    n_inputs = len(buffers.inputs)
    return list(range(n_inputs)) if buffers.grad is None else [n_inputs]


def storages(buffer_sets: Sequence[InputBuffers]) -> frozenset[int]:
    """Return the addresses of the storages behind these buffers."""
    return frozenset(t.untyped_storage().data_ptr() for s in buffer_sets for t in s.all_tensors)


def poison(result: Outputs, protected: frozenset[int] = frozenset()) -> None:
    """Overwrite a result, so that a call that writes nothing is noticed.

    Floating-point elements become a NaN that no hardware computes, integers their largest value.
    Storages at ``protected`` addresses are left alone: a result may be a view of an input.
    """
    for tensor in tensors_of(result):
        if tensor.untyped_storage().data_ptr() in protected:
            continue
        stored = distinct_elements(tensor).data
        if stored.is_complex():
            stored = torch.view_as_real(stored)
        if _has_poison_pattern(stored.dtype):
            # As integers: filling with a float NaN would write the ordinary quiet NaN.
            as_integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.element_size()]
            stored.view(as_integer).fill_(pattern_of(NAN, stored.element_size()))
        elif stored.is_floating_point():
            stored.fill_(float("nan"))
        else:
            stored.fill_(True if stored.dtype is torch.bool else torch.iinfo(stored.dtype).max)


def _has_poison_pattern(dtype: torch.dtype) -> bool:
    """Return True if the dtype can hold the two-byte poison (float8 and integers cannot)."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def has_poison(outputs: Outputs) -> bool:
    """Return True if an element still holds the NaN of :func:`poison`.

    A NaN that a kernel computed has other bits.
    """
    # In pieces: of gigabytes the comparison would not fit beside the tensor.
    return any(
        bool((piece == pattern_of(NAN, t.element_size())).any())
        for t in tensors_of(outputs)
        if _has_poison_pattern(t.dtype)
        for piece in bits(t).reshape(-1).split(COMPARED_AT_ONCE)
    )


def values_equal(one: Outputs, other: Outputs) -> bool:
    """Return True if two outputs are equal element by element (NaN equals NaN)."""
    return all(_equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def shares_memory(results: Sequence[Outputs]) -> bool:
    """Return True if two outputs start at the same address; empty tensors do not count."""
    seen: set[int] = set()
    for result in results:
        starts = {t.data_ptr() for t in tensors_of(result) if t.numel()}
        if starts & seen:
            return True
        seen |= starts
    return False
