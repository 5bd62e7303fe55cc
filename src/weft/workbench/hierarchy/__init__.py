"""The memory hierarchy of this machine, measured: ``measure`` gives plain data, as a record has it.

Latency by pointer chase and bandwidth by streaming reads over working sets of rising size; where a
curve leaves a plateau a level ends. What a launch or a call costs stands beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from weft import machine
from weft.backends import backend_support
from weft.core import Ceilings, WeftError
from weft.workbench.hierarchy.plan import known_sizes
from weft.workbench.hierarchy.result import Figure, Series

__all__ = ["measure"]


def measure(
    device: machine.Device,
    ceilings: Ceilings | None = None,
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure ``device``: ``known`` sizes (bytes), ``series``, ``figures``, ``seconds``, machine.

    ``ceilings``, where they are known, are what the DRAM's figures are held against. ``quick``
    measures fewer sizes, so that the largest level may not be left. ``say`` gets a line a step.
    Raises :class:`WeftError` where this device's toolchain (NVRTC, or numba on a CPU) is missing.
    """
    began = time.perf_counter()
    known = known_sizes(device)
    on_gpu = device.kind == "cuda"
    if why_not := _missing(on_gpu):
        raise WeftError("the hierarchy cannot be measured", got=why_not)
    if on_gpu:
        series, figures = _gpu(device, known, ceilings, quick, say)
    else:
        from weft.workbench.hierarchy import on_cpu

        say("compiling the loops with numba")
        on_cpu.kernels()
        series, figures = on_cpu.measure(device, known, quick, say)
    return {
        "device": device.to_json(),
        "known": known,
        "quick": quick,
        "series": [s.to_json(known) for s in series],
        "figures": [f.to_json() for f in figures],
        "seconds": time.perf_counter() - began,
        "machine": machine.fingerprint(device.kind),
    }


def _missing(on_gpu: bool) -> str:
    """Why the loops cannot be compiled here; empty where they can."""
    if on_gpu:
        return backend_support("cuda", "cuda").reason
    # A CPU's loops are plain njit: whether numba.cuda is simulated does not matter to them.
    return "" if find_spec("numba") else "numba is not installed; pip install numba"


def _gpu(
    device: machine.Device,
    known: dict[str, int],
    ceilings: Ceilings | None,
    quick: bool,
    say: Callable[[str], None],
) -> tuple[list[Series], list[Figure]]:
    import torch

    from weft.workbench.hierarchy import chases, launches, streams

    with torch.random.fork_rng(devices=[0]), torch.cuda.device(0), torch.no_grad():
        series = streams.bandwidths(device, known, quick, say)  # its work steadies the clock
        torch.cuda.empty_cache()
        figures = streams.peaks(series, known) + streams.dram(ceilings, quick, say)
        torch.cuda.empty_cache()
        series = chases.latencies(device, known, quick, say) + series
        torch.cuda.empty_cache()
        figures += launches.overheads(say)
    return series, figures
