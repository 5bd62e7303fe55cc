"""Offsets, masks, values and variables of a traced Triton program, as short text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.lab.triton_trace import Access, Argument, Launch, Trace, TracedTensor

SHOWN = 6  # values of a block that are written out
DIM_NAMES = "ijkl"


def offsets_text(offsets: np.ndarray, active: np.ndarray) -> str:
    """Return the active offsets of a block as a formula where they are one, else the first and the last.

    >>> everywhere = np.ones(4, dtype=bool)
    >>> offsets_text(np.array([3, 4, 5, 6]), everywhere), offsets_text(np.array([0, 2, 4, 6]), everywhere)
    ('3..6', '0..6 step 2')
    >>> offsets_text(np.arange(3)[:, None] * 10 + np.arange(2), np.ones((3, 2), dtype=bool))
    '10 i + j (i < 3, j < 2)'
    """
    if not active.any():
        return "none"
    if offsets.size == 1:
        return str(int(offsets.item()))
    shown = offsets[active]
    steps = np.diff(shown)
    if (steps == steps[0]).all() if len(steps) else True:
        first, last, step = int(shown[0]), int(shown[-1]), int(steps[0]) if len(steps) else 1
        if step == 0:
            return f"{first} ({len(shown)} times)"
        return f"{first}..{last}" + ("" if step == 1 else f" step {step}") if first != last else str(first)
    return _formula(offsets) or ", ".join(_some([str(int(v)) for v in shown]))


def _formula(offsets: np.ndarray) -> str:
    """Return ``start + a i + b j`` for offsets that are affine in the block's indices, else nothing."""
    first = int(offsets.flat[0])
    strides = [
        int(offsets.take(1, axis).flat[0]) - first if n > 1 else 0 for axis, n in enumerate(offsets.shape)
    ]
    grid = np.indices(offsets.shape)
    if not np.array_equal(first + sum(s * g for s, g in zip(strides, grid, strict=True)), offsets):
        return ""
    dims = [
        (s, n, DIM_NAMES[a]) for a, (s, n) in enumerate(zip(strides, offsets.shape, strict=True)) if n > 1
    ]
    terms = [str(first)] if first else []
    terms += [name if s == 1 else f"{s} {name}" for s, _, name in dims if s]
    return f"{' + '.join(terms) or '0'} ({', '.join(f'{name} < {n}' for _, n, name in dims)})"


def _some(texts: list[str]) -> list[str]:
    return texts if len(texts) <= SHOWN else [*texts[: SHOWN - 2], "...", texts[-1]]


def values_text(values: np.ndarray, active: np.ndarray) -> str:
    """Return the first active values and the last one."""
    return ", ".join(_some([_number_text(v) for v in values[active].ravel()]))


def _number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def mask_text(access: Access) -> str:
    count, size = int(access.active.sum()), access.active.size
    return f"{count} of {size}"


def outside_text(access: Access) -> str:
    """Return the offsets beyond the storage, or else those between the tensor's elements."""
    if access.outside.any():
        return offsets_text(access.offsets, access.outside)
    return f"gap: {offsets_text(access.offsets, access.gaps)}" if access.gaps.any() else "none"


def argument_text(argument: Argument) -> str:
    """Return an argument: a tensor by its dtype, shape and strides, else its value."""
    if argument.tensor is None:
        return f"{argument.value!r:.60}"
    x = argument.tensor
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {_sizes(x.shape)}, strides {_sizes(x.stride())}"


def _sizes(sizes: Any) -> str:
    return f"({', '.join(map(str, sizes))})"


def variables(trace: Trace) -> dict[str, str]:
    """Return the kernel's variables where the trace ended, by name, as text: its arguments excepted."""
    launch = trace.selected
    assert launch is not None
    arguments = {a.name for a in launch.arguments}
    values: Mapping[str, Any] = trace.variables or {}
    return {name: _variable_text(v, launch) for name, v in values.items() if name not in arguments}


def _variable_text(value: Any, launch: Launch) -> str:
    handle = getattr(value, "handle", None)
    data = getattr(handle, "data", None)
    if not isinstance(data, np.ndarray):
        return f"{value!r:.60}"
    everywhere = np.ones(data.shape, dtype=bool)
    if data.dtype == np.uint64 and (owner := _owner(data, launch)) is not None:
        offsets = (data - np.uint64(owner.base)).astype(np.int64) // owner.itemsize
        return f"{owner.name} + {offsets_text(offsets, everywhere)}"
    shape = f"{_sizes(data.shape)} " if data.size > 1 else ""
    if data.dtype == bool:
        return f"{shape}true at {int(data.sum())} of {data.size}" if shape else str(bool(data.item()))
    if np.issubdtype(data.dtype, np.integer):
        return f"{value.dtype.scalar} {shape}{offsets_text(data.astype(np.int64), everywhere)}"
    return f"{value.dtype.scalar} {shape}{values_text(data, everywhere)}"


def _owner(pointers: np.ndarray, launch: Launch) -> TracedTensor | None:
    from weft.lab.triton_trace import OWNER_SHIFT

    index = int(pointers.flat[0]) >> OWNER_SHIFT if pointers.size else 0
    return launch.tensors[index - 1] if 0 < index <= len(launch.tensors) else None


def access_json(access: Access) -> dict[str, Any]:
    """Return an access with all its offsets and values, as nested lists in the block's shape."""
    return {
        "kind": access.kind,
        "line": access.line,
        "source": access.source,
        "tensor": access.tensor,
        "shape": list(access.offsets.shape),
        "offsets": access.offsets.tolist(),
        "mask": access.active.tolist(),
        "values": _finite(access.values.tolist()),
        "out_of_bounds": access.offsets[access.outside].tolist(),
        "gaps": access.offsets[access.gaps].tolist(),
    }


def argument_json(argument: Argument) -> dict[str, Any]:
    if argument.tensor is None:
        value = argument.value
        plain = value if isinstance(value, bool | int | float | str) or value is None else repr(value)
        return {"name": argument.name, "constexpr": argument.is_constexpr, "value": _finite(plain)}
    x = argument.tensor
    dtype = str(x.dtype).removeprefix("torch.")
    return {"name": argument.name, "dtype": dtype, "shape": list(x.shape), "strides": list(x.stride())}


def _finite(value: Any) -> Any:
    """Return a value with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
