"""NVTX ranges: the switch, balance when an exception passes, and the ranges of check, timing and training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import training_toys
from weft.core import WeftError, registry
from weft.machine import nvtx
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.check.check import check
from weft.workbench.timing import cpu
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import Budget, Candidate


class FakeNvtx:
    """Backend that records each range's beginning and end, and the ranges that are open."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open: list[str] = []

    def range_push(self, msg: str) -> None:
        self.events.append(f"+{msg}")
        self.open.append(msg)

    def range_pop(self) -> None:
        self.events.append(f"-{self.open.pop()}")

    @property
    def names(self) -> list[str]:
        return [e[1:] for e in self.events if e.startswith("+")]


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test decide anew, and leave no decision behind."""
    for name in (nvtx.SWITCH, nvtx.UNDER_NSYS):
        monkeypatch.delenv(name, raising=False)
    nvtx.active_backend.cache_clear()
    yield
    nvtx.active_backend.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    backend = FakeNvtx()
    library = SimpleNamespace(
        mark=lambda msg: None, range_push=backend.range_push, range_pop=backend.range_pop
    )
    monkeypatch.setattr(torch.cuda, "nvtx", library)
    monkeypatch.setenv(nvtx.SWITCH, "1")
    return backend


def test_ranges_are_off_by_default_and_cost_no_object() -> None:
    assert nvtx.active_backend() is None
    assert nvtx.annotate("a") is nvtx.annotate("b")


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({nvtx.SWITCH: "1"}, True),
        ({nvtx.UNDER_NSYS: "71"}, True),
        ({nvtx.SWITCH: "0", nvtx.UNDER_NSYS: "71"}, False),
        ({nvtx.SWITCH: "0"}, False),
    ],
)
def test_the_environment_decides(
    variables: dict[str, str], on: bool, fake: FakeNvtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nvtx.SWITCH)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with nvtx.annotate("a"):
        pass
    assert fake.events == (["+a", "-a"] if on else [])


def test_a_wrong_value_and_a_pytorch_without_nvtx_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.SWITCH, "yes")
    with pytest.raises(WeftError, match="WEFT_NVTX: expected 0 or 1, got yes"):
        nvtx.annotate("a")

    def mark(msg: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(mark=mark))
    monkeypatch.setenv(nvtx.SWITCH, "1")
    with pytest.raises(WeftError, match="expected a PyTorch with NVTX, got NVTX functions not installed"):
        nvtx.annotate("a")
    # Nobody asked for ranges here: a program without CUDA can run under nsys.
    monkeypatch.delenv(nvtx.SWITCH)
    monkeypatch.setenv(nvtx.UNDER_NSYS, "71")
    assert nvtx.active_backend() is None


def test_ranges_are_balanced_when_an_exception_passes(fake: FakeNvtx) -> None:
    with pytest.raises(ZeroDivisionError), nvtx.annotate("outer"), nvtx.annotate("inner"):
        _ = 1 / 0
    assert fake.events == ["+outer", "+inner", "-inner", "-outer"]


def test_a_check_has_ranges_for_its_reference_and_its_calls(fake: FakeNvtx) -> None:
    operator = registry.operator("gelu")
    implementation = registry.implementation("gelu", "eager")
    verdict = check(operator, implementation, operator.case("fp32-1031"), "forward", "cpu", n_seeds=1)
    title = "check gelu eager fp32-1031 forward"
    assert verdict.status == "pass" and not fake.open
    assert fake.names == [f"{title}: reference", f"{title}: calls"]


def test_no_range_begins_or_ends_while_a_sample_is_timed(
    fake: FakeNvtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take a real timing on the CPU, and compare the ranges at each reading of the clock's interval."""
    operator = registry.operator("gelu")
    implementation = registry.implementation("gelu", "torch")
    case = operator.case("fp32-1031")
    inside: list[tuple[int, int, str]] = []
    run = cpu.CpuRunner.run

    def watched(self: Any, *arguments: Any) -> Any:
        before, phase = len(fake.events), fake.open[-1] if fake.open else ""
        times = run(self, *arguments)
        inside.append((before, len(fake.events), phase))
        return times

    # Every reading of the clock is in this function.
    monkeypatch.setattr(cpu.CpuRunner, "run", watched)
    candidate = Candidate(
        name="torch", bind=lambda buffers: partial(implementation.forward, *buffers.inputs, **case.params)
    )
    budget = Budget(seconds=0.05, warmup=0.02, min_samples=3, max_rounds=6, side_samples=1)
    buffers = partial(allocate_buffers, case, "cpu", None)
    outcomes = measure([candidate], buffers, device="cpu", budget=budget, without=("replaced",))
    outcome = outcomes["torch"]
    assert outcome.timing is not None and not fake.open
    assert len(inside) >= 3 and all(before == after for before, after, _ in inside)
    assert {name for *_, name in inside} >= {"timing: prepare", "timing: sample", "timing: warm and host"}
    assert fake.names[:2] == ["timing: prepare", "timing: sample"]


def test_a_timing_that_fails_leaves_no_range_open(fake: FakeNvtx, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("weft.workbench.timing.session.TimingSession.sample", sample)
    case = registry.operator("gelu").case("fp32-1031")
    candidate = Candidate(name="x", bind=lambda buffers: lambda: torch.relu(buffers.inputs[0]))
    budget = Budget(seconds=0.05, warmup=0.01)
    buffers = partial(allocate_buffers, case, "cpu", None)
    with pytest.raises(MemoryError):
        measure([candidate], buffers, device="cpu", budget=budget, without=("replaced",))
    assert not fake.open and fake.names == ["timing: prepare", "timing: sample"]


def test_a_training_step_has_ranges_for_forward_backward_and_optimizer(
    fake: FakeNvtx, tmp_path: Path
) -> None:
    training_toys.train(tmp_path / "run", steps=2, warmup=1, accumulate=2, batch=4, checkpoint_every=None)
    one = ["step", "forward", "backward", "forward", "backward", "gradient norms", "optimizer"]
    assert fake.names == 2 * one and not fake.open
    assert fake.events[:3] == ["+step", "+forward", "-forward"]
    # The step ends after its last part.
    assert fake.events[len(fake.events) // 2 - 2 :][:2] == ["-optimizer", "-step"]
