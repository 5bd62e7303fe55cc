"""A GPU's latencies: pointer chases through L1, L2, DRAM and shared memory (chase.cu), and call overheads.

An overhead on the device is a slope: of 1 and of ``MANY`` empty kernels queued behind a spin kernel,
so that no launch from the host falls between the two events. The time of an empty queue is the
events' own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import Log
from weft.lab.hierarchy.curves import GIB, KIB, LATENCY, MIB, Figure, Series, sizes
from weft.lab.hierarchy.plateaus import sweep
from weft.machine import Device
from weft.workbench.timing.cuda import MAX_SPIN_CYCLES, SPIN_CYCLES, CudaTimingBackend, capture

SOURCE = CudaSource(
    file=Path(__file__).with_name("chase.cu"),
    kernels=("chase_l1", "chase_l2", "chase_shared", "nothing"),
    label="hierarchy",
)
PAGE = 2 * MIB  # bytes that one address translation covers
LINE = 128  # bytes of a cache line, and the stride of a chase
UNROLL = 16  # hops in one iteration of chase.cu's loop
REPEATS = 3
HOPS = {
    "chase_l1": 32768,
    "chase_l2": 32768,
    "pages": 8192,
    "written": 8192,
    "chase_shared": 8192,
}
SMALL_SET = 4 * MIB  # a set up to this size may be partly in the L1, which is then warmed up
FULL_WARM_UP = 3  # L2 sizes: sets up to this are walked once before timing; larger ones never fit
WARM_UP_HOPS = 1024  # untimed hops for larger sets: they warm up the code and the translations

MANY = 257  # kernels; a launch queue holds about a thousand
BATCH = 100  # calls timed together on the host
ROUNDS = 21


def round_up_hops(hops: int) -> int:
    """Return the next number of hops that the kernels accept: a multiple of ``UNROLL``."""
    return -(-hops // UNROLL) * UNROLL


def random_cycle(lines: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random order of 0 .. lines - 1 that starts at 0: (lines,) int64 on the generator's device.

    Each leads to the next and the last to the first, so that a chase visits every line once.
    """
    device = generator.device
    rest = torch.randperm(lines - 1, generator=generator, device=device) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=device), rest])


def link_lines(data: torch.Tensor, order: torch.Tensor) -> None:
    """Write the address of the next line in ``order`` to the head of each; data is (bytes / 8,) int64."""
    heads = data.view(-1, LINE // 8)
    heads[order, 0] = data.data_ptr() + order.roll(-1) * LINE


class Chaser:
    """Memory to chase through on the current GPU, and the chase's results.

    ``state`` has the address, the cycles and the ns of a chase; ``ns`` has the median ns of each point.
    """

    def __init__(self, device: Device, most: int = GIB) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.l2 = device.l2_bytes or 64 * MIB
        self.most = min(most, free // 4) // LINE * LINE
        self.shared = device.shared_per_block_optin or 48 * KIB
        self.data = torch.zeros(self.most // 8, dtype=torch.int64, device="cuda")
        self.flusher = torch.zeros(2 * self.l2 // 4, dtype=torch.int32, device="cuda")
        self.state = torch.zeros(3, dtype=torch.int64, device="cuda")
        self.random = torch.Generator(device="cuda").manual_seed(0)
        self.device = self.random.device
        self.ns: dict[tuple[str, int], float] = {}
        prefer_l1(SOURCE["chase_l1"])

    def lines(self, kernel: str, nbytes: int) -> float:
        """Return the cycles of a hop over all lines of a set: the median of ``REPEATS``."""
        order = random_cycle(nbytes // LINE, self.random)
        return self._chase(kernel, kernel, nbytes, order, nbytes <= FULL_WARM_UP * self.l2)

    def pages(self, nbytes: int) -> float:
        """Return the cycles of a hop if each line is in a page of its own.

        The lines are few, so the L2 holds them; as many addresses are translated as ``nbytes`` has pages.
        """
        lines = PAGE // LINE
        within = torch.randint(lines, (nbytes // PAGE,), generator=self.random, device=self.device)
        within[0] = 0  # the chase starts at line 0
        order = random_cycle(nbytes // PAGE, self.random) * lines + within
        return self._chase("pages", "chase_l2", nbytes, order, True)

    def _chase(self, key: str, kernel: str, nbytes: int, order: torch.Tensor, fits: bool) -> float:
        link_lines(self.data, order)
        self.state[0] = self.data.data_ptr()
        if not fits:
            self.flusher.sum()  # reads twice the L2, so that no line of the set is in it
        count = HOPS[key]
        results, hops_done = [], 0
        for repeat in range(REPEATS):
            # The L2 keeps its lines across launches, the L1 does not: it is filled before each.
            needs_warm_up = repeat == 0 or (kernel == "chase_l1" and nbytes <= SMALL_SET)
            warm = round_up_hops(len(order) if fits else WARM_UP_HOPS) if needs_warm_up else 0
            SOURCE[kernel](1, 1, self.state, warm, count)
            hops_done += warm + count
            results.append(self._cycles_and_ns(count))
        arrived = int(self.state[0]) - self.data.data_ptr()
        self._require_line(key, arrived // LINE, int(order[hops_done % len(order)]))
        return self._median(key, nbytes, results)

    def written(self, nbytes: int) -> float:
        """Return the cycles of a hop among a few lines of a set that all SMs have just written.

        A written line is in the L2 once, whichever half of it serves the request. So few lines are read
        that the lines they displace do not matter.
        """
        results = []
        for _ in range(REPEATS):
            hops = min(HOPS["written"], nbytes // LINE // UNROLL * UNROLL)
            picked = random_cycle(nbytes // LINE, self.random)[:hops].clone()
            self.data[: nbytes // 8].fill_(1)
            link_lines(self.data, picked)
            self.state[0] = self.data.data_ptr()
            SOURCE["chase_l2"](1, 1, self.state, 0, hops)
            results.append(self._cycles_and_ns(hops))
            arrived = int(self.state[0]) - self.data.data_ptr()
            self._require_line("written", arrived // LINE, 0)
        return self._median("written", nbytes, results)

    def shared_memory(self, nbytes: int) -> float:
        """Return the cycles of a hop in ``nbytes`` of one block's shared memory."""
        order = random_cycle(nbytes // LINE, self.random)
        successors = torch.empty_like(order, dtype=torch.int32)
        successors[order] = order.roll(-1).to(torch.int32)
        count = HOPS["chase_shared"]
        results = []
        for _ in range(REPEATS):
            kernel = SOURCE["chase_shared"]
            kernel(1, 256, successors, len(order), self.state, UNROLL, count, shared=nbytes)
            results.append(self._cycles_and_ns(count))
        expected = int(order[(UNROLL + count) % len(order)])
        self._require_line("chase_shared", int(self.state[0]), expected)
        return self._median("chase_shared", nbytes, results)

    def _cycles_and_ns(self, count: int) -> tuple[float, float]:
        _, cycles, ns = self.state.tolist()  # waits for the chase
        return cycles / count, ns / count

    def _median(self, key: str, nbytes: int, results: list[tuple[float, float]]) -> float:
        self.ns[key, nbytes] = statistics.median(ns for _, ns in results)
        return statistics.median(cycles for cycles, _ in results)

    def _require_line(self, key: str, arrived: int, expected: int) -> None:
        # A chase that ends at another line did not make the hops that its time is divided by.
        if arrived != expected:
            raise RuntimeError(f"{key} arrived at line {arrived} and not at {expected}")


def prefer_l1(kernel: Kernel) -> None:
    """Reserve no shared memory on the SMs that run this kernel, so that its L1 is as large as possible."""
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    if int(status) == 0:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (status,) = driver.cuKernelSetAttribute(attribute, 0, kernel.handle.handle, device)
    if int(status) != 0:
        raise RuntimeError(f"the L1's share of {kernel.name} cannot be set: {status!r}")


def latencies(device: Device, known: dict[str, int], quick: bool, log: Log) -> Iterator[Series]:
    """Yield the five chases, in cycles and ns. ``quick``: up to 256 MiB, more than an L2."""
    chaser = Chaser(device, 256 * MIB if quick else GIB)
    l1 = [known["L1"]] if "L1" in known else []
    # An L2 of two halves may show a break at half of its size too.
    l2 = [known["L2"] // divisor for divisor in (1, 2)] if "L2" in known else []
    most = chaser.most
    plans = (
        ("chase_l1", "global, through L1", ("L1", "L2"), sizes(4 * KIB, most, l1 + l2, LINE)),
        ("chase_l2", "global, bypassing L1", ("L2",), sizes(4 * KIB, most, l2, LINE)),
        ("written", "global, just written", ("L2",), sizes(MIB, 6 * chaser.l2, l2, LINE)),
        ("pages", "global, one line a page", (), sizes(2 * PAGE, most, (), PAGE)),
        ("chase_shared", "shared memory", (), sizes(KIB, chaser.shared, (), LINE)),
    )
    for key, label, levels, planned in plans:
        within = [s for s in planned if s <= chaser.most]
        log(f"latency, {label}: {within[0] / KIB:.0f} KiB to {within[-1] / MIB:.4g} MiB")
        yield latency_series(chaser, key, label, levels, within)


def latency_series(
    chaser: Chaser, key: str, label: str, levels: tuple[str, ...], planned: list[int]
) -> Series:
    """Measure one chase over the planned sizes, and more around its breaks."""
    points: dict[str, Callable[[int], float]] = {
        "pages": chaser.pages,
        "written": chaser.written,
        "chase_shared": chaser.shared_memory,
    }
    unit = PAGE if key == "pages" else LINE
    measured_sizes, cycles = sweep(points.get(key, partial(chaser.lines, key)), planned, unit)
    return Series(
        key=key,
        label=label,
        kind=LATENCY,
        unit="cycles",
        levels=levels,
        sizes=tuple(measured_sizes),
        values=tuple(cycles),
        ns=tuple(chaser.ns[key, size] for size in measured_sizes),
    )


def overheads(log: Log) -> list[Figure]:
    """Measure the overheads of launches, graphs and events in us, on the host and on the device."""
    log("launches, graphs and events without work")
    backend = CudaTimingBackend()
    empty = partial(SOURCE["nothing"], 1, 32)
    with backend.context():
        empty()
        one, _ = capture([empty], keep=False)
        many, _ = capture([empty] * MANY, keep=False)
        event = torch.cuda.Event(enable_timing=True)
        gap = slope(partial(time_behind_spin, backend), empty, partial(_repeat, MANY, empty))
        node = slope(partial(time_behind_spin, backend), one.replay, many.replay)
        event_pair = time_behind_spin(backend, lambda: None)
        launch_us = time_per_call(empty, torch.cuda.synchronize)
        graph_us = time_per_call(one.replay, torch.cuda.synchronize)
        node_us = time_per_call(many.replay, torch.cuda.synchronize, batch=4) / MANY
        record_us = time_per_call(event.record, torch.cuda.synchronize)
    rows = (
        ("host_launch", "launch, on the host", launch_us),
        ("device_gap", "launch behind another, on the device", gap),
        ("host_graph", "graph of one kernel, on the host", graph_us),
        ("host_node", f"node of a graph of {MANY}, on the host", node_us),
        ("device_node", "node behind another, on the device", node),
        ("host_record", "recording an event, on the host", record_us),
        ("event_pair", "two events with nothing between", event_pair),
    )
    return [Figure(key=key, label=label, value=us, unit="us") for key, label, us in rows]


def _repeat(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def time_behind_spin(backend: CudaTimingBackend, body: Callable[[], object]) -> float:
    """Return the median us between two events around ``body``, queued while the GPU spins.

    The spin grows until it is longer than the queueing. Raises RuntimeError if even the longest is not.
    """
    spin = 10 * SPIN_CYCLES
    samples: list[float] = []
    while len(samples) < ROUNDS:
        us = backend.timed(lambda: None, body, spin)
        if us >= 0:  # negative: the spin ended before the body was queued
            samples.append(us)
            continue
        spin *= 2
        if spin > MAX_SPIN_CYCLES:
            raise RuntimeError("the host does not get ahead of the GPU: is it busy elsewhere?")
    return statistics.median(samples)


def slope(
    timer: Callable[[Callable[[], object]], float],
    one: Callable[[], object],
    many: Callable[[], object],
) -> float:
    """Return the time that each of ``MANY`` adds to the first."""
    return (timer(many) - timer(one)) / (MANY - 1)


def time_per_call(
    call: Callable[[], object],
    wait: Callable[[], object],
    batch: int = BATCH,
    now: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Return the median host time of a call in us, in batches that fit into an empty launch queue."""
    times = []
    for _ in range(ROUNDS):
        wait()
        start = now()
        for _ in range(batch):
            call()
        times.append((now() - start) / batch / 1e3)
    wait()
    return statistics.median(times)
