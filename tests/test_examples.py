"""Every example runs in a separate process and prints its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.sample_records import bench
from weft.core.record import append

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.pooled(1, "examples")
def test_use_operators() -> None:
    output = run("use_operators.py")
    assert "rows sum to 1" in output and "inner sizes" in output


@pytest.mark.slow
@pytest.mark.pooled(1, "examples")
def test_judge_a_kernel() -> None:
    lines = run("judge_a_kernel.py").splitlines()
    verdicts = {tuple(line.split()[:2]): line.split()[2] for line in lines[1:5]}
    assert verdicts.pop(("textbook_form", "fp32-4099-sweep")) == "fail"
    assert set(verdicts.values()) == {"pass"}
    timed = [line.split()[0] for line in lines if line.endswith(" us")]
    assert timed == ["sigmoid_form", "torch"]


def test_draw_a_page(tmp_path: Path) -> None:
    records, target = tmp_path / "a.jsonl", tmp_path / "page.html"
    append(records, bench())
    assert f"of {len(bench())} records drawn" in run("draw_a_page.py", records, target)
    assert "Within a factor of two of the limit" in target.read_text()


@pytest.mark.slow
@pytest.mark.pooled(1, "examples")
def test_patch_gpt2() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    output = run("patch_gpt2.py")
    assert "transformer.h.*.ln_1 (2x)" in output and "logits None" in output
    assert "undone, bit for bit: True" in output


def test_every_example_is_tested() -> None:
    tests = Path(__file__).read_text()
    assert [p.name for p in EXAMPLES.glob("*.py") if p.name not in tests] == []
