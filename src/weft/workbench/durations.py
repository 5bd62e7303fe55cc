"""Expected duration of checks and timings, to say beforehand about how long a command takes.

The tables are seconds on a CPU with two cores and on an H200. They are no measurement of this machine:
a command corrects them by the steps that it has done.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.backends import support
from weft.core import BACKWARD, Implementation, Support
from weft.core.support import no
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.selection import BenchPoint
from weft.workbench.timing.plan import Budget

# Seconds of one check (all seeds, one direction) by backend. On a CPU Triton's kernels run in its
# interpreter and numba's in a simulator; `compile` compiles each shape anew.
CHECK_SECONDS = {
    "cpu": {"eager": 0.15, "torch": 0.15, "compile": 1.0, "triton": 0.5, "numba": 1.0},
    "cuda": {"eager": 0.1, "torch": 0.1, "compile": 1.5, "triton": 0.5, "cuda": 0.3, "numba": 0.5},
}
OTHER_SECONDS = 0.3  # a backend that the tables do not name
BACKWARD_FACTOR = 1.5
# Seconds for an element of the input: reference in float64, baseline and comparisons, over the seeds.
ELEMENT_SECONDS = {"cpu": 2e-7, "cuda": 2e-9}
# A timed point: the check of an implementation at a large case, and its warm-up and re-check.
TIMED_CHECK_SECONDS = {"cpu": 1.0, "cuda": 1.5}


def expected_check_seconds(point: BenchPoint, implementation: Implementation) -> float:
    """Return the expected seconds of one check; 0 if the implementation cannot run there."""
    if not _support(point, implementation):
        return 0.0
    seconds = CHECK_SECONDS[point.device].get(implementation.backend, OTHER_SECONDS)
    factor = BACKWARD_FACTOR if point.direction == BACKWARD else 1.0
    elements = max((i.numel for i in point.case.inputs), default=0)
    return factor * (seconds + ELEMENT_SECONDS[point.device] * elements)


def expected_bench_seconds(points: Sequence[BenchPoint], budget: Budget) -> list[float]:
    """Return the expected seconds of each timed point: its budget, and a check of each implementation."""
    expected = []
    for point in points:
        count = sum(_support(point, i).timed for i in point.implementations)
        expected.append(budget.seconds + count * TIMED_CHECK_SECONDS[point.device] if count else 0.0)
    return expected


def _support(point: BenchPoint, implementation: Implementation) -> Support:
    try:
        return support(implementation, point.case, point.device, point.direction)
    except (SandboxDied, WorkerError) as error:
        return no(str(error) or "its process ended")
