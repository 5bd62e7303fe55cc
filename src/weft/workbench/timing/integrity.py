"""Integrity of a timing: are its functions its own?

A snapshot of the functions is taken when their modules are imported, which is before any candidate
is. They are compared with it before and after a timing.
"""

from __future__ import annotations

import sys
import time

import torch

# Functions of other packages that take the time, make inputs or compare outputs.
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
    ("torch", torch, ("equal", "isnan", "randn", "empty", "empty_strided", "stack")),
    (
        "torch.Tensor",
        torch.Tensor,
        ("copy_", "clone", "fill_", "equal", "isnan", "data_ptr", "__eq__", "__ne__", "all", "tolist"),
    ),
    ("torch.cuda", torch.cuda, ("synchronize", "Event", "CUDAGraph", "current_stream", "graph")),
    ("torch.cuda.Event", torch.cuda.Event, ("record", "elapsed_time", "query", "synchronize")),
    ("torch.cuda.Stream", torch.cuda.Stream, ("synchronize", "wait_stream")),
    ("torch.cuda.CUDAGraph", torch.cuda.CUDAGraph, ("replay",)),
)
# Weft's own modules, by the first words of their names: the packages that make calls, judge their
# outputs and take the time, and the parts of the sandbox that do so in a worker process.
PROTECTED_MODULES = (
    "weft.workbench.calls.",
    "weft.workbench.check.",
    "weft.workbench.timing.",
    "weft.workbench.sandbox.remote_timing",
    "weft.workbench.sandbox.worker",
    "weft.workbench.sandbox.protocol",
    "weft.workbench.sandbox.memory_map",
    "weft.workbench.sandbox.observed_kernels",
    "weft.workbench.kernels.provenance",
)
_own: dict[str, tuple[object, str, object]] = {
    f"{label}.{name}": (owner, name, getattr(owner, name))
    for label, owner, names in _FOREIGN
    for name in names
    if hasattr(owner, name)
}
_snapshotted: set[str] = set()


class ClockReplaced(RuntimeError):
    """Raised when a function of the clock is no longer the one bound at import."""


def snapshot() -> None:
    """Store the functions of the protected modules that are imported by now.

    A module is stored once. Call it after the modules are imported and before external code is.
    """
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(PROTECTED_MODULES) or module_name in _snapshotted:
            continue
        _snapshotted.add(module_name)
        short = module_name.removeprefix("weft.workbench.")
        for name, value in list(vars(module).items()):
            if not callable(value) or name.startswith("__"):
                continue
            _own[f"{short}.{name}"] = (module, name, value)
            # Methods too: replacing one on the class changes it for every instance.
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, function in vars(value).items():
                    if callable(function):
                        key = f"{short}.{name}.{attribute}"
                        _own[key] = (value, attribute, getattr(value, attribute))


def replaced_functions() -> list[str]:
    """Return the names of functions that were replaced since the snapshot."""
    # Modules imported since the last snapshot are stored now, before the next candidate can reach them.
    snapshot()
    return [n for n, (owner, name, own) in _own.items() if getattr(owner, name, None) is not own]


def protected_functions() -> dict[str, object]:
    """Return the functions of the protected modules by name, as they were at the last snapshot."""
    return {name: own for name, (_, _, own) in _own.items()}
