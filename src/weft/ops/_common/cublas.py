"""Calls of cuBLAS held to the operators' precision contract for the length of one call.

By default PyTorch lets a product of half types that cuBLAS splits along K add its parts in the half
type: a second rounding, and a weaker yardstick. float32 products take the precision that is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class _Switch:
    """A process-wide switch of cuBLAS's precision that has one value at a time.

    PyTorch reads it during a call, on the host, so a value must not change before the call returns. Threads
    that want the same value run at once; a thread that wants another one waits until they have left. The
    first to enter stores the user's value, and the last to leave restores it.

    ``read()`` and ``write(*values)`` are PyTorch's own functions. The attributes of
    ``torch.backends.cuda.matmul`` do the same by Python, which costs the host as much as a small product.
    ``read`` may return a tuple: its first is the switch, and the others are left as the user has them.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[..., Any]) -> None:
        self._read, self._write = read, write
        lock = threading.Lock()
        # Bound once: two calls of each are all that a product pays that no other thread disturbs.
        self._acquire, self._release = lock.acquire, lock.release
        self._left = threading.Condition(lock)
        self._waiting = 0
        self._users = 0
        self._value: Any = None
        self._of_user: tuple[Any, ...] | None = None  # None if the user's value is the one that is wanted
        # While the user's value is what every call wants, calls take no lock: each is an entry of a list,
        # whose append and pop are atomic. The first call that changes the value waits until it is empty.
        self._without_lock: list[None] = []
        self._was_changed = False

    def always_is(self, value: Any) -> bool:
        """True if the user's value is this one, and Weft has never replaced it in this process.

        A call at this value then needs no switch. The other threads of a program whose products have several
        precisions do.
        """
        if self._was_changed:
            return False
        read = self._read()
        return _agrees(read[0] if type(read) is tuple else read, value)

    def enter(self, value: Any) -> None:
        self._acquire()
        try:
            while self._users and self._value != value:
                self._waiting += 1
                try:
                    self._left.wait()
                finally:
                    self._waiting -= 1
            if not self._users:
                read = self._read()
                of_user = read if type(read) is tuple else (read,)
                if _agrees(of_user[0], value):
                    self._of_user = None
                else:
                    self._change(of_user, value)
                self._value = value
            self._users += 1
        finally:
            self._release()

    def _change(self, of_user: tuple[Any, ...], value: Any) -> None:
        self._was_changed = True
        while self._without_lock:
            time.sleep(1e-5)
        self._write(value, *of_user[1:])
        self._of_user = of_user

    def leave(self) -> None:
        self._acquire()
        try:
            self._users -= 1
            if not self._users:
                if self._of_user is not None:
                    self._write(*self._of_user)
                if self._waiting:
                    self._left.notify_all()
        finally:
            self._release()

    def hold(self, function: Callable[..., Any], value: Any) -> Callable[..., Any]:
        """Return ``function`` between :meth:`enter` and :meth:`leave`, which stand in it as they are."""
        acquire, release, read, write = self._acquire, self._release, self._read, self._write
        equals = (value, "none") if value == "ieee" else (value,)
        without_lock = self._without_lock

        def at_value(*arguments: Any) -> Any:
            if not self._was_changed:
                without_lock.append(None)
                try:
                    if not self._was_changed:
                        of_user = read()
                        if (of_user[0] if type(of_user) is tuple else of_user) in equals:
                            return function(*arguments)
                finally:
                    without_lock.pop()
            acquire()
            if self._users:  # of other threads
                release()
                self.enter(value)
                try:
                    return function(*arguments)
                finally:
                    self.leave()
            # enter() and leave() by hand: PyTorch's default for half types is another value, so that each
            # product comes here.
            try:
                of_user = read()
                if type(of_user) is not tuple:
                    of_user = (of_user,)
                if of_user[0] in equals:
                    self._of_user = None
                elif self._was_changed and not without_lock:
                    write(value, *of_user[1:])
                    self._of_user = of_user
                else:
                    self._change(of_user, value)
                self._value, self._users = value, 1
            finally:
                release()
            try:
                return function(*arguments)
            finally:
                acquire()
                try:
                    self._users -= 1
                    if not self._users:
                        if self._of_user is not None:
                            write(*self._of_user)
                        if self._waiting:
                            self._left.notify_all()
                finally:
                    release()

        return at_value


def _agrees(of_user: Any, value: Any) -> bool:
    """True if products are the same at both values: ``none`` (nothing was asked for) is ``ieee``."""
    return of_user == value or (of_user == "none" and value == "ieee")  # type: ignore[no-any-return]


def _reduced_precision_switch(name: str) -> _Switch:
    """Return the switch of a half type, whose second value says if cuBLAS may split a sum along K at all."""
    suffix = f"cublas_allow_{name}_reduced_precision_reduction"
    return _Switch(getattr(torch._C, f"_get_{suffix}"), getattr(torch._C, f"_set_{suffix}"))


FP32_SWITCH = _Switch(
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    partial(torch._C._set_fp32_precision_setter, "cuda", "matmul"),
)
REDUCED_PRECISION_SWITCHES = {
    torch.float16: _reduced_precision_switch("fp16"),
    torch.bfloat16: _reduced_precision_switch("bf16"),
}


def _switch_of(dtype: torch.dtype, precision: str) -> tuple[_Switch, Any]:
    reduced = REDUCED_PRECISION_SWITCHES.get(dtype)
    return (FP32_SWITCH, precision) if reduced is None else (reduced, False)


def is_always_at(x: torch.Tensor, precision: str) -> bool:
    """True if products of ``x``'s dtype are at this precision without a switch: see :class:`_Switch`."""
    switch, value = _switch_of(x.dtype, precision)
    return not x.is_cuda or switch.always_is(value)


def held_at_precision(
    function: Callable[..., Any], x: torch.Tensor, precision: str = "ieee"
) -> Callable[..., Any]:
    """Return ``call_at_precision`` of a function as a function, for arguments like ``x``."""
    if not x.is_cuda:
        return function
    switch, value = _switch_of(x.dtype, precision)
    return switch.hold(function, value)


def call_at_precision(function: Callable[..., Any], x: torch.Tensor, precision: str, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, with cuBLAS held to ``precision`` for ``x``'s dtype.

    ``precision`` is ``ieee`` or ``tf32`` for float32; half types are always summed in float32. Any thread
    may call this at any time. ``function`` must not call it with another precision.
    """
    if not x.is_cuda:
        return function(*arguments)
    switch, value = _switch_of(x.dtype, precision)
    switch.enter(value)
    try:
        return function(*arguments)
    finally:
        switch.leave()
