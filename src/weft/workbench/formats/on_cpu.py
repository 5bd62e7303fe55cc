"""Files that say ``cuda`` run on a machine without one: the device they name becomes the CPU.

Nothing is hidden from the reader: a verdict that was reached this way says so. What needs a real
GPU (a launch, a stream, a driver call) still fails, and is said to need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
NOTE = "judged on the CPU: where the files say cuda, the CPU was meant"


def _moved(value: Any) -> Any:
    """``cpu`` where a value names a CUDA device, else the value."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func == _IS_CUDA:
            return True  # it stands for a GPU's tensor: `assert x.is_cuda` must hold
        kwargs = {k: _moved(v) for k, v in (kwargs or {}).items()}
        return func(*(_moved(a) for a in args), **kwargs)


class _Generator(torch.Generator):
    """A generator that is the CPU's, whatever device is named."""

    def __new__(cls, device: object = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


@contextmanager
def on_cpu() -> Iterator[None]:
    """While entered, CUDA devices that are named mean the CPU."""
    with _OnCpu():
        yield


@contextmanager
def generating_on_cpu() -> Iterator[None]:
    """:func:`on_cpu` for a file's generator of inputs, whose random generators are the CPU's too.

    ``torch.Generator`` is a type and no function, so that only a replacement reaches it. It stands
    while inputs are drawn, and only then.
    """
    own = torch.Generator
    torch.Generator = _Generator  # type: ignore[misc]
    try:
        with _OnCpu():
            yield
    finally:
        torch.Generator = own  # type: ignore[misc]
