"""The memory hierarchy of this machine: latency, bandwidth and call overheads, as plain data.

Latency is measured by pointer chases and bandwidth by streaming reads, both over working sets of
rising size. A level ends where a curve leaves a plateau.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from weft import machine
from weft.backends import backend_support
from weft.core import Ceilings, Interrupted, Log, WeftError, no_log
from weft.lab.hierarchy.curves import Figure, Series, known_sizes

__all__ = ["EXPECTED_SECONDS", "NUM_CURVES", "QUICK_SHARE", "measure"]

EXPECTED_SECONDS = {"cuda": 20.0, "cpu": 60.0}  # of all curves
QUICK_SHARE = 1 / 6  # of them, with fewer sizes
NUM_CURVES = {"cuda": 8, "cpu": 2}


def measure(
    device: machine.Device,
    ceilings: Ceilings | None = None,
    *,
    quick: bool = False,
    log: Log = no_log,
) -> dict[str, Any]:
    """Measure ``device``: ``known`` sizes (bytes), ``series``, ``figures``, ``seconds``, machine.

    ``ceilings``, if known, are compared with the DRAM's bandwidth. ``quick`` measures fewer sizes, so
    the curves may end inside the largest level. ``log`` gets a line for each step. Raises
    :class:`WeftError` if this device's toolchain (NVRTC, or numba on a CPU) is missing, and
    :class:`Interrupted` with the record of the finished curves for a ``KeyboardInterrupt``.
    """
    start = time.perf_counter()
    known = known_sizes(device)
    on_gpu = device.kind == "cuda"
    if reason := _missing_toolchain(on_gpu):
        raise WeftError("the hierarchy cannot be measured", got=reason)
    series: list[Series] = []
    figures: list[Figure] = []

    def record() -> dict[str, Any]:
        return {
            "device": device.to_json(),
            "known": known,
            "quick": quick,
            "series": [s.to_json(known) for s in series],
            "figures": [f.to_json() for f in figures],
            "seconds": time.perf_counter() - start,
            "machine": machine.fingerprint(device.kind),
        }

    try:
        if on_gpu:
            _measure_gpu(device, known, ceilings, quick, log, series, figures)
        else:
            from weft.lab.hierarchy import cpu

            log("compiling the loops with numba")
            cpu.kernels()
            series += cpu.curves(known, quick, log)
            figures += cpu.overheads()
    except KeyboardInterrupt as error:
        raise Interrupted(record()) from error
    return record()


def _missing_toolchain(on_gpu: bool) -> str:
    """Return why the loops cannot be compiled here; empty if they can."""
    if on_gpu:
        return backend_support("cuda", "cuda").reason
    # A CPU's loops are plain njit, so it does not matter whether numba.cuda is simulated.
    return "" if find_spec("numba") else "numba is not installed; pip install numba"


def _measure_gpu(
    device: machine.Device,
    known: dict[str, int],
    ceilings: Ceilings | None,
    quick: bool,
    log: Log,
    series: list[Series],
    figures: list[Figure],
) -> None:
    """Append each curve to ``series`` and the single values to ``figures`` as they are measured."""
    import torch

    from weft.lab.hierarchy import gpu_bandwidth, gpu_latency

    with torch.random.fork_rng(devices=[0]), torch.cuda.device(0), torch.no_grad():
        # Bandwidth comes first: its load brings the clocks to a steady rate before cycles are counted.
        series += gpu_bandwidth.bandwidths(device, known, quick, log)
        torch.cuda.empty_cache()
        figures += gpu_bandwidth.peaks(series, known) + gpu_bandwidth.dram(ceilings, quick, log)
        torch.cuda.empty_cache()
        for number, curve in enumerate(gpu_latency.latencies(device, known, quick, log)):
            series.insert(number, curve)  # latencies come first in the record
        torch.cuda.empty_cache()
        figures += gpu_latency.overheads(log)
