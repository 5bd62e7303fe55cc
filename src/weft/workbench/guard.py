"""What guards the clock against the one it times: are its functions its own, who else runs?

The functions are remembered when they are imported, which is before any candidate is, and looked
at again before and after a timing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

_FOREIGN: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    (
        "time",
        time,
        (
            "perf_counter_ns",
            "perf_counter",
            "monotonic",
            "monotonic_ns",
            "process_time_ns",
            "sleep",
        ),
    ),
    ("torch", torch, ("equal", "isnan", "randn", "empty", "empty_strided")),
    ("torch.Tensor", torch.Tensor, ("copy_", "clone", "fill_", "equal", "isnan", "data_ptr")),
    ("torch.cuda", torch.cuda, ("synchronize", "Event", "CUDAGraph", "current_stream", "graph")),
    ("torch.cuda.Event", torch.cuda.Event, ("record", "elapsed_time", "query", "synchronize")),
    ("torch.cuda.Stream", torch.cuda.Stream, ("synchronize", "wait_stream")),
    ("torch.cuda.CUDAGraph", torch.cuda.CUDAGraph, ("replay",)),
)
# The modules of this house that take the time, deal the inputs and compare the answers.
_HOUSE = tuple(
    f"weft.workbench.{name}"
    for name in (
        "at_hand",
        "bind",
        "clock",
        "clock_cpu",
        "clock_cuda",
        "fresh",
        "guard",
        "guest",
        "guest_clock",
        "inputs",
        "judge",
        "local_rig",
        "memory",
        "oracle",
        "plan",
        "race",
        "readings",
        "recheck",
        "remote_clock",
        "slots",
        "stage",
        "statistics",
        "tolerance",
    )
)
_own: dict[str, tuple[object, str, object]] = {
    f"{label}.{name}": (owner, name, getattr(owner, name))
    for label, owner, names in _FOREIGN
    for name in names
    if hasattr(owner, name)
}
_remembered: set[str] = set()


class ClockReplaced(RuntimeError):
    """One of the clock's own functions is no longer the one bound at import."""


def remember() -> None:
    """Note the house's functions as they are now; a module that is known already is not noted
    again. To be called once its modules are imported and before a stranger's code is."""
    for module_name in _HOUSE:
        module = sys.modules.get(module_name)
        if module is None or module_name in _remembered:
            continue
        _remembered.add(module_name)
        short = module_name.removeprefix("weft.workbench.")
        for name, value in list(vars(module).items()):
            if not callable(value) or name.startswith("__"):
                continue
            _own[f"{short}.{name}"] = (module, name, value)
            if isinstance(value, type) and value.__module__ == module_name:
                for part, function in vars(value).items():
                    if callable(function):
                        _own[f"{short}.{name}.{part}"] = (value, part, getattr(value, part))


def replaced() -> list[str]:
    """The names of the clock's functions that somebody has replaced since they were bound."""
    remember()
    return [n for n, (owner, name, own) in _own.items() if getattr(owner, name, None) is not own]


# OS threads that a driver or torch itself starts, by how their names begin.
_DRIVERS = ("cuda", "pt_", "nv")


def _os_threads() -> int:
    """Threads of this process that the system knows, less those of driver and torch; 0 where
    there is no /proc."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return 0
    names: Counter[bool] = Counter()
    for task in tasks.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:  # it ended while we looked
            name = _DRIVERS[0]
        names[name.startswith(_DRIVERS)] += 1
    return names[False]


def _inductors_own(thread: threading.Thread) -> bool:
    """Whether torch.compile started this thread, to compile in or to wind its workers up."""
    target = getattr(thread, "_target", None)
    if str(getattr(target, "__module__", "")).startswith("torch._inductor."):
        return True
    module = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    if pool is None or not pool.cache_info().currsize:
        return False
    return thread in getattr(pool(), "_threads", ())


class Threads:
    """Who runs beside the main thread, and who came while a candidate's step was on."""

    def __init__(self) -> None:
        self._known = set(threading.enumerate())
        pools = torch.get_num_threads() + torch.get_num_interop_threads()
        self._tasks = _os_threads() - threading.active_count() + pools

    def absorb(self) -> None:
        """Whoever is there by now is none of the next candidate's."""
        self._known |= set(threading.enumerate())

    def newcomers(self) -> set[str]:
        """The names of Python threads that came since and are no worker of torch.compile's."""
        new = [t for t in threading.enumerate() if t not in self._known]
        self._known |= set(new)
        return {t.name for t in new if not _inductors_own(t)}

    def crowd(self) -> int:
        """How many more OS threads there are than at first, beyond torch's own pools."""
        return max(0, _os_threads() - threading.active_count() - self._tasks)
