"""Foreign formats read unchanged: what a file defines, its data, its float64, its weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from weft.core import FORWARD, Finding, Verdict, WeftError
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.bring import Source, load
from weft.workbench.formats import gpumode, gpumode_names, kernelbench, task_yml
from weft.workbench.formats.data import results, take_apart
from weft.workbench.formats.detect import GPUMODE, KERNELBENCH, detect
from weft.workbench.formats.files import facts
from weft.workbench.formats.in_float64 import in_float64
from weft.workbench.formats.judgement import Judgement, Time, take_verdicts
from weft.workbench.formats.on_cpu import generating_on_cpu, on_cpu
from weft.workbench.oracle import Oracle

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what becomes of cuda without a GPU")

MODEL = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return {body}
def get_inputs():
    return [torch.rand(3, 5)]
def get_init_inputs():
    return []
"""
TASK = """
import torch
from task import input_t, output_t
from utils import make_match_reference
def generate_input(size: int, seed: int) -> input_t:
    g = torch.Generator(device="cuda")
    g.manual_seed(seed)
    {data}
def ref_kernel(data: input_t) -> output_t:
    {body}
check_implementation = make_match_reference(ref_kernel)
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model(folder: Path, body: str = "torch.softmax(x, 1)") -> Path:
    return write(folder, "reference.py", MODEL.format(body=body))


def task(folder: Path, data: str, body: str, yml: str = "tests:\n  - {size: 7, seed: 3}\n") -> Path:
    write(folder, "task.yml", yml)
    return write(folder, "reference.py", TASK.format(data=data, body=body)).parent


# -- which format ------------------------------------------------------------------------------


def test_detects_both_formats(tmp_path: Path) -> None:
    candidate = write(tmp_path, "c.py", "x = = 1")  # what is wrong with it is a verdict
    assert detect(model(tmp_path / "a"), candidate) == KERNELBENCH
    folder = task(tmp_path / "b", "return torch.rand(size)", "return data")
    assert detect(folder, candidate) == GPUMODE
    assert detect(folder / "reference.py", candidate) == GPUMODE


@pytest.mark.parametrize("text", ["x = 1", "def f(:", "", "\x00"])
def test_a_reference_in_no_format_is_a_wrong_call(tmp_path: Path, text: str) -> None:
    candidate = write(tmp_path, "c.py", "")
    with pytest.raises(WeftError):
        detect(write(tmp_path, "r.py", text), candidate)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="REFERENCE"):
        detect(tmp_path / "no.py", tmp_path / "c.py")
    with pytest.raises(WeftError, match="CANDIDATE"):
        detect(model(tmp_path), tmp_path / "c.py")
    candidate, folder = write(tmp_path, "c.py", ""), tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(WeftError, match="reference"):
        detect(folder, candidate)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("import torch", "eager"),
        ("import triton.language as tl", "triton"),
        ("from torch.utils.cpp_extension import load_inline\nload_inline(cuda_sources='')", "cuda"),
        ("from torch.utils.cpp_extension import load_inline\nload_inline(cpp_sources='')", "eager"),
        ("from torch.utils.cpp_extension import load\nload('k', ['k.cu'])", "cuda"),
        ("import cupy", "cuda"),
        ("from numba import cuda", "numba"),
        ("from numba import njit", "eager"),
        ("import torch\nf = torch.compile(g)", "compile"),
    ],
)
def test_the_backend_a_file_is_written_in(tmp_path: Path, text: str, backend: str) -> None:
    assert facts(write(tmp_path, "c.py", text)).backend == backend


def verdict(case: str, status: str, **findings: str) -> Verdict:
    return Verdict(
        operator="o",
        implementation="i",
        case=case,
        direction=FORWARD,
        status=status,
        reason="" if status == PASS else f"error: {findings['error']}",
        findings=tuple(
            Finding(check=k, status=v if v == PASS else FAIL, detail="" if v == PASS else v)
            for k, v in findings.items()
        ),
        tolerance_used=0.25,
    )


def test_a_failure_at_one_case_is_the_verdict() -> None:
    found = Judgement(format="gpumode", operator="o")
    take_verdicts(found, [verdict("a", PASS, type=PASS, error=PASS), verdict("b", FAIL, error="x")])
    assert not found.correct and found.reason == "error: x at b"
    assert [(c.check, c.status, c.detail) for c in found.checks] == [
        ("type", PASS, ""),
        ("error", FAIL, "x at b"),
    ]
    right = Judgement(format="gpumode", operator="o")
    take_verdicts(right, [verdict("a", PASS, type=PASS, error=PASS)])
    assert right.correct and right.checks[1].detail == "25% of the tolerance"
    right.times = [
        Time(case="a", time_us=2, baseline_us=8),
        Time(case="b", time_us=8, baseline_us=8),
    ]
    told = right.to_json()
    assert told["speedup"] == pytest.approx(2) and told["time_us"] == pytest.approx(4)
    right.refuse("provenance", "declared triton")
    assert not right.correct and right.to_json()["reason"] == "provenance: declared triton"


def test_what_was_not_run_is_not_right() -> None:
    found = Judgement(format="gpumode", operator="o")
    take_verdicts(found, [verdict("a", PASS, error=PASS), verdict("b", UNSUPPORTED, error=PASS)])
    assert not found.correct and found.reason.startswith("not run:")
    assert not Judgement(format="gpumode", operator="o").to_json()["correct"]


# -- task.yml ----------------------------------------------------------------------------------


def test_cases_in_braces_over_lines_and_as_blocks(tmp_path: Path) -> None:
    text = """# a comment
description: |
  tests: are not here
  - {"nor": here}
tests:
  - {"m": 32, 'n': 4.5, k: true,
     "shape": [1, 2], "kind": "a b"}   # behind
  - size: 7
    seed: -3
benchmarks: []
config:
  - {"size": 9}
"""
    found = task_yml.read(write(tmp_path, "task.yml", text))
    assert found["tests"] == [
        {"m": 32, "n": 4.5, "k": True, "shape": [1, 2], "kind": "a b"},
        {"size": 7, "seed": -3},
    ]
    assert found["benchmarks"] == []


@pytest.mark.parametrize("item", ['{"size": 1', "{size}", "[1, 2]", '{"a": 1} b'])
def test_a_case_that_is_not_understood_says_so(tmp_path: Path, item: str) -> None:
    path = write(tmp_path, "task.yml", f"tests:\n  - {item}\nlang: py\n")
    with pytest.raises(WeftError, match=r"task\.yml"):
        task_yml.read(path)


# -- float64 -----------------------------------------------------------------------------------


def test_every_dtype_that_is_named_becomes_float64() -> None:
    x = torch.rand(4, dtype=torch.float64)
    held = torch.rand(4)  # a constant of the file's, made before
    with in_float64():
        for made in (
            x.half(),
            x.to(torch.bfloat16),
            x.float() + held,
            torch.zeros(3),
            torch.empty(2, dtype=torch.float16),
            torch.tensor([1.5]),
            torch.full((2,), 1.0),
            torch.softmax(x, 0, dtype=torch.float32),
            x.type(torch.float32),
            torch.nn.Linear(4, 2).half()(x),
            torch.stack([x, held]),
        ):
            assert made.dtype is torch.float64
        assert torch.arange(3).dtype is torch.int64 and (x > 0).dtype is torch.bool
        kept = x.clone()
        assert kept.mul_(2) is kept
    assert torch.get_default_dtype() is torch.float32 and x.half().dtype is torch.float16


def test_random_numbers_are_those_of_the_own_dtype() -> None:
    torch.manual_seed(7)
    own = torch.randn(5)
    torch.manual_seed(7)
    with in_float64():
        wide = torch.randn(5)
    assert wide.dtype is torch.float64 and torch.equal(wide, own.double())


def test_a_reference_that_casts_is_still_exact(tmp_path: Path) -> None:
    body = "(x.half() @ x.half().t()).float()"
    problem = kernelbench.problem(model(tmp_path, body), "cpu", seed=1)
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 5, "cpu")
    exact = problem.operator.reference(x.double(), **case.params)
    assert torch.allclose(exact, x.double() @ x.double().t(), rtol=1e-14)
    own = problem.baseline.forward(x, **case.params)
    assert own.dtype is torch.float32 and 1e-5 < (own - exact).abs().max() < 1e-2


# -- cuda without one --------------------------------------------------------------------------


@no_gpu
def test_cuda_means_the_cpu_where_there_is_none() -> None:
    with on_cpu():
        x = torch.zeros(2, device="cuda:0").cuda().to("cuda").to(torch.device("cuda"))
        assert x.is_cuda and x.device.type == "cpu"
    own = torch.Generator
    with generating_on_cpu():
        g = torch.Generator(device="cuda")
        first = torch.rand(2, device="cuda", generator=g.manual_seed(3))
    assert torch.Generator is own and not x.is_cuda
    assert torch.equal(first, torch.rand(2, generator=own().manual_seed(3)))


# -- data --------------------------------------------------------------------------------------


def test_data_is_taken_apart_and_put_back() -> None:
    a, b = torch.rand(2, 3), torch.arange(4)
    data = (a, {"w": [b, 5], "none": None}, 2.5, "name")
    form, tensors = take_apart(data)
    assert [i.name for i in form.inputs] == ["data[0]", "data[1]['w'][0]"]
    assert [i.dtype for i in form.inputs] == ["float32", "int64"]
    built, fresh = form.build(tensors)
    assert torch.equal(built[1]["w"].pop(0), b) and built[1] == {"w": [5], "none": None}
    assert built[0] is tensors[0] and built[2:] == (2.5, "name") and not fresh


def test_a_transposed_tensor_keeps_its_layout() -> None:
    form, _ = take_apart((torch.rand(3, 5).t(), torch.rand(3, 5)[:, ::2]))
    assert [i.layout for i in form.inputs] == ["transposed", "contiguous"]


def test_data_that_is_not_understood_says_where() -> None:
    with pytest.raises(WeftError, match=r"data\[1\]"):
        take_apart((torch.rand(1), object()))
    with pytest.raises(WeftError, match="complex64"):
        take_apart(torch.zeros(1, dtype=torch.complex64))


def test_answers_become_a_tensor_or_a_tuple() -> None:
    a, b = torch.rand(1), torch.rand(2)
    assert results(a) is a and results([a, (b,)]) == (a, b) and results({"x": a}) is a
    assert results(None) is None and results(None, [b]) is b
    assert results(3).dtype is torch.int64 and results(0.1).dtype is torch.float64


# -- how a reference behaves -------------------------------------------------------------------


def test_a_buffer_is_told_from_an_input_that_is_overwritten(tmp_path: Path) -> None:
    data = "return torch.rand(size, generator=g), torch.rand(size, generator=g)"
    writes = task(tmp_path / "a", data, "data[1][:] = data[0] * 2; return data[1]")
    problem = gpumode.problem(writes, "cpu")
    assert problem.extra["habits"]["buffers"] == [1] and not problem.operator.in_place
    assert [i.name for i in problem.operator.cases[0].inputs] == ["data[0]"]
    reads = task(tmp_path / "b", data, "data[1].add_(data[0])")
    problem = gpumode.problem(reads, "cpu")
    assert problem.operator.in_place == ("data[1]",) and not problem.extra["habits"]["buffers"]
    oracle = Oracle(
        problem.operator, problem.operator.cases[0], FORWARD, "cpu", [4], problem.baseline
    )
    a, b = oracle.inputs(4)
    assert torch.equal(oracle.answer(4)[0], a.double() + b.double())


def test_an_input_that_only_looks_like_an_answer_is_no_buffer(tmp_path: Path) -> None:
    data = "return torch.rand(size, generator=g), torch.rand(size, generator=g)"
    problem = gpumode.problem(task(tmp_path, data, "return data[0] + data[1]"), "cpu")
    assert not problem.extra["habits"]["buffers"]


def test_a_reference_that_draws_gives_every_caller_the_same(tmp_path: Path) -> None:
    problem = kernelbench.problem(model(tmp_path, "x + torch.randn(3, 5)"), "cpu", seed=1)
    assert problem.extra["habits"]["random"]
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 5, "cpu")
    first = problem.baseline.forward(x, **case.params)
    assert torch.equal(first, problem.baseline.forward(x, **case.params))
    exact = problem.operator.reference(x.double(), **case.params)
    assert torch.allclose(first.double(), exact, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("torch.zeros(int(x.element_size()))", "float64"),
        ("'text'", "tensors"),
    ],
)
def test_a_reference_that_cannot_be_run_is_a_wrong_call(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(WeftError, match=said):
        kernelbench.problem(model(tmp_path, body), "cpu")


@pytest.mark.parametrize("name", ["Model", "get_inputs"])
def test_a_reference_without_its_parts_is_a_wrong_call(tmp_path: Path, name: str) -> None:
    text = MODEL.format(body="x").replace(name, "Other")
    with pytest.raises(WeftError, match=name):
        kernelbench.problem(write(tmp_path, "r.py", text), "cpu")


def test_a_generator_with_other_shapes_for_each_seed_is_a_wrong_call(tmp_path: Path) -> None:
    text = MODEL.format(body="x").replace(
        "torch.rand(3, 5)", "torch.rand(int(torch.randint(99, ())))"
    )
    problem = kernelbench.problem(write(tmp_path, "r.py", text), "cpu", seed=1)
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
    problem = gpumode.problem(folder, "cpu")
    tags = {c.name: set(c.tags) for c in problem.operator.cases}
    assert tags == {"size7": {"check", "bench"}, "size9": {"bench"}}
    case = problem.operator.case("size7")
    (own,) = problem.operator.draw(case, 0, "cpu")
    assert torch.equal(own, torch.rand(7, generator=torch.Generator().manual_seed(8)))
    assert problem.own_check(case, 0, own * 2) == (True, "")
    passed, said = problem.own_check(case, 0, own * 2 + 1e-3)
    assert not passed and "7 of 7 elements" in said


def test_a_lone_reference_is_judged_at_its_defaults(tmp_path: Path) -> None:
    text = TASK.format(data="return torch.rand(size, generator=g)", body="return data")
    alone = write(tmp_path / "a", "reference.py", text.replace("size: int,", "size: int = 6, *,"))
    (case,) = gpumode.problem(alone, "cpu").operator.cases
    assert case.inputs[0].shape == (6,)
    with pytest.raises(WeftError, match="default"):
        gpumode.problem(write(tmp_path / "b", "reference.py", text), "cpu")


def test_the_folders_own_helpers_go_first(tmp_path: Path) -> None:
    folder = task(tmp_path, "return torch.rand(size, generator=g)", "return data * factor")
    write(tmp_path, "utils.py", "factor = 3\ndef make_match_reference(f): return None\n")
    text = (folder / "reference.py").read_text()
    write(tmp_path, "reference.py", text.replace("import make_match", "import factor, make_match"))
    problem = gpumode.problem(folder, "cpu")
    (x,) = problem.operator.draw(problem.operator.cases[0], 1, "cpu")
    assert torch.equal(problem.baseline.forward(x, point="size7"), x * 3)
    with pytest.raises(ImportError):
        importlib.import_module("utils")


def test_the_stand_ins_compare() -> None:
    a = torch.tensor([1.0, float("nan"), 2.0])
    assert gpumode_names.verbose_allclose(a, a) == []
    assert "1 of 3" in gpumode_names.verbose_allclose(a, torch.tensor([1.0, 5.0, 2.0]))[0]
    assert "shape" in gpumode_names.verbose_allequal(a, a[:2])[0]
    good = gpumode_names.make_match_reference(lambda x: (x, x + 1))
    assert good(a, (a, a + 1)) == (True, "") and not good(a, (a, a))[0]
    assert gpumode_names.task().anything is not None


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


def brought(tmp_path: Path, reference: str, candidate: str):  # type: ignore[no-untyped-def]
    path = write(tmp_path, "r.py", reference)
    problem = kernelbench.problem(path, "cpu")
    mine = write(tmp_path, "c.py", candidate)
    source = Source(kind="kernelbench", path=str(mine), reference=str(path), extra=problem.extra)
    return problem, load(source)


@pytest.mark.parametrize("name", CANDIDATES)
def test_weights_change_from_case_to_case(tmp_path: Path, name: str) -> None:
    init, forward, follows = CANDIDATES[name]
    text = LINEAR.replace("class Model", "class ModelNew").replace("self.linear(x)", forward)
    text = text.replace("nn.Linear(n, n)", f"nn.Linear(n, n)\n        {init}")
    problem, guest = brought(tmp_path, LINEAR, text)
    (mine,) = guest.implementations
    right = []
    for case in problem.operator.cases:
        (x,) = problem.operator.draw(case, 3, "cpu")
        due = problem.baseline.forward(x, **case.params)
        right.append(torch.allclose(mine.forward(x, **case.params), due, atol=1e-5))
    assert [c.name for c in problem.operator.cases] == ["weights-1", "weights-2"]
    assert right == [True, follows]


def test_a_guest_draws_the_same_and_knows_no_reference(tmp_path: Path) -> None:
    text = LINEAR.replace("class Model", "class ModelNew")
    problem, guest = brought(tmp_path, LINEAR, text)
    (operator,) = guest.operators
    case = operator.cases[0]
    for a, b in zip(
        operator.draw(case, 9, "cpu"), problem.operator.draw(case, 9, "cpu"), strict=True
    ):
        assert torch.equal(a, b)
    with pytest.raises(AssertionError, match="knows no reference"):
        operator.reference(torch.zeros(2, 6, dtype=torch.float64), **case.params)
    assert not hasattr(sys.modules["weft_problem"], "Model")


def test_a_candidate_without_its_class_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="ModelNew"):
        brought(tmp_path, LINEAR, "x = 1")


def test_the_formats_own_tolerance_is_looser() -> None:
    problems = Path(__file__).resolve().parent.parent / "examples" / "judge" / "kernelbench"
    problem = kernelbench.problem(problems / "softmax" / "reference.py", "cpu")
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 1, "cpu")
    assert problem.own_check(case, 1, torch.zeros_like(x))[0]
    assert not problem.own_check(case, 1, torch.zeros(1))[0]
    assert not problem.own_check(case, 1, torch.full_like(x, float("nan")))[0]
    bound = Oracle(problem.operator, case, FORWARD, "cpu", [1], problem.baseline).bounds[0]
    assert bound.maximum < 1e-8
