"""Rows of calls: their plan, the outputs that are judged, and the memory of those that are kept."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from helpers.fake_sandbox import POINT, compute, judge_of
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.calls.make_calls import make_calls, schedule_row
from weft.workbench.timing import call_rows
from weft.workbench.timing.call_rows import (
    FOREIGN,
    KEPT_OUTPUTS,
    MAX_ROW_CALLS,
    RETAINED,
    RING_CALLS,
    SUSPECT_CALLS,
    CallRow,
    plan_row,
    plan_suspect_row,
)
from weft.workbench.timing.cpu import CpuRunner, CpuTimingBackend
from weft.workbench.timing.local_candidate import BufferCache, LocalSteps
from weft.workbench.timing.plan import MAX_SPARE_BYTES, PLAIN, Candidate, IntegrityError, Plan, make_plan
from weft.workbench.timing.recheck import Recheck

MIB = 1 << 20
Forward = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def backend() -> CpuTimingBackend:
    return CpuTimingBackend()


def first_row(buffers: int, call_us: float, output_bytes: int) -> CallRow:
    row = plan_row(buffers, call_us, output_bytes, 0)
    assert row is not None
    return row


def test_the_calls_of_a_row_alternate_between_two_contents_at_random() -> None:
    for buffers in (2, 3, 8):
        row = first_row(buffers, 100.0, 4)
        assert len({i % 2 for i in row.buffers[:2]}) == 2 and len(set(row.buffers)) == 2
        turns = sum(a != b for a, b in zip(row.buffers, row.buffers[1:], strict=False))
        assert 0.3 < turns / len(row.buffers) < 0.7  # neither in turn nor one after the other
    alone = first_row(1, 100.0, 4)
    assert set(alone.buffers) == {0} and alone.kept_positions[-1] == len(alone.buffers) - 1


def test_a_row_of_slow_calls_is_long_enough_for_a_ring_and_one_of_quick_calls_has_an_end() -> None:
    slow, quick = first_row(4, 5_000.0, 4), first_row(4, 0.5, 4)
    assert len(slow.kept_positions) == len(slow.buffers) >= RING_CALLS and len(quick.buffers) == MAX_ROW_CALLS
    assert len(quick.kept_positions) == KEPT_OUTPUTS and {0, MAX_ROW_CALLS - 1} <= set(quick.kept_positions)
    assert len({len(first_row(4, 1_000.0, 4).buffers) for _ in range(20)}) > 5
    assert len(first_row(4, 1e7, 4).buffers) == 2
    assert len(first_row(4, 100.0, 64 * MIB).kept_positions) == 4
    assert plan_row(4, 100.0, 200 * MIB, 0) is None


def test_later_rounds_have_few_and_short_rows() -> None:
    rows = [plan_row(4, 100.0, 4, number) for number in range(1, 400)]
    lengths = [len(row.buffers) for row in rows if row is not None]
    assert 40 < len(lengths) < 180 and max(lengths) <= 33


def test_every_output_that_differs_is_judged_once() -> None:
    row = CallRow(buffers=[0, 1] * 50, kept_positions=list(range(100)))
    digests = ["right"] * 100
    digests[37] = "wrong"
    for _ in range(20):
        judged = row.choose_judged(digests)
        assert 37 in judged and 3 <= len(judged) <= 5
    assert len(row.choose_judged([str(i) for i in range(100)])) <= call_rows.JUDGED_OUTPUTS + 2


def test_the_outputs_of_a_row_are_kept_by_position() -> None:
    numbers = iter(range(100))
    outputs: list[Any] = [None] * 7
    make_calls(schedule_row([lambda: next(numbers)] * 2, [0, 1, 1, 0, 1, 0], [0, 2, 5]), outputs)
    assert outputs == [0, None, 2, None, None, 5, None]


def test_a_plan_has_spare_buffers_where_a_sample_has_one_call_that_is_not_large() -> None:
    slow = make_plan(1 << 20, 1 << 25, 1e6, slow_us=6e4, fits=100)
    assert (slow.calls, slow.spare, slow.buffers) == (1, 1, 2)
    assert make_plan(1 << 20, 1 << 22, 1.0, slow_us=6e4, fits=100).spare == 0
    assert make_plan(1 << 20, 1 << 25, 1e6, slow_us=6e4, fits=1).spare == 0
    assert make_plan(MAX_SPARE_BYTES + 1, 1 << 25, 1e6, slow_us=6e4, fits=9).spare == 0


def refusal(backend: CpuTimingBackend, forward: Forward, plan: Plan) -> str:
    """Return why the first round of a re-check refuses a candidate of this process."""
    make = partial(allocate_buffers, POINT, "cpu", None)
    buffers = [make(seed) for seed in range(plan.buffers)]
    candidate = Candidate(name="it", bind=lambda b: lambda: forward(b.inputs[0]))
    timed = backend.prepare(candidate, buffers, BufferCache(make), plan)
    for _ in range(20):  # the least of them decides how long a row is, on a busy machine too
        timed.sample()
    recheck = Recheck(list(range(plan.buffers)), BufferCache(make), judge_of, [7, 8], backward=False)
    recheck.begin_round(0)
    return recheck.refusal(timed)


class Stale:
    """Return an earlier answer for an input that comes again within four calls, with others between."""

    def __init__(self, ago: int = 1) -> None:
        self.recent: deque[int] = deque(maxlen=4)
        self.answers: deque[torch.Tensor] = deque(maxlen=4)
        self.ago = ago

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        due = x.data_ptr() in self.recent and len(set(self.recent)) > 1 and len(self.answers) >= self.ago
        y = self.answers[-self.ago].clone() if due else compute(x)
        self.recent.append(x.data_ptr())
        self.answers.append(y)
        return y


@pytest.mark.parametrize("plan", [Plan(calls=1, flush=True, spare=1), Plan(calls=5, flush=False)])
def test_an_old_answer_in_a_row_is_refused(backend: CpuTimingBackend, plan: Plan) -> None:
    assert refusal(backend, compute, plan) == ""
    for ago in (1, 2):
        assert refusal(backend, Stale(ago), plan).startswith("rows: back-to-back call")


def rings(size: int) -> Forward:
    buffers = [torch.empty(160, 128) for _ in range(size)]
    numbers = iter(range(1 << 30))
    return lambda x: buffers[next(numbers) % size].copy_(compute(x))


def native_ring(size: int) -> Forward:
    memory, numbers, nbytes = mmap.mmap(-1, size * 160 * 128 * 4), iter(range(1 << 30)), 160 * 128 * 4

    def forward(x: torch.Tensor) -> torch.Tensor:
        offset = next(numbers) % size * nbytes
        y = torch.frombuffer(memory, dtype=torch.float32, count=160 * 128, offset=offset)
        return y.view(160, 128).copy_(compute(x))

    return forward


@pytest.mark.parametrize("make", [rings, native_ring])
def test_a_ring_of_a_hundred_buffers_is_refused(
    make: Callable[[int], Forward], backend: CpuTimingBackend
) -> None:
    reason = refusal(backend, make(100), Plan(calls=1, flush=True, spare=1))
    assert reason == "rows: two timed calls returned the same memory: one overwrites the other's answer"


@pytest.mark.parametrize(
    ("make", "suspicion"),
    [
        (lambda: compute, ""),
        (lambda: lambda x: compute(x).view(128, 160).view(160, 128), ""),
        (lambda: lambda x: compute(x).t().contiguous().t(), ""),
        (lambda: rings(1000), RETAINED),
        (lambda: (lambda ring: lambda x: ring(x).view(160, 128))(rings(1000)), RETAINED),
        (lambda: (lambda ring: lambda x: ring(x).detach())(rings(1000)), RETAINED),
        (lambda: native_ring(1000), FOREIGN),
        (lambda: lambda x: torch.from_numpy(compute(x).numpy().copy()), FOREIGN),
    ],
)
def test_what_makes_a_longer_row(
    make: Callable[[], Forward], suspicion: str, backend: CpuTimingBackend
) -> None:
    buffers = [allocate_buffers(POINT, "cpu", None, seed) for seed in (0, 1)]
    forward = make()
    closures = [partial(forward, b.inputs[0]) for b in buffers]
    runner = CpuRunner(backend, closures, Plan(calls=1, flush=True, spare=1), subtract=0.0)
    steps = LocalSteps(runner, buffers, BufferCache(partial(allocate_buffers, POINT, "cpu", None)))
    steps.run([0, 1] * 8, 1, PLAIN, list(range(16)))
    assert steps.ring_suspicion() == suspicion


def test_a_suspect_row_takes_bounded_memory_and_time() -> None:
    for call_us, nbytes in ((1.0, 4), (100.0, MIB), (1e6, MIB), (1e8, MIB)):
        for suspicion, seconds in ((RETAINED, 10.0), (FOREIGN, 1.0)):
            row = plan_suspect_row(2, call_us, nbytes, suspicion)
            assert len(row.buffers) <= SUSPECT_CALLS and len(row.kept_positions) * nbytes <= 1 << 30
            assert len(row.buffers) == 2 or len(row.buffers) * call_us <= 1e6 * seconds


def test_a_row_that_shares_memory_is_an_integrity_error(backend: CpuTimingBackend) -> None:
    make = partial(allocate_buffers, POINT, "cpu", None)
    ring = rings(2)
    candidate = Candidate(name="it", bind=lambda b: lambda: ring(b.inputs[0]))
    timed = backend.prepare(
        candidate, [make(0), make(1)], BufferCache(make), Plan(calls=1, flush=True, spare=1)
    )
    timed.sample()
    with pytest.raises(IntegrityError, match="same memory"):
        timed.run_in_a_row([7, 8], 0)
