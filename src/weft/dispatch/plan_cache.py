"""Cached decisions about calls: one dictionary by kind of call, and before it the tensors of recent calls.

A kind of call is given by shapes, dtypes, layouts and devices of its tensors, by whether a gradient is
wanted, and by its parameters except seeds. Its key is a tuple of all these, whose parts are read in Python
one by one. That costs the host as much as a launch, so that a call is compared with recent ones first: a
:class:`TensorGuards` of PyTorch's compares all properties of all tensors in one call of C++.

A few kinds are compared one after another. Where there are more, the shapes of the first two tensors are
looked up first, so that the time of a call does not depend on the number of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch


def _comparison(*tensors: torch.Tensor | None) -> Callable[..., bool]:
    """Return a function that tells whether tensors are like these in all that decides about a call.

    The same positions are None, and the same positions have the same tensor. The class is not part of
    PyTorch's public interface: :data:`COMPARES` says whether it does as it did.
    """
    from torch._C._dynamo.guards import TensorGuards

    firsts = [next(i for i, y in enumerate(tensors) if y is x) for x in tensors]
    distinct = {i: x for i, x in enumerate(tensors) if x is not None and firsts[i] == i}
    guards = TensorGuards(
        *distinct.values(),
        dynamic_dims_sizes=[list(x.shape) for x in distinct.values()],  # type: ignore[misc]
        dynamic_dims_strides=[list(x.stride()) for x in distinct.values()],  # type: ignore[misc]
    )
    if len(distinct) == len(tensors):
        return guards.check
    # The guards take no None, and no tensor twice.
    conditions = [
        f"x{i} is None" if x is None else f"x{i} is x{firsts[i]}"
        for i, x in enumerate(tensors)
        if i not in distinct
    ]
    conditions.append(f"check({', '.join(f'x{i}' for i in distinct)})")
    names = ", ".join(f"x{i}" for i in range(len(tensors)))
    return eval(f"lambda {names}: {' and '.join(conditions)}", {"check": guards.check})  # type: ignore[no-any-return]


def _can_compare() -> bool:
    a, b = torch.empty(2, 3), torch.empty(3, 2)
    try:
        is_alike = _comparison(a, b)
        return is_alike(a, b) and not is_alike(b, b) and not is_alike(a, b.requires_grad_())
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):  # another version of PyTorch
        return False


COMPARES = _can_compare()  # if False, every call takes the dictionary
Value = TypeVar("Value")
Key = tuple[Any, ...]
MAX_MEMOIZED = 4096  # kinds of calls; a program with more starts over
MAX_RECENT = 8  # kinds of tensors that are compared one after another
MAX_SHAPES = 256  # shapes that are looked up for one operator, implementation and set of parameters
RECORDED_CALL = 3  # the call of a kind that is recorded (repeated_calls.py); many kinds come once or twice
REPLACE_EVERY = 16  # misses after which another kind of tensors takes the place of the oldest one
SEED_END = 1 << 63

# Names of the fast path are bound once: each attribute in a chain is another look-up in each call.
_is_grad_enabled, _strided = torch.is_grad_enabled, torch.strided
_memo: dict[Key, Any] = {}


class Entry:
    """Recent call: ``is_alike(*tensors)`` compares with its tensors; ``value`` is what it stands for.

    ``shapes`` are those of its tensors, as :func:`shapes_of` returns them. ``calls`` counts the calls like it
    until there is ``direct``, a function of the tensors alone that does what the plan does. ``by_torch`` says
    that this function calls PyTorch alone. ``grad_mode`` tells whether gradients were enabled; None if no
    tensor requires one, so that it does not matter.
    """

    __slots__ = ("by_torch", "calls", "direct", "grad_mode", "is_alike", "shapes", "value")

    def __init__(
        self, is_alike: Callable[..., bool], value: Any, grad_mode: bool | None = None, shapes: Shapes = ()
    ) -> None:
        self.is_alike, self.value, self.grad_mode, self.shapes = is_alike, value, grad_mode, shapes
        self.direct: Callable[..., Any] | None = None
        self.calls = 0
        self.by_torch = False


# Recent calls by all that decides beside the tensors: up to MAX_RECENT of them, or, where there are more, by
# the shapes of two tensors. A tuple is replaced as a whole, so that other threads see the old one or the new.
Shapes = tuple[Any, ...]
Table = dict[Any, tuple[Entry, ...] | dict[Shapes, tuple[Entry, ...]]]
_tables: list[Table] = []


def shapes_of(tensors: Sequence[Any]) -> Shapes:
    """Return the shapes of the first two tensors. Those of the others follow in nearly all operators."""
    return tuple([None if x is None else x.shape for x in tensors[:2]])


def new_table() -> Table:
    """Return an empty table of recent calls, which :func:`clear` empties with all others."""
    table: Table = {}
    _tables.append(table)
    return table


_recent = new_table()  # of operators, by (name, impl, gradients enabled, parameters)
_misses = 0


def memoized(
    prefix: tuple[Any, ...], inputs: Sequence[Any], params: Mapping[str, Any], make: Callable[[], Value]
) -> Value:
    """Return ``make()`` as it was computed for the first call of this kind: one dictionary lookup.

    Calls are of one kind if they agree in ``prefix``, in the tensors' shapes, dtypes, layouts and devices,
    in whether a gradient is wanted, and in the parameters except seeds. ``make`` runs each time for an
    argument without these attributes, or for a parameter that cannot be hashed.
    """
    key, value = look_up(prefix, inputs, params)
    if value is None:
        value = make()
        memoize(key, value)
    return value  # type: ignore[no-any-return]


def look_up(
    prefix: tuple[Any, ...], inputs: Sequence[Any], params: Mapping[str, Any]
) -> tuple[Key | None, Any]:
    """Return the key of a kind of call and its value, if it has one; no key if it cannot be remembered."""
    parts: list[Any] = [*prefix]
    needs_grad = False
    try:
        for x in inputs:
            if x is None:
                parts.append(None)
                continue
            parts += (x.shape, x.dtype, x.device)
            if x.layout is not _strided:
                parts.append(x.layout)
            if x.requires_grad:
                needs_grad = True
        for name, value in params.items():
            # A seed out of range is kept in the key: it must be validated, and refused, again.
            valid_seed = name == "seed" and type(value) is int and 0 <= value < SEED_END
            parts.append("seed" if valid_seed else value)
        parts.append(needs_grad and _is_grad_enabled())
        key = tuple(parts)
        return key, _memo.get(key)
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: a nested tensor has no shape
        return None, None


def memoize(key: Key | None, value: Any) -> None:
    if key is None:
        return
    # Cleared as a whole: an eviction order would cost each hit more than a rare rebuild costs.
    if len(_memo) >= MAX_MEMOIZED:
        _memo.clear()
    _memo[key] = value


def recent(name: str, impl: str | None, inputs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Return what :func:`store_recent` was given for tensors and parameters like these, or None."""
    entry = find_recent(name, impl, inputs, params)
    return None if entry is None else entry.value


def find_recent(
    name: str, impl: str | None, inputs: Sequence[Any], params: Mapping[str, Any]
) -> Entry | None:
    """Return the entry that :func:`store_recent` made for tensors and parameters like these, or None.

    Tensors are alike in type, dtype, device, sizes, strides, ``requires_grad`` and dispatch keys, the ones
    of the thread included: inside of a transform, a trace or ``inference_mode`` they are not.
    """
    try:
        entries = _recent.get((name, impl, _is_grad_enabled(), *params.values()))
        if entries is None:
            return None
        # A comparison with a nested tensor would end the process.
        for x in inputs:
            if x.is_nested:
                return None
        if isinstance(entries, dict):
            entries = entries.get(shapes_of(inputs), ())
        for entry in entries:
            if entry.is_alike(*inputs):
                return entry
    # A parameter that cannot be hashed, or no tensor.
    except (TypeError, AttributeError, RuntimeError):
        return None
    return None


def comparison_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that tells whether tensors are like these, or None where it cannot."""
    if not COMPARES or any(x.layout is not _strided for x in tensors):
        return None
    return _comparison(*tensors)


def store_recent(
    name: str, impl: str | None, inputs: Sequence[Any], params: Mapping[str, Any], value: Any
) -> None:
    """Let :func:`recent` return ``value`` for tensors and parameters like these.

    They are those of a call that :func:`look_up` has a key for, with plain tensors and outside of all modes
    (``can_skip_dispatcher``). Nothing is stored for a seed, which differs in each call.
    """
    if not params.get("seed") and not any(x is None for x in inputs):
        store(_recent, (name, impl, _is_grad_enabled(), *params.values()), inputs, value)


def store(table: Table, key: Any, inputs: Sequence[Any], value: Any) -> None:
    """Add a recent call to a table, unless its inputs cannot be compared with those of others."""
    global _misses
    if not COMPARES or any(x is not None and x.layout is not _strided for x in inputs):
        return
    _misses += 1
    if len(table) >= MAX_MEMOIZED:
        table.clear()
    known, shapes = table.get(key, ()), shapes_of(inputs)
    if isinstance(known, tuple) and len(known) >= MAX_RECENT:
        by_shapes: dict[Shapes, tuple[Entry, ...]] = {}
        for entry in known:
            by_shapes[entry.shapes] = (*by_shapes.get(entry.shapes, ()), entry)
        table[key] = known = by_shapes
    entries = known if isinstance(known, tuple) else known.get(shapes, ())
    is_full = len(entries) >= MAX_RECENT
    has_too_many_shapes = isinstance(known, dict) and not entries and len(known) >= MAX_SHAPES
    # Calls with ever other tensors would make one comparison after another, which no call passes.
    if (is_full or has_too_many_shapes) and _misses % REPLACE_EVERY:
        return
    is_alike = _comparison(*inputs)
    if not is_alike(*inputs):
        return
    grad_mode = _is_grad_enabled() if any(x is not None and x.requires_grad for x in inputs) else None
    entries = (*entries[is_full:], Entry(is_alike, value, grad_mode, shapes))
    if isinstance(known, tuple):
        table[key] = entries
        return
    if has_too_many_shapes:
        # The oldest. An iterator in Python would raise where another thread adds something.
        known.pop(list(known)[0], None)  # noqa: RUF015
    known[shapes] = entries


def clear() -> None:
    """Forget everything."""
    _memo.clear()
    for table in _tables:
        table.clear()
