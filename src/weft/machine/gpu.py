"""Describe CUDA's device 0: limits from the driver, clocks and power from NVML."""

from __future__ import annotations

from typing import Any

from weft.machine import driver, nvml
from weft.machine.query import Device


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
    """CUDA's device 0. What neither the driver nor NVML knows is None."""
    found = driver.find()
    limits: dict[str, Any] = dict(found.attributes)
    major, minor = limits.pop("major", None), limits.pop("minor", None)
    clock, memory_clock = limits.pop("clock_khz", None), limits.pop("memory_clock_khz", None)
    ecc = limits.pop("ecc", None)
    said: dict[str, Any] = {
        # The driver's clocks are the highest ones; NVML, where it is there, replaces them.
        "clock_max_mhz": clock / 1000 if clock else None,
        "memory_clock_max_mhz": memory_clock / 1000 if memory_clock else None,
        "ecc": None if ecc is None else bool(ecc),
    }
    said |= {word: value for word, value in _from_nvml().items() if value is not None}
    return Device(
        kind="cuda",
        name=found.name or "unknown",
        arch="unknown" if major is None or minor is None else f"sm_{major}{minor}",
        units=limits.pop("sms", None),
        memory_bytes=found.memory_bytes,
        driver_cuda=found.cuda,
        count=found.count,
        **limits,
        **said,
    )
