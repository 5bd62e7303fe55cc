"""Foreign formats read unchanged: what a file defines, its cases, its data, its float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from format_toys import model, task, write
from weft.core import FORWARD, Finding, Verdict, WeftError
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.formats import kernelbench, task_yml
from weft.workbench.formats.data import results, take_apart
from weft.workbench.formats.detect import GPUMODE, KERNELBENCH, detect
from weft.workbench.formats.files import facts
from weft.workbench.formats.in_float64 import in_float64
from weft.workbench.formats.judgement import Judgement, Time, take_verdicts
from weft.workbench.formats.on_cpu import generating_on_cpu, on_cpu

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what becomes of cuda without a GPU")


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
