"""Cheats with outputs: cached from an earlier call, deferred to a later one, or never computed.

Each is correct except for its cheat: it returns the library's output at the wrong time. ``MUTANTS``
contains these and the mutants of the modules ``cheats_*``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from weft.workbench.selftest.mutants import cheats_clock, cheats_conditions, cheats_process, cheats_samples
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import (
    OPERATORS,
    TIMED,
    Forward,
    blank,
    honest,
    plant,
    timed_calls,
)

MAX_CACHED = 300  # outputs in a cache
KEY_BYTES = 64  # first bytes of a tensor that serve as its key

Key = Callable[[torch.Tensor], Hashable]


def layout_key(x: torch.Tensor) -> Hashable:
    return (tuple(x.shape), x.stride(), x.dtype)


def first_bytes(x: torch.Tensor) -> bytes:
    """Return the first bytes of a tensor's contents."""
    some = x.detach().reshape(-1)[: KEY_BYTES // x.element_size()].clone()
    return some.cpu().view(torch.uint8).numpy().tobytes()


def checksum(x: torch.Tensor) -> float:
    """Return the sum of every 61st element."""
    return float(x.detach().reshape(-1)[::61].float().sum())


def whole(x: torch.Tensor) -> float:
    """Return the sum of all elements, which any change of the contents changes."""
    return float(x.detach().sum(dtype=torch.float64))


def _first_rows_cached(operator: str, share: float) -> Callable[[], Forward]:
    """Keep the first rows of the output by the first bytes; compute only the other rows."""

    def make() -> Forward:
        cache: dict[Hashable, torch.Tensor] = {}

        def forward(x: torch.Tensor, **params: object) -> torch.Tensor:
            rows = int(share * x.shape[0]) if x.dim() else 0
            if rows == 0:
                return honest(operator)(x, **params)  # type: ignore[no-any-return]
            key = (first_bytes(x), layout_key(x), *params.items())
            if key not in cache:
                if len(cache) > MAX_CACHED:
                    del cache[next(iter(cache))]
                cache[key] = honest(operator)(x[:rows], **params)
            y = blank(operator, x)
            y[:rows].copy_(cache[key])
            y[rows:].copy_(honest(operator)(x[rows:], **params))
            return y

        return forward

    return make


def cached_by(operator: str, key: Key) -> Callable[[], Forward]:
    """Compute only if the ``key`` of an input is new; else return a cached output."""

    def make() -> Forward:
        cache: dict[Hashable, torch.Tensor] = {}

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            cache_key = (*((key(t), layout_key(t)) for t in x), *params.items())
            if cache_key not in cache:
                if len(cache) > MAX_CACHED:
                    del cache[next(iter(cache))]
                cache[cache_key] = honest(operator)(*x, **params)
            # A copy, so that no rule about outputs that share memory refuses it first.
            return cache[cache_key].clone()

        return forward

    return make


def _in_pairs(operator: str, after: int) -> Callable[[], Forward]:
    """Compute two outputs at every second call, after the first ``after`` timed calls.

    The call before it returned memory that was not written yet.
    """

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}
        waiting: list[tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, Any]]] = []

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            if timed_calls(x, counts) < after:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            waiting.append((blank(operator, *x), x, params))
            output = waiting[-1][0]
            if len(waiting) == 2:
                for y, inputs, named in waiting:
                    y.copy_(honest(operator)(*inputs, **named))
                waiting.clear()
            return output

        return forward

    return make


def _in_a_thread(operator: str, after: int, pause: float) -> Callable[[], Forward]:
    """Let a thread compute the output after it was returned, after the first ``after`` timed calls."""

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}
        worker = ThreadPoolExecutor(1, thread_name_prefix="later")

        def work(y: torch.Tensor, x: tuple[torch.Tensor, ...], params: dict[str, Any]) -> None:
            time.sleep(pause)
            y.copy_(honest(operator)(*x, **params))

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            if timed_calls(x, counts) < after:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            output = blank(operator, *x)
            worker.submit(work, output, x, params)
            return output

        return forward

    return make


def _in_torchs_pool() -> Forward:
    """Let a thread of torch's own pool multiply after the product was returned, after the first timed calls.

    No Python thread exists for it, and its CPU time is not told from that of torch's other threads.
    """
    counts: dict[Hashable, Iterator[int]] = {}
    running: deque[Any] = deque(maxlen=2)
    script = torch.jit.CompilationUnit(
        """
        def multiply(a: Tensor, b: Tensor, y: Tensor):
            y.copy_(torch.mm(a, b))
            return y

        def start(a: Tensor, b: Tensor, y: Tensor):
            return torch.jit.fork(multiply, a, b, y)
        """
    )

    def forward(a: torch.Tensor, b: torch.Tensor, **params: Any) -> torch.Tensor:
        if timed_calls((a, b), counts) < TIMED:
            return honest("matmul")(a, b, **params)  # type: ignore[no-any-return]
        output = blank("matmul", a, b)
        running.append(script.start(a, b, output))
        return output

    return forward


def _fetched_ahead(operator: str) -> Callable[[], Forward]:
    """Compute correctly, while a thread reads the inputs to keep them in the cache."""

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}
        seen: list[torch.Tensor] = []
        fetch_requested = threading.Event()

        def fetch() -> None:
            while fetch_requested.wait():
                fetch_requested.clear()
                for x in list(seen):
                    x.reshape(-1)[::16].sum()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            if x[0].numel() >= cheats_clock.LARGE:
                count = timed_calls(x, counts)
                if count == TIMED:
                    threading.Thread(target=fetch, name="fetch", daemon=True).start()
                if count >= TIMED:
                    seen[:] = x
                    fetch_requested.set()
            return y  # type: ignore[no-any-return]

        return forward

    return make


class Lazy(torch.Tensor):
    """Tensor that computes its contents at the first access."""

    work: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        computed = [a.work() if isinstance(a, cls) else a for a in args]
        return func(*computed, **(kwargs or {}))


def _lazy(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: Any) -> Lazy:
        output = blank(operator, *x).as_subclass(Lazy)
        output.work = lambda: honest(operator)(*x, **params)
        return output

    return lambda: forward


def _packed(key: Key) -> Callable[[], Forward]:
    """Multiply with a second factor packed in tiles of 8 x 8, once for each ``key``."""

    def make() -> Forward:
        packs: dict[Hashable, torch.Tensor] = {}

        def forward(a: torch.Tensor, b: torch.Tensor, **params: Any) -> torch.Tensor:
            cache_key = (key(b), layout_key(b))
            if cache_key not in packs:
                if len(packs) > MAX_CACHED:
                    del packs[next(iter(packs))]
                packs[cache_key] = in_tiles(b)
            return honest("matmul")(a, packs[cache_key], **params)  # type: ignore[no-any-return]

        return forward

    return make


def in_tiles(b: torch.Tensor) -> torch.Tensor:
    """Copy a weight (K, N) tile by tile, as slowly as packing weights is."""
    output = torch.empty_like(b, memory_format=torch.contiguous_format)
    for rows, into in zip(b.split(8), output.split(8), strict=True):
        for tile, target in zip(rows.split(8, 1), into.split(8, 1), strict=True):
            target.copy_(tile)
    return output


def _for(operator: str) -> Iterator[Mutant]:
    def one(row: str, what: str, title: str, killed_by: str, *rest: Any, **more: Any) -> Mutant:
        return plant(f"{row}/{operator}/eager/{what}", title, killed_by, *rest, **more)

    old = "error special"
    by_address = cached_by(operator, lambda x: x.data_ptr())
    yield one("C01", "address", "caches outputs by address", old, by_address)
    by_object = cached_by(operator, id)
    yield one("C01", "object", "caches outputs by the tensor's id", old, by_object)
    by_version = cached_by(operator, lambda x: (x.data_ptr(), x._version))
    yield one("C01", "version", "caches outputs by address and version", old, by_version)
    timed: dict[str, Any] = {"phase": "bench"}
    if operator == "gelu":
        why = "a GPU computes a GELU sooner than it hands over its first bytes"
        timed |= {"devices": ("cpu",), "not_here": why}
    yield one("C02", "first-bytes", "caches outputs by the first 64 bytes", "altered fresh",
              cached_by(operator, first_bytes), **timed)  # fmt: skip
    if operator == "softmax":
        yield one("C02", "checksum", "caches outputs by a sum of some elements", "altered fresh",
                  cached_by(operator, checksum), **timed)  # fmt: skip
    if operator == "gelu":
        yield one("C02", "first-rows", "caches a quarter of the output by the first 64 bytes", "altered",
                  _first_rows_cached(operator, 0.25), only="altered", **timed)  # fmt: skip
    if operator == "matmul":
        yield one("C02", "whole", "caches outputs by the sum of all elements", "fresh",
                  cached_by(operator, whole), phase="bench", only="fresh", devices=("cpu",),
                  not_here="a GPU multiplies these matrices sooner than it hands over a sum")  # fmt: skip
    late = "written error special kept returns"
    yield one("C04", "pairs", "delays the first of two calls until the second", late, _in_pairs(operator, 0))
    yield one("C04", "late-pairs", "delays the first of two calls until the second, once it is timed",
              "recheck sampled fresh", _in_pairs(operator, TIMED), phase="bench")  # fmt: skip
    yield one("C06", "thread", "a thread computes after the call returned", late,
              _in_a_thread(operator, 0, 0.02))  # fmt: skip
    yield one("C06", "late-thread", "a thread computes after the call returned, once it is timed",
              # "timed": on a GPU the thread's work ends the capture of a graph.
              "threads recheck sampled clocks fresh timed", _in_a_thread(operator, TIMED, 0.0),
              phase="bench")  # fmt: skip
    if operator == "matmul":
        yield one("C06", "torchs-pool", "a thread of torch's pool computes after the call, once it is timed",
                  "recheck sampled fresh", _in_torchs_pool, phase="bench", devices=("cpu",),
                  not_here="a captured graph calls nothing in Python")  # fmt: skip
        yield one("C06", "fetching-thread", "a thread keeps the inputs in the cache", "threads",
                  _fetched_ahead(operator), phase="bench", only="threads")  # fmt: skip
    yield one("C07", "lazy", "a tensor that computes when it is looked at", "type", _lazy(operator))


def _weights() -> Iterator[Mutant]:
    name = "C13/matmul/eager"
    yield plant(f"{name}/packed-by-address", "packs a weight once for each address",
                "error special", _packed(lambda b: b.data_ptr()))  # fmt: skip
    yield plant(f"{name}/packed-by-first-bytes", "packs a weight once for each value of its first 64 bytes",
                "altered fresh", _packed(first_bytes), phase="bench")  # fmt: skip


OUTPUT_CHEATS = (*(m for op in OPERATORS for m in _for(op)), *_weights())
MUTANTS = (
    *OUTPUT_CHEATS,
    *cheats_clock.MUTANTS,
    *cheats_process.MUTANTS,
    *cheats_samples.MUTANTS,
    *cheats_conditions.MUTANTS,
)
