"""Run kernels faster in Triton's interpreter and numba's simulator: without repeated searches and calls that
test nothing more of a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from weft.workbench.check import check


@contextmanager
def asked_twice(twice: bool) -> Iterator[None]:
    """If ``twice``, limit the check's repeated calls at one case to two, with different memory.

    Otherwise the check repeats a call of under 0.05 s up to thirteen times, to detect kernels that are
    correct only in the first calls. Whether an interpreted kernel is that fast depends on the machine,
    and more repetitions test nothing more of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if twice:
            patch.setattr(check, "QUICK", 0.0)
        yield


def search_once(patch: pytest.MonkeyPatch) -> None:
    """Cache the builtins of ``triton.language`` that Triton's interpreter replaces, once in this process.

    Without the cache each launch, and each call of a function within a kernel, lists all of
    ``triton.language`` and creates a replacement for each builtin: a quarter of the time of a small
    kernel. The cache selects and replaces the same builtins. Does nothing where kernels are compiled.
    """
    from weft.backends.triton_jit import INTERPRETED

    if not INTERPRETED:
        return
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def replacements(package: Any, builder: Any) -> list[tuple[str, Any, Any]]:
        cached: list[tuple[str, Any, Any]] = []
        for name, member in inspect.getmembers(package):
            if core.is_builtin(member):
                recorder = SimpleNamespace(
                    set_attr=lambda _, name, value, member=member: cached.append((name, member, value))
                )
                interpreter._patch_attr(package, name, member, builder, recorder)
        return cached

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member, replacement in replacements(package, builder):
            if getattr(package, name) is member:  # already replaced in a function that a kernel calls
                scope.set_attr(package, name, replacement)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
