"""Clocks, power, temperature and throttling, read during a measurement (from NVML)."""

from __future__ import annotations

from typing import Any

from weft.machine import nvml
from weft.machine.query import known_kind

# nvmlClocksEventReasons, NVML's bit mask of what holds the clock down (nvml.h).
REASONS = {
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
}
# An idle card, and clocks that somebody chose (application clocks, display), are no throttling.
NOT_THROTTLING = 0x001 | 0x002 | 0x100


def throttle_words(mask: int) -> list[str]:
    """The reasons in NVML's mask as words; a bit that is not known here is named by its value.

    >>> throttle_words(0x1 | 0x4)
    ['sw_power_cap']
    """
    rest = mask & ~NOT_THROTTLING
    words = []
    for bit in (1 << i for i in range(rest.bit_length())):
        if rest & bit:
            words.append(REASONS.get(bit, f"reason_{bit:#x}"))
    return words


class Sampler:
    """Reads a GPU's state: ``Sampler().read()`` beside every round of a measurement.

    A reading takes well under a millisecond and never touches CUDA's queue. On a CPU, and where
    NVML is missing, a reading is empty.
    """

    def __init__(self, kind: str | None = None) -> None:
        self._handle = nvml.handle() if known_kind(kind) == "cuda" else None
        self._nvml = nvml.library() if self._handle is not None else None

    def read(self) -> dict[str, Any]:
        """``sm_mhz``, ``mem_mhz``, ``power_w``, ``temp_c`` (None where the card does not tell)
        and ``throttle``, a list of words, empty where nothing holds the clock down."""
        lib = self._nvml
        if lib is None:
            return {}
        power = nvml.ask(lib.nvmlDeviceGetPowerUsage, self._handle)
        # nvmlDeviceGetCurrentClocksEventReasons under its older name, which old drivers know too.
        mask = nvml.ask(lib.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        return {
            "sm_mhz": nvml.ask(lib.nvmlDeviceGetClockInfo, self._handle, lib.NVML_CLOCK_SM),
            "mem_mhz": nvml.ask(lib.nvmlDeviceGetClockInfo, self._handle, lib.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000,
            "temp_c": nvml.ask(lib.nvmlDeviceGetTemperature, self._handle, lib.NVML_TEMPERATURE_GPU),
            "throttle": throttle_words(mask or 0),
        }

    def joules(self) -> float | None:
        """Return the energy that the card has used since its driver was loaded; None if it does not tell.

        NVML does not say how often the counter is updated: take differences over a second or more.
        """
        if self._nvml is None:
            return None
        millijoules = nvml.ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1000
