"""``weft judge`` on definitions in JSON: ten kernels, each with a right and a wrong solution."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers.trace_problems import PROBLEMS, solution, write_json, write_problem
from weft import machine
from weft.cli import main
from weft.workbench.judge.judge import TRACE, JudgeOptions, judge
from weft.workbench.judge.judgement import Judgement
from weft.workbench.sandbox.process import Limits

# Wrong solutions that the suite's own check accepts.
LET_PASS = {"rmsnorm", "softmax", "add"}


def judge_solution(folder: Path, name: str, data: dict[str, Any], seconds: float = 60.0) -> Judgement:
    candidate = write_json(folder / "solution.json", data)
    options = JudgeOptions(time=False, limits=Limits(seconds=seconds, memory_bytes=4 << 30))
    return judge(write_problem(folder, name), candidate, options)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_solution_is_right_and_a_wrong_one_wrong(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    problem = PROBLEMS[name]
    right = judge_solution(tmp_path, name, solution(name, problem.right))
    assert right.correct and not right.reason, right.reason
    assert {c.status for c in right.checks} == {"pass"} and right.format == TRACE
    assert right.own is not None and right.own.passed, right.own
    wrong = judge_solution(tmp_path, name, solution(name, problem.wrong))
    assert not wrong.correct and wrong.reason.startswith("error: "), wrong.reason
    assert "times what is allowed" in wrong.reason
    assert wrong.own is not None and wrong.own.passed is (name in LET_PASS), wrong.own
    assert list(folder.iterdir()) == []  # the sources are removed


def in_two_files(name: str) -> dict[str, Any]:
    data = solution(name, PROBLEMS[name].right, entry_point="src/entry.py::kernel")
    (source,) = data["sources"]
    data["sources"] = [
        {"path": "src/entry.py", "content": "import parts.main\nkernel = parts.main.run"},
        {"path": "parts/main.py", "content": source["content"]},
    ]
    return data


@pytest.mark.slow
def test_a_solution_of_several_files_imports_its_own_modules(tmp_path: Path) -> None:
    judgement = judge_solution(tmp_path, "rope", in_two_files("rope"))
    assert judgement.correct, judgement.reason


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("body", "spec", "reason"),
    [
        ("y = x / 0 if eps else undefined", {}, "returns: raised NameError"),
        ("y = (x, x)", {}, "returns: raised ValueError: returned 2 values, expected y"),
        ("y = x.double()", {}, "dtype: "),
        ("y = x[:, :5]", {}, "shape: "),
        ("y = x.mul_(2)", {}, "alias: "),
        ("y = x", {"entry_point": "main.py::other"}, "import: "),
        ("y = (", {}, "import: SyntaxError"),
    ],
)
def test_a_solution_that_fails_is_a_verdict(
    tmp_path: Path, body: str, spec: dict[str, Any], reason: str
) -> None:
    body = body.replace("if eps else", "if eps > 1 else")
    judgement = judge_solution(tmp_path, "rmsnorm", solution("rmsnorm", body, **spec))
    assert not judgement.correct and reason in judgement.reason, judgement.reason


@pytest.mark.slow
@pytest.mark.pooled(1, "kinds of solutions")
def test_unwritten_outputs_are_poison_in_one_suite_and_zeros_in_the_other(tmp_path: Path) -> None:
    body = "a, b = x.chunk(2, 1)\ny.add_(torch.nn.functional.silu(a) * b)"  # relies on zeros
    flashinfer = judge_solution(tmp_path, "silu_mul", solution("silu_mul", body))
    assert not flashinfer.correct and "poison" in flashinfer.reason, flashinfer.reason
    sol = solution("silu_mul", body, languages=["pytorch"])
    del sol["spec"]["language"]
    assert judge_solution(tmp_path, "silu_mul", sol).correct


TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def add(a, b, c, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(c + i, tl.load(a + i, m) + tl.load(b + i, m), m)
def run(a, b, flag):
    c = torch.empty_like(a)
    add[(triton.cdiv(a.numel(), 256),)](a, b, c, a.numel(), B=256)
    return c
"""


@pytest.mark.slow
@pytest.mark.pooled(1, "kinds of solutions")
def test_a_triton_solution(tmp_path: Path) -> None:
    data = solution("add", "c = a", language="triton")
    data["sources"][0]["content"] = TRITON
    judgement = judge_solution(tmp_path, "add", data)
    assert judgement.correct and judgement.backend == "triton", judgement.reason


# The headers that it needs: <torch/extension.h> has all of PyTorch's, and compiles four times as long.
CPP = """
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include "scale.h"
at::Tensor run(at::Tensor a, at::Tensor b, bool flag) { return a.add(b, sign(flag)); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="no C++ compiler here")
@pytest.mark.pooled(1, "kinds of solutions")
def test_a_cpp_solution_is_built_in_the_worker_process(tmp_path: Path) -> None:
    data = solution("add", "c = a", language="cpp", binding="torch", entry_point="main.cpp::run")
    data["sources"] = [
        {"path": "main.cpp", "content": CPP},
        {"path": "scale.h", "content": "inline double sign(bool flag) { return flag ? 1.0 : -1.0; }"},
    ]
    judgement = judge_solution(tmp_path, "add", data, seconds=400.0)
    assert judgement.correct, judgement.reason


def test_cuda_sources_without_a_gpu_are_not_run(tmp_path: Path) -> None:
    if machine.has_gpu():
        pytest.skip("there is a GPU")
    data = solution("add", "c = a", language="cuda", binding="torch", entry_point="main.cu::run")
    data["sources"][0]["path"] = "main.cu"
    judgement = judge_solution(tmp_path, "add", data)
    assert judgement.reason == "not run: needs a GPU: the candidate is in CUDA C++"
    assert not judgement.correct and judgement.to_json()["format"] == TRACE


def test_the_command_reads_workloads_from_a_file_and_refuses_a_bad_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    path = write_problem(tmp_path, "add")
    (tmp_path / "workload.jsonl").rename(tmp_path / "other.jsonl")
    data = solution("add", "c = a", language="tilelang")
    candidate = write_json(tmp_path / "s.json", data)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", "judge", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0)

    assert run(path, candidate) == 2 and "--workloads" in capsys.readouterr().err
    assert run(path, candidate, "--workloads", tmp_path / "other.jsonl", "--json") == 1
    assert json.loads(capsys.readouterr().out)["reason"].startswith("not run: the candidate is in tilelang")
    write_json(path, {"name": "add"})
    assert run(path, candidate) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: definition.json: axes"), error
