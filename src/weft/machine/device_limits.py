"""Limits of the GPU that a tensor is on, as launch configurations need them.

Each function takes the tensor's ``torch.device``. A CPU device stands for an interpreter or emulator,
where a small grid makes each program take several tiles. A meta device stands for the target of a dry
run (``weft inspect``), whose properties differ from call to call and are therefore never cached.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TMA_CAPABILITY = (9, 0)  # the first with the tensor memory accelerator, clusters and 227 KiB a block
TMA_SMEM_PER_BLOCK = 227 << 10
WGMMA_CAPABILITY = (9, 0)  # the only one: later chips have other tensor-core instructions


def num_sms(device: torch.device, *, interpreted: int = 1) -> int:
    """Number of SMs (streaming multiprocessors) of ``device``; ``interpreted`` for a CPU device."""
    if device.type == "cpu":
        return interpreted
    return int(_properties(device).multi_processor_count)


def smem_per_sm(device: torch.device) -> int:
    """Shared memory of one SM in bytes, for all its blocks together; 0 for a CPU device."""
    if device.type == "cpu":
        return 0
    return int(_properties(device).shared_memory_per_multiprocessor)


def smem_per_block(device: torch.device) -> float:
    """Shared memory that a block may opt in to, in bytes; unlimited unless ``device`` is a GPU."""
    if device.type != "cuda":
        return float("inf")
    return float(_properties(device).shared_memory_per_block_optin)


def has_tma(device: torch.device) -> bool:
    """True if ``device`` has the tensor memory accelerator and 227 KiB of shared memory for one block."""
    if device.type == "cpu":
        return False
    properties = _properties(device)
    capability = (properties.major, properties.minor)
    return capability >= TMA_CAPABILITY and properties.shared_memory_per_block_optin >= TMA_SMEM_PER_BLOCK


def has_wgmma(device: torch.device) -> bool:
    """True if ``device`` multiplies by wgmma, from 227 KiB of shared memory for one block."""
    if not has_tma(device):
        return False
    properties = _properties(device)
    return (properties.major, properties.minor) == WGMMA_CAPABILITY


def _properties(device: torch.device) -> Any:
    if device.type == "cuda":
        return _cached_properties(device)
    import torch

    return torch.cuda.get_device_properties(device)


@cache
def _cached_properties(device: torch.device) -> Any:
    import torch

    return torch.cuda.get_device_properties(device)
