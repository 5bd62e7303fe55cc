"""Split the data of a problem's input generator into tensors and a template that holds the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft.core import Input, WeftError
from weft.core.cases import ITEMSIZE
from weft.workbench.calls.guarded_memory import dense_strides

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class _TensorIndex:
    """Placeholder for the tensor with this index."""

    index: int


@dataclass(frozen=True)
class DataTemplate:
    """Structure of a generator's data: tuples, lists and dictionaries with placeholders for tensors.

    ``buffers`` are the indexes of tensors that the reference only writes to. They are not inputs:
    each call gets new, unwritten memory for them.
    """

    tree: Any
    tensors: tuple[Input, ...]
    buffers: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The tensors without the buffers."""
        return tuple(t for n, t in enumerate(self.tensors) if n not in self.buffers)

    @cached_property
    def _is_flat(self) -> bool:
        """True for a plain tuple of all tensors: it is the inputs themselves, at no cost in a timed call."""
        return type(self.tree) is tuple and self.tree == tuple(map(_TensorIndex, range(len(self.tensors))))

    def without_buffers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for n, t in enumerate(tensors) if n not in self.buffers]

    def build(self, inputs: Sequence[torch.Tensor], float64: bool = False) -> tuple[Any, list[Any]]:
        """Return data that contains these inputs, and its new buffers (in float64 on request)."""
        if not self.buffers:
            return (tuple(inputs) if self._is_flat else _fill_tree(self.tree, inputs)), []
        tensors, remaining, buffers = [], iter(inputs), []
        for index, spec in enumerate(self.tensors):
            if index not in self.buffers:
                tensors.append(next(remaining))
                continue
            dtype = getattr(torch, spec.dtype)
            dtype = torch.float64 if float64 and dtype.is_floating_point else dtype
            buffers.append(torch.empty(spec.shape, dtype=dtype, device=inputs[0].device))
            tensors.append(buffers[-1])
        return _fill_tree(self.tree, tensors), buffers


def split_data(
    data: Any, names: Sequence[str] = (), root: str = "data"
) -> tuple[DataTemplate, list[torch.Tensor]]:
    """Return the template of ``data`` and its tensors in order, each named by its path (``data[0]``).

    ``names`` name the elements of a sequence, as a function's parameters do. Raises
    :class:`WeftError` for a value that is neither a tensor, nor plain, nor a container of these.
    """
    tensors: list[torch.Tensor] = []
    specs: list[Input] = []
    tree = _extract_tensors(data, root, tensors, specs, names)
    return DataTemplate(tree, tuple(specs)), tensors


def _extract_tensors(
    value: Any, name: str, tensors: list[Any], specs: list[Input], names: Sequence[str] = ()
) -> Any:
    if isinstance(value, torch.Tensor):
        specs.append(_input_spec(name, value))
        # A generator may return tensors that require gradients or belong to a graph.
        tensors.append(value.detach())
        return _TensorIndex(len(tensors) - 1)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        labels = [*names[: len(value)], *(f"{name}[{i}]" for i in range(len(names), len(value)))]
        items = [_extract_tensors(v, n, tensors, specs) for v, n in zip(value, labels, strict=True)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        return {k: _extract_tensors(v, f"{name}[{k!r}]", tensors, specs) for k, v in value.items()}
    raise WeftError(
        f"the file's generator: {name}",
        expected="tensors, plain values, and tuples, lists or dictionaries of these",
        got=f"{type(value).__module__}.{type(value).__name__}",
    )


def _input_spec(name: str, tensor: torch.Tensor) -> Input:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE or tensor.layout is not torch.strided:
        raise WeftError(
            f"the file's generator: {name}",
            expected="dense tensors of " + ", ".join(ITEMSIZE),
            got=f"{dtype}, {str(tensor.layout).removeprefix('torch.')}",
        )
    layout = "contiguous"
    if tensor.dim() >= 2 and not tensor.is_contiguous():
        # "transposed": the last two dimensions are stored in swapped order
        swapped = tensor.transpose(-1, -2)
        if swapped.stride() == dense_strides(swapped.shape):
            layout = "transposed"
    return Input(name=name, shape=tuple(tensor.shape), dtype=dtype, layout=layout)


def _fill_tree(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, _TensorIndex):
        return tensors[tree.index]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_fill_tree(t, tensors) for t in tree))
    # torch.Size is a tuple that cannot be rebuilt from a generator; it holds no tensors
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return type(tree)(_fill_tree(t, tensors) for t in tree)
    if isinstance(tree, dict):
        return {k: _fill_tree(v, tensors) for k, v in tree.items()}
    return tree


def output_tensors(
    output: Any, buffers: Sequence[torch.Tensor] = (), keys: Mapping[str, Sequence[str]] | None = None
) -> Any:
    """Return a call's output as one tensor or a tuple of them, in order; None if there is none.

    If the call returns nothing, the buffers that it wrote are the output. Numbers become tensors. ``keys``
    are the reference's, as :func:`output_keys` returns them: a dictionary is read in their order. Raises
    ValueError for a dictionary with other keys.
    """
    if output is None and buffers:
        output = tuple(buffers)
    if output is None or isinstance(output, torch.Tensor):
        return output
    tensors = tuple(_leaves(output, keys or {}, ""))
    return tensors[0] if len(tensors) == 1 else tensors


def output_keys(output: Any, path: str = "") -> dict[str, list[str]]:
    """Return the keys of each dictionary in an output, in order, by its path: plain data for a worker."""
    if isinstance(output, tuple | list):
        items = list(enumerate(output))
        keys = {}
    elif isinstance(output, dict):
        items = list(output.items())
        keys = {path: [repr(key) for key in output]}
    else:
        return {}
    for key, item in items:
        keys |= output_keys(item, f"{path}[{key!r}]")
    return keys


def _leaves(output: Any, keys: Mapping[str, Sequence[str]], path: str) -> Iterable[Any]:
    if isinstance(output, tuple | list):
        for index, item in enumerate(output):
            yield from _leaves(item, keys, f"{path}[{index}]")
    elif isinstance(output, dict):
        items = {repr(key): item for key, item in output.items()}
        # A reference without a dictionary here has no keys: then the order alone says which is which.
        order = keys.get(path, list(items))
        if sorted(order) != sorted(items):
            got, expected = ", ".join(items), ", ".join(order)
            raise ValueError(f"the output{path} has the keys {got}; the reference's has {expected}")
        for key in order:
            yield from _leaves(items[key], keys, f"{path}[{key}]")
    elif isinstance(output, bool | int | float):
        yield torch.tensor(output, dtype=torch.float64 if isinstance(output, float) else None)
    else:
        yield output
