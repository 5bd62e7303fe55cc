"""Devices of a call: all of its tensors are on one, which is current while kernels are launched.

A kernel is launched in the current device's context and on its current stream, whatever device the pointers
belong to. The dispatch therefore makes the tensors' device the current one around an implementation that
launches kernels itself, so that no implementation has to. PyTorch's own calls do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from weft.core import WeftError

NO_GPU = -1  # the index of a tensor that is on no GPU, as Tensor.get_device returns it


def _no_device() -> int:
    return NO_GPU


# The cheapest read of the current device. torch.cuda.current_device also checks in each call that CUDA is
# initialised, which it is if there is a tensor on a GPU. A PyTorch without CUDA has no such function.
current_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_device)


def index_of(tensors: Sequence[Any]) -> int:
    """Return the index of the GPU that the first of these tensors is on, or ``NO_GPU``."""
    return _index(next((x.device for x in tensors if x is not None), None))


def _index(device: torch.device | None) -> int:
    return NO_GPU if device is None or device.type != "cuda" else device.index


def call_on(index: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called while the GPU ``index`` is the current device."""
    if index == NO_GPU or index == current_index():
        return function(*arguments)
    with torch.cuda.device(index):
        return function(*arguments)


def on_device_of_arguments(operator: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` for registration as ``weft::operator`` on GPUs.

    The returned function refuses tensors of several devices, and makes the device of its tensors, which may
    be in lists, the current one.
    """

    def run(*arguments: Any) -> Any:
        return call_on(_index(common_device(operator, arguments)), kernel, *arguments)

    return run


def common_device(operator: str, arguments: Sequence[Any]) -> torch.device | None:
    """Return the device of all tensors, also in lists, among the arguments of ``weft::operator``.

    It is None if there is no tensor. Raises :class:`WeftError` if tensors are on several devices.
    """
    first: tuple[tuple[int, int | None], torch.device] | None = None
    for position, argument in enumerate(arguments):
        is_list = isinstance(argument, list | tuple)
        for i, x in enumerate(argument if is_list else (argument,)):
            if not isinstance(x, torch.Tensor):
                continue
            index = (position, i if is_list else None)
            if first is None:
                first = (index, x.device)
            elif x.device != first[1]:
                name, other_name = (_argument_name(operator, *n) for n in (first[0], index))
                raise mixed_devices(operator, name, other_name, first[1], x.device)
    return None if first is None else first[1]


def mixed_devices(
    where: str, name: str, other_name: str, device: torch.device, other_device: torch.device
) -> WeftError:
    """Return the error for two tensors of one call that are on two devices."""
    return WeftError(
        f"{where}: {name} and {other_name} on one device",
        expected=device,
        got=f"{other_name} on {other_device}",
        hint=f"move one of them: {other_name}.to({str(device)!r})",
    )


def _argument_name(operator: str, position: int, index_in_list: int | None) -> str:
    """Return the name that an argument has in the schema of ``weft::operator``."""
    name = getattr(torch.ops.weft, operator).default._schema.arguments[position].name
    return name if index_in_list is None else f"{name}[{index_in_list}]"


@cache
def architecture(index: int) -> str:
    """Return the architecture of a GPU, such as ``sm_90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
