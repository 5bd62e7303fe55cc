"""Calls of cuBLAS held to the operators' precision contract for the length of one call.

By default PyTorch lets a product of half types that cuBLAS splits along K add its parts in the half
type: a second rounding, and a weaker yardstick. float32 products take the precision that is asked for.
"""

from __future__ import annotations

import threading
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
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._users = 0
        self._value: Any = None
        self._of_user: tuple[Any, ...] = ()
        self._was_changed = False

    def always_is(self, value: Any) -> bool:
        """True if the user's value is this one, and Weft has never replaced it in this process.

        A call at this value then needs no switch. The other threads of a program whose products have several
        precisions do.
        """
        return not self._was_changed and _agrees(_as_tuple(self._read())[0], value)

    def enter(self, value: Any) -> None:
        with self._lock:
            while self._users and self._value != value:
                self._left.wait()
            if not self._users:
                self._of_user = _as_tuple(self._read())
                self._value = value
                if not _agrees(self._of_user[0], value):
                    self._was_changed = True
                    self._write(value, *self._of_user[1:])
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                if not _agrees(self._of_user[0], self._value):
                    self._write(*self._of_user)
                self._left.notify_all()


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return values if type(values) is tuple else (values,)


def _agrees(of_user: Any, value: Any) -> bool:
    """True if products are the same at both values: ``none`` (nothing was asked for) is ``ieee``."""
    return bool(of_user == value or (of_user == "none" and value == "ieee"))


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
    enter, leave = switch.enter, switch.leave

    def held(*arguments: Any) -> Any:
        enter(value)
        try:
            return function(*arguments)
        finally:
            leave()

    return held


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
