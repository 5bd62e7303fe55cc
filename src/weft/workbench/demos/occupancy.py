"""Occupancy: resident warps hide memory's latency, and shared memory limits their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.demo import ARITHMETIC, Counter, Demo, Fact, Way, normal

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("one_block", "eight_blocks"))
N, BLOCK = 1 << 25, 256
METRIC = "sm__warps_active.avg.pct_of_peak_sustained_active"
SHARES = (12.5, 100.0)  # % of 2048 threads: one block of 256, and eight


def _facts(arch: str) -> Sequence[Fact]:
    from weft.workbench.demos.evidence import occupancy

    most = occupancy(SOURCE, arch, "one_block", BLOCK, whole_shared=True)
    free = occupancy(SOURCE, arch, "eight_blocks", BLOCK)
    label = "threads that an SM can hold, of its most (%)"
    return [Fact(label=label, bad=most, good=free, source=ARITHMETIC)]


def _call(kernel: str, crowded: bool) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        from weft.workbench.demos.evidence import shared_of_a_block

        y = torch.empty_like(x)
        SOURCE[kernel](N // BLOCK, BLOCK, x, y, shared=shared_of_a_block() if crowded else 0)
        return y

    return call


DEMO = Demo(
    name="occupancy",
    sentence="enough warps should be resident to wait for memory together",
    source=SOURCE,
    bad=Way(
        kernel="one_block",
        how="launched with an SM's whole shared memory: 256 threads on it",
        call=_call("one_block", True),
    ),
    good=Way(
        kernel="eight_blocks",
        how="launched with none: 2048 threads on it",
        call=_call("eight_blocks", False),
    ),
    expected=15.0,
    because=(
        "With one block at a time on an SM, 993 blocks go one after another on each of 132. Memory "
        "answers in 0.6 us or so, and a block takes about half that to start and to end: 1 ms in "
        "all. Eight at a time keep DRAM busy, 268 MB at 4.2 TB/s: 64 us. A factor of 15."
    ),
    at_least=3.0,
    see=(
        "The kernel's code is the same. Shared memory that is asked for counts, used or not; so do "
        "registers. (A kernel with more loads in flight a thread needs fewer threads.)"
    ),
    facts=_facts,
    inputs=lambda seed: [normal(seed, N)],
    reference=lambda x: 2 * x.double(),
    counter=Counter(
        label="warps that were active, of an SM's most (%)",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=SHARES,
        within=0.35,  # blocks that come and go leave gaps
    ),
)
