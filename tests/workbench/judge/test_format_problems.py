"""Problems of other suites: the behavior of a reference, its cases, a candidate and its weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from helpers.judge_problems import MODEL, TASK, model, task, write
from helpers.paths import EXAMPLES
from weft.core import FORWARD, WeftError
from weft.workbench.check.oracle import Oracle
from weft.workbench.judge import gpumode, gpumode_modules, kernelbench
from weft.workbench.sources.source import Source, load

# -- behavior of a reference -------------------------------------------------------------------


def test_an_output_buffer_is_distinguished_from_an_overwritten_input(tmp_path: Path) -> None:
    data = "return torch.rand(size, generator=g), torch.rand(size, generator=g)"
    writes = task(tmp_path / "a", data, "data[1][:] = data[0] * 2; return data[1]")
    problem = gpumode.read_problem(writes, "cpu")
    assert problem.extra["behavior"]["buffers"] == [1] and not problem.operator.in_place
    assert [i.name for i in problem.operator.cases[0].inputs] == ["data[0]"]
    reads = task(tmp_path / "b", data, "data[1].add_(data[0])")
    problem = gpumode.read_problem(reads, "cpu")
    assert problem.operator.in_place == ("data[1]",) and not problem.extra["behavior"]["buffers"]
    oracle = Oracle(problem.operator, problem.operator.cases[0], FORWARD, "cpu", [4], problem.baseline)
    a, b = oracle.inputs(4)
    assert torch.equal(oracle.answer(4)[0], a.double() + b.double())


def test_an_input_of_the_output_s_shape_is_no_buffer(tmp_path: Path) -> None:
    data = "return torch.rand(size, generator=g), torch.rand(size, generator=g)"
    problem = gpumode.read_problem(task(tmp_path, data, "return data[0] + data[1]"), "cpu")
    assert not problem.extra["behavior"]["buffers"]


def test_a_random_reference_gives_every_call_the_same_numbers(tmp_path: Path) -> None:
    problem = kernelbench.read_problem(model(tmp_path, "x + torch.randn(3, 5)"), "cpu", seed=1)
    assert problem.extra["behavior"]["random"]
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 5, "cpu")
    first = problem.baseline.forward(x, **case.params)
    assert torch.equal(first, problem.baseline.forward(x, **case.params))
    exact = problem.operator.reference(x.double(), **case.params)
    assert torch.allclose(first.double(), exact, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("torch.zeros(int(x.element_size()))", "float64"),
        ("'text'", "tensors"),
    ],
)
def test_a_reference_that_cannot_be_run_is_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        kernelbench.read_problem(model(tmp_path, body), "cpu")


@pytest.mark.parametrize("name", ["Model", "get_inputs"])
def test_an_incomplete_reference_is_a_mistake_in_the_request(tmp_path: Path, name: str) -> None:
    text = MODEL.format(body="x").replace(name, "Other")
    with pytest.raises(WeftError, match=name):
        kernelbench.read_problem(write(tmp_path, "r.py", text), "cpu")


def test_a_generator_with_other_shapes_for_each_seed_is_a_mistake_in_the_request(tmp_path: Path) -> None:
    text = MODEL.format(body="x").replace("torch.rand(3, 5)", "torch.rand(int(torch.randint(99, ())))")
    problem = kernelbench.read_problem(write(tmp_path, "r.py", text), "cpu", seed=1)
    with pytest.raises(WeftError, match="same shapes"):
        [problem.operator.draw(problem.operator.cases[0], s, "cpu") for s in range(1, 9)]


# -- GPU MODE ----------------------------------------------------------------------------------


def test_cases_and_seeds_of_a_task(tmp_path: Path) -> None:
    yml = """
tests:
  - {size: 7, seed: 3}
benchmarks:
  - {size: 9, seed: 1}
  - {size: 7, seed: 8}
"""
    folder = task(tmp_path, "return torch.rand(size, generator=g)", "return data * 2", yml)
    problem = gpumode.read_problem(folder, "cpu")
    tags = {c.name: set(c.tags) for c in problem.operator.cases}
    assert tags == {"size7": {"check", "bench"}, "size9": {"bench"}}
    case = problem.operator.case("size7")
    (own,) = problem.operator.draw(case, 0, "cpu")
    assert torch.equal(own, torch.rand(7, generator=torch.Generator().manual_seed(8)))
    assert problem.own_check(case, 0, own * 2) == (True, "")
    passed, message = problem.own_check(case, 0, own * 2 + 1e-3)
    assert not passed and "7 of 7 elements" in message


def test_a_lone_reference_is_judged_at_its_defaults(tmp_path: Path) -> None:
    text = TASK.format(data="return torch.rand(size, generator=g)", body="return data")
    alone = write(tmp_path / "a", "reference.py", text.replace("size: int,", "size: int = 6, *,"))
    (case,) = gpumode.read_problem(alone, "cpu").operator.cases
    assert case.inputs[0].shape == (6,)
    with pytest.raises(WeftError, match="default"):
        gpumode.read_problem(write(tmp_path / "b", "reference.py", text), "cpu")


def test_the_folders_own_modules_take_precedence(tmp_path: Path) -> None:
    folder = task(tmp_path, "return torch.rand(size, generator=g)", "return data * factor")
    write(tmp_path, "utils.py", "factor = 3\ndef make_match_reference(f): return None\n")
    text = (folder / "reference.py").read_text()
    write(tmp_path, "reference.py", text.replace("import make_match", "import factor, make_match"))
    problem = gpumode.read_problem(folder, "cpu")
    (x,) = problem.operator.draw(problem.operator.cases[0], 1, "cpu")
    assert torch.equal(problem.baseline.forward(x, point="size7"), x * 3)
    with pytest.raises(ImportError):
        importlib.import_module("utils")


def test_the_substitute_modules_compare() -> None:
    a = torch.tensor([1.0, float("nan"), 2.0])
    assert gpumode_modules.verbose_allclose(a, a) == []
    assert "1 of 3" in gpumode_modules.verbose_allclose(a, torch.tensor([1.0, 5.0, 2.0]))[0]
    assert "shape" in gpumode_modules.verbose_allequal(a, a[:2])[0]
    good = gpumode_modules.make_match_reference(lambda x: (x, x + 1))
    assert good(a, (a, a + 1)) == (True, "") and not good(a, (a, a))[0]
    assert gpumode_modules.make_task().anything is not None


# -- a candidate and its weights ---------------------------------------------------------------

LINEAR = """
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(n, n)
    def forward(self, x):
        return self.linear(x)
def get_inputs():
    return [torch.rand(2, 6)]
def get_init_inputs():
    return [6]
"""
CANDIDATES = {
    "plain": ("", "self.linear(x)", True),
    "other names": ("self.other = self.linear; del self.linear", "self.other(x)", True),
    "declared set-up": (
        "self.setup()\n    def setup(self):\n"
        "        self.packed = self.linear.weight.detach().t().contiguous()",
        "x @ self.packed + self.linear.bias",
        True,
    ),
    "packed and kept": (
        "self.packed = self.linear.weight.detach().t().contiguous()",
        "x @ self.packed + self.linear.bias",
        False,
    ),
}


def load_candidate(tmp_path: Path, reference: str, candidate: str):  # type: ignore[no-untyped-def]
    path = write(tmp_path, "r.py", reference)
    problem = kernelbench.read_problem(path, "cpu")
    candidate_file = write(tmp_path, "c.py", candidate)
    source = Source(kind="kernelbench", path=str(candidate_file), reference=str(path), extra=problem.extra)
    return problem, load(source)


@pytest.mark.parametrize("name", CANDIDATES)
def test_each_case_has_its_own_weights(tmp_path: Path, name: str) -> None:
    init, forward, follows = CANDIDATES[name]
    text = LINEAR.replace("class Model", "class ModelNew").replace("self.linear(x)", forward)
    text = text.replace("nn.Linear(n, n)", f"nn.Linear(n, n)\n        {init}")
    problem, loaded = load_candidate(tmp_path, LINEAR, text)
    (candidate_file,) = loaded.implementations
    right = []
    for case in problem.operator.cases:
        (x,) = problem.operator.draw(case, 3, "cpu")
        expected = problem.baseline.forward(x, **case.params)
        right.append(torch.allclose(candidate_file.forward(x, **case.params), expected, atol=1e-5))
    assert [c.name for c in problem.operator.cases] == ["weights-1", "weights-2"]
    assert right == [True, follows]


def test_a_worker_generates_the_same_inputs_and_has_no_reference(tmp_path: Path) -> None:
    text = LINEAR.replace("class Model", "class ModelNew")
    problem, loaded = load_candidate(tmp_path, LINEAR, text)
    (operator,) = loaded.operators
    case = operator.cases[0]
    for a, b in zip(operator.draw(case, 9, "cpu"), problem.operator.draw(case, 9, "cpu"), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(AssertionError, match="has no reference"):
        operator.reference(torch.zeros(2, 6, dtype=torch.float64), **case.params)
    assert not hasattr(sys.modules["weft_problem"], "Model")


def test_a_candidate_without_its_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="ModelNew"):
        load_candidate(tmp_path, LINEAR, "x = 1")


def test_the_format_s_own_tolerance_is_looser() -> None:
    problems = EXAMPLES / "judge" / "kernelbench"
    problem = kernelbench.read_problem(problems / "softmax" / "reference.py", "cpu")
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 1, "cpu")
    assert problem.own_check(case, 1, torch.zeros_like(x))[0]
    assert not problem.own_check(case, 1, torch.zeros(1))[0]
    assert not problem.own_check(case, 1, torch.full_like(x, float("nan")))[0]
    bound = Oracle(problem.operator, case, FORWARD, "cpu", [1], problem.baseline).bounds[0]
    assert bound.maximum < 1e-8
