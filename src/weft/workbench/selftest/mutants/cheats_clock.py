"""Cheats with the clock: work outside the timed region, replaced functions, a reserved cache.

The outputs are the library's own and complete by the time that they are compared.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import (
    NEEDS_GPU,
    OPERATORS,
    Forward,
    blank,
    honest,
    past_the_end,
    plant,
)

NO_STREAMS = "without a GPU there are no streams"
NO_GRAPHS = "without a GPU nothing is captured into a graph"
NO_L2 = "a CPU's cache cannot be set aside"
LARGE = 1 << 14  # elements: timed cases have more
PAUSE, PAUSES = 7.0, 4  # seconds of one sleep, and the largest number of sleeps


def _on_a_side_stream(operator: str) -> Callable[[], Forward]:
    """Work on a side stream that waits for the caller's, while the caller's does not wait for it."""

    def make() -> Forward:
        streams: list[torch.cuda.Stream] = []

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            side = streams[0] if streams else torch.cuda.Stream()
            streams[:] = [side]
            # The inputs must be ready. The fault is the missing wait in the other direction.
            side.wait_stream(torch.cuda.current_stream())
            y = blank(operator, *x)
            with torch.cuda.stream(side):
                y.copy_(honest(operator)(*x, **params))
            return y

        return forward

    return make


def _not_in_a_graph(operator: str, share: float) -> Callable[[], Forward]:
    """While a graph is captured, compute only a ``share`` of the output; copy the rest from an old one."""

    def make() -> Forward:
        last: dict[object, torch.Tensor] = {}

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            shapes = tuple((t.shape, t.dtype) for t in x)
            if torch.cuda.is_current_stream_capturing() and shapes in last:
                y = blank(operator, *x)
                y.copy_(last[shapes])
                rows = int(share * x[0].shape[0]) if operator != "sum" else 0
                if rows:
                    y[:rows].copy_(honest(operator)(x[0][:rows], *x[1:], **params))
                return y
            y = honest(operator)(*x, **params)
            last[shapes] = y
            return y  # type: ignore[no-any-return]

        return forward

    return make


def _reserves_cache(operator: str) -> Callable[[], Forward]:
    """Reserve half of the L2 cache, and mark this stream's accesses to persist there."""

    def make() -> Forward:
        done: set[int] = set()

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            stream = torch.cuda.current_stream()
            if not torch.cuda.is_current_stream_capturing() and stream.cuda_stream not in done:
                _persist(stream.cuda_stream, x[0])
                done.add(stream.cuda_stream)
            return honest(operator)(*x, **params)  # type: ignore[no-any-return]

        return forward

    return make


def _persist(stream: int, x: torch.Tensor) -> None:
    """Mark a stream's accesses to ``x`` as persisting in reserved L2."""
    from cuda.bindings import driver

    _, device = driver.cuCtxGetDevice()
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
    _, size = driver.cuDeviceGetAttribute(most, device)
    driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, size)
    value = driver.CUstreamAttrValue()
    window = value.accessPolicyWindow
    window.base_ptr = x.data_ptr()
    window.num_bytes = min(x.nbytes, size)
    window.hitRatio = 1.0
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    value.accessPolicyWindow = window
    named = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    driver.cuStreamSetAttribute(driver.CUstream(stream), named, value)


def half_speed(real: Callable[[], int]) -> Callable[[], int]:
    """Return a clock that starts now and runs at half speed."""
    begun = real()
    return lambda: begun + (real() - begun) // 2


def _slow_clock() -> None:
    time.perf_counter_ns = half_speed(time.perf_counter_ns)


def _slow_sampler() -> None:
    """Slow down wall and CPU time alike, so that the sampler's two clocks agree."""
    from weft.workbench.timing import cpu as clock_cpu
    from weft.workbench.timing import cuda as clock_cuda

    for module in (clock_cpu, clock_cuda):
        for name in ("_now", "_cpu_now"):
            if hasattr(module, name):
                setattr(module, name, half_speed(getattr(module, name)))


def _slow_sampler_in_snapshot() -> None:
    """Slow the sampler, and store the new functions in the integrity snapshot."""
    from weft.workbench.timing import cpu as clock_cpu
    from weft.workbench.timing import integrity

    _slow_sampler()
    for name in ("_now", "_cpu_now"):
        integrity._own[f"timing.cpu.{name}"] = (clock_cpu, name, getattr(clock_cpu, name))


def _slow_events() -> None:
    real = torch.cuda.Event.elapsed_time
    halved = lambda self, end: 0.5 * real(self, end)  # noqa: E731 - as a cheat would write it
    torch.cuda.Event.elapsed_time = halved  # type: ignore[method-assign]


def _no_waiting() -> None:
    torch.cuda.synchronize = lambda *_: None


def _all_are_equal() -> None:
    torch.equal = lambda *_: True


def _no_poison() -> None:
    """Report that no output has poison left, so that unwritten outputs go unnoticed."""
    from weft.workbench.timing import local_candidate

    local_candidate.has_poison = lambda outputs: False


def _patched(operator: str, patch: Callable[[], None]) -> Callable[[], Forward]:
    def make() -> Forward:
        patch()
        return honest(operator)

    return make


def _hides_guards(operator: str) -> Callable[[], Forward]:
    """Write past the output's end, and replace the check of the guard bands."""

    def make() -> Forward:
        from weft.workbench.calls.guarded_memory import Arena

        Arena.broken = lambda self: []  # type: ignore[method-assign]

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            y = blank(operator, *x)
            if y.untyped_storage().nbytes() > y.nbytes:  # the allocation continues after the output
                past_the_end(y).zero_()
            return y.copy_(honest(operator)(*x, **params))

        return forward

    return make


def _sleeps(operator: str) -> Callable[[], Forward]:
    """Sleep in every third sample until the budget is used up; the other samples are quick."""

    def make() -> Forward:
        first: list[int] = []
        samples = itertools.count()
        pauses = iter(range(PAUSES))

        def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
            if _sampled():
                first[:] = first or [x[0].data_ptr()]  # a sample begins with the first slot
                new = x[0].data_ptr() == first[0]
                if new and next(samples) % 3 == 2 and next(pauses, None) is not None:
                    time.sleep(PAUSE)
            return honest(operator)(*x, **params)  # type: ignore[no-any-return]

        return forward

    return make


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the module and the function of each frame above the cheat's own."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def _sampled() -> bool:
    return any(m.endswith((".timing.cpu", ".timing.cuda")) and f == "run" for m, f in _callers())


def _unwritten_when_sampled(operator: str) -> Callable[[], Forward]:
    """Return an unwritten output if the call is sampled."""

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        y = honest(operator)(*x, **params)
        return blank(operator, *x) if _sampled() else y  # type: ignore[no-any-return]

    return lambda: forward


def _for(operator: str) -> Iterator[Mutant]:
    def one(row: str, what: str, *rest: Any, **more: Any) -> Mutant:
        return plant(f"{row}/{operator}/eager/{what}", *rest, phase="bench", **more)

    yield one("C05", "side-stream", "works on a stream that no one waits for", "clocks recheck sampled",
              _on_a_side_stream(operator), only="clocks", not_here=NO_STREAMS, **NEEDS_GPU)  # fmt: skip
    yield one("C08", "perf-counter", "puts a slow clock in place of perf_counter_ns", "replaced",
              _patched(operator, _slow_clock), only="replaced")  # fmt: skip
    yield one("C10", "old-answer", "copies an old answer in a captured graph",
              "recheck sampled observed fresh",
              _not_in_a_graph(operator, 0.0), not_here=NO_GRAPHS, **NEEDS_GPU)  # fmt: skip
    if operator != "sum":
        yield one("C10", "half", "computes half its rows in a captured graph",
                  "recheck sampled observed fresh",
                  _not_in_a_graph(operator, 0.5), not_here=NO_GRAPHS, **NEEDS_GPU)  # fmt: skip
    yield one("C11", "persisting", "reserves a part of the L2 for itself", "cache",
              _reserves_cache(operator), only="cache", not_here=NO_L2, **NEEDS_GPU)  # fmt: skip
    yield one("C14", "unsampled", "returns unwritten memory when it is sampled", "recheck sampled",
              _unwritten_when_sampled(operator), devices=("cpu",),
              not_here="a GPU's samples replay a graph, and call nothing")  # fmt: skip


def _patches() -> Iterator[Mutant]:
    def one(operator: str, what: str, title: str, patch: Callable[[], None], *killed_by: str,
            **more: Any) -> Mutant:  # fmt: skip
        by = " ".join(killed_by) or "replaced"
        name = f"C08/{operator}/eager/{what}"
        return plant(name, title, by, _patched(operator, patch), phase="bench", **more)

    yield one("softmax", "sampler", "halves the time in Weft's sampler", _slow_sampler,
              "replaced", "wall")  # fmt: skip
    yield one("softmax", "unseen", "halves the time, and hides the patch", _slow_sampler_in_snapshot,
              "wall", only="wall", devices=("cpu",),
              not_here="a GPU's time is the events', which C08 elapsed-time halves")  # fmt: skip
    yield one("sum", "elapsed-time", "halves Event.elapsed_time", _slow_events)
    yield one("matmul", "synchronize", "patches synchronize not to wait", _no_waiting)
    yield one("matmul", "equal", "patches torch.equal to return True", _all_are_equal)
    yield one("softmax", "unwritten", "patches the check for unwritten memory", _no_poison)
    for operator in OPERATORS:
        yield plant(f"C08/{operator}/eager/guards", "writes past the end, and hides the guards",
                    "replaced guards", _hides_guards(operator))  # fmt: skip
    yield plant("C09/softmax/eager/sleeps", "sleeps, so that few samples are taken", "samples wall",
                _sleeps("softmax"), phase="bench", only="samples", devices=("cpu",),
                not_here="a GPU's samples replay a graph, and call nothing")  # fmt: skip


MUTANTS = (*(m for op in OPERATORS for m in _for(op)), *_patches())
