"""Each kind of hook is detected while it is installed, and nothing is detected in a process without hooks."""

from __future__ import annotations

import builtins
import gc
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workbench.calls import buffers
from weft.workbench.timing import hooks
from weft.workbench.timing.hooks import MAX_GAP_NS, MIN_GAPS, HookMonitor

PROTECTED = {"buffers.poison": buffers.poison}


def nothing(*_: Any) -> None:
    return None


@contextmanager
def profiled() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(nothing)
    yield
    sys.setprofile(before)


@contextmanager
def traced() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(nothing)
    yield
    sys.settrace(before)


@contextmanager
def profiled_threads() -> Iterator[None]:
    before = threading.getprofile()
    threading.setprofile(nothing)
    yield
    threading.setprofile(before)  # type: ignore[arg-type]


@contextmanager
def collected() -> Iterator[None]:
    gc.callbacks.append(nothing)
    yield
    gc.callbacks.remove(nothing)


@contextmanager
def alarm() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000.0)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


@contextmanager
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, nothing)
    yield
    signal.signal(signal.SIGUSR2, before)


def attribute(owner: Any, name: str, value: Any) -> Any:
    @contextmanager
    def patched() -> Iterator[None]:
        own = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return patched


@contextmanager
def other_code() -> Iterator[None]:
    before = buffers.poison.__code__
    buffers.poison.__code__ = nothing.__code__
    yield
    buffers.poison.__code__ = before


@contextmanager
def other_defaults() -> Iterator[None]:
    before = buffers.poison.__defaults__
    buffers.poison.__defaults__ = (frozenset({1}),)
    yield
    buffers.poison.__defaults__ = before


@contextmanager
def other_kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("normal_", nothing, "CPU")
    yield
    library._destroy()


HOOKS: dict[str, tuple[Callable[[], Any], str]] = {
    "profile": (profiled, "profile function"),
    "trace": (traced, "trace function"),
    "threads": (profiled_threads, "for threads"),
    "collector": (collected, "garbage collector"),
    "timer": (alarm, "timer"),
    "handler": (handler, "signal handler"),
    "dispatch mode": (TorchDispatchMode, "dispatch mode"),
    "function mode": (TorchFunctionMode, "function mode"),
    "builtin": (attribute(builtins, "sorted", nothing), "builtins.sorted"),
    "hidden method": (attribute(torch.Tensor, "detach", nothing), "torch.Tensor.detach"),
    "factory": (attribute(torch, "randn", nothing), "torch.randn"),
    "message": (attribute(json, "loads", json.loads.__call__), "json.loads"),
    "code": (other_code, "buffers.poison"),
    "defaults": (other_defaults, "buffers.poison"),
    "kernel": (other_kernel, "another kernel"),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_found_and_named(kind: str) -> None:
    hook, words = HOOKS[kind]
    monitor = HookMonitor(PROTECTED)
    assert monitor.look_at_all() == []
    with hook():
        monitor.look_at_all()
    assert [m for m in monitor.messages if words in m], monitor.messages


@pytest.mark.parametrize("kind", ["handler", "collector"])
def test_a_handler_that_removes_itself_is_found_at_the_clock(kind: str) -> None:
    hook, words = HOOKS[kind]
    monitor = HookMonitor(PROTECTED)
    start = perf_counter_ns()
    with hook():
        monitor.after_clock(perf_counter_ns, start, 1000)
    assert [m for m in monitor.look() if words in m], monitor.messages
    monitor.before_clock()


def test_the_handler_of_any_signal_is_found() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        monitor = HookMonitor(PROTECTED)
        before = signal.signal(number, nothing)
        try:
            assert monitor.look() == ["a signal handler"], number
        finally:
            signal.signal(number, before if before is not None else signal.SIG_DFL)


def test_a_finalizer_of_garbage_does_not_run_between_the_clock_and_the_next_run() -> None:
    """A cycle whose finalizer writes the output, and a collector that is about to run."""
    finalizations: list[bool] = []

    class Work:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            finalizations.append(True)

    def garbage_then(inspect: Callable[[], object]) -> None:
        Work()
        inspect()
        objects = [[] for _ in range(5000)]  # more than the young generation's threshold
        del objects

    monitor, was_enabled, thresholds = HookMonitor(PROTECTED), gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    try:
        start = perf_counter_ns()
        garbage_then(lambda: monitor.after_clock(perf_counter_ns, start, 1000))
        assert not finalizations
        monitor.before_clock()
        assert finalizations and gc.isenabled()
        finalizations.clear()
        garbage_then(lambda: None)  # without the monitor it runs in the inspection
        assert finalizations
        gc.disable()  # a candidate may turn it off; then it stays off
        monitor.after_clock(perf_counter_ns, start, 1000)
        monitor.before_clock()
        assert not gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable() if was_enabled else gc.disable()


def test_the_hooks_of_the_process_itself_are_no_finding() -> None:
    """A coverage tool or a debugger was there before the candidate."""
    with profiled(), traced():
        assert HookMonitor(PROTECTED).look_at_all() == []


def test_what_honest_files_do_is_no_finding() -> None:
    monitor = HookMonitor(PROTECTED)
    torch.set_default_device("cpu")
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(torch.tanh, [torch.randn(8)] * 4))
        builtins.name_of_a_library = nothing  # type: ignore[attr-defined]
        torch.Tensor.method_of_a_library = nothing  # type: ignore[attr-defined]
        assert monitor.look_at_all() == []
    finally:
        torch.set_default_device(None)
        del builtins.name_of_a_library, torch.Tensor.method_of_a_library  # type: ignore[attr-defined]


@pytest.mark.slow
def test_compilers_leave_no_hook() -> None:
    """torch.compile evaluates frames and replaces functions of torch; numba registers for a thread pool."""
    monitor = HookMonitor(PROTECTED)
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")
    compiled(torch.randn(4, requires_grad=True)).sum().backward()
    numba = pytest.importorskip("numba")
    assert numba.njit(lambda n: n + 1)(1) == 2
    monitor.after_clock(lambda: 10_100, 0, 10_000)
    assert monitor.look_at_all() == []


def test_a_hook_that_removes_itself_is_found_when_the_clock_has_stopped() -> None:
    monitor = HookMonitor(PROTECTED)
    with profiled():
        monitor.after_clock(lambda: 10_100, 0, 10_000)
    assert monitor.look() == [hooks.QUICK_NAMES[0]]


@pytest.mark.parametrize(("gap", "is_detected"), [(200, False), (20 * MAX_GAP_NS, True)])
def test_work_after_the_last_reading_of_the_clock_is_found_by_its_time(gap: int, is_detected: bool) -> None:
    """A process may wait for a core once, so one long gap is accepted; a gap in most samples is not."""
    monitor, spent = HookMonitor(PROTECTED), 10 * MAX_GAP_NS
    monitor.after_clock(lambda: spent + 100 * MAX_GAP_NS, 0, spent)
    for _ in range(MIN_GAPS):
        monitor.after_clock(lambda: spent + gap, 0, spent)
    assert bool(monitor.look()) == is_detected
