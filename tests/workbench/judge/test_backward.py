"""``weft judge --backward``: planted wrong gradients, right ones, and what is not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.gradient_candidates import RIGHT, WRONG, plain, problem
from helpers.judge_problems import model, task, write
from weft.core import BACKWARD, FORWARD, WeftError
from weft.workbench.check.oracle import Oracle
from weft.workbench.judge import kernelbench
from weft.workbench.judge.backward import match_parameters
from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.judge.judgement import Judgement
from weft.workbench.sandbox.process import Limits

OPTIONS = JudgeOptions(backward=True, time=False, limits=Limits(seconds=60.0, memory_bytes=4 << 30))


def judge_gradients(folder: Path, name: str, candidate: str) -> Judgement:
    reference = write(folder, f"{name}.py", problem(name))
    return judge(reference, write(folder, "candidate.py", candidate), OPTIONS)


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_gradient_is_judged_wrong(tmp_path: Path, fault: str) -> None:
    name, candidate, reason = WRONG[fault]
    judgement = judge_gradients(tmp_path, name, candidate)
    assert not judgement.correct and judgement.reason.startswith(reason), judgement.reason
    assert judgement.to_json()["direction"] == BACKWARD and "\n" not in judgement.reason
    if fault not in ("half precision lost", "stale"):  # the others compute the right output
        forward = judge(tmp_path / f"{name}.py", tmp_path / "candidate.py", JudgeOptions(time=False))
        assert forward.correct, "only the gradient is wrong"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", RIGHT)
def test_a_right_gradient_is_judged_right(tmp_path: Path, how: str) -> None:
    name, candidate = RIGHT[how]
    judgement = judge_gradients(tmp_path, name, candidate)
    assert judgement.correct and not judgement.reason, judgement.reason
    assert {c.status for c in judgement.checks} == {"pass"}
    assert judgement.flags == ["not timed: left out"]  # no gradient was left out
    assert judgement.direction == BACKWARD and judgement.own is None and judgement.gradients


@pytest.mark.slow
def test_unmatched_parameters_are_reported(tmp_path: Path) -> None:
    packed = """
    def __init__(self, n):
        super().__init__()
        self.both = nn.Parameter(torch.cat([torch.randn(n), torch.randn(n)]))
"""
    candidate = plain("scale", "x * self.both[:48] + self.both[48:]", packed)
    judgement = judge_gradients(tmp_path, "scale", candidate)
    assert judgement.correct, judgement.reason
    assert judgement.gradients == ["x"]
    assert judgement.flags and judgement.flags[0].startswith("gradients not compared: parameter weight")


def test_the_oracle_is_float64_autograd_of_the_reference(tmp_path: Path) -> None:
    path = write(tmp_path, "linear.py", problem("linear"))
    gradients = kernelbench.read_problem(path, "cpu", seed=3, backward=True)
    assert gradients.operator.output_names == ("gradient of x", "gradient of parameter weight")
    case = gradients.operator.cases[0]
    oracle = Oracle(gradients.operator, case, FORWARD, "cpu", [5], gradients.baseline)
    x, incoming = (t.double() for t in oracle.inputs(5))
    weight = kernelbench.read_problem(path, "cpu", seed=3).baseline.forward(torch.eye(24, 40), **case.params)
    grad_x, grad_weight = oracle.answer(5)
    assert grad_x.dtype is torch.float64 and torch.allclose(grad_weight, x.t() @ incoming, rtol=1e-13)
    assert torch.allclose(grad_x[:, :24], incoming @ weight.double().t(), rtol=1e-12)
    assert max(b.maximum for b in oracle.bounds) < 1e-3


def test_parameters_match_by_name_then_by_a_shape_that_only_they_have() -> None:
    own = {"a": torch.zeros(3), "x": torch.zeros(4, 5), "p": torch.zeros(7), "q": torch.zeros(7)}
    shapes = {"a": [3], "weight": [4, 5], "bias": [7], "gone": [9]}
    matched = match_parameters(own, shapes)
    assert list(matched) == ["a", "weight"] and matched["weight"] is own["x"]
    assert match_parameters({"a": torch.zeros(2)}, {"a": [3]}) == {}


@pytest.mark.parametrize(("body", "message"), [("x > 0.5", "autograd reaches none"), ("x.detach()", "none")])
def test_a_reference_without_a_gradient_is_a_mistake_in_the_request(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(WeftError, match=message):
        kernelbench.read_problem(model(tmp_path, body), "cpu", backward=True)


def test_other_formats_have_no_backward(tmp_path: Path) -> None:
    folder = task(tmp_path, "return torch.rand(size, generator=g)", "return data * 2")
    with pytest.raises(WeftError, match="KernelBench"):
        judge(folder, write(tmp_path, "candidate.py", ""), OPTIONS)
