"""What a file's generator gives, taken apart: tensors in a row, and the form they stood in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.core import Input, WeftError
from weft.core.cases import ITEMSIZE
from weft.workbench.memory import dense_strides

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class _At:
    """The place of the tensor with this number."""

    number: int


@dataclass(frozen=True)
class Form:
    """The shape of a generator's answer: tuples, lists and dictionaries with places in them.

    ``buffers`` are the numbers of tensors that are only written to: these are no inputs but
    fresh, unwritten memory at each call.
    """

    tree: Any
    inputs: tuple[Input, ...]
    buffers: frozenset[int] = frozenset()

    @property
    def given(self) -> tuple[Input, ...]:
        """The inputs proper: all but the buffers."""
        return tuple(i for n, i in enumerate(self.inputs) if n not in self.buffers)

    def without_buffers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for n, t in enumerate(tensors) if n not in self.buffers]

    def build(self, given: Sequence[torch.Tensor], wide: bool = False) -> tuple[Any, list[Any]]:
        """The data around these tensors, and the buffers in it; float64 ones if ``wide``."""
        if not self.buffers:
            return _rebuilt(self.tree, given), []
        whole, left, fresh = [], iter(given), []
        for number, spec in enumerate(self.inputs):
            if number not in self.buffers:
                whole.append(next(left))
                continue
            dtype = getattr(torch, spec.dtype)
            dtype = torch.float64 if wide and dtype.is_floating_point else dtype
            fresh.append(torch.empty(spec.shape, dtype=dtype, device=given[0].device))
            whole.append(fresh[-1])
        return _rebuilt(self.tree, whole), fresh


def take_apart(data: Any, names: Sequence[str] = (), root: str = "data") -> tuple[Form, list[Any]]:
    """The form of ``data`` and its tensors in order, each named by its place (``data[0]``).

    ``names`` name the parts of a sequence, as a call's parameters do. Raises :class:`WeftError` for
    what is neither a tensor, nor plain data, nor a container of these.
    """
    tensors: list[torch.Tensor] = []
    inputs: list[Input] = []
    tree = _placed(data, root, tensors, inputs, names)
    return Form(tree, tuple(inputs)), tensors


def _placed(
    value: Any, name: str, tensors: list[Any], inputs: list[Input], names: Sequence[str] = ()
) -> Any:
    if isinstance(value, torch.Tensor):
        inputs.append(_spec(name, value))
        tensors.append(value.detach())
        return _At(len(tensors) - 1)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        labels = [*names[: len(value)], *(f"{name}[{i}]" for i in range(len(names), len(value)))]
        parts = [_placed(v, n, tensors, inputs) for v, n in zip(value, labels, strict=True)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if isinstance(value, dict):
        return {k: _placed(v, f"{name}[{k!r}]", tensors, inputs) for k, v in value.items()}
    raise WeftError(
        f"the file's generator: {name}",
        expected="tensors, plain values, and tuples, lists or dictionaries of these",
        got=f"{type(value).__module__}.{type(value).__name__}",
    )


def _spec(name: str, tensor: torch.Tensor) -> Input:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE or tensor.layout is not torch.strided:
        raise WeftError(
            f"the file's generator: {name}",
            expected="dense tensors of " + ", ".join(ITEMSIZE),
            got=f"{dtype}, {str(tensor.layout).removeprefix('torch.')}",
        )
    return Input(name=name, shape=tuple(tensor.shape), dtype=dtype, layout=_layout(tensor))


def _layout(tensor: torch.Tensor) -> str:
    """``transposed`` where the last two dimensions are stored the other way round."""
    if tensor.dim() < 2 or tensor.is_contiguous():
        return "contiguous"
    turned = tensor.transpose(-1, -2)
    return "transposed" if turned.stride() == dense_strides(turned.shape) else "contiguous"


def _rebuilt(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, _At):
        return tensors[tree.number]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(t, tensors) for t in tree))
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return type(tree)(_rebuilt(t, tensors) for t in tree)
    if isinstance(tree, dict):
        return {k: _rebuilt(v, tensors) for k, v in tree.items()}
    return tree


def results(answer: Any, buffers: Sequence[torch.Tensor] = ()) -> Any:
    """A call's answer as one tensor or a tuple of them, in order; None where there is none.

    Where it returns nothing, the buffers it was given are the answer. Numbers become tensors.
    """
    if answer is None and buffers:
        answer = tuple(buffers)
    if answer is None or isinstance(answer, torch.Tensor):
        return answer
    found = tuple(_leaves(answer))
    return found[0] if len(found) == 1 else found


def _leaves(answer: Any) -> Iterable[Any]:
    if isinstance(answer, tuple | list):
        for part in answer:
            yield from _leaves(part)
    elif isinstance(answer, dict):
        for part in answer.values():
            yield from _leaves(part)
    elif isinstance(answer, bool | int | float):
        yield torch.tensor(answer, dtype=torch.float64 if isinstance(answer, float) else None)
    else:
        yield answer
