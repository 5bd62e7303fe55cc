"""Formats of other suites: definitions of a file, its cases, its data and float64."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.judge_problems import model, task, write
from weft.core import FORWARD, Finding, Timing, Verdict, WeftError
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.judge import kernelbench
from weft.workbench.judge.data_template import output_keys, output_tensors, split_data
from weft.workbench.judge.gpumode import read_task_yml
from weft.workbench.judge.judge import GPUMODE, KERNELBENCH, JudgeOptions, detect_format, judge
from weft.workbench.judge.judgement import Judgement, SpeedUp, Time, compare
from weft.workbench.judge.source_facts import execute, source_facts
from weft.workbench.judge.torch_modes import Float64Mode, cuda_generators_on_cpu, cuda_on_cpu
from weft.workbench.timing.stats import Ratio, summarise

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a test of cuda without a GPU")


def test_a_file_is_run_as_it_is_now(tmp_path: Path) -> None:
    """Not as a cache has it: the new code has the size and the time of the old one."""
    path = write(tmp_path, "model.py", "answer = 1")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    assert execute(path, "weft_test_model").answer == 1
    py_compile.compile(str(path), doraise=True)  # as an import of it would
    path.write_text("answer = 2")
    os.utime(path, ns=times)
    assert execute(path, "weft_test_model").answer == 2
    del sys.modules["weft_test_model"]


# -- which format ------------------------------------------------------------------------------


def test_detects_both_formats(tmp_path: Path) -> None:
    candidate = write(tmp_path, "c.py", "x = = 1")  # what is wrong with it is a verdict
    assert detect_format(model(tmp_path / "a"), candidate) == KERNELBENCH
    folder = task(tmp_path / "b", "return torch.rand(size)", "return data")
    assert detect_format(folder, candidate) == GPUMODE
    assert detect_format(folder / "reference.py", candidate) == GPUMODE


@pytest.mark.parametrize("text", ["x = 1", "def f(:", "", "\x00"])
def test_a_reference_in_no_format_is_a_mistake_in_the_request(tmp_path: Path, text: str) -> None:
    candidate = write(tmp_path, "c.py", "")
    with pytest.raises(WeftError):
        detect_format(write(tmp_path, "r.py", text), candidate)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="REFERENCE"):
        detect_format(tmp_path / "no.py", tmp_path / "c.py")
    with pytest.raises(WeftError, match="CANDIDATE"):
        detect_format(model(tmp_path), tmp_path / "c.py")
    candidate, folder = write(tmp_path, "c.py", ""), tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(WeftError, match="reference"):
        detect_format(folder, candidate)


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
def test_the_backend_of_a_file(tmp_path: Path, text: str, backend: str) -> None:
    assert source_facts(write(tmp_path, "c.py", text)).backend == backend


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


def test_a_failure_at_one_case_fails_the_candidate() -> None:
    judgement = Judgement(format="gpumode", operator="o")
    judgement.add_verdicts([verdict("a", PASS, type=PASS, error=PASS), verdict("b", FAIL, error="x")])
    assert not judgement.correct and judgement.reason == "error: x at b"
    assert [(c.check, c.status, c.detail) for c in judgement.checks] == [
        ("type", PASS, ""),
        ("error", FAIL, "x at b"),
    ]
    right = Judgement(format="gpumode", operator="o")
    right.add_verdicts([verdict("a", PASS, type=PASS, error=PASS)])
    assert right.correct and right.checks[1].detail == "25% of the tolerance"
    same = Ratio(value=1.0, interval=(0.99, 1.02))
    right.times = [
        Time(case=c, time_us=t, baseline_us=8, comparison=SpeedUp(ratio=r, interval=i, against_itself=same))
        for c, t, r, i in (("a", 2, 4.0, (3.9, 4.2)), ("b", 8, 1.0, (0.97, 1.04)))
    ]
    data = right.to_json()
    assert data["speedup"] == pytest.approx(2) and data["time_us"] == pytest.approx(4)
    assert data["difference_shown"] and data["reference_against_itself"]["interval"] == [
        pytest.approx(0.99),
        pytest.approx(1.02),
    ]
    assert [t["difference_shown"] for t in data["times"]] == [True, False]
    right.refuse("provenance", "declared triton")
    assert not right.correct and right.to_json()["reason"] == "provenance: declared triton"


@pytest.mark.parametrize(
    ("interval", "itself", "is_shown", "is_known"),
    [
        ((1.4, 1.6), (0.98, 1.02), True, True),
        ((0.5, 0.6), (0.98, 1.02), True, True),  # slower is a difference, too
        ((0.99, 1.01), (0.98, 1.02), False, True),
        ((1.01, 1.03), (0.98, 1.02), False, True),  # less than the machine's own noise
        ((1.4, 1.6), (0.6, 1.2), False, False),  # so noisy that not even "the same" can be told
        ((11.0, 13.0), (0.6, 1.2), True, True),
    ],
)
def test_a_speed_up_is_told_as_far_as_the_reference_agrees_with_itself(
    interval: tuple[float, float], itself: tuple[float, float], is_shown: bool, is_known: bool
) -> None:
    against_itself = Ratio(value=1.0, interval=itself)
    comparison = SpeedUp(ratio=sum(interval) / 2, interval=interval, against_itself=against_itself)
    assert (comparison.is_shown, comparison.is_known) == (is_shown, is_known)
    judgement = Judgement(format="gpumode", operator="o")
    judgement.times = [Time(case="a", time_us=1, baseline_us=1, comparison=comparison)]
    assert (judgement.speedup is not None) == is_known


def timing_of(samples: list[float], repeated: tuple[float, ...] = ()) -> Timing:
    """Return the timing with these samples; ``repeated`` are the second ones of a reference."""
    figures = summarise(samples)
    return Timing(
        cold=figures.median,
        warm=None,
        host=None,
        first=None,
        interval=figures.interval,
        p10=figures.p10,
        p90=figures.p90,
        minimum=figures.minimum,
        samples=tuple(samples),
        calls_per_sample=1,
        repeated=repeated,
    )


def test_a_speed_up_by_medians_alone_is_not_shown() -> None:
    """Other work on the machine makes most samples longer, and hardly the least."""

    reference = timing_of([210.0, *[8000.0] * 15], repeated=(8000.0,) * 15)
    for least, shown in ((205.0, False), (20.0, True)):
        time = compare("a", timing_of([least, *[1.5 * least] * 15]), reference)
        assert time.comparison.ratio > 20 and time.comparison.is_shown == shown
        assert time.comparison.is_known == shown


@pytest.mark.parametrize(
    ("again", "speedup", "is_shown", "factors"),
    [
        (2.0, 1.3, True, ""),
        (1.2, 1.2, True, ""),
        (1.0, None, False, "a factor of 1.30 in one pair of processes, and of 1.00 in another"),
        (0.5, None, False, "a factor of 1.30 in one pair of processes, and of 0.50 in another"),
        (None, None, False, "not confirmed in new processes"),
    ],
)
def test_a_speed_up_must_come_back_in_new_processes(
    again: float | None, speedup: float | None, is_shown: bool, factors: str
) -> None:
    def steady(us: float) -> Timing:
        return timing_of([us * (1 + n / 1e4) for n in range(20)])

    judgement = Judgement(format="gpumode", operator="o")
    judgement.times = [compare("a", steady(100.0), steady(130.0))]
    assert judgement.shows_difference("a") and not judgement.shows_difference("b")
    new = None if again is None else steady(130.0 / again)
    records: list[Any] = [
        SimpleNamespace(case="a", implementation="reference", timing=steady(130.0)),
        SimpleNamespace(case="a", implementation="candidate", timing=new),
    ]
    judgement.confirm(records, "candidate")
    assert judgement.shows_difference("a") == is_shown
    assert judgement.speedup == (speedup and pytest.approx(speedup, rel=1e-3))
    assert all(t.baseline_us / t.time_us == pytest.approx(t.speedup, rel=1e-3) for t in judgement.times)
    assert len(judgement.notes) == bool(factors) and all(factors in note for note in judgement.notes)


def test_a_case_that_was_not_run_is_not_correct() -> None:
    judgement = Judgement(format="gpumode", operator="o")
    judgement.add_verdicts([verdict("a", PASS, error=PASS), verdict("b", UNSUPPORTED, error=PASS)])
    assert not judgement.correct and judgement.reason.startswith("not run:")
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
    judgement = read_task_yml(write(tmp_path, "task.yml", text))
    assert judgement["tests"] == [
        {"m": 32, "n": 4.5, "k": True, "shape": [1, 2], "kind": "a b"},
        {"size": 7, "seed": -3},
    ]
    assert judgement["benchmarks"] == []


@pytest.mark.parametrize(
    "item", ['{"size": 1', "[1, 2]", '{"a": 1} b', '{"size": "x", "seed": [1,2}', "{1: 2}", "[" * 3000]
)
def test_a_case_that_cannot_be_parsed_is_refused(tmp_path: Path, item: str) -> None:
    path = write(tmp_path, "task.yml", f"tests:\n  - {item}\nlang: py\n")
    with pytest.raises(WeftError, match=r"task\.yml"):
        read_task_yml(path)


# -- float64 -----------------------------------------------------------------------------------


def test_every_named_dtype_becomes_float64() -> None:
    x = torch.rand(4, dtype=torch.float64)
    constant = torch.rand(4)  # a constant of the file's, result before
    with Float64Mode():
        for result in (
            x.half(),
            x.to(torch.bfloat16),
            x.float() + constant,
            torch.zeros(3),
            torch.empty(2, dtype=torch.float16),
            torch.tensor([1.5]),
            torch.full((2,), 1.0),
            torch.softmax(x, 0, dtype=torch.float32),
            x.type(torch.float32),
            torch.nn.Linear(4, 2).half()(x),
            torch.stack([x, constant]),
        ):
            assert result.dtype is torch.float64
        assert torch.arange(3).dtype is torch.int64 and (x > 0).dtype is torch.bool
        alias = x.clone()
        assert alias.mul_(2) is alias
    assert torch.get_default_dtype() is torch.float32 and x.half().dtype is torch.float16


def test_random_numbers_are_generated_in_the_requested_dtype() -> None:
    torch.manual_seed(7)
    own = torch.randn(5)
    torch.manual_seed(7)
    with Float64Mode():
        wide = torch.randn(5)
    assert wide.dtype is torch.float64 and torch.equal(wide, own.double())


def test_a_reference_that_casts_is_still_exact(tmp_path: Path) -> None:
    body = "(x.half() @ x.half().t()).float()"
    problem = kernelbench.read_problem(model(tmp_path, body), "cpu", seed=1)
    (case,) = problem.operator.cases
    (x,) = problem.operator.draw(case, 5, "cpu")
    exact = problem.operator.reference(x.double(), **case.params)
    assert torch.allclose(exact, x.double() @ x.double().t(), rtol=1e-14)
    own = problem.baseline.forward(x, **case.params)
    assert own.dtype is torch.float32 and 1e-5 < (own - exact).abs().max() < 1e-2


# -- cuda without one --------------------------------------------------------------------------


@no_gpu
def test_cuda_is_the_cpu_on_a_machine_without_a_gpu() -> None:
    with cuda_on_cpu():
        x = torch.zeros(2, device="cuda:0").cuda().to("cuda").to(torch.device("cuda"))
        assert x.is_cuda and x.device.type == "cpu"
    own = torch.Generator
    with cuda_generators_on_cpu():
        g = torch.Generator(device="cuda")
        first = torch.rand(2, device="cuda", generator=g.manual_seed(3))
    assert torch.Generator is own and not x.is_cuda
    assert torch.equal(first, torch.rand(2, generator=own().manual_seed(3)))


# -- data --------------------------------------------------------------------------------------


def test_data_is_split_and_rebuilt() -> None:
    a, b = torch.rand(2, 3), torch.arange(4)
    data = (a, {"w": [b, 5], "none": None}, 2.5, "name")
    template, tensors = split_data(data)
    assert [i.name for i in template.tensors] == ["data[0]", "data[1]['w'][0]"]
    assert [i.dtype for i in template.tensors] == ["float32", "int64"]
    built, buffers = template.build(tensors)
    assert torch.equal(built[1]["w"].pop(0), b) and built[1] == {"w": [5], "none": None}
    assert built[0] is tensors[0] and built[2:] == (2.5, "name") and not buffers


def test_a_transposed_tensor_keeps_its_layout() -> None:
    template, _ = split_data((torch.rand(3, 5).t(), torch.rand(3, 5)[:, ::2]))
    assert [i.layout for i in template.tensors] == ["transposed", "contiguous"]


def test_unsupported_data_is_refused_with_its_path() -> None:
    with pytest.raises(WeftError, match=r"data\[1\]"):
        split_data((torch.rand(1), object()))
    with pytest.raises(WeftError, match="complex64"):
        split_data(torch.zeros(1, dtype=torch.complex64))


def test_outputs_become_a_tensor_or_a_tuple() -> None:
    a, b = torch.rand(1), torch.rand(2)
    assert output_tensors(a) is a and output_tensors([a, (b,)]) == (a, b) and output_tensors({"x": a}) is a
    assert output_tensors(None) is None and output_tensors(None, [b]) is b
    assert output_tensors(3).dtype is torch.int64 and output_tensors(0.1).dtype is torch.float64


def test_dictionaries_are_read_in_the_order_of_the_reference() -> None:
    a, b, c = torch.rand(1), torch.rand(2), torch.rand(3)
    keys = output_keys((c, {"mean": a, 7: {"x": b}}))
    assert keys == {"[1]": ["'mean'", "7"], "[1][7]": ["'x'"]}
    assert output_tensors((c, {7: {"x": b}, "mean": a}), keys=keys) == (c, a, b)
    assert output_tensors((c, a, b), keys=keys) == (c, a, b)
    assert output_tensors({"rstd": b, "mean": a}, keys=keys) == (b, a)  # the reference has none here
    with pytest.raises(
        ValueError, match=r"output\[1\] has the keys 'mean', 8; the reference's has 'mean', 7"
    ):
        output_tensors((c, {"mean": a, 8: {"x": b}}), keys=keys)


@pytest.mark.parametrize(
    ("outputs", "correct"),
    [('{"low": x.amin(1), "high": x.amax(1)}', True), ('{"low": x.amin(1), "top": x.amax(1)}', False)],
)
def test_a_dictionary_is_compared_by_key(tmp_path: Path, outputs: str, correct: bool) -> None:
    reference = model(tmp_path, '{"high": x.amax(1), "low": x.amin(1)}')
    candidate = tmp_path / "candidate.py"
    candidate.write_text(reference.read_text().replace("Model", "ModelNew").replace(
        '{"high": x.amax(1), "low": x.amin(1)}', outputs
    ))  # fmt: skip
    judgement = judge(reference, candidate, JudgeOptions(time=False))
    assert judgement.correct == correct, judgement.reason
    assert correct or "the reference's has 'high', 'low'" in judgement.reason
