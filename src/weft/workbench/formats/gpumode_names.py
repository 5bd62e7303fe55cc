"""What a GPU MODE file imports from beside it, where the folder lacks it: ``utils`` and ``task``.

Written here from what such files ask for, so that a lone ``reference.py`` can be read. A file of
the folder's own always goes first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
import torch

Said = tuple[bool, str]
SHOWN = 5  # mismatches that a message names


def set_seed(seed: int = 42) -> None:
    """Seed every generator that a file may draw from."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def get_device(use_cuda: bool = True) -> torch.device:
    return torch.device("cuda" if use_cuda and torch.cuda.is_available() else "cpu")


def verbose_allclose(
    received: torch.Tensor,
    expected: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_print: int = SHOWN,
) -> list[str]:
    """What differs by more than ``atol + rtol |expected|``, as lines; nothing where none does."""
    if received.shape != expected.shape:
        return [f"shape {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    off = ~torch.isclose(received.to(expected.dtype), expected, rtol, atol, equal_nan=True)
    return _told(off, received, expected, max_print)


def verbose_allequal(
    received: torch.Tensor, expected: torch.Tensor, max_print: int = SHOWN
) -> list[str]:
    """What is not equal, as lines; nothing where all is."""
    if received.shape != expected.shape:
        return [f"shape {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    return _told(received != expected, received, expected, max_print)


def _told(
    off: torch.Tensor, received: torch.Tensor, expected: torch.Tensor, most: int
) -> list[str]:
    places = off.nonzero()
    if not len(places):
        return []
    lines = [f"{len(places)} of {off.numel()} elements differ"]
    for place in places[:most].tolist():
        at = tuple(place)
        lines.append(f"at {at}: {received[at].item()}, expected {expected[at].item()}")
    return lines


def match_reference(
    data: Any, output: Any, reference: Callable[[Any], Any], rtol: float = 1e-05, atol: float = 1e-8
) -> Said:
    """Whether an output is close to what ``reference`` gives for the data, and what is not."""
    expected = reference(data)
    many = isinstance(expected, tuple | list)
    pairs = zip(output, expected, strict=True) if many else [(output, expected)]
    lines = [line for got, want in pairs for line in verbose_allclose(got, want, rtol, atol)]
    return not lines, "; ".join(lines)


def make_match_reference(
    reference: Callable[[Any], Any], **tolerances: float
) -> Callable[[Any, Any], Said]:
    """:func:`match_reference` as a task's ``check_implementation``."""

    def check_implementation(data: Any, output: Any) -> Said:
        return match_reference(data, output, reference, **tolerances)

    return check_implementation


class _Switches(AbstractContextManager["_Switches"]):
    """cuDNN in full float32, and always the same algorithm, while it is entered."""

    def __enter__(self) -> _Switches:
        cudnn = torch.backends.cudnn
        self.before = (cudnn.allow_tf32, cudnn.deterministic)
        cudnn.allow_tf32, cudnn.deterministic = False, True
        return self

    def __exit__(self, *raised: object) -> None:
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32, cudnn.deterministic = self.before


def clear_l2_cache() -> None:
    """Nothing: Weft's clock flushes the cache itself."""


def utils() -> ModuleType:
    """A module with the helpers that a ``reference.py`` asks for."""
    made = ModuleType("utils")
    helpers = (
        set_seed,
        get_device,
        verbose_allclose,
        verbose_allequal,
        match_reference,
        make_match_reference,
        clear_l2_cache,
    )
    for helper in helpers:
        setattr(made, helper.__name__, helper)
    made.DisableCuDNNTF32 = made.DeterministicContext = _Switches  # type: ignore[attr-defined]
    return made


class _Task(ModuleType):
    """Every name that a file imports from its task is a type, and the type of anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return dict if name == "TestSpec" else Any


def task() -> ModuleType:
    return _Task("task")
