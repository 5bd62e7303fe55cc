"""Size of problems: the memory of a judgement, and a lack of memory as a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.process_memory import run
from weft.workbench.calls.memory import available_host_bytes, is_shortage
from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.judge.memory import PEAK_FACTOR
from weft.workbench.sandbox.process import Limits

MODEL = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {body}
def get_inputs():
    return [torch.rand({rows}, {columns})]
def get_init_inputs():
    return []
"""
PIPE_MIB = 64  # buffers of fixed size in both processes: beginnings of inputs, factors of digests


def write(folder: Path, rows: int, columns: int, body: str = "torch.relu(x - 0.5)") -> tuple[Path, Path]:
    reference, candidate = folder / f"problem{rows}.py", folder / f"candidate{rows}.py"
    text = MODEL.format(rows=rows, columns=columns, body=body)
    reference.write_text(text)
    candidate.write_text(text.replace("Model(", "ModelNew("))
    return reference, candidate


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.pooled(1, "timed alone")
def test_a_judgement_takes_four_times_the_problems_own_memory(tmp_path: Path) -> None:
    peaks, sizes = [], []
    for rows in (4, 640):
        files = map(str, write(tmp_path, rows, 40960))
        command = [sys.executable, "-m", "weft", "judge", *files, "--json", "--no-time", "--device", "cpu"]
        code, output, errors, _, peak = run(command, timeout=500)
        assert code == 0, errors or output
        peaks.append(peak)
        sizes.append(json.loads(output)["problem_bytes"])
    assert sizes[1] == 2 * 640 * 40960 * 4
    # The small problem's peak is that of the interpreters and libraries of all processes.
    assert peaks[1] - peaks[0] <= PEAK_FACTOR * sizes[1] + (PIPE_MIB << 20), (peaks, sizes)


def test_a_problem_that_cannot_fit_is_refused_before_it_is_run(tmp_path: Path) -> None:
    rows = available_host_bytes() // (4 << 20) + 1  # inputs alone take all memory
    reference, candidate = write(tmp_path, rows, 1 << 20)
    judgement = judge(reference, candidate, JudgeOptions())
    assert not judgement.correct
    assert judgement.reason.startswith("not run: out of memory: needed about "), judgement.reason
    contract = judgement.to_json()["out_of_memory"]
    assert contract["needed"] == PEAK_FACTOR * 2 * rows * (4 << 20) > contract["free"] > 0


def test_a_problem_above_the_candidates_limit_is_not_run(tmp_path: Path) -> None:
    reference, candidate = write(tmp_path, 64, 1 << 20)
    judgement = judge(reference, candidate, JudgeOptions(limits=Limits(memory_bytes=1 << 28)))
    assert "--memory" in judgement.reason and "0.25 GiB free" in judgement.reason, judgement.reason
    assert [c.status for c in judgement.checks] == ["not run"]


@pytest.mark.slow
def test_a_candidate_that_takes_too_much_is_not_run(tmp_path: Path) -> None:
    reference, candidate = write(tmp_path, 4, 64)
    body = "[bytearray(b'x') * (1 << 26) for _ in range(100)] and x"
    candidate.write_text(candidate.read_text().replace("torch.relu(x - 0.5)", body))
    judgement = judge(reference, candidate, JudgeOptions(time=False, limits=Limits(memory_bytes=3 << 29)))
    assert judgement.reason.startswith("not run: out of memory"), judgement.reason
    assert "used more than 1.5 GiB" in judgement.reason and judgement.shortage is not None
    assert judgement.shortage.where == "the candidate"


def test_messages_of_a_lack_of_memory_are_known() -> None:
    for text in (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
        "channel: used more than 8 GiB of memory",
    ):
        assert is_shortage(text)
    assert is_shortage(MemoryError()) and not is_shortage("error: largest error 3 at [0] is too large")
