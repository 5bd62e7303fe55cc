"""Memory of a large problem's timing on a GPU, by a model of its allocators: four times the problem's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional

from helpers import gpu_memory
from helpers.gpu_memory import AllocatorModel, ModelWorker
from weft.core import Case, Cost, Implementation, Input, Operator
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.check.output_judge import OutputJudges
from weft.workbench.judge.memory import PEAK_FACTOR
from weft.workbench.sandbox.remote_timing import RemoteTimingBackend, describe_point
from weft.workbench.timing import cuda
from weft.workbench.timing.plan import Budget, Candidate, Outcome
from weft.workbench.timing.session import TimingSession

BUDGET = Budget(seconds=0.3, warmup=0.0, min_samples=8, max_rounds=8, side_samples=2)
WITHOUT = ("wall", "hooks", "replaced")


class NoReadings:
    """Readings of clocks that this machine does not have."""

    def read(self) -> dict[str, object]:
        return {}


def time_both(
    model: AllocatorModel, compute: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> dict[str, Outcome]:
    """Time a reference and a candidate of the same code in two workers, in the order of a judgement."""

    def draw(case: Case, seed: int, device: str) -> list[torch.Tensor]:
        return [torch.rand(shape, generator=torch.Generator().manual_seed(seed))]

    operator = Operator(
        name="toy",
        reference=compute,
        cases=(Case(name="case", inputs=(Input(name="x", shape=shape),)),),
        cost=lambda case, direction: Cost(read=1, written=1),
        splits_rows=True,
        draw=draw,
    )
    names = ("reference", "candidate")
    both = [Implementation(operator="toy", name=n, backend="torch", forward=compute) for n in names]
    candidates = []
    for implementation in both:
        worker = ModelWorker(model, operator, implementation)
        point = describe_point("toy", implementation.name, "case", "forward", "cpu", None)
        worker.request("timing.first_call", {**point, "seed": 3})
        is_reference = implementation is both[0]
        backend = RemoteTimingBackend(worker, point, "cuda", WITHOUT, is_reference)
        candidates.append(
            Candidate(name=implementation.name, bind=compute, backend=backend, trusted=is_reference)
        )
    case = operator.cases[0]
    make_judge = OutputJudges(operator, case, "forward", "cpu", both[0])
    make_buffers = partial(allocate_buffers, case, "cpu", None)
    session = TimingSession(
        candidates[0].backend,  # type: ignore[arg-type]
        candidates,
        make_buffers,
        BUDGET,
        None,
        device="cuda",
        without=WITHOUT,
        make_judge=make_judge,
    )
    readings = NoReadings()
    session.prepare()
    session.sample(readings, None)  # type: ignore[arg-type]
    session.finish_audits(readings)  # type: ignore[arg-type]
    session.judge_samples()
    session.measure_side_times()
    session.audit()
    session.recheck(make_judge)
    return session.outcomes()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> AllocatorModel:
    model = AllocatorModel()
    gpu_memory.patch(monkeypatch, model)
    monkeypatch.setattr(
        cuda.CudaRunner,
        "_wall_and_event_time",
        lambda self, repeats, body: (body(), (repeats * 100.0, repeats * 100.0))[1],
    )
    monkeypatch.setattr("weft.workbench.timing.session.summarise_clocks", lambda readings: {})
    return model


# Large enough that tensors of a fixed size, such as the sums of the error by slices, hardly count.
PROBLEMS = {
    "as much output as input": (torch.sigmoid, (512, 1024)),
    "hardly any output": (lambda x: x.amax(1), (32, 256, 32)),
    "three times as much output": (lambda x: torch.cat((x, x, x), 1), (512, 512)),
    # Its rows depend on each other: the reference in float64 is computed as a whole.
    "batch norm": (lambda x: functional.batch_norm(x, None, None, training=True), (16, 64, 16, 32)),
    # Between their first and last operation these calls need more memory than the problem has.
    "pooling": (lambda x: functional.max_pool1d(x, 8, 1, 4), (64, 16, 512)),
    "two steps": (lambda x: torch.sigmoid(torch.relu(x - 0.5)), (512, 1024)),
}


# A pooling's indexes take as much memory as the problem, in both processes: nothing is left for the judge's
# tensors of fixed size.
FACTORS = {"pooling": 4.1}
SLOW = ("as much output as input", "three times as much output", "batch norm", "pooling")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PROBLEMS]
)
def test_a_timing_takes_four_times_the_problems_own_memory(name: str, model: AllocatorModel) -> None:
    compute, shape = PROBLEMS[name]
    own_bytes = 4 * (torch.Size(shape).numel() + compute(torch.zeros(shape)).numel())
    with model, torch.no_grad():
        outcomes = time_both(model, compute, shape)
    assert all(o.timing is not None for o in outcomes.values()), outcomes
    print(f"{model.peak / own_bytes:.2f} times the problem's own memory")
    shares = {process: round(n / own_bytes, 2) for process, n in model.at_peak.items()}
    assert model.peak <= FACTORS.get(name, PEAK_FACTOR) * own_bytes, shares
    left = {process: n / own_bytes for process, n in model.reserved.items() if process != gpu_memory.JUDGE}
    assert max(left.values()) < 0.1, "the workers keep nothing for what follows"
