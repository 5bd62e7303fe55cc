"""NVML, NVIDIA's management library, opened once; every question may go unanswered.

What a card does not support raises in NVML; here it is None, so that a missing fan or ECC
counter never costs the rest of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from weft.machine import driver


@cache
def library() -> Any | None:
    """The started ``pynvml`` module, or None where the package or NVML itself is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@cache
def handle() -> Any | None:
    """NVML's handle of CUDA's device 0, found by its PCI address.

    NVML counts every card of the machine and does not know CUDA_VISIBLE_DEVICES, so its card 0
    may be another than CUDA's.
    """
    nvml, pci = library(), driver.find().pci
    if nvml is None or pci is None:
        return None
    return ask(nvml.nvmlDeviceGetHandleByPciBusId, pci.encode())


def ask(question: Callable[..., Any], *arguments: Any) -> Any | None:
    """The answer, or None where this card or driver does not know."""
    import pynvml

    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
