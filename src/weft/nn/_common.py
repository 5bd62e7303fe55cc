"""Helpers of several modules: autocast's casts, seeds of dropout, and checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.core import WeftError

OptionalTensors = tuple[torch.Tensor | None, ...]


def cast(*tensors: torch.Tensor | None) -> Any:
    """Return the tensors in autocast's dtype if autocast is on, as torch casts a product's operands."""
    # Autocast is a setting per device type; all operands are on one device.
    device = _device_type(tensors)
    return _to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None, tensors)


def cast_norm(*tensors: torch.Tensor | None) -> Any:
    """Return a norm's inputs as torch casts them under autocast: float32 on a GPU, unchanged on a CPU."""
    # torch's policy lists norms under float32 for CUDA and not at all for the CPU.
    use_float32 = _device_type(tensors) == "cuda" and torch.is_autocast_enabled("cuda")
    return _to(torch.float32 if use_float32 else None, tensors)


def _device_type(tensors: OptionalTensors) -> str:
    assert tensors[0] is not None
    return tensors[0].device.type


def _to(dtype: torch.dtype | None, tensors: OptionalTensors) -> Any:
    converted = tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)
    return converted if len(converted) > 1 else converted[0]


def new_seed() -> int:
    """Return a seed from torch's CPU generator.

    ``torch.manual_seed`` repeats it, and so does activation checkpointing, which restores that generator
    before it recomputes. It does not wait for a GPU.
    """
    # The CPU generator: reading a GPU's would wait for the device.
    return int(torch.randint(0, 2**31 - 1, ()).item())


def refuse_unsupported(
    name: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any], hint: str
) -> None:
    """Raise :class:`WeftError` for the first argument of torch's that differs from its only supported
    value."""
    for argument, default in defaults.items():
        if arguments[argument] != default:
            got = arguments[argument]
            raise WeftError(f"{name}: {argument}", expected=repr(default), got=got, hint=hint)


def check_dropout(name: str, p: float) -> float:
    """Return ``p`` if it is a valid dropout probability, else raise :class:`WeftError`."""
    if not 0.0 <= p < 1.0:
        raise WeftError(f"{name}: dropout", expected="at least 0 and under 1", got=p)
    return float(p)
