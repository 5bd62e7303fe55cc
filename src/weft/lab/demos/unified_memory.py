"""Unified memory: page faults move pages a few at a time; a prefetch moves all of them at once.

    python -m weft.lab.demos.unified_memory

runs the measurement and prints one JSON object: samples in microseconds by side, or the reason why
there are none. The demonstration runs it as a separate process, since a driver that does not serve
page faults (some sandboxes pass a GPU on without them) may kill a process, or hang.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.backends.nvrtc import CudaSource
from weft.core.errors import WeftError
from weft.core.log import Log
from weft.lab.demos.demo import ARITHMETIC, BAD, GOOD, SIDES, Demo, Fact, Measurement, Variant

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("twice",))
N, BLOCK, ROUNDS = 1 << 24, 256, 10
MANAGED_BYTES = 4 * N  # 64 MiB
MAX_MANAGED_BYTES = 256 << 20
FREE_FACTOR = 5  # this many times MANAGED_BYTES must be free on the device: x, y, and the check's tensors
TIMEOUT = 120.0  # seconds; a usual run takes about 10, most of it importing torch


def _facts(arch: str) -> Sequence[Fact]:
    size = MANAGED_BYTES / (1 << 20)
    return [Fact(label="MiB that must move to the GPU", bad=size, good=size, source=ARITHMETIC)]


def refusal(free: int, concurrent: bool) -> str:
    """Return why it cannot run on a device with so many free bytes; empty if it can."""
    if MANAGED_BYTES > MAX_MANAGED_BYTES or free < FREE_FACTOR * MANAGED_BYTES:
        needed = FREE_FACTOR * MANAGED_BYTES >> 20
        return f"{needed} MiB must be free on the device, and {free >> 20} MiB are"
    if not concurrent:
        return "host and device cannot share managed pages here (a Windows or WSL driver)"
    return ""


def _measure(log: Log) -> Mapping[str, Measurement]:
    """Run :func:`measure` in a separate process and return its times."""
    from weft.workbench.explain.ncu.process import environment

    log("unified-memory: measuring in a separate process")
    command = [sys.executable, "-m", "weft.lab.demos.unified_memory"]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise WeftError(f"managed memory did not answer within {TIMEOUT:.0f} s") from error
    if done.returncode:
        end = " ".join(done.stderr.split())[-200:]
        raise WeftError(f"managed memory failed (exit code {done.returncode})", got=end)
    return measurements(json.loads(done.stdout))


def measurements(reply: Mapping[str, Any]) -> Mapping[str, Measurement]:
    """Convert the process's JSON to measurements; raises :class:`WeftError` if it refused."""
    if "refused" in reply:
        raise WeftError(str(reply["refused"]))
    if "wrong" in reply:
        return {BAD: Measurement(wrong=str(reply["wrong"]))}
    return {side: Measurement(samples=tuple(reply[side])) for side in SIDES}


def _check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call's result; raises :class:`WeftError` for an error status."""
    status, *values = result
    if int(status) != 0:
        raise WeftError("managed memory cannot be used here", got=f"{status!r}")
    return values[0] if values else None


@contextmanager
def managed_allocation(driver: Any) -> Iterator[int]:
    """Yield the address of ``MANAGED_BYTES`` bytes of managed memory."""
    attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    pointer = _check(driver.cuMemAllocManaged(MANAGED_BYTES, attach))
    try:
        yield int(pointer)
    finally:
        _check(driver.cuMemFree(pointer))


def prefetch(driver: Any, pointer: int, device: int | None, stream: int) -> None:
    """Prefetch all pages to a device, or to the host (None), in the stream's order."""
    kinds = driver.CUmemLocationType
    location = driver.CUmemLocation()
    location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if device is None else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device or 0
    # CUDA 13's bindings have the second version under the plain name.
    call = getattr(driver, "cuMemPrefetchAsync_v2", driver.cuMemPrefetchAsync)
    _check(call(driver.CUdeviceptr(pointer), MANAGED_BYTES, location, 0, driver.CUstream(stream)))


def measure() -> dict[str, Any]:
    """Verify both variants and time them with events around the kernel and the prefetch.

    The pages go back to the host before each sample.
    """
    import torch
    from cuda.bindings import driver

    from weft.lab.demos.run import SEED, interleaved, mismatch

    y = torch.empty(N, device="cuda")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    device = torch.cuda.current_device()
    concurrent = bool(_check(driver.cuDeviceGetAttribute(attribute, _check(driver.cuDeviceGet(device)))))
    if reason := refusal(torch.cuda.mem_get_info()[0], concurrent):
        return {"refused": reason}
    host = torch.rand(N, generator=torch.Generator().manual_seed(SEED))
    expected = 2 * host.double().cuda()
    stream = torch.cuda.current_stream().cuda_stream
    kernel = SOURCE["twice"]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with managed_allocation(driver) as pointer:
        ctypes.memmove(pointer, host.data_ptr(), MANAGED_BYTES)

        def sample(side: str) -> float:
            prefetch(driver, pointer, None, stream)
            torch.cuda.synchronize()
            begin.record()
            if side == GOOD:
                prefetch(driver, pointer, device, stream)
            kernel(N // BLOCK, BLOCK, pointer, y)
            end.record()
            torch.cuda.synchronize()
            return 1000.0 * begin.elapsed_time(end)

        for side in SIDES:
            y.fill_(float("nan"))  # so that elements the kernel did not write are wrong
            sample(side)
            if wrong := mismatch(y, expected, 0.0):
                return {"wrong": f"{side}: {wrong}"}
        return dict(interleaved(SIDES, sample, ROUNDS))


DEMO = Demo(
    name="unified-memory",
    sentence="managed memory should be prefetched, not fetched by page faults",
    source=SOURCE,
    bad=Variant(kernel="twice", how="a page moves when it is first touched"),
    good=Variant(kernel="twice", how="one prefetch before the kernel, timed with it"),
    expected=2.5,
    because=(
        "A prefetch moves all pages at the bus's bandwidth, 25 to 50 GB/s. A fault stops the warp, "
        "goes to the host's driver and returns with a few pages, 10 to 20 us each, many of them one "
        "after another: 10 to 20 GB/s. About 2.5 times as long."
    ),
    at_least=1.2,
    see=(
        "The same bytes cross the bus, and the kernel is the same. The time itself is the evidence. "
        "Plain device memory needs neither."
    ),
    facts=_facts,
    clock="cold: all pages are on the host before each sample; events around prefetch and kernel",
    measure=_measure,
)


if __name__ == "__main__":
    try:
        print(json.dumps(measure()))
    except WeftError as error:
        print(json.dumps({"refused": str(error)}))
    sys.exit(0)
