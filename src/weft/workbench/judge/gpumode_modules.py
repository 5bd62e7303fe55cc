"""Substitutes for the modules ``utils`` and ``task`` that a GPU MODE file imports.

They provide the names that such files use, so that a ``reference.py`` without its folder can be
read. A file of the folder itself always takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from weft.workbench.judge.variation import seed_generators

CheckResult = tuple[bool, str]
MAX_SHOWN = 5  # mismatches that a message lists


def set_seed(seed: int = 42) -> None:
    """Seed every random generator that a file may use."""
    seed_generators(seed)


def get_device(use_cuda: bool = True) -> torch.device:
    return torch.device("cuda" if use_cuda and torch.cuda.is_available() else "cpu")


def verbose_allclose(
    received: torch.Tensor,
    expected: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_print: int = MAX_SHOWN,
) -> list[str]:
    """Return a line for each element off by more than ``atol + rtol |expected|``; none if all fit."""
    if received.shape != expected.shape:
        return [f"shape {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    mismatch = ~torch.isclose(received.to(expected.dtype), expected, rtol, atol, equal_nan=True)
    return _mismatch_lines(mismatch, received, expected, max_print)


def verbose_allequal(received: torch.Tensor, expected: torch.Tensor, max_print: int = MAX_SHOWN) -> list[str]:
    """Return a line for each element that differs; none if all are equal."""
    if received.shape != expected.shape:
        return [f"shape {tuple(received.shape)}, expected {tuple(expected.shape)}"]
    return _mismatch_lines(received != expected, received, expected, max_print)


def _mismatch_lines(
    mismatch: torch.Tensor, received: torch.Tensor, expected: torch.Tensor, max_print: int
) -> list[str]:
    indexes = mismatch.nonzero()
    if not len(indexes):
        return []
    lines = [f"{len(indexes)} of {mismatch.numel()} elements differ"]
    for index in map(tuple, indexes[:max_print].tolist()):
        lines.append(f"at {index}: {received[index].item()}, expected {expected[index].item()}")
    return lines


def match_reference(
    data: Any, output: Any, reference: Callable[[Any], Any], rtol: float = 1e-05, atol: float = 1e-8
) -> CheckResult:
    """Return True if an output is close to ``reference(data)``, and the mismatches as text."""
    expected = reference(data)
    several = isinstance(expected, tuple | list)
    pairs = zip(output, expected, strict=True) if several else [(output, expected)]
    lines = [line for got, want in pairs for line in verbose_allclose(got, want, rtol, atol)]
    return not lines, "; ".join(lines)


def make_match_reference(
    reference: Callable[[Any], Any], **tolerances: float
) -> Callable[[Any, Any], CheckResult]:
    """Return :func:`match_reference` as a task's ``check_implementation``."""

    def check_implementation(data: Any, output: Any) -> CheckResult:
        return match_reference(data, output, reference, **tolerances)

    return check_implementation


class _CudnnSettings(AbstractContextManager["_CudnnSettings"]):
    """Context in which cuDNN uses full float32 and deterministic algorithms."""

    def __enter__(self) -> _CudnnSettings:
        cudnn = torch.backends.cudnn
        self.previous = (cudnn.allow_tf32, cudnn.deterministic)
        cudnn.allow_tf32, cudnn.deterministic = False, True
        return self

    def __exit__(self, *exc_info: object) -> None:
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32, cudnn.deterministic = self.previous


def clear_l2_cache() -> None:
    """Do nothing: Weft's timing flushes the cache itself."""


def make_utils() -> ModuleType:
    """Create the module ``utils`` with the helpers that a ``reference.py`` imports."""
    module = ModuleType("utils")
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
        setattr(module, helper.__name__, helper)
    module.DisableCuDNNTF32 = module.DeterministicContext = _CudnnSettings  # type: ignore[attr-defined]
    return module


class _Task(ModuleType):
    """Module in which every name is a type that accepts anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return dict if name == "TestSpec" else Any


def make_task() -> ModuleType:
    """Create the module ``task``, whose names are used in annotations only."""
    return _Task("task")
