"""A GPU's bandwidths: streaming reads from L1, shared memory, L2 and DRAM; see stream.cu."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Ceilings, Log
from weft.lab.hierarchy.curves import BANDWIDTH, GIB, KIB, MIB, Figure, Series, sizes
from weft.lab.hierarchy.gpu_latency import prefer_l1
from weft.lab.hierarchy.plateaus import sweep
from weft.machine import Device
from weft.machine.measure_gpu import best_median, fitting

SOURCE = CudaSource(
    file=Path(__file__).with_name("stream.cu"),
    kernels=("read_l1", "read_shared", "read_all", "copy_all"),
    label="hierarchy",
)
THREADS, UNROLL, VECTOR = 1024, 4, 16  # as in stream.cu: threads of a block, loads in flight, bytes
WARP_BYTES = 32 * VECTOR  # a warp's load; sets are multiples of it, so that no load wraps around
ROUNDS = 512  # of UNROLL loads a thread: 32 MiB an SM, which take 0.1 ms from the L1
MIN_CALL_BYTES = 2 * GIB  # of read_all, so that the launch is negligible
CALLS = 8
COPY_THREADS = (128, 256, 512)  # of a block; the fastest differs between GPUs
BANK_BYTES = 128.0  # a cycle
BANK_SOURCE = "32 banks of 4 bytes"


class Reader:
    """Memory to read on the current GPU, and the kernels' results."""

    def __init__(self, device: Device, most: int) -> None:
        self.sms = device.units or torch.cuda.get_device_properties(0).multi_processor_count
        free, _ = torch.cuda.mem_get_info()
        self.unit = self.sms * THREADS * VECTOR  # bytes: one vector for each thread of the GPU
        self.most = min(most, free // 4) // self.unit * self.unit
        self.data = torch.randn(self.most // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.zeros(1, dtype=torch.float32, device="cuda")
        self.cycles = torch.zeros(self.sms, dtype=torch.int64, device="cuda")
        prefer_l1(SOURCE["read_l1"])

    def per_sm(self, kernel: str, nbytes: int) -> float:
        """Return the bytes a cycle of the median SM while all SMs read the same ``nbytes``.

        The result is the median of three launches.
        """
        vectors = nbytes // VECTOR
        warm = -(-vectors // (THREADS * UNROLL)) + 1
        shared = nbytes if kernel == "read_shared" else 0
        medians = []
        for _ in range(3):
            arguments = (self.data, vectors, warm, ROUNDS, self.sink, self.cycles)
            SOURCE[kernel](self.sms, THREADS, *arguments, shared=shared)
            medians.append(statistics.median(self.cycles.tolist()))
        return ROUNDS * UNROLL * THREADS * VECTOR / statistics.median(medians)

    def all_sms(self, nbytes: int) -> float:
        """Return the bytes a second of all SMs that together read ``nbytes`` repeatedly."""
        repeats = max(1, -(-MIN_CALL_BYTES // nbytes))
        arguments = (self.data, nbytes // VECTOR, repeats, self.sink)
        call = partial(SOURCE["read_all"], self.sms, THREADS, *arguments)
        return repeats * nbytes / best_median(torch, call, calls=CALLS)

    def cost(self, kernel: str, nbytes: int) -> float:
        """Return the cycles a byte of one SM, or the seconds a byte of all SMs for ``read_all``."""
        return 1 / (self.all_sms(nbytes) if kernel == "read_all" else self.per_sm(kernel, nbytes))


def bandwidths(device: Device, known: dict[str, int], quick: bool, log: Log) -> Iterator[Series]:
    """Yield bandwidths over working sets: an SM's from L1 and shared memory, all SMs' from L2 and DRAM."""
    reader = Reader(device, 256 * MIB if quick else GIB)
    l1 = [known["L1"]] if "L1" in known else []
    l2 = [known["L2"] // divisor for divisor in (1, 2)] if "L2" in known else []
    most = (device.shared_per_block_optin or 48 * KIB) // WARP_BYTES * WARP_BYTES
    per_cycle, per_second = "B/cycle/SM", "B/s"
    plans = (
        ("read_l1", "one SM, through L1", per_cycle, ("L1",), sizes(4 * KIB, 4 * MIB, l1, WARP_BYTES)),
        ("read_shared", "one SM, shared memory", per_cycle, (), sizes(4 * KIB, most, (), WARP_BYTES)),
        (
            "read_all",
            "all SMs, bypassing L1",
            per_second,
            ("L2",),
            sizes(reader.unit, reader.most, l2, reader.unit),
        ),
    )
    for key, label, unit, levels, planned in plans:
        log(f"bandwidth, {label}: {planned[0] / KIB:.4g} KiB to {planned[-1] / MIB:.4g} MiB")
        step = reader.unit if key == "read_all" else WARP_BYTES
        measured_sizes, costs = sweep(partial(reader.cost, key), planned, step)
        yield Series(
            key=key,
            label=label,
            kind=BANDWIDTH,
            unit=unit,
            levels=levels,
            sizes=tuple(measured_sizes),
            values=tuple(1 / c for c in costs),
        )


def dram(ceilings: Ceilings | None, quick: bool, log: Log) -> list[Figure]:
    """Measure read and copy of buffers of 1 GiB and more, and compare them with the measured ceilings."""
    free, _ = torch.cuda.mem_get_info()
    read = copy = 0.0
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    unit = sms * THREADS * VECTOR
    for buffer in fitting(free)[: 1 if quick else None]:
        nbytes = buffer // unit * unit
        log(f"bandwidth, DRAM: read and copy of {nbytes / GIB:.3g} GiB")
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
            raise RuntimeError("the copy is wrong")
        del source, target
    rates = {"read": (read, "DRAM, read"), "copy": (copy, "DRAM, copy (read + written)")}
    return [
        Figure(
            key=f"dram_{name}",
            label=label,
            value=rate,
            unit="B/s",
            expected=getattr(ceilings, name) if ceilings else None,
            by="the measured ceiling" if ceilings else "",
        )
        for name, (rate, label) in rates.items()
    ]


def peaks(series: list[Series], known: dict[str, int]) -> list[Figure]:
    """Return the best rates of L1 and shared memory, and the most shared memory that a block could read.

    They are compared with the banks' rate and with the shared memory of an SM.
    """
    labels = {"read_l1": "L1, read by one SM", "read_shared": "shared memory, read by one SM"}
    largest = max(s.sizes[-1] for s in series if s.key == "read_shared")
    capacity = Figure(
        key="shared_room",
        label="shared memory, largest read by one block",
        value=largest,
        unit="B",
        expected=known.get("shared"),
        by="the driver, for an SM",
    )
    return [capacity] + [
        Figure(
            key=f"peak_{s.key}",
            label=labels[s.key],
            value=max(s.values),
            unit=s.unit,
            expected=BANK_BYTES,
            by=BANK_SOURCE,
        )
        for s in series
        if s.key in labels
    ]
