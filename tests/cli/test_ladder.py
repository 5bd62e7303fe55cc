"""``weft ladder``: gains, counters and errors, from records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers.paths import ROOT
from weft.cli import app
from weft.core import WeftError

H200 = ROOT / "results" / "nvidia-h200"


def _ladder(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ladder", *map(str, arguments)])


def test_gains_multiply_to_the_whole_and_the_last_step_is_the_implementation() -> None:
    (ladder,) = json.loads(_ladder("sum", H200, "--json").stdout)["ladders"]
    steps = [s for s in ladder["steps"] if s["us"]]
    product = 1.0
    for step in steps[1:]:
        product *= step["gain"]
    assert steps[0]["implementation"] == "cuda/01-global-atomics" and steps[0]["gain"] is None
    assert steps[-1]["implementation"] == "cuda"
    assert product == pytest.approx(steps[0]["us"] / steps[-1]["us"])


def test_a_step_with_counters_says_what_limits_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, case = "cuda/01-global-atomics", "fp32-2^28"
    (tmp_path / "sum.jsonl").write_bytes((H200 / "sum.jsonl").read_bytes())
    counters = json.loads((H200 / "ncu.ndjson").read_text().splitlines()[0])
    counters |= {"operator": "sum", "implementation": name, "case": case, "direction": "forward"}
    (tmp_path / "ncu.ndjson").write_text("not JSON\n" + json.dumps(counters) + "\n")
    (ladder,) = json.loads(_ladder("sum", tmp_path, "--json").stdout)["ladders"]
    limits = {s["implementation"]: s["limited_by"] for s in ladder["steps"]}
    assert limits.pop(name) == counters["bottleneck"]["sentence"]
    assert set(limits.values()) == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gelu", str(H200)], "an operator with a ladder"),
        (["sum", str(H200 / "softmax.jsonl")], "no ladder of sum"),
        (["sum", str(H200), "--case", "fp32-3"], "no ladder of sum at fp32-3"),
        (["sun", str(H200)], "sum"),
    ],
)
def test_what_has_no_ladder_is_an_error(arguments: list[str], message: str) -> None:
    error = _ladder(*arguments).exception
    assert isinstance(error, WeftError) and message in str(error)
