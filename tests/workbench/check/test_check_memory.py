"""Memory of a large problem's check on a GPU, by the model of its allocators."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch.nn import functional

from helpers import gpu_memory
from helpers.gpu_memory import AllocatorModel
from weft.core import Case, Cost, Implementation, Input, Operator
from weft.core.record import PASS
from weft.workbench.calls.call import CallResult, RepeatBudget, make_local_caller
from weft.workbench.calls.staging import CallSpec
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle

T = TypeVar("T")


class ModelCaller:
    """Caller in this process, whose tensors the model counts as a worker's; outputs arrive as copies."""

    sends_copies = True

    def __init__(
        self, model: AllocatorModel, implementation: Implementation, spec: CallSpec, poison: int
    ) -> None:
        self.model, self.repeat_budget = model, RepeatBudget(0.0, least_is_done=True)
        self.local = self._in_worker(lambda: make_local_caller(implementation, spec, poison))

    def _in_worker(self, run: Callable[[], T]) -> T:
        process, self.model.process = self.model.process, "worker"
        try:
            return run()
        finally:
            self.model.process = process

    def load(self, seed: int) -> None:
        self._in_worker(lambda: self.local.load(seed))

    def call(self, on_side_stream: bool, without: Collection[str] = ()) -> CallResult:
        result = self._in_worker(lambda: self.local.call(False, without))
        return replace(result, outputs=tuple(t.clone() for t in result.outputs))

    def close(self) -> None:
        self._in_worker(self.local.close)


# With the bound for each. A batch norm's reference is computed as a whole, beside the candidate's memory.
PROBLEMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], float]] = {
    "as much output as input": (torch.sigmoid, (1024, 1024), 3.0),
    "hardly any output": (lambda x: x.amax(1), (32, 256, 64), 3.4),
    "batch norm": (lambda x: functional.batch_norm(x, None, None, training=True), (16, 64, 32, 32), 4.5),
}
LARGE = {
    "calls.call.COMPARED_AT_ONCE": 1 << 12,
    "calls.call.COPIED_BYTES": 1,
    "calls.guarded_memory.LARGE_OUTPUT": 1,
    "calls.staging.BEGINNING": 1 << 12,
    "calls.staging.LARGE_INPUT": 1,
    "check.oracle.LARGEST_CACHED": {"cpu": 0},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_check_keeps_no_large_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, shape, most = PROBLEMS[name]
    model = AllocatorModel()
    gpu_memory.patch(monkeypatch, model)
    for target, value in LARGE.items():
        monkeypatch.setattr(f"weft.workbench.{target}", value)

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
    reference, candidate = (
        Implementation(operator="toy", name=n, backend="torch", forward=compute)
        for n in ("reference", "mine")  # a judged problem's reference, which may be compared by rows
    )
    own_bytes = 4 * (torch.Size(shape).numel() + compute(torch.zeros(shape)).numel())
    point = (operator.cases[0], "forward", "cpu")
    with model, torch.no_grad():
        oracle = Oracle(operator, *point, (1, 2), reference)
        _ = oracle.bounds  # before the candidate is called, as a judgement does
        model.release()
        model.peak = 0

        def make_caller(implementation: Implementation, spec: CallSpec, poison: int) -> ModelCaller:
            return ModelCaller(model, implementation, spec, poison)

        verdict = check(operator, candidate, *point, oracle=oracle, make_caller=make_caller)
    assert verdict.status == PASS, verdict.reason
    shares = {process: round(n / own_bytes, 2) for process, n in model.at_peak.items()}
    print(f"{model.peak / own_bytes:.2f} times the problem's own memory", shares)
    assert model.peak <= most * own_bytes, shares
