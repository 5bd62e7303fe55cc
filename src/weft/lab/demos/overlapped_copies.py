"""Overlapped copies: streams let copies in both directions and a kernel run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.core.log import Log
from weft.lab.demos.demo import ARITHMETIC, BAD, GOOD, SIDES, Demo, Fact, Measurement, Variant

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("twice_between_copies",))
N, BLOCK, ROUNDS = 1 << 25, 256, 20  # 128 MiB in each direction
PARTS, STREAMS = 8, 3  # one stream copies to the device, one computes, one copies back, each another part


def _facts(arch: str) -> Sequence[Fact]:
    label = "time, in copies of all elements in one direction"
    # The first part has nothing to overlap with on its way to the device, the last none on its way back.
    return [Fact(label=label, bad=2, good=1 + 1 / PARTS, source=ARITHMETIC)]


def _measure(log: Log) -> Mapping[str, Measurement]:
    """Measure the wall time of both copies and the kernel, until the host has the result."""
    import torch

    from weft.lab.demos.run import SEED, interleaved, mismatch

    source = torch.rand(N, generator=torch.Generator().manual_seed(SEED)).pin_memory()
    target = torch.empty(N).pin_memory()
    x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def move(part: slice) -> None:
        x[part].copy_(source[part], non_blocking=True)
        SOURCE["twice_between_copies"]((part.stop - part.start) // BLOCK, BLOCK, x[part], y[part])
        target[part].copy_(y[part], non_blocking=True)

    def one_after_another() -> None:
        move(slice(0, N))

    def overlapped() -> None:
        for number in range(PARTS):
            with torch.cuda.stream(streams[number % STREAMS]):
                move(slice(number * N // PARTS, (number + 1) * N // PARTS))

    calls: dict[str, Callable[[], None]] = {BAD: one_after_another, GOOD: overlapped}

    def sample(side: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        calls[side]()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1000

    expected = 2 * source.double()
    for side in SIDES:
        for buffer in (x, y, target):  # so that elements that did not arrive are wrong
            buffer.fill_(float("nan"))
        sample(side)
        if wrong := mismatch(target, expected, 0.0):
            return {side: Measurement(wrong=f"{side}: {wrong}")}
    log("overlapped-copies: both outputs are correct; timing")
    return {side: Measurement(samples=tuple(us)) for side, us in interleaved(SIDES, sample, ROUNDS).items()}


DEMO = Demo(
    name="overlapped-copies",
    sentence="copies should overlap with kernels and with copies in the other direction, by streams",
    source=SOURCE,
    bad=Variant(kernel="twice_between_copies", how="copy in, compute, copy out, in one stream"),
    good=Variant(kernel="twice_between_copies", how=f"{PARTS} parts in {STREAMS} streams"),
    expected=1.7,
    because=(
        "A GPU has a copy engine for each direction, and the bus carries both at once. In one stream they "
        f"wait for each other: two copies and a short kernel. With {PARTS} parts in streams only the first "
        "part's way in and the last part's way out are alone: 1 + 1/8 copies, a factor of 1.78, less what "
        f"launching {3 * PARTS} operations costs."
    ),
    at_least=1.25,
    see=(
        "The same bytes and the same kernel. The time itself is the evidence. The memory is pinned in both "
        "variants: a copy from pageable memory would make the host wait."
    ),
    facts=_facts,
    clock="of the host: wall time until the result is in its memory",
    measure=_measure,
)
