"""Calls of cuBLAS held to the operators' precision contract for the length of one call.

By default PyTorch lets a product of half types that cuBLAS splits along K add its parts in the half
type: a second rounding, and a weaker yardstick. float32 products take the precision that is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class _Switch:
    """A process-wide switch of ``torch.backends.cuda.matmul`` that has one value at a time.

    PyTorch reads it during a call, on the host, so a value must not change before the call returns. Threads
    that want the same value run at once; a thread that wants another one waits until they have left. The
    first to enter stores the user's value, and the last to leave restores it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._condition = threading.Condition()
        self._users = 0
        self._value: Any = None
        self._of_user: Any = None

    def enter(self, value: Any) -> None:
        switches = torch.backends.cuda.matmul
        with self._condition:
            while self._users and self._value != value:
                self._condition.wait()
            if not self._users:
                self._of_user, self._value = getattr(switches, self.name), value
                if self._of_user != value:  # setting it costs host time
                    setattr(switches, self.name, value)
            self._users += 1

    def leave(self) -> None:
        with self._condition:
            self._users -= 1
            if not self._users:
                if self._of_user != self._value:
                    setattr(torch.backends.cuda.matmul, self.name, self._of_user)
                self._condition.notify_all()


FP32_SWITCH = _Switch("fp32_precision")
REDUCED_PRECISION_SWITCHES = {
    torch.float16: _Switch("allow_fp16_reduced_precision_reduction"),
    torch.bfloat16: _Switch("allow_bf16_reduced_precision_reduction"),
}


def call_at_precision(function: Callable[..., Any], x: torch.Tensor, precision: str, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, with cuBLAS held to ``precision`` for ``x``'s dtype.

    ``precision`` is ``ieee`` or ``tf32`` for float32; half types are always summed in float32. Any thread
    may call this at any time. ``function`` must not call it with another precision.
    """
    if not x.is_cuda:
        return function(*arguments)
    reduced = REDUCED_PRECISION_SWITCHES.get(x.dtype)
    switch, value = (FP32_SWITCH, precision) if reduced is None else (reduced, False)
    switch.enter(value)
    try:
        return function(*arguments)
    finally:
        switch.leave()
