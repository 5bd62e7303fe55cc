"""Cheats with answers: kept from an earlier call, put off to a later one, or never given at all.

Each is right in everything but its cheat: the library's own answer, handed out at the wrong time.
``MUTANTS`` are these, and those of ``cheats_clock`` and ``cheats_process``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from weft.workbench.mutants import cheats_clock, cheats_process
from weft.workbench.mutants.mutant import Mutant
from weft.workbench.mutants.planting import OPERATORS, Forward, blank, honest, plant

CHECKED = 25  # calls at one shape that a check of one case does not reach, and a timing soon does
KEPT = 300  # answers that are kept at most
WORD = 64  # bytes at the beginning that are taken for the whole

Key = Callable[[torch.Tensor], Hashable]


def form(x: torch.Tensor) -> Hashable:
    return (tuple(x.shape), x.stride(), x.dtype)


def first_bytes(x: torch.Tensor) -> bytes:
    """The first bytes of a tensor's contents."""
    some = x.detach().reshape(-1)[: WORD // x.element_size()].clone()
    return some.cpu().view(torch.uint8).numpy().tobytes()


def checksum(x: torch.Tensor) -> float:
    """The sum of each 61st element."""
    return float(x.detach().reshape(-1)[::61].float().sum())


def keeping(operator: str, key: Key) -> Callable[[], Forward]:
    """Answers anew only where an input's ``key`` is new."""

    def make() -> Forward:
        kept: dict[Hashable, torch.Tensor] = {}

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            known = (*((key(t), form(t)) for t in x), *params.items())
            if known not in kept:
                if len(kept) > KEPT:
                    del kept[next(iter(kept))]
                kept[known] = honest(operator)(*x, **params)
            return kept[known].clone()

        return forward

    return make


def _in_pairs(operator: str, after: int) -> Callable[[], Forward]:
    """From call ``after`` on, each second call computes its own answer and that of the one before,
    which was given memory not yet written."""

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}
        waiting: list[tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, Any]]] = []

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            count = next(counts.setdefault(tuple(map(form, x)), itertools.count()))
            if count < after:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            waiting.append((blank(operator, *x), x, params))
            made = waiting[-1][0]
            if len(waiting) == 2:
                for y, inputs, named in waiting:
                    y.copy_(honest(operator)(*inputs, **named))
                waiting.clear()
            return made

        return forward

    return make


def _in_a_thread(operator: str, after: int, pause: float) -> Callable[[], Forward]:
    """From call ``after`` on, a thread computes the answer that was returned already."""

    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}
        worker = ThreadPoolExecutor(1, thread_name_prefix="later")

        def work(y: torch.Tensor, x: tuple[torch.Tensor, ...], params: dict[str, Any]) -> None:
            time.sleep(pause)
            y.copy_(honest(operator)(*x, **params))

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            count = next(counts.setdefault(tuple(map(form, x)), itertools.count()))
            if count < after:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            made = blank(operator, *x)
            worker.submit(work, made, x, params)
            return made

        return forward

    return make


def _fetched_ahead(operator: str) -> Callable[[], Forward]:
    """Right and in time, while a thread reads the inputs so that they stay in the cache."""

    def make() -> Forward:
        counts = itertools.count()
        seen: list[torch.Tensor] = []
        wanted = threading.Event()

        def fetch() -> None:
            while wanted.wait():
                wanted.clear()
                for x in list(seen):
                    x.reshape(-1)[::16].sum()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            if x[0].numel() >= cheats_clock.LARGE:
                count = next(counts)
                if count == CHECKED:
                    threading.Thread(target=fetch, name="fetch", daemon=True).start()
                if count >= CHECKED:
                    seen[:] = x
                    wanted.set()
            return y  # type: ignore[no-any-return]

        return forward

    return make


class Lazy(torch.Tensor):
    """A tensor that computes when it is looked at, and not before."""

    work: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        computed = [a.work() if isinstance(a, cls) else a for a in args]
        return func(*computed, **(kwargs or {}))


def _lazy(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: Any) -> Lazy:
        made = blank(operator, *x).as_subclass(Lazy)
        made.work = lambda: honest(operator)(*x, **params)
        return made

    return lambda: forward


def _packed(key: Key) -> Callable[[], Forward]:
    """A product whose second factor is packed in tiles of 8 x 8, once for each ``key``."""

    def make() -> Forward:
        packs: dict[Hashable, torch.Tensor] = {}

        def forward(a: torch.Tensor, b: torch.Tensor, **params: Any) -> torch.Tensor:
            known = (key(b), form(b))
            if known not in packs:
                if len(packs) > KEPT:
                    del packs[next(iter(packs))]
                packs[known] = in_tiles(b)
            return honest("matmul")(a, packs[known], **params)  # type: ignore[no-any-return]

        return forward

    return make


def in_tiles(b: torch.Tensor) -> torch.Tensor:
    """A copy of a weight (K, N), tile by tile, as slowly as weights are packed."""
    made = torch.empty_like(b, memory_format=torch.contiguous_format)
    for rows, into in zip(b.split(8), made.split(8), strict=True):
        for tile, place in zip(rows.split(8, 1), into.split(8, 1), strict=True):
            place.copy_(tile)
    return made


def _for(operator: str) -> Iterator[Mutant]:
    def one(row: str, what: str, title: str, killed_by: str, *rest: Any, **more: Any) -> Mutant:
        return plant(f"{row}/{operator}/eager/{what}", title, killed_by, *rest, **more)

    old = "error special"
    by_address = keeping(operator, lambda x: x.data_ptr())
    yield one("C01", "address", "keeps answers by address", old, by_address)
    by_object = keeping(operator, id)
    yield one("C01", "object", "keeps answers by the tensor's id", old, by_object)
    by_version = keeping(operator, lambda x: (x.data_ptr(), x._version))
    yield one("C01", "version", "keeps answers by address and version", old, by_version)
    timed: dict[str, Any] = {"phase": "bench", "only": "fresh"}
    if operator == "gelu":
        why = "a GPU computes a GELU sooner than it hands over its first bytes"
        timed |= {"devices": ("cpu",), "not_here": why}
    yield one("C02", "first-bytes", "keeps answers by the first 64 bytes", "fresh",
              keeping(operator, first_bytes), **timed)  # fmt: skip
    if operator == "softmax":
        yield one("C02", "checksum", "keeps answers by a sum of some elements", "fresh",
                  keeping(operator, checksum), **timed)  # fmt: skip
    late = "written error special kept returns"
    yield one("C04", "pairs", "computes two calls at the second", late, _in_pairs(operator, 0))
    yield one("C04", "late-pairs", "computes two calls at the second, once it is timed",
              "recheck fresh", _in_pairs(operator, CHECKED), phase="bench")  # fmt: skip
    yield one("C06", "thread", "a thread computes after the call returned", late,
              _in_a_thread(operator, 0, 0.02))  # fmt: skip
    yield one("C06", "late-thread", "a thread computes after the call returned, once it is timed",
              "threads recheck clocks fresh", _in_a_thread(operator, CHECKED, 0.0),
              phase="bench")  # fmt: skip
    if operator == "matmul":
        yield one("C06", "fetching-thread", "a thread keeps the inputs in the cache", "threads",
                  _fetched_ahead(operator), phase="bench", only="threads")  # fmt: skip
    yield one("C07", "lazy", "a tensor that computes when it is looked at", "type", _lazy(operator))


def _weights() -> Iterator[Mutant]:
    name = "C13/matmul/eager"
    yield plant(f"{name}/packed-by-address", "packs a weight once for each address",
                "error special", _packed(lambda b: b.data_ptr()))  # fmt: skip
    yield plant(f"{name}/packed-by-first-bytes", "packs a weight once for each 64 first bytes",
                "fresh", _packed(first_bytes), phase="bench", only="fresh")  # fmt: skip


OWN = (*(m for op in OPERATORS for m in _for(op)), *_weights())
MUTANTS = (*OWN, *cheats_clock.MUTANTS, *cheats_process.MUTANTS)
