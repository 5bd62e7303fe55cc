"""Inputs and weights that vary: seeds of all generators, constant inputs, constant weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.judge_problems import task, write
from weft.core import WeftError
from weft.workbench.judge import gpumode, kernelbench
from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.judge.judgement import Judgement
from weft.workbench.judge.variation import preserved_rng, vary, vary_weights

REFERENCE = """
import random
import numpy as np
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, *x):
        return {forward}
def get_inputs():
    return [{inputs}]
def get_init_inputs():
    return []
"""
CANDIDATE = """
import torch, torch.nn as nn
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, *x):
        return {forward}
"""
RAND = "torch.rand(8, 64)"
NUMPY = "torch.from_numpy(np.random.rand(8, 64).astype('float32'))"
PYTHON = "torch.tensor([[random.random() for _ in range(64)] for _ in range(8)])"
NORM = "self.norm = nn.LayerNorm(64)"
MASK = "torch.zeros(8, 64, dtype=torch.bool)"


def problem(folder: Path, inputs: str, forward: str, init: str = "") -> Path:
    text = REFERENCE.format(inputs=inputs, forward=forward, init=f"        {init or 'pass'}")
    return write(folder, "reference.py", text)


def judged(folder: Path, reference: Path, forward: str, init: str = "", time: bool = False) -> Judgement:
    text = CANDIDATE.format(forward=forward, init=f"        {init or 'pass'}")
    return judge(reference, write(folder, "candidate.py", text), JudgeOptions(time=time))


# -- seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [RAND, NUMPY, PYTHON])
def test_inputs_follow_the_seed_whichever_generator_draws_them(tmp_path: Path, inputs: str) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    read = kernelbench.read_problem(problem(tmp_path, inputs, "torch.relu(x[0])"), "cpu")
    (case,) = read.operator.cases
    first, again, other = (read.operator.draw(case, seed, "cpu")[0] for seed in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert read.notes == () and read.constant == ()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


@pytest.mark.slow
@pytest.mark.pooled(2, "constants")
def test_a_generator_with_numpy_and_random_is_judged(tmp_path: Path) -> None:
    """In the worker the same values are drawn: the right candidate passes and zeros do not."""
    reference = problem(tmp_path, f"{NUMPY}, {PYTHON}", "torch.softmax(x[0] + x[1], 1)")
    right = judged(tmp_path, reference, "torch.softmax(x[0] + x[1], 1)")
    assert right.correct, right.reason
    zeros = judged(tmp_path, reference, "torch.zeros_like(x[0])")
    assert zeros.reason.startswith("error: "), zeros.reason


UNSEEDED = "torch.from_numpy(np.random.default_rng().random((8, 64), dtype='float32'))"


def test_a_generator_that_does_not_follow_its_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WeftError, match=r"at inputs.*same values for the same seed.*second call with it: data.1"
    ):
        kernelbench.read_problem(problem(tmp_path, f"{RAND}, {UNSEEDED}", "x[0] + x[1]"), "cpu")
    text = (tmp_path / "reference.py").read_text().replace("forward(self, *x)", "forward(self, a, b)")
    named = write(tmp_path, "named.py", text.replace("x[0] + x[1]", "a + b"))
    with pytest.raises(WeftError, match="second call with it: b"):
        kernelbench.read_problem(named, "cpu")
    folder = task(tmp_path / "task", "return torch.rand(size)", "return data * 2")
    reference = folder / "reference.py"
    reference.write_text(reference.read_text().replace("g.manual_seed(seed)", "g.seed()"))
    text = reference.read_text().replace("torch.rand(size)", "torch.rand(size, generator=g)")
    reference.write_text(text.replace('device="cuda"', ""))
    with pytest.raises(WeftError, match="at size7: expected the same values for the same seed"):
        gpumode.read_problem(folder, "cpu")


def test_weights_that_do_not_follow_their_seed_are_refused(tmp_path: Path) -> None:
    init = "self.w = nn.Parameter(torch.from_numpy(np.random.default_rng().random(64, dtype='float32')))"
    read = kernelbench.read_problem
    with pytest.raises(WeftError, match=r"weights.*second model: w"):
        read(problem(tmp_path, RAND, "x[0] * self.w", init), "cpu")
    init = "self.w = nn.Parameter(torch.from_numpy(np.random.rand(64).astype('float32')))"
    assert read(problem(tmp_path, RAND, "x[0] * self.w", init), "cpu").notes == ()


# -- inputs ----------------------------------------------------------------------------------------


def test_a_mask_that_is_always_false_gets_both_values(tmp_path: Path) -> None:
    reference = problem(tmp_path, f"{RAND}, {MASK}", "x[0].masked_fill(x[1], 0.0)")
    read = kernelbench.read_problem(reference, "cpu")
    (case,) = read.operator.cases
    (_, mask), (_, other) = (read.operator.draw(case, seed, "cpu") for seed in (3, 4))
    assert 0 < int(mask.sum()) < mask.numel() and not torch.equal(mask, other)
    assert read.constant == ()
    (note,) = read.notes
    assert "the same at every seed: " in note and "given other values" in note


@pytest.mark.slow
@pytest.mark.pooled(2, "constants")
def test_a_candidate_that_leaves_a_constant_mask_out_fails(tmp_path: Path) -> None:
    reference = problem(tmp_path, f"{RAND}, {MASK}", "x[0].masked_fill(x[1], 0.0)")
    right = judged(tmp_path, reference, "x[0].masked_fill(x[1], 0.0)")
    assert right.correct and right.own is not None and right.own.passed, right.reason
    wrong = judged(tmp_path, reference, "x[0].clone()")
    assert wrong.reason.startswith("error: "), wrong.reason


@pytest.mark.slow
@pytest.mark.pooled(2, "constants")
def test_a_constant_answer_to_constant_inputs(tmp_path: Path) -> None:
    """Floating inputs are varied; of integers there is no time, so no speed-up of a stored answer."""
    reference = problem(tmp_path, "torch.ones(8, 64)", "torch.softmax(x[0], 1)")
    stored = judged(tmp_path, reference, "torch.full((8, 64), 1 / 64)")
    assert stored.reason.startswith("error: "), stored.reason
    reference = problem(tmp_path, "torch.arange(512).view(8, 64)", "x[0] * 2.5")
    stored = judged(tmp_path, reference, "torch.arange(512).view(8, 64) * 2.5", time=True)
    assert stored.correct, stored.reason
    assert stored.speedup is None and not stored.times
    assert any("not timed: the same at every seed" in flag for flag in stored.flags)
    assert any("the same at every seed: " in note for note in stored.notes)


def test_a_constant_that_the_reference_does_not_take_otherwise_stays(tmp_path: Path) -> None:
    """A logarithm of numbers that are no longer positive, or a check of the file's own."""
    check = "torch.relu(x[0]) if bool((x[1] == 1).all()) else 1 / 0"
    read = kernelbench.read_problem(problem(tmp_path, f"{RAND}, torch.ones(4)", check), "cpu")
    (case,) = read.operator.cases
    assert torch.equal(read.operator.draw(case, 5, "cpu")[1], torch.ones(4))
    assert len(read.constant) == 1 and "given other values" not in read.notes[0]


def test_each_case_of_a_task_is_looked_at(tmp_path: Path) -> None:
    yml = "tests:\n  - {size: 7, seed: 3}\nbenchmarks:\n  - {size: 64, seed: 3}\n"
    data = "return torch.rand(size), torch.zeros(size) if size > 7 else torch.rand(size)"
    read = gpumode.read_problem(task(tmp_path, data, "return data[0] + data[1]", yml), "cpu")
    small, large = read.operator.cases
    assert read.extra["behavior"]["varied"] == {large.name: [1]}
    second = read.operator.draw(large, 1, "cpu")[1]
    assert second.unique().numel() > 32 and second.abs().max() <= 0.25
    assert small.name == "size7"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_other_values_keep_what_a_constant_means(dtype: torch.dtype) -> None:
    ones = vary(torch.ones(1000).to(dtype), 3)
    assert ones.dtype is dtype and bool((ones.float() >= 0.5).all()) and ones.float().std() > 0.1
    assert torch.equal(ones.float(), vary(torch.ones(1000).to(dtype), 3).float())
    mask = torch.zeros(1000)
    mask[::2] = -float("inf") if dtype is not torch.float8_e4m3fn else 1.0
    varied = vary(mask.to(dtype), 3).float()
    assert set(varied.tolist()) == set(mask.tolist()) and 100 < int((varied != mask).sum()) < 400


# -- weights ---------------------------------------------------------------------------------------

# Each leaves out what is constant in every set of weights that its constructor gives: in the last column
# the weights that the candidate has nevertheless.
LEFT_OUT = {
    "a norm's weight and bias": (NORM, "self.norm(x[0])", "nn.functional.layer_norm(x[0], (64,))", NORM),
    "a batch norm's statistics": (
        "self.norm = nn.BatchNorm1d(64).eval()",
        "self.norm(x[0])",
        "x[0] * (1 + 1e-5) ** -0.5",
        "",
    ),
    "a scale of one element": ("self.a = nn.Parameter(torch.ones(()))", "x[0] * self.a", "x[0].clone()", ""),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", LEFT_OUT)
def test_leaving_out_constant_weights_fails(tmp_path: Path, what: str) -> None:
    init, forward, without, has = LEFT_OUT[what]
    wrong = judged(tmp_path, problem(tmp_path, RAND, forward, init), without, has)
    assert wrong.reason.startswith("error: ") and "weights-2" in wrong.reason, wrong.reason
    assert "constant weights have other values in weights-2" in wrong.notes


@pytest.mark.slow
@pytest.mark.pooled(2, "constants")
def test_a_candidate_may_call_its_weights_otherwise(tmp_path: Path) -> None:
    reference = problem(tmp_path, RAND, "self.norm(x[0])", NORM)
    init = "self.a, self.b = nn.Parameter(torch.ones(1, 64)), nn.Parameter(torch.zeros(1, 64))"
    own = "nn.functional.layer_norm(x[0], (64,)) * self.a + self.b"
    assert judged(tmp_path, reference, own, init).correct
    assert judged(tmp_path, reference, "self.norm(x[0])", NORM).correct


def test_a_reference_that_takes_no_other_weights_keeps_its_own(tmp_path: Path) -> None:
    check = "self.norm(x[0]) if bool((self.norm.weight == 1).all()) else 1 / 0"
    read = kernelbench.read_problem(problem(tmp_path, RAND, check, NORM), "cpu")
    assert read.extra["varied_weights"] is None
    assert read.notes == ("the reference does not take other values of its constant weights",)


def test_varied_weights_keep_their_signs_and_do_not_depend_on_names() -> None:
    norm, other = torch.nn.BatchNorm1d(64), torch.nn.BatchNorm1d(64)
    with preserved_rng():
        vary_weights(norm, 5)
    vary_weights(torch.nn.Sequential(other), 5)
    for name, weight in norm.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    assert (norm.running_var > 0).all() and (norm.weight > 0).all() and int(norm.num_batches_tracked) == 0
    assert not torch.equal(norm.weight, norm.running_var) and norm.bias.std() > 0.1
    linear = torch.nn.Linear(8, 8)
    before = linear.weight.clone()
    vary_weights(linear, 5)
    assert torch.equal(linear.weight, before)


def test_weights_that_are_zeros_or_ones_in_part_vary_there_and_masks_do_not() -> None:
    layer = torch.nn.BatchNorm1d(64)
    with torch.no_grad():
        layer.weight[::2] = 0.0
    mask, scale = torch.ones(8, 8).tril(), torch.tensor([0.125])
    for name, buffer in (("mask", mask), ("scale", scale), ("fade", torch.zeros(1))):
        layer.register_buffer(name, buffer.clone())
    vary_weights(layer, 5)
    assert (layer.weight != 0).all() and (layer.weight != 1).all() and layer.bias.std() > 0.1
    assert torch.equal(layer.mask, mask) and torch.equal(layer.scale, scale)
    assert layer.fade != 0, "the branch that it turns off is judged"


def test_an_answer_made_for_constant_integers_gets_no_speed_up(tmp_path: Path) -> None:
    """Several integers decide what is computed; one alone is a size."""
    ids, length = "torch.arange(64) // 8", "torch.tensor(3)"
    read = {
        inputs: kernelbench.read_problem(problem(tmp_path, f"{RAND}, {inputs}", "x[0] * x[1]"), "cpu")
        for inputs in (ids, length, "torch.randint(9, (64,))", "torch.rand(8, 64).tril()")
    }
    assert [len(p.constant) for p in read.values()] == [1, 0, 0, 0]
    fixed = "torch.cat([torch.linspace(2, 3, 7 * 64).view(7, 64), torch.rand(1, 64)])"
    partly = kernelbench.read_problem(problem(tmp_path, f"{RAND}, {fixed}", "x[0] * x[1]"), "cpu")
    assert len(partly.constant) == 1 and "the same at every seed in part" in partly.notes[0]
