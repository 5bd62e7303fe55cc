"""Pinned memory: the copy engine reads it directly; pageable memory is copied on the host first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.core.log import Log
from weft.lab.demos.demo import ARITHMETIC, BAD, GOOD, SIDES, Demo, Fact, Measurement, Variant

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("twice_after_copy",))
N, BLOCK, ROUNDS = 1 << 24, 256, 20  # 64 MiB


def _facts(arch: str) -> Sequence[Fact]:
    return [Fact(label="copies of each byte within the host", bad=1, good=0, source=ARITHMETIC)]


def _measure(log: Log) -> Mapping[str, Measurement]:
    """Measure a copy to the device and the kernel that uses it, with events around both."""
    import torch

    from weft.lab.demos.run import SEED, interleaved, mismatch

    pageable = torch.rand(N, generator=torch.Generator().manual_seed(SEED))
    hosts = {BAD: pageable, GOOD: pageable.pin_memory()}
    x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(side: str) -> float:
        torch.cuda.synchronize()
        begin.record()
        x.copy_(hosts[side], non_blocking=True)
        SOURCE["twice_after_copy"](N // BLOCK, BLOCK, x, y)
        end.record()
        torch.cuda.synchronize()
        return 1000.0 * begin.elapsed_time(end)

    expected = 2 * pageable.double().cuda()
    for side in SIDES:
        # So that elements that were not copied, or not written, are wrong.
        x.fill_(float("nan"))
        y.fill_(float("nan"))
        sample(side)
        if wrong := mismatch(y, expected, 0.0):
            return {side: Measurement(wrong=f"{side}: {wrong}")}
    log("pinned-memory: both outputs are correct; timing")
    return {side: Measurement(samples=tuple(us)) for side, us in interleaved(SIDES, sample, ROUNDS).items()}


DEMO = Demo(
    name="pinned-memory",
    sentence="memory that is copied to a GPU should be pinned",
    source=SOURCE,
    bad=Variant(kernel="twice_after_copy", how="a copy from pageable memory"),
    good=Variant(kernel="twice_after_copy", how="a copy from pinned memory"),
    expected=4.0,
    because=(
        "The copy engine needs pages that cannot move. From pinned memory it reads at the bus's bandwidth, "
        "25 to 55 GB/s. Pageable memory is first copied to a pinned buffer of the driver by one thread of "
        "the host, at 8 to 12 GB/s: about 4 times as long."
    ),
    at_least=1.3,
    see=(
        "The same bytes cross the bus. The time itself is the evidence. A copy from pageable memory also "
        "makes the host wait, so that it cannot overlap with anything. torch pins with pin_memory()."
    ),
    facts=_facts,
    clock="events around the copy and the kernel",
    measure=_measure,
)
