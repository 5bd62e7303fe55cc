"""A GPU's bandwidths: streaming reads from L1, shared memory, L2 and DRAM; see stream.cu."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Ceilings
from weft.machine import Device
from weft.machine.measure_gpu import best_median, fitting
from weft.workbench.hierarchy.chases import all_l1
from weft.workbench.hierarchy.plan import GIB, KIB, MIB, sizes
from weft.workbench.hierarchy.plateaus import sweep
from weft.workbench.hierarchy.result import BANDWIDTH, Figure, Series

SOURCE = CudaSource(
    file=Path(__file__).with_name("stream.cu"),
    kernels=("read_l1", "read_shared", "read_all", "copy_all"),
    label="hierarchy",
)
THREADS, UNROLL, VECTOR = 1024, 4, 16  # of stream.cu: threads a block, loads in flight, bytes
WARP = 32 * VECTOR  # bytes: a warp's read; sets are multiples, so that none wraps around inside one
ROUNDS = 512  # of UNROLL loads a thread: 32 MiB an SM, a tenth of a millisecond from the L1
CALL = 2 * GIB  # bytes that a call of read_all moves, at least: a launch is nothing beside it
CALLS = 8
COPY_THREADS = (128, 256, 512)  # a block; which is fastest differs from card to card
BANKS = 128.0  # bytes a cycle: 32 banks of 4 bytes
GUIDE = "32 banks of 4 bytes"
Say = Callable[[str], None]


class Streams:
    """Memory to read on the current GPU."""

    def __init__(self, device: Device, most: int) -> None:
        self.sms = device.units or torch.cuda.get_device_properties(0).multi_processor_count
        free, _ = torch.cuda.mem_get_info()
        self.unit = self.sms * THREADS * VECTOR  # bytes: one vector for each thread
        self.most = min(most, free // 4) // self.unit * self.unit
        self.data = torch.randn(self.most // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.zeros(1, dtype=torch.float32, device="cuda")
        self.cycles = torch.zeros(self.sms, dtype=torch.int64, device="cuda")
        all_l1(SOURCE["read_l1"])

    def per_sm(self, kernel: str, nbytes: int) -> float:
        """Bytes a cycle of one SM, all of them reading the same ``nbytes``: the median SM's, of
        three launches the median."""
        vectors = nbytes // VECTOR
        warm = -(-vectors // (THREADS * UNROLL)) + 1
        shared = nbytes if kernel == "read_shared" else 0
        seen = []
        for _ in range(3):
            arguments = (self.data, vectors, warm, ROUNDS, self.sink, self.cycles)
            SOURCE[kernel](self.sms, THREADS, *arguments, shared=shared)
            seen.append(statistics.median(self.cycles.tolist()))
        return ROUNDS * UNROLL * THREADS * VECTOR / statistics.median(seen)

    def everywhere(self, nbytes: int) -> float:
        """Bytes a second of all SMs reading ``nbytes`` between them, over and over."""
        passes = max(1, -(-CALL // nbytes))
        arguments = (self.data, nbytes // VECTOR, passes, self.sink)
        call = partial(SOURCE["read_all"], self.sms, THREADS, *arguments)
        return passes * nbytes / best_median(torch, call, calls=CALLS)

    def cost(self, kernel: str, nbytes: int) -> float:
        """Cycles a byte of one SM, or seconds a byte of all."""
        all_of_them = kernel == "read_all"
        return 1 / (self.everywhere(nbytes) if all_of_them else self.per_sm(kernel, nbytes))


def bandwidths(device: Device, known: dict[str, int], quick: bool, say: Say) -> list[Series]:
    """By working set: of an SM from its L1 and from shared memory; of all SMs from L2 and DRAM."""
    streams = Streams(device, 256 * MIB if quick else GIB)
    l1 = [known["L1"]] if "L1" in known else []
    l2 = [known["L2"] // part for part in (1, 2)] if "L2" in known else []
    most = (device.shared_per_block_optin or 48 * KIB) // WARP * WARP
    per_cycle, per_second = "B/cycle/SM", "B/s"
    plans = (
        ("read_l1", "an SM, through L1", per_cycle, ("L1",), sizes(4 * KIB, 4 * MIB, l1, WARP)),
        ("read_shared", "an SM, shared memory", per_cycle, (), sizes(4 * KIB, most, (), WARP)),
        (
            "read_all",
            "all SMs, past L1",
            per_second,
            ("L2",),
            sizes(streams.unit, streams.most, l2, streams.unit),
        ),
    )
    series = []
    for key, label, unit, levels, planned in plans:
        say(f"bandwidth, {label}: {planned[0] / KIB:.4g} KiB to {planned[-1] / MIB:.4g} MiB")
        step = streams.unit if key == "read_all" else WARP
        found, costs = sweep(partial(streams.cost, key), planned, step)
        series.append(
            Series(
                key=key,
                label=label,
                kind=BANDWIDTH,
                unit=unit,
                levels=levels,
                sizes=tuple(found),
                values=tuple(1 / c for c in costs),
            )
        )
    return series


def dram(ceilings: Ceilings | None, quick: bool, say: Say) -> list[Figure]:
    """Read and copy of 1 GiB and more, as much as fits easily, beside the measured ceilings."""
    free, _ = torch.cuda.mem_get_info()
    read = copy = 0.0
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    unit = sms * THREADS * VECTOR
    for buffer in fitting(free)[: 1 if quick else None]:
        nbytes = buffer // unit * unit
        say(f"bandwidth, DRAM: read and copy of {nbytes / GIB:.3g} GiB")
        source = torch.randn(nbytes // 4, dtype=torch.float32, device="cuda")
        target = torch.empty_like(source)
        sink = torch.zeros(1, dtype=torch.float32, device="cuda")
        vectors = nbytes // VECTOR
        reading = partial(SOURCE["read_all"], sms, THREADS, source, vectors, 1, sink)
        read = max(read, nbytes / best_median(torch, reading))
        for threads in COPY_THREADS:
            arguments = (source, target, vectors)
            copying = partial(SOURCE["copy_all"], -(-vectors // threads), threads, *arguments)
            copy = max(copy, 2 * nbytes / best_median(torch, copying))
        if not torch.equal(source[-unit:], target[-unit:]):
            raise RuntimeError("the copy did not arrive")
        del source, target
    by = "the measured ceiling"
    told = {"read": (read, "DRAM, read"), "copy": (copy, "DRAM, copy (read + written)")}
    return [
        Figure(
            key=f"dram_{word}",
            label=label,
            value=reached,
            unit="B/s",
            expected=getattr(ceilings, word) if ceilings else None,
            by=by if ceilings else "",
        )
        for word, (reached, label) in told.items()
    ]


def peaks(series: list[Series], known: dict[str, int]) -> list[Figure]:
    """What an SM reads a cycle at best from shared memory and L1, beside what the banks give; and
    the most shared memory that a block could read, beside what an SM has."""
    labels = {"read_l1": "L1, read by an SM", "read_shared": "shared memory, read by an SM"}
    walked = max(s.sizes[-1] for s in series if s.key == "read_shared")
    room = Figure(
        key="shared_room",
        label="shared memory, the most that a block read",
        value=walked,
        unit="B",
        expected=known.get("shared"),
        by="the driver, for an SM",
    )
    return [room] + [
        Figure(
            key=f"peak_{s.key}",
            label=labels[s.key],
            value=max(s.values),
            unit=s.unit,
            expected=BANKS,
            by=GUIDE,
        )
        for s in series
        if s.key in labels
    ]
