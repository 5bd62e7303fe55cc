"""Hooks of a worker process: what could run a candidate's code while the clock stands still.

A profile or trace function, a torch mode that was left entered, a timer's signal, a callback of the garbage
collector, a patched function of the worker or of torch can all do the work of a timed call after its clock
has stopped, before its output is looked at. :class:`HookMonitor` stores the state of the process before the
candidate is loaded, and names what differs from it.

Functions registered with ``atexit`` are not looked at: a worker ends without calling them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import builtins
import gc
import importlib
import json
import random
import signal
import socket
import statistics
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch.utils._device import DeviceContext

# Bound at import, so that a candidate that replaces them changes nothing here.
_id, _vars = id, vars
_getprofile, _gettrace, _getitimer = sys.getprofile, sys.gettrace, signal.getitimer
_gc_enable, _gc_disable, _gc_is_enabled, _gc_collect = gc.enable, gc.disable, gc.isenabled, gc.collect
_gc_callbacks, _getsignal = gc.callbacks, _signal.getsignal  # `signal.getsignal` makes an enum, which is slow
_n_dispatch_modes = torch._C._len_torch_dispatch_stack
_n_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_code_of = attrgetter("__code__")

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# All of them: a timer of the system's library, a thread or another process can send any.
SIGNALS = tuple(sorted(map(int, signal.valid_signals())))
MONITORING_TOOLS = 6  # ids that `sys.monitoring` has
# Namespaces of which every attribute is compared, also a new one that hides an inherited one: torch.Tensor
# inherits most of its methods from a type that cannot be changed.
WATCHED: tuple[tuple[str, Any], ...] = (
    ("builtins", builtins),
    ("torch.Tensor", torch.Tensor),
    ("socket.socket", socket.socket),
    ("json", json),
    ("json.JSONEncoder", json.JSONEncoder),
    ("json.JSONDecoder", json.JSONDecoder),
    ("gc", gc),
    ("random.Random", random.Random),
)
# Functions of torch that the worker calls, and those that generate inputs. Not `manual_seed`, which
# torch.compile replaces.
TORCH_FUNCTIONS = (
    *("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "full", "arange", "tensor"),
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("randperm", "where", "equal", "isnan", "stack", "cat", "no_grad", "enable_grad"),
    *("Generator", "is_tensor", "device", "unravel_index", "view_as_real", "finfo", "iinfo", "as_strided"),
)
SYS_FUNCTIONS = ("setprofile", "settrace", "getprofile", "gettrace", "addaudithook", "_getframe")
# Operators whose kernels a candidate could replace through `torch.library`.
OPERATORS = ("aten::copy_", "aten::clone", "aten::empty.memory_format", "aten::normal_", "aten::detach")
# Time between two readings of the clock with nothing but these comparisons in between. The median over the
# samples: one reading says only that the process waited for a core.
MAX_GAP_NS, GAP_SHARE, MIN_GAPS = 50_000, 0.05, 5


class HookMonitor:
    """State of a process before external code is loaded; ``messages`` name the hooks seen since.

    ``protected`` are functions of Weft whose code must stay the same.
    """

    def __init__(self, protected: Mapping[str, Any]) -> None:
        self.messages: dict[str, None] = {}  # in the order of their discovery
        self._gaps: list[tuple[int, int]] = []
        _count_audit_hooks()
        self._audit_hooks = _n_audit_hooks[0]
        self._namespaces = {label: dict(_vars(owner)) for label, owner in WATCHED}
        self._namespaces["torch"] = {n: getattr(torch, n) for n in TORCH_FUNCTIONS if hasattr(torch, n)}
        self._namespaces["sys"] = {n: getattr(sys, n) for n in SYS_FUNCTIONS}
        self._ids: dict[str, tuple[int, ...]] = {}
        functions = dict(_functions(protected))
        functions |= dict(_functions(self._namespaces["torch"])) | dict(_functions(vars(json)))
        self._functions = list(functions.values())
        self._names = list(functions)
        self._codes = list(map(_code_of, self._functions))  # kept alive: an id is not used again
        self._code_ids = list(map(_id, self._codes))
        self._defaults = [(f.__defaults__, f.__kwdefaults__) for f in self._functions]
        self._frame_evaluation = _frame_evaluation()
        self._quick_state = self._quick()
        self._callbacks = list(map(_id, _gc_callbacks))
        self._handlers = _handlers()
        self._collects = False  # True while `after_clock` keeps the garbage collector from running
        self._slow_state = _slow_state()

    def _quick(self) -> tuple[object, ...]:
        """Return the hooks that a C function can name at once."""
        return (_getprofile(), _gettrace(), _n_dispatch_modes(), self._frame_evaluation())

    def before_clock(self) -> None:
        """Let the garbage collector run again, if the candidate left it on; call it before each run.

        Young garbage is collected first, so that the inspection of the last run costs this run no time.
        """
        if self._collects:
            self._collects = False
            _gc_collect(0)
            _gc_enable()

    def after_clock(self, now: Callable[[], int], start: int, spent: int) -> None:
        """Look for hooks when the clock ``now`` has stopped; it measured ``spent`` ns from ``start`` on.

        A hook that runs at the return of the last reading may remove itself before this looks. It has then
        taken time between that reading and the next one.

        From here to :meth:`before_clock` the garbage collector is off. A call can leave a cycle of objects
        whose finalizer does its work, and fill the collector's count, so that the next few objects that
        Weft creates would start a collection: after this look, before the output is read, without a trace.
        """
        if _gc_is_enabled():
            self._collects = True
            _gc_disable()
        state = self._quick()
        gap = now() - start - spent
        for current, before, name in zip(state, self._quick_state, QUICK_NAMES, strict=True):
            if current is not before:  # its comparison operators could be the candidate's
                self.messages[name] = None
        if any(_getitimer(timer) != (0.0, 0.0) for timer in TIMERS):
            self.messages["a timer that sends a signal"] = None
        # Here too, because a handler or a callback may remove itself once it has done its work.
        self._look_at_handlers()
        self._gaps.append((gap, max(spent, 1)))

    def _look_at_handlers(self) -> None:
        """Compare signal handlers, monitoring tools and callbacks of the collector: a few microseconds."""
        handlers = _handlers()
        for name, before in self._handlers.items():
            # By identity: the comparison operators of a handler are the candidate's.
            if list(map(_id, handlers[name])) != list(map(_id, before)):
                self.messages[name] = None
        if list(map(_id, _gc_callbacks)) != self._callbacks or gc.callbacks is not _gc_callbacks:
            self.messages["a callback of the garbage collector"] = None

    def look(self) -> list[str]:
        """Compare everything that takes little time; return the messages of all hooks found so far."""
        messages = self.messages
        for current, before, name in zip(self._quick(), self._quick_state, QUICK_NAMES, strict=True):
            if current is not before:  # its comparison operators could be the candidate's
                messages[name] = None
        for index in range(_n_function_modes()):
            # torch.set_default_device enters one of these, which an honest file may do.
            if type(_function_mode_at(index)) is not DeviceContext:
                messages["a torch function mode that was left entered"] = None
        if any(_getitimer(timer) != (0.0, 0.0) for timer in TIMERS):
            messages["a timer that sends a signal"] = None
        if _n_audit_hooks[0] != self._audit_hooks:
            messages["an audit hook"] = None
        self._look_at_handlers()
        for label, owner in (*WATCHED, ("torch", torch), ("sys", sys)):
            self._compare_namespace(label, owner)
        if list(map(_id, map(_code_of, self._functions))) != self._code_ids:
            for name, function, code in zip(self._names, self._functions, self._codes, strict=True):
                if function.__code__ is not code:
                    messages[f"other code in {name}"] = None
        if names := self._gap_hooks():
            messages[names] = None
        return list(messages)

    def look_at_all(self) -> list[str]:
        """Compare the slow ones too: profile functions of threads, kernels of torch's operators."""
        for name, now in _slow_state().items():
            if now != self._slow_state[name]:
                self.messages[name] = None
        for name, function, defaults in zip(self._names, self._functions, self._defaults, strict=True):
            if (function.__defaults__, function.__kwdefaults__) != defaults:
                self.messages[f"other default arguments of {name}"] = None
        return self.look()

    def _compare_namespace(self, label: str, owner: Any) -> None:
        """Find attributes that are no longer the stored ones, and new ones that hide an inherited one."""
        before = self._namespaces[label]
        if label in ("torch", "sys"):
            current = {name: getattr(owner, name, None) for name in before}
        else:
            current = dict(_vars(owner))
        ids = tuple(map(_id, current.values()))
        if ids == self._ids.get(label):
            return
        changed = [n for n, value in before.items() if callable(value) and current.get(n) is not value]
        bases = owner.__mro__[1:] if isinstance(owner, type) else ()
        changed += [n for n in current if n not in before and any(n in _vars(base) for base in bases)]
        self._ids[label] = () if changed else ids
        for name in changed:
            if name not in IGNORED:
                self.messages[f"a patched {label}.{name}"] = None

    def _gap_hooks(self) -> str:
        """Return that something runs when the clock has stopped, by the time that it takes."""
        if len(self._gaps) < MIN_GAPS:
            return ""
        gap = statistics.median(gap for gap, _ in self._gaps)
        share = statistics.median(gap / spent for gap, spent in self._gaps)
        if gap <= MAX_GAP_NS or share <= GAP_SHARE:
            return ""
        return f"something that runs for {gap / 1000:.0f} us once the clock has stopped"


QUICK_NAMES = (
    "a profile function (sys.setprofile)",
    "a trace function (sys.settrace)",
    "a torch dispatch mode that was left entered",
    "a function that evaluates Python's frames",
)
IGNORED = ("_",)  # a name that an interactive session or gettext puts into builtins


_n_audit_hooks = [0]  # added since the first monitor was created


def _count_audit_hooks() -> None:
    """Count the audit hooks that are added from now on: Python has no list of them."""
    # On Python 3.12 it adds one when it is imported, as torch.compile does at its first use.
    with suppress(ImportError):
        importlib.import_module("filelock")
    real = sys.addaudithook
    if getattr(real, "__module__", "") == __name__:
        return

    def addaudithook(hook: Callable[[str, tuple[Any, ...]], Any], /) -> None:
        _n_audit_hooks[0] += 1
        real(hook)

    sys.addaudithook = addaudithook  # type: ignore[assignment]


def _frame_evaluation() -> Callable[[], object]:
    """Return the function that says which callback evaluates frames (none in an older torch)."""
    module = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    getter = getattr(module, "get_eval_frame_callback", None)
    return getter or (lambda: None)


def _handlers() -> dict[str, list[object]]:
    """Return the handlers that Python calls between two instructions, by message."""
    monitoring = getattr(sys, "monitoring", None)
    return {
        "a tool of sys.monitoring": [monitoring.get_tool(i) for i in range(MONITORING_TOOLS)]
        if monitoring
        else [],
        "a signal handler": list(map(_getsignal, SIGNALS)),
    }


def _slow_state() -> dict[str, object]:
    """Return the hooks that take longer to read, by message."""
    return {
        "a profile function for threads": (threading.getprofile(), threading.gettrace()),
        "another kernel for an operator of torch": [torch._C._dispatch_dump(name) for name in OPERATORS],
    }


def _functions(namespace: Mapping[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the Python functions of a namespace, which have code of their own."""
    for name, value in namespace.items():
        function = getattr(value, "__func__", value)  # of a method
        function = function.fget if isinstance(function, property) else function
        if isinstance(function, types.FunctionType):
            yield name, function
