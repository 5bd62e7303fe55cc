"""A GPU's latencies: pointer chases through L1, L2, DRAM and shared memory; see chase.cu."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.machine import Device
from weft.workbench.hierarchy.plan import GIB, KIB, MIB, sizes
from weft.workbench.hierarchy.plateaus import sweep
from weft.workbench.hierarchy.result import LATENCY, Series

SOURCE = CudaSource(
    file=Path(__file__).with_name("chase.cu"),
    kernels=("chase_l1", "chase_l2", "chase_shared", "nothing"),
    label="hierarchy",
)
PAGE = 2 * MIB  # bytes that one translation covers in memory of this size
LINE = 128  # bytes of a cache line, and from one stop of a chase to the next
UNROLL = 16  # hops that chase.cu takes at a time
REPEATS = 3
HOPS = {
    "chase_l1": 32768,
    "chase_l2": 32768,
    "pages": 8192,
    "written": 8192,
    "chase_shared": 8192,
}
SMALL = 4 * MIB  # a set this small may in part be in the L1, which must then be warm
WHOLE = 3  # L2s: a set this large is walked whole before it is timed, a larger one does not fit
PAUSE = 1024  # hops untimed where the set is not walked whole: code and translations are warm then
Say = Callable[[str], None]


def whole(hops: int) -> int:
    """The next number of hops that the kernels take: a multiple of ``UNROLL``."""
    return -(-hops // UNROLL) * UNROLL


def cycle(lines: int, generator: torch.Generator) -> torch.Tensor:
    """A random order of 0 .. lines - 1 that starts at 0: (lines,) int64 on the generator's device.

    Each leads to the next and the last to the first, so that a walk comes by every line once.
    """
    device = generator.device
    rest = torch.randperm(lines - 1, generator=generator, device=device) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=device), rest])


def link(data: torch.Tensor, order: torch.Tensor) -> None:
    """Write into data, (bytes / 8,) int64, at the head of each line in ``order`` the address of the
    line after it."""
    heads = data.view(-1, LINE // 8)
    heads[order, 0] = data.data_ptr() + order.roll(-1) * LINE


class Chaser:
    """Memory to chase through on the current GPU, and what is read after a chase."""

    def __init__(self, device: Device, most: int = GIB) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.l2 = device.l2_bytes or 64 * MIB
        self.most = min(most, free // 4) // LINE * LINE
        self.shared = device.shared_per_block_optin or 48 * KIB
        self.data = torch.zeros(self.most // 8, dtype=torch.int64, device="cuda")
        self.flusher = torch.zeros(2 * self.l2 // 4, dtype=torch.int32, device="cuda")
        self.state = torch.zeros(3, dtype=torch.int64, device="cuda")
        self.random = torch.Generator(device="cuda").manual_seed(0)
        self.where = self.random.device
        self.ns: dict[tuple[str, int], float] = {}
        all_l1(SOURCE["chase_l1"])

    def point(self, kernel: str, nbytes: int) -> float:
        """Cycles a hop over a set of this size: the median of ``REPEATS``, ns beside in ``ns``."""
        order = cycle(nbytes // LINE, self.random)
        return self._walk(kernel, kernel, nbytes, order, nbytes <= WHOLE * self.l2)

    def paged(self, nbytes: int) -> float:
        """Cycles a hop where each line is in a page of its own: few lines, which the L2 holds, but
        as many addresses to translate as there are pages in ``nbytes``."""
        lines = PAGE // LINE
        within = torch.randint(lines, (nbytes // PAGE,), generator=self.random, device=self.where)
        within[0] = 0  # the walk starts at line 0
        order = cycle(nbytes // PAGE, self.random) * lines + within
        return self._walk("pages", "chase_l2", nbytes, order, True)

    def _walk(self, key: str, kernel: str, nbytes: int, order: torch.Tensor, fits: bool) -> float:
        link(self.data, order)
        self.state[0] = self.data.data_ptr()
        if not fits:
            self.flusher.sum()
        count = HOPS[key]
        seen, done = [], 0
        for repeat in range(REPEATS):
            # The L2 outlives a launch, the L1 does not: it is filled before each.
            again = repeat == 0 or (kernel == "chase_l1" and nbytes <= SMALL)
            warm = whole(len(order) if fits else PAUSE) if again else 0
            SOURCE[kernel](1, 1, self.state, warm, count)
            done += warm + count
            seen.append(self._read(count))
        arrived = int(self.state[0]) - self.data.data_ptr()
        self._expect(key, arrived // LINE, int(order[done % len(order)]))
        return self._median(key, nbytes, seen)

    def written(self, nbytes: int) -> float:
        """Cycles a hop among a few lines picked from a set that all SMs have just written.

        A written line is in the L2 once, whichever half of it is asked, and so few are read that
        what they displace does not count.
        """
        seen = []
        for _ in range(REPEATS):
            hops = min(HOPS["written"], nbytes // LINE // UNROLL * UNROLL)
            picked = cycle(nbytes // LINE, self.random)[:hops].clone()
            self.data[: nbytes // 8].fill_(1)
            link(self.data, picked)
            self.state[0] = self.data.data_ptr()
            SOURCE["chase_l2"](1, 1, self.state, 0, hops)
            seen.append(self._read(hops))
            arrived = int(self.state[0]) - self.data.data_ptr()
            self._expect("written", arrived // LINE, 0)
        return self._median("written", nbytes, seen)

    def shared_point(self, nbytes: int) -> float:
        """Cycles a hop in shared memory: one block has ``nbytes`` of it."""
        order = cycle(nbytes // LINE, self.random)
        after = torch.empty_like(order, dtype=torch.int32)
        after[order] = order.roll(-1).to(torch.int32)
        count = HOPS["chase_shared"]
        seen = []
        for _ in range(REPEATS):
            kernel = SOURCE["chase_shared"]
            kernel(1, 256, after, len(order), self.state, UNROLL, count, shared=nbytes)
            seen.append(self._read(count))
        expected = int(order[(UNROLL + count) % len(order)])
        self._expect("chase_shared", int(self.state[0]), expected)
        return self._median("chase_shared", nbytes, seen)

    def _read(self, count: int) -> tuple[float, float]:
        _, cycles, ns = self.state.tolist()  # waits for the chase
        return cycles / count, ns / count

    def _median(self, key: str, nbytes: int, seen: list[tuple[float, float]]) -> float:
        self.ns[key, nbytes] = statistics.median(ns for _, ns in seen)
        return statistics.median(cycles for cycles, _ in seen)

    def _expect(self, what: str, arrived: int, expected: int) -> None:
        if arrived != expected:
            raise RuntimeError(f"{what} arrived at line {arrived} and not at {expected}")


def all_l1(kernel: Kernel) -> None:
    """Ask for no shared memory on the SMs that run this kernel: its L1 is as large as can be."""
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    if int(status) == 0:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (status,) = driver.cuKernelSetAttribute(attribute, 0, kernel.handle.handle, device)
    if int(status) != 0:
        raise RuntimeError(f"the L1's share of {kernel.name} cannot be set: {status!r}")


def latencies(device: Device, known: dict[str, int], quick: bool, say: Say) -> list[Series]:
    """The five chases, in cycles and ns. ``quick``: to 256 MiB, which is enough to leave an L2."""
    chaser = Chaser(device, 256 * MIB if quick else GIB)
    l1 = [known["L1"]] if "L1" in known else []
    l2 = [known["L2"] // part for part in (1, 2)] if "L2" in known else []
    most = chaser.most
    plans = (
        ("chase_l1", "global, through L1", ("L1", "L2"), sizes(4 * KIB, most, l1 + l2, LINE)),
        ("chase_l2", "global, past L1", ("L2",), sizes(4 * KIB, most, l2, LINE)),
        ("written", "global, just written", ("L2",), sizes(MIB, 6 * chaser.l2, l2, LINE)),
        ("pages", "global, one line a page", (), sizes(2 * PAGE, most, (), PAGE)),
        ("chase_shared", "shared memory", (), sizes(KIB, chaser.shared, (), LINE)),
    )
    series = []
    for key, label, levels, planned in plans:
        within = [s for s in planned if s <= chaser.most]
        say(f"latency, {label}: {within[0] / KIB:.0f} KiB to {within[-1] / MIB:.4g} MiB")
        series.append(_series(chaser, key, label, levels, within))
    return series


def _series(
    chaser: Chaser, key: str, label: str, levels: tuple[str, ...], planned: list[int]
) -> Series:
    points: dict[str, Callable[[int], float]] = {
        "pages": chaser.paged,
        "written": chaser.written,
        "chase_shared": chaser.shared_point,
    }
    unit = PAGE if key == "pages" else LINE
    found, values = sweep(points.get(key, lambda n: chaser.point(key, n)), planned, unit)
    return Series(
        key=key,
        label=label,
        kind=LATENCY,
        unit="cycles",
        levels=levels,
        sizes=tuple(found),
        values=tuple(values),
        ns=tuple(chaser.ns[key, size] for size in found),
    )
