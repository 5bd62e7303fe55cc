"""Expected duration of checks and timings, to say beforehand about how long a command takes.

The tables are seconds of one core of a CPU, and of an H200. They are no measurement of this machine: a
command corrects them by the steps that it has done.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from weft.backends import support
from weft.core import BACKWARD, Implementation, Support
from weft.core.support import no
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.selection import BenchPoint
from weft.workbench.timing.plan import Budget

# Seconds of one check (all seeds, one direction) by backend. On a CPU Triton's kernels run in its
# interpreter.
CHECK_SECONDS = {
    "cpu": {"eager": 0.1, "torch": 0.1, "compile": 0.25, "triton": 0.3, "numba": 0.2},
    "cuda": {"eager": 0.1, "torch": 0.1, "compile": 0.4, "triton": 0.5, "cuda": 0.3, "numba": 0.5},
}
OTHER_SECONDS = 0.3  # a backend that the tables do not name
BACKWARD_FACTOR = 1.5
# torch.compile compiles anew for other dtypes, layouts, numbers of dimensions, and sizes of 0 and 1.
COMPILE_SECONDS = {"cpu": 2.5, "cuda": 1.5}
# What the checks of a point share: the float64 reference, and the baseline.
REFERENCE_SECONDS = {"cpu": 0.1, "cuda": 0.05}
# Seconds for an element of the input: reference in float64, baseline and comparisons, over the seeds.
ELEMENT_SECONDS = {"cpu": 2e-7, "cuda": 2e-9}
# numba's simulator runs a thread of the kernel at a time: seconds of a check, and for each element.
SIMULATOR_SECONDS, SIMULATOR_ELEMENT_SECONDS = 0.8, 1.2e-3
# A timed point: the check of an implementation at a large case, and its warm-up and re-check.
TIMED_CHECK_SECONDS = {"cpu": 1.0, "cuda": 1.5}


@dataclass(frozen=True)
class CheckCost:
    """Expected seconds of a check: its own, and those of work that it shares with other checks, by key."""

    own: float
    shared: tuple[tuple[Hashable, float], ...]


def expected_check_cost(point: BenchPoint, implementation: Implementation) -> CheckCost | None:
    """Return the expected seconds of one check; None if the implementation cannot run there."""
    answer = _support(point, implementation)
    if not answer:
        return None
    case, device = point.case, point.device
    factor = BACKWARD_FACTOR if point.direction == BACKWARD else 1.0
    elements = max((i.numel for i in case.inputs), default=0)
    of_elements = factor * ELEMENT_SECONDS[device] * elements
    own = factor * CHECK_SECONDS[device].get(implementation.backend, OTHER_SECONDS)
    if "simulator" in answer.reason:
        own = factor * (SIMULATOR_SECONDS + SIMULATOR_ELEMENT_SECONDS * elements)
    key = (point.operator.name, case.name, point.direction)
    shared: list[tuple[Hashable, float]] = [(key, factor * REFERENCE_SECONDS[device] + of_elements)]
    if implementation.backend == "compile":
        forms = [(i.dtype, i.layout, tuple(min(n, 2) for n in i.shape)) for i in case.inputs]
        code = (point.operator.name, implementation.name, point.direction, *forms)
        shared.append((code, factor * COMPILE_SECONDS[device]))
    return CheckCost(own + of_elements, tuple(shared))


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
