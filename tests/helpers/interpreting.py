"""Code that Python interprets (Triton's kernels, and numba's in its simulator), without what it does in
vain: searches at every call, and calls that show nothing of a kernel."""

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
    """Where ``twice``, the check asks for the same bits twice, in two memories, and no more often.

    It repeats a call of under 0.05 s up to thirteen times, for kernels that behave ten times over;
    whether an interpreter's is one of these hangs on the machine, and it computes the same again.
    """
    with pytest.MonkeyPatch.context() as patch:
        if twice:
            patch.setattr(check, "QUICK", 0.0)
        yield


def search_once(patch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter look for what it replaces once in this process.

    A launch, and each call of a function within a kernel, lists all of ``triton.language`` to find
    the builtins there, and makes a function for each: a quarter of the time of a small kernel. The
    same builtins are cached here by the same rule, while nothing is launched, and replaced by the
    same functions. Does nothing where kernels are compiled.
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
            if getattr(package, name) is member:  # not so in a function that a kernel calls
                scope.set_attr(package, name, replacement)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
