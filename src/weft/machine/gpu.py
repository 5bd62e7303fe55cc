"""Description of CUDA's device 0: limits from the driver, clocks and power from NVML."""

from __future__ import annotations

from typing import Any

from weft.machine import driver, nvml
from weft.machine.device import Device


def _from_nvml() -> dict[str, Any]:
    lib, handle = nvml.library(), nvml.handle()
    if lib is None or handle is None:
        return {}
    sm, memory = lib.NVML_CLOCK_SM, lib.NVML_CLOCK_MEM
    version = nvml.ask(lib.nvmlSystemGetDriverVersion)
    ecc = nvml.ask(lib.nvmlDeviceGetEccMode, handle)
    power = nvml.ask(lib.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "clock_mhz": nvml.ask(lib.nvmlDeviceGetClockInfo, handle, sm),
        "clock_max_mhz": nvml.ask(lib.nvmlDeviceGetMaxClockInfo, handle, sm),
        "memory_clock_mhz": nvml.ask(lib.nvmlDeviceGetClockInfo, handle, memory),
        "memory_clock_max_mhz": nvml.ask(lib.nvmlDeviceGetMaxClockInfo, handle, memory),
        "ecc": None if ecc is None else bool(ecc[0]),
        "power_limit_w": None if power is None else power / 1000,
        "driver": version.decode() if isinstance(version, bytes) else version,
    }


def describe() -> Device:
    """Describe CUDA's device 0. A field that neither the driver nor NVML knows is None."""
    first = driver.find()
    limits: dict[str, Any] = dict(first.attributes)
    for part in ("major", "minor"):  # in arch
        limits.pop(part, None)
    clock, memory_clock = limits.pop("clock_khz", None), limits.pop("memory_clock_khz", None)
    ecc = limits.pop("ecc", None)
    state: dict[str, Any] = {
        # The driver reports the highest clocks; NVML, if present, replaces them with the current ones.
        "clock_max_mhz": clock / 1000 if clock else None,
        "memory_clock_max_mhz": memory_clock / 1000 if memory_clock else None,
        "ecc": None if ecc is None else bool(ecc),
    }
    state |= {key: value for key, value in _from_nvml().items() if value is not None}
    return Device(
        kind="cuda",
        name=first.name or "unknown",
        arch=first.arch or "unknown",
        units=limits.pop("sms", None),
        memory_bytes=first.memory_bytes,
        driver_cuda=first.cuda,
        count=first.count,
        **limits,
        **state,
    )
