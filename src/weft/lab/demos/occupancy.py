"""Occupancy: resident warps hide memory latency, and shared memory limits their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.demo import ARITHMETIC, Counter, Demo, Fact, Variant, normal

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("one_block", "eight_blocks"))
N, BLOCK = 1 << 25, 256
METRIC = "sm__warps_active.avg.pct_of_peak_sustained_active"
SHARES = (12.5, 100.0)  # % of 2048 threads: one block of 256, and eight


def _facts(arch: str) -> Sequence[Fact]:
    from weft.lab.demos.evidence import occupancy

    limited = occupancy(SOURCE, arch, "one_block", BLOCK, max_dynamic_shared=True)
    full = occupancy(SOURCE, arch, "eight_blocks", BLOCK)
    label = "threads resident on an SM, of its maximum (%)"
    return [Fact(label=label, bad=limited, good=full, source=ARITHMETIC)]


def _call(kernel: str, max_shared: bool) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        from weft.lab.demos.evidence import max_shared_per_block

        y = torch.empty_like(x)
        SOURCE[kernel](N // BLOCK, BLOCK, x, y, shared=max_shared_per_block() if max_shared else 0)
        return y

    return call


DEMO = Demo(
    name="occupancy",
    sentence="an SM needs enough resident warps to hide memory latency",
    source=SOURCE,
    bad=Variant(
        kernel="one_block",
        how="launched with all shared memory of an SM: 256 resident threads",
        call=_call("one_block", True),
    ),
    good=Variant(
        kernel="eight_blocks",
        how="launched without shared memory: 2048 resident threads",
        call=_call("eight_blocks", False),
    ),
    expected=15.0,
    because=(
        "With one resident block, each of 132 SMs runs 993 blocks one after another. Memory latency is "
        "about 0.6 us, and a block takes about half of that to start and end: 1 ms in all. Eight "
        "resident blocks keep DRAM busy: 268 MB at 4.2 TB/s take 64 us. A factor of 15."
    ),
    at_least=3.0,
    see=(
        "Both kernels have the same code. Shared memory that a launch requests counts, used or not; so "
        "do registers. (A kernel with more loads in flight in each thread needs fewer threads.)"
    ),
    facts=_facts,
    inputs=lambda seed: [normal(seed, N)],
    reference=lambda x: 2 * x.double(),
    counter=Counter(
        label="active warps, of an SM's maximum (%)",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=SHARES,
        within=0.35,  # blocks that start and end leave gaps
    ),
)
