"""What is this machine: query, datasheet, measured ceilings, clocks, fingerprint. No torch here."""

from weft.machine.ceilings import ceilings
from weft.machine.fingerprint import fingerprint
from weft.machine.query import (
    Device,
    default_device,
    gpu_reason,
    has_gpu,
    known_kind,
    l2_bytes,
    query,
)

__all__ = [
    "Device",
    "ceilings",
    "default_device",
    "fingerprint",
    "gpu_reason",
    "has_gpu",
    "known_kind",
    "l2_bytes",
    "query",
]
