"""Form of the outputs of timed calls: type, memory, shape, strides and address, inspected after each sample.

A tensor that computes its contents when it is read (a subclass, a lazy copy, a wrapper) would make a timed
call short and its outputs right. The inspector therefore looks at every output before any other code does,
without a call of torch's operators, once the clock has stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.calls.guarded_memory import dense_strides, span
from weft.workbench.calls.staging import TensorForm

# Bound at import, so that a candidate that replaces them in `torch` changes nothing here.
_Tensor = torch.Tensor
_dispatch_keys, _is_lazy_copy = torch._C._dispatch_keys, torch._C._is_cow_tensor  # type: ignore[attr-defined]
HELD_BYTES = 1 << 26  # an output that is larger is not kept alive
_METHODS = ("__iter__", "__getitem__", "__len__")  # of a tuple: how its items are read


class OutputInspector:
    """Requirements on the outputs of calls on ``buffer_sets``; ``violation`` is the first one broken.

    ``forms`` are the forms of a call's outputs: shape, dtype, and the baseline's strides. None: unknown,
    and only the number of outputs, their shapes and dtypes must be those of the first call.

    The first output stays alive, so that no later one may have its memory: a candidate with a ring of
    output buffers returns it again, however many they are.
    """

    def __init__(
        self, buffer_sets: Sequence[InputBuffers], forms: Sequence[TensorForm] | None = None
    ) -> None:
        self.violation = ""
        self._held: torch.Tensor | None = None
        self._held_address = -1
        self._forms = None if forms is None else tuple(forms)
        first = buffer_sets[0].all_tensors if buffer_sets else []
        self._device = first[0].device if first else torch.device("cpu")
        # Keys of a plain tensor. A subclass, a lazy negation or conjugate, a zero tensor, a batched, a nested
        # and a sparse one have others, also where its Python type was changed to torch.Tensor afterwards.
        plain = _dispatch_keys(torch.empty(0, device=self._device)).raw_repr()
        self._other_keys = ~plain
        gradients = [b.grad for b in buffer_sets if b.grad is not None]
        self._is_backward = bool(gradients)
        self._gradients = {g.untyped_storage().data_ptr() for g in gradients}
        inputs = [t for b in buffer_sets for t in b.all_tensors if t.numel()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in inputs}
        # Starts and ends in turn: an address inside of a storage comes after an odd number of them.
        self._ranges = [n for start in sorted(storages) for n in (start, start + storages[start])]

    def inspect(self, outputs: Sequence[object], first_call: int = 0) -> None:
        """Look at the outputs of successive calls, the first of which has this number; keep a violation."""
        if self.violation:
            return
        for number, output in enumerate(outputs):
            if why := self._why(output):
                self.violation = f"timed call {first_call + number + 1}: {why}"
                return

    def _why(self, result: Any) -> str:
        """Return what is wrong with the result of a call, or an empty string."""
        kind = type(result)
        if kind is _Tensor:
            outputs = (result,)
        elif isinstance(result, tuple) and all(getattr(kind, m) is getattr(tuple, m) for m in _METHODS):
            outputs = tuple(tuple.__iter__(result))  # a named tuple, for one, is read like any tuple
        else:
            return (
                f"returned a {kind.__module__}.{kind.__qualname__}, expected exactly torch.Tensor or a tuple"
            )
        for out in outputs:
            if type(out) is not _Tensor:
                return f"returned a {type(out).__module__}.{type(out).__qualname__}, expected torch.Tensor"
            # Before its address is asked for: that would make the copy.
            if _dispatch_keys(out).raw_repr() & self._other_keys or _is_lazy_copy(out):
                return "returned a tensor that is computed when it is read"
        if self._forms is None:
            self._forms = tuple(TensorForm(tuple(o.shape), o.dtype, None) for o in outputs)
        # One of Weft's own implementations may return the leading outputs alone.
        if len(outputs) != len(self._forms):
            return f"returned {len(outputs)} tensors, expected {len(self._forms)}"
        for out, form in zip(outputs, self._forms, strict=True):
            if self._is_dense(out, form) and bisect_right(self._ranges, out.data_ptr()) % 2 == 0:
                # The usual output, at the least cost: there may be hundreds in a sample.
                if out.data_ptr() == self._held_address:  # each output that comes here is a new call's
                    return "returned the memory of an earlier output that is still in use"
                if self._held is None and 0 < out.nbytes <= HELD_BYTES:
                    self._held, self._held_address = out, out.data_ptr()
                continue
            if why := self._why_not(out, form) or self._why_alias(out):
                return why
        return ""

    def _is_dense(self, out: torch.Tensor, form: TensorForm) -> bool:
        """Return True for a contiguous tensor of this form with memory of its own from its first byte on."""
        return (
            out.shape == form.shape
            and out.dtype is form.dtype
            and out.is_contiguous()
            and out.device == self._device
            and out.storage_offset() == 0
            and out.untyped_storage().nbytes() >= form.nbytes
            and out.data_ptr() != 0
        )

    def _why_not(self, out: torch.Tensor, form: TensorForm) -> str:
        """Return how a plain tensor differs from the form that is due, or that it has no memory."""
        shape, strides = tuple(out.shape), tuple(out.stride())
        if shape != form.shape or out.dtype != form.dtype:
            return f"returned shape {shape}, {out.dtype}, expected {form.shape}, {form.dtype}"
        if out.device != self._device:
            return f"returned a tensor on {out.device}, expected {self._device}"
        need = (out.storage_offset() + span(shape, strides)) * out.element_size()
        if out.numel() and (out.untyped_storage().nbytes() < need or not out.data_ptr()):
            return "returned a tensor without memory behind it"
        allowed = (dense_strides(shape), form.strides)
        if self._is_backward or form.strides is None or strides in allowed or not out.numel():
            return ""
        # The stride of a dimension of one element does not count.
        counted = [d for d, n in enumerate(shape) if n > 1]
        if any(all(strides[d] == a[d] for d in counted) for a in allowed if a is not None):
            return ""
        return f"returned strides {strides}, expected contiguous or {form.strides} (the baseline's)"

    def _why_alias(self, out: torch.Tensor) -> str:
        """Return that an output lies in the memory of the inputs, if it does."""
        after = bisect_right(self._ranges, out.data_ptr())
        if after % 2 == 0 or not out.numel():
            return ""
        broadcast = any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True))
        if (broadcast or out.numel() == 1) and self._ranges[after - 1] in self._gradients:
            return ""  # the gradient of a sum
        return "returned memory of its inputs"
