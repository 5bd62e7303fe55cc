"""This machine: device query, datasheet, measured ceilings, clocks, fingerprint. No torch at import."""

from weft.machine.ceilings import ceilings
from weft.machine.device import Device
from weft.machine.fingerprint import fingerprint
from weft.machine.query import (
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
