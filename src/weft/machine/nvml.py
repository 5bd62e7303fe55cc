"""NVML, NVIDIA's management library, opened once. Any query may return nothing.

NVML raises for a query that a card does not support; here the answer is None, so that a missing ECC counter
never costs the other values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from weft.machine import driver


@cache
def library() -> Any | None:
    """Return the initialised ``pynvml`` module, or None if the package or NVML is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def count() -> int | None:
    """Return the number of cards of the machine, whatever CUDA sees of them; None if unknown."""
    nvml = library()
    return None if nvml is None else ask(nvml.nvmlDeviceGetCount)


@cache
def handle() -> Any | None:
    """Return NVML's handle of CUDA's device 0."""
    return handle_of(driver.find().pci)


def handle_of(pci: str | None) -> Any | None:
    """Return NVML's handle of the card at a PCI address as CUDA gives it.

    NVML counts every card of the machine and does not know CUDA_VISIBLE_DEVICES, so its card 0
    may be another than CUDA's.
    """
    nvml = library()
    if nvml is None or pci is None:
        return None
    return ask(nvml.nvmlDeviceGetHandleByPciBusId, pci.encode())


def ask(question: Callable[..., Any], *arguments: Any) -> Any | None:
    """Return the answer to a query, or None if this card or driver does not support it."""
    import pynvml

    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
