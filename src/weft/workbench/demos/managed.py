"""The process that uses managed memory: what goes wrong there goes wrong there alone.

    python -m weft.workbench.demos.managed

Prints one JSON object: samples in microseconds by side, or why there are none. A driver that does
not serve page faults (some sandboxes pass a GPU on without them) may kill a process, or hang.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.core.errors import WeftError
from weft.workbench.demos.demo import GOOD, SIDES
from weft.workbench.demos.unified_memory import BLOCK, MANAGED, ROUNDS, SOURCE, N, refusal


def _ok(answer: tuple[Any, ...]) -> Any:
    status, *rest = answer
    if int(status) != 0:
        raise WeftError("managed memory cannot be used here", got=f"{status!r}")
    return rest[0] if rest else None


@contextmanager
def allocated(driver: Any) -> Iterator[int]:
    """The address of ``MANAGED`` bytes of managed memory."""
    pointer = _ok(
        driver.cuMemAllocManaged(MANAGED, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value)
    )
    try:
        yield int(pointer)
    finally:
        _ok(driver.cuMemFree(pointer))


def move(driver: Any, pointer: int, device: int | None, stream: int) -> None:
    """Prefetch all pages to a device, or to the host (None), in the stream's order."""
    kinds = driver.CUmemLocationType
    there = kinds.CU_MEM_LOCATION_TYPE_DEVICE
    place = driver.CUmemLocation()
    place.type = kinds.CU_MEM_LOCATION_TYPE_HOST if device is None else there
    place.id = device or 0
    # CUDA 13's bindings have the second version under the plain name.
    prefetch = getattr(driver, "cuMemPrefetchAsync_v2", driver.cuMemPrefetchAsync)
    _ok(prefetch(driver.CUdeviceptr(pointer), MANAGED, place, 0, driver.CUstream(stream)))


def measure() -> dict[str, Any]:
    """Events around the kernel, and the prefetch where there is one; the pages go back to the
    host before each sample. Both answers are looked at first."""
    import torch
    from cuda.bindings import driver

    from weft.workbench.demos.taking import SEED, differs, interleaved

    y = torch.empty(N, device="cuda")
    known = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    here = torch.cuda.current_device()
    shared = bool(_ok(driver.cuDeviceGetAttribute(known, _ok(driver.cuDeviceGet(here)))))
    if why := refusal(torch.cuda.mem_get_info()[0], shared):
        return {"refused": why}
    host = torch.rand(N, generator=torch.Generator().manual_seed(SEED))
    wanted = 2 * host.double().cuda()
    stream = torch.cuda.current_stream().cuda_stream
    kernel = SOURCE["twice"]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with allocated(driver) as pointer:
        ctypes.memmove(pointer, host.data_ptr(), MANAGED)

        def sample(side: str) -> float:
            move(driver, pointer, None, stream)
            torch.cuda.synchronize()
            begin.record()
            if side == GOOD:
                move(driver, pointer, here, stream)
            kernel(N // BLOCK, BLOCK, pointer, y)
            end.record()
            torch.cuda.synchronize()
            return 1000.0 * begin.elapsed_time(end)

        for side in SIDES:
            y.fill_(float("nan"))
            sample(side)
            if wrong := differs(y, wanted, 0.0):
                return {"wrong": f"{side}: {wrong}"}
        return dict(interleaved(SIDES, sample, ROUNDS))


if __name__ == "__main__":
    try:
        print(json.dumps(measure()))
    except WeftError as error:
        print(json.dumps({"refused": str(error)}))
    sys.exit(0)
