"""What several modules need: autocast's casts, the seeds of dropout, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.core import WeftError

Tensors = tuple[torch.Tensor | None, ...]


def cast(*tensors: torch.Tensor | None) -> Any:
    """The tensors in autocast's dtype where autocast is on, as torch casts a product's factors."""
    return _to(torch.get_autocast_dtype(_kind(tensors)) if _autocast(tensors) else None, tensors)


def cast_norm(*tensors: torch.Tensor | None) -> Any:
    """What a norm takes under autocast: float32 on a GPU; on a CPU it stays, as with torch."""
    up = _kind(tensors) == "cuda" and _autocast(tensors)
    return _to(torch.float32 if up else None, tensors)


def _kind(tensors: Tensors) -> str:
    assert tensors[0] is not None
    return tensors[0].device.type


def _autocast(tensors: Tensors) -> bool:
    return torch.is_autocast_enabled(_kind(tensors))


def _to(dtype: torch.dtype | None, tensors: Tensors) -> Any:
    cast = tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)
    return cast if len(cast) > 1 else cast[0]


def draw_seed() -> int:
    """A seed from torch's CPU generator: ``torch.manual_seed`` repeats it, and activation
    checkpointing, which restores that generator, draws the same one again. No GPU is waited for.
    """
    return int(torch.randint(0, 2**31 - 1, ()).item())


def refuse(where: str, given: Mapping[str, Any], defaults: Mapping[str, Any], hint: str) -> None:
    """Raise :class:`WeftError` for the first option of torch's that has no answer here."""
    for name, default in defaults.items():
        if given[name] != default:
            expected = repr(default)
            raise WeftError(f"{where}: {name}", expected=expected, got=given[name], hint=hint)


def probability(where: str, p: float) -> float:
    """``p`` if it is a share that dropout can leave out, else :class:`WeftError`."""
    if not 0.0 <= p < 1.0:
        raise WeftError(f"{where}: dropout", expected="at least 0 and under 1", got=p)
    return float(p)
