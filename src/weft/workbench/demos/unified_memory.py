"""Unified memory: pages that lie elsewhere come fault by fault; a prefetch brings all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.backends.nvrtc import CudaSource
from weft.core.errors import WeftError
from weft.workbench.demos.demo import ARITHMETIC, BAD, SIDES, Demo, Fact, Say, Taken, Way

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("twice",))
N, BLOCK, ROUNDS = 1 << 24, 256, 10
MANAGED = 4 * N  # bytes, 64 MiB: all the managed memory that there is
MOST = 256 << 20  # and never more than this
ROOM = 5  # times as much must be free on the device: x, y, and what the check takes
TIMEOUT = 120.0  # seconds; importing torch takes most of what is usual, some 10


def _facts(arch: str) -> Sequence[Fact]:
    size = MANAGED / (1 << 20)
    return [Fact(label="MiB that must move to the GPU", bad=size, good=size, source=ARITHMETIC)]


def refusal(free: int, concurrent: bool) -> str:
    """Why it cannot be shown on a device with so many bytes free; empty where it can."""
    if MANAGED > MOST or free < ROOM * MANAGED:
        return f"{ROOM * MANAGED >> 20} MiB must be free on the device, and {free >> 20} MiB are"
    if not concurrent:
        return "host and device cannot share managed pages here (a Windows or WSL driver)"
    return ""


def _take(say: Say) -> Mapping[str, Taken]:
    """The times that :mod:`managed` finds in a process of its own."""
    from weft.workbench.ncu.running import environment

    say("unified-memory: in a process of its own")
    command = [sys.executable, "-m", "weft.workbench.demos.managed"]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise WeftError(f"managed memory gave no answer within {TIMEOUT:.0f} s") from error
    if done.returncode:
        end = " ".join(done.stderr.split())[-200:]
        raise WeftError(f"managed memory failed (exit code {done.returncode})", got=end)
    return told(json.loads(done.stdout))


def told(said: Mapping[str, Any]) -> Mapping[str, Taken]:
    """The times in what the process printed; raises :class:`WeftError` where it refused."""
    if "refused" in said:
        raise WeftError(str(said["refused"]))
    if "wrong" in said:
        return {BAD: Taken(wrong=str(said["wrong"]))}
    return {side: Taken(samples=tuple(said[side])) for side in SIDES}


DEMO = Demo(
    name="unified-memory",
    sentence="managed memory should be prefetched, not fetched by page faults",
    source=SOURCE,
    bad=Way(kernel="twice", how="each page comes when it is first touched"),
    good=Way(kernel="twice", how="one prefetch before the kernel, timed with it"),
    expected=2.5,
    because=(
        "A prefetch moves pages in one go, at what the bus gives, 25 to 50 GB/s. A fault stops the "
        "warp, goes to the host's driver and comes back with some pages, 10 to 20 us each, many of "
        "them one after another: 10 to 20 GB/s. About 2.5 times as long."
    ),
    at_least=1.2,
    see=(
        "The same bytes cross the bus, and the kernel is the same. Here the time itself is the "
        "counter. Plain device memory would need neither."
    ),
    facts=_facts,
    clock="cold: all pages lie on the host before each sample; events around prefetch and kernel",
    take=_take,
)
