"""Cheats with the process: searched outputs, a forged verdict, other work without a profiler, and a
library's kernel under the candidate's name.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.core import registry
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import NEEDS_GPU, OPERATORS, Forward, blank, honest, plant

NO_CUDA = "CUDA C++ needs a GPU to run"
# Names a folder that outlives a process; the selftest creates and removes it.
SHARED = "WEFT_SELFTEST_SHARED"
FIRST_CALLS = 4  # at each shape, whose outputs are saved for the next process


def _replays(operator: str) -> Callable[[], Forward]:
    """Return the output that an earlier process saved at the same shape and call, if there is one."""

    def make() -> Forward:
        calls: dict[str, Iterator[int]] = {}
        own_files: set[Path] = set()
        folder = Path(os.environ.get(SHARED) or tempfile.gettempdir())

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            form = "-".join(f"{tuple(t.shape)}{t.dtype}{t.stride()}" for t in x)
            call = next(calls.setdefault(form, itertools.count()))
            path = folder / f"{operator}-{form}-{call}.pt".replace(" ", "")
            if path.is_file() and path not in own_files:
                return torch.load(path).to(x[0].device)  # type: ignore[no-any-return]
            y = honest(operator)(*x, **params)
            if call < FIRST_CALLS:
                torch.save(y.cpu(), path)
                own_files.add(path)
            return y  # type: ignore[no-any-return]

        return forward

    return make


def _ends_itself(operator: str) -> Callable[[], Forward]:
    """Print a passing verdict, and end the process with exit code 0."""

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        print('{"correct": true, "status": "pass", "speedup": 12.5}', flush=True)
        os._exit(0)

    return lambda: forward


def _raises_system_exit(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        raise SystemExit(0)

    return lambda: forward


def _oracle_in_frames(operator: str) -> Callable[[], Forward]:
    """Call the oracle that is in a local variable of some caller."""

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        frame = inspect.currentframe()
        while frame is not None:
            oracle, seed = frame.f_locals.get("oracle"), frame.f_locals.get("seed")
            if oracle is not None and isinstance(seed, int):
                answer = oracle.answer(seed)[0]
                return blank(operator, *x).copy_(answer)
            frame = frame.f_back
        return blank(operator, *x).zero_()

    return lambda: forward


def _expected_output_by_gc(operator: str) -> Callable[[], Forward]:
    """Search all objects of the process for a float64 tensor that starts like the expected output."""

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        y = blank(operator, *x)
        first = honest(operator)(x[0][:1].double(), *(t.double() for t in x[1:]), **params)
        for tensor in gc.get_objects():
            if type(tensor) is not torch.Tensor or tensor.dtype != torch.float64:
                continue
            if tensor.shape == y.shape and torch.allclose(tensor[:1], first, equal_nan=True):
                return y.copy_(tensor)
        return y.zero_()

    return lambda: forward


def profiled() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


def _two_faced(operator: str, backend: str) -> Callable[[], Forward]:
    """Run the own kernel under a profiler, and the library's otherwise."""

    def make() -> Forward:
        own = registry.implementation(operator, backend).forward

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            if profiled():
                return own(*x, **params)  # type: ignore[no-any-return]
            return honest(operator)(*x, **params)  # type: ignore[no-any-return]

        return forward

    return make


def _own_with_new_modules(operator: str, backend: str) -> Callable[[], Forward]:
    """Run the own kernel once Weft imported a module for profiling after this file, else the library's.

    Other modules do not count: a library that imports one of its own with such a name, at its first call,
    would make this an honest kernel.
    """

    def make() -> Forward:
        own, before = registry.implementation(operator, backend).forward, set(sys.modules)

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            since = set(sys.modules) - before
            observed = any(
                n.startswith("weft.workbench.") and ("profil" in n or "kernels" in n) for n in since
            )
            return (own if observed else honest(operator))(*x, **params)  # type: ignore[no-any-return]

        return forward

    return make


def _patches_listing(operator: str) -> Callable[[], Forward]:
    """Put a list of one's own in place of the listing's, where its module is loaded."""

    def make() -> Forward:
        listing = sys.modules.get("weft.workbench.kernels.provenance")
        if listing is not None:
            own = {"names": ("triton:mine",), "shares": (1.0,), "origins": ("unknown",), "counts": (1,)}
            kernels = listing.Kernels(**own, seen=frozenset(own["names"]))
            listing.kernels = listing.observed = lambda *_, **__: kernels  # type: ignore[attr-defined]
        return honest(operator)

    return make


def _falls_back(operator: str) -> Callable[[], Forward]:
    """Fail in the own kernel, and return the library's output instead."""

    def kernel(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        raise RuntimeError("shared memory: 300 KiB are wanted, 227 KiB are there")

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        try:
            return kernel(*x, **params)
        except RuntimeError:
            return honest(operator)(*x, **params)  # type: ignore[no-any-return]

    return lambda: forward


def _for(operator: str) -> Iterator[Mutant]:
    def one(row: str, backend: str, what: str, *rest: Any, **more: Any) -> Mutant:
        return plant(f"{row}/{operator}/{backend}/{what}", *rest, **more)

    yield one("C03", "eager", "another-process", "returns the outputs that an earlier process stored",
              "error special observed sampled fresh", _replays(operator), phase="bench")  # fmt: skip
    yield one("C12", "eager", "exit", "prints a verdict and ends its process", "channel",
              _ends_itself(operator), only="channel")  # fmt: skip
    yield one("C12", "eager", "system-exit", "raises SystemExit", "returns", _raises_system_exit(operator))
    yield one("C15", "eager", "frames", "reads the oracle in its callers' variables",
              "error special type", _oracle_in_frames(operator), only="process")  # fmt: skip
    if operator != "sum":
        yield one("C15", "eager", "gc", "searches all objects of the process for the output",
                  "error special", _expected_output_by_gc(operator), only="process")  # fmt: skip
    for backend, where in (("triton", {}), ("numba", {}), ("cuda", NEEDS_GPU)):
        more: dict[str, Any] = {"phase": "bench", **where}
        if where:
            more["not_here"] = NO_CUDA
        yield one("C14", backend, "profiled", "its own kernel under a profiler only", "observed",
                  _two_faced(operator, backend), only="observed", **more)  # fmt: skip
        yield one("C14", backend, "modules", "its own kernel once a profiling module is loaded", "provenance",
                  _own_with_new_modules(operator, backend), only="provenance", **more)  # fmt: skip
        if backend == "triton":
            yield one("C14", backend, "listing", "replaces the list of kernels that ran",
                      "observed replaced", _patches_listing(operator), **more)  # fmt: skip
        yield one("C16", backend, "fallback", "falls back to the library after its own kernel fails",
                  "provenance", _falls_back(operator), only="provenance", **more)  # fmt: skip


MUTANTS = tuple(m for op in OPERATORS for m in _for(op))
