"""Commands that are stopped by a signal: finished work is shown and saved, and no process continues.

Each command runs in a process of its own with pipes. The signal is sent once a line on its stderr or stdout
shows that some of its work is done.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.marked_processes import marked_processes
from helpers.paths import EXAMPLES, SRC
from weft.core.record import read

pytestmark = pytest.mark.slow

# A process of a job in the background ignores SIGINT. Each line of progress is printed at once, so that
# the test sees it.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from weft.cli import main, progress
progress.INTERVAL = 0.0
"""
MAIN = "main()\n"
TIMEOUT = 500  # seconds, on a machine with much other work


class Stopped(NamedTuple):
    """Exit code and output of a stopped command, and its processes that are still alive."""

    code: int
    out: str
    err: str
    remaining: list[str]

    @property
    def last(self) -> str:
        return self.out.rstrip().splitlines()[-1]


def stop(
    at: str,
    number: signal.Signals,
    *arguments: object,
    patch: str = "",
    again_at: str = "",
    **environment: str,
) -> Stopped:
    """Run weft, send the signal at the first line of stderr or stdout that matches ``at``.

    With ``again_at`` the signal is sent a second time, at a line that matches ``again_at``.
    """
    mark = f"mark-{uuid.uuid4()}"
    variables = {**os.environ, "PYTHONPATH": str(SRC), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", START + patch + MAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=variables | {"WEFT_TEST_MARK": mark} | environment,
        start_new_session=True,
    )
    texts: dict[str, list[str]] = {"out": [], "err": []}
    patterns = [at, again_at] if again_at else [at]
    lock = threading.Lock()

    def follow(name: str, stream: Any) -> None:
        for line in stream:
            texts[name].append(line)
            with lock:
                if patterns and re.search(patterns[0], line):
                    patterns.pop(0)
                    process.send_signal(number)

    readers = [
        threading.Thread(target=follow, args=pair, daemon=True)
        for pair in (("out", process.stdout), ("err", process.stderr))
    ]
    for reader in readers:
        reader.start()
    watchdog = threading.Timer(TIMEOUT, process.kill)
    watchdog.start()
    try:
        process.wait()
    finally:
        process.kill()
        watchdog.cancel()
    for reader in readers:
        reader.join(timeout=30)
    assert not patterns, f"no line {patterns[0]!r}:\n{''.join(texts['out'] + texts['err'])}"
    return Stopped(process.returncode, "".join(texts["out"]), "".join(texts["err"]), marked_processes(mark))


EAGER = ("--impl", "eager", "--impl", "torch", "--device", "cpu")


@pytest.mark.pooled(4, "stopped commands")
def test_check_shows_the_checks_that_are_done() -> None:
    several = (
        "from weft.cli import check\ncheck.PARALLEL_SECONDS = 0.0\n"  # worker processes, which must end too
    )
    done = stop(r"\[([5-9]|\d\d)/\d+\]", signal.SIGINT, "check", "gelu", *EAGER, patch=several)
    assert done.code == 130 and done.remaining == [], done.err
    assert "gelu" in done.out.splitlines()[1]
    match = re.fullmatch(r"stopped after (\d+) of (\d+) checks: (\d+) passed, 0 failed \(.*\)", done.last)
    assert match, done.out
    n_done, total, passed = map(int, match.groups())
    assert 4 <= n_done < total and passed == n_done


@pytest.mark.pooled(4, "stopped commands")
def test_check_prints_json_and_ends_the_worker_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch, weft\n\n"
        "@weft.implementation('gelu', name='mine', backend='torch')\n"
        "def mine(x, approximate='none'):\n"
        "    return torch.nn.functional.gelu(x, approximate=approximate)\n"
    )
    done = stop(r"\[([3-9]|\d\d)/\d+\]", signal.SIGTERM, "check", "--with", file, "--json", "--device", "cpu")
    assert done.code == 143 and done.remaining == [], done.err
    report = json.loads(done.out)
    assert report["stopped"] is True and report["passed"] is False and len(report["verdicts"]) >= 2
    assert re.search(r"^stopped after \d+ of \d+ checks", done.err, re.MULTILINE)


@pytest.mark.pooled(4, "stopped commands")
def test_bench_keeps_the_points_that_are_timed(tmp_path: Path) -> None:
    saved = tmp_path / "records.jsonl"
    cases = ("--case", "fp32-7x129", "--case", "fp32-64x64-outliers", "--case", "fp32-4099-sweep")
    done = stop(r"\[2/\d+\]", signal.SIGINT, "bench", "gelu", *cases, *EAGER, "--quick", "--save", saved)
    assert done.code == 130 and done.remaining == [], done.err
    records, torn = read(saved)
    assert torn == 0 and len(records) in (2, 4) and {r.operator for r in records} == {"gelu"}
    assert re.fullmatch(rf"stopped after [12] points?: [24] timed \(.*\); saved in {saved}", done.last), (
        done.out
    )


@pytest.mark.pooled(4, "stopped commands")
def test_selftest_keeps_its_results_and_ends_its_workers(tmp_path: Path) -> None:
    saved = tmp_path / "selftest.json"
    # The line after a result: at least one kernel of several is judged by then.
    killed = r"after W\d\d/sum/eager\S*: killed"
    done = stop(killed, signal.SIGTERM, "selftest", "--operator", "sum", "--device", "cpu", "--save", saved)
    assert done.code == 143 and done.remaining == [], done.err
    assert re.match(r"stopped after \d+ of \d+ planted kernels: killed [1-9]", done.last), done.out
    report = json.loads(saved.read_text())
    assert report["stopped"] is True and report["killed"] >= 1 and report["survivors"] == []


@pytest.mark.pooled(4, "stopped commands")
def test_judge_shows_the_checks_that_are_done() -> None:
    folder = EXAMPLES / "judge" / "kernelbench" / "gelu"
    arguments = (folder / "reference.py", folder / "right.py", "--json", "--device", "cpu")
    done = stop(r"checking|observing", signal.SIGINT, "judge", *arguments)
    assert done.code == 130 and done.remaining == [], done.err
    report = json.loads(done.out)
    assert report["stopped"] is True and report["correct"] is False
    assert {"name": "import", "status": "pass", "detail": ""} in report["checks"]


@pytest.mark.pooled(4, "stopped commands")
def test_the_noise_of_stopped_runs_is_shown_and_not_saved(tmp_path: Path, cache_with_ceilings: Path) -> None:
    noise = tmp_path / "noise.json"
    bench = ("gelu", "--", "--case", "fp32-7x129", "--direction", "forward", "--quick", *EAGER)
    done = stop(
        r"\[3/6\]",
        *(signal.SIGTERM, "compare", "--measure-noise", "--noise", noise, "--json", *bench),
        WEFT_CACHE_DIR=str(cache_with_ceilings),
    )
    assert done.code == 143 and done.remaining == [], done.err
    report = json.loads(done.out)
    assert report["stopped"] is True and report["runs"] == 2 and len(report["points"]) == 2
    assert report["path"] is None and not noise.exists()


@pytest.mark.pooled(4, "stopped commands")
def test_a_stopped_study_is_a_record_without_a_profile(tmp_path: Path, cache_with_ceilings: Path) -> None:
    sizes = ("--depths", "1,2,3", "--widths", "16,32,64", "--batches", "1,2,4,8,16", "--steps", "1,2,3")
    out = tmp_path / "study"
    done = stop(
        r"^round \d\d",
        *(signal.SIGINT, "study", "mlp", "--device", "cpu", *sizes, "--no-pictures", "--out", out),
        # Rounds of these sizes are short: without the patch a quick machine ends before the signal.
        patch="from weft.lab.study import measure\nmeasure.MAX_ROUNDS = 10**6\n",
        WEFT_CACHE_DIR=str(cache_with_ceilings),
    )
    assert done.code == 130 and done.remaining == [], done.err
    record = json.loads((out / "study.json").read_text())
    assert record["stopped"] is True and record["profile"] == []
    assert all(p["samples"] >= 3 for points in record["points"].values() for p in points)
    assert re.match(r"stopped after \d+ rounds of \d+ points of the MLP", done.last), done.out


@pytest.mark.pooled(4, "stopped commands")
def test_the_finished_curves_of_the_hierarchy_are_kept(tmp_path: Path) -> None:
    saved = tmp_path / "levels.json"
    arguments = ("device", "--device", "cpu", "--hierarchy", "--save", saved, "--json")
    done = stop(r"^bandwidth, one thread", signal.SIGTERM, *arguments, patch=SLOW_BANDWIDTH)
    assert done.code == 143, done.err
    report = json.loads(done.out)
    assert report["stopped"] is True and [s["key"] for s in report["hierarchy"]["series"]] == ["chase"]
    assert json.loads(saved.read_text())["stopped"] is True


# Few and small working sets for the latency, then a bandwidth that lasts until the signal.
SLOW_BANDWIDTH = """
from weft.lab.hierarchy import cpu
cpu.MAX_SET = 1 << 18
def bandwidth(nbytes, rounds=0):
    signal.pause()
cpu.bandwidth = bandwidth
"""

# Without a GPU: points as the measurement yields them, and then one that lasts until the signal.
TUNED = """
from weft.cli import tune as command
from weft.dispatch.choice import Point
from weft.workbench import tune
command._gpu_name = lambda request: "Example GPU"
command._architecture = lambda: None
def measure_planned(planned, device, *, on_event):
    on_event("[1/1] gelu fp32: timing")
    times = {"torch": (2.0, 2.0), "triton": (1.0, 1.0)}
    size = {"elements": 64, "last": 8, "sizes": (64,), "flags": ()}
    yield Point(operator="gelu", case="fp32", dtype="fp32", **size, forward=times, backward={})
    on_event("[1/1] gelu bf16: timing")
    signal.pause()
tune.measure_planned = measure_planned
"""


@pytest.mark.pooled(4, "stopped commands")
def test_tune_keeps_the_points_that_are_measured(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = stop(
        "gelu bf16: timing", signal.SIGINT, "tune", "gelu", "--json", patch=TUNED, WEFT_CACHE_DIR=cache
    )
    assert done.code == 130, done.err
    report = json.loads(done.out)
    assert report["stopped"] is True and [p["case"] for p in report["points"]] == ["fp32"]
    (table,) = (tmp_path / "cache").rglob("*.json")
    assert [p["case"] for p in json.loads(table.read_text())["points"]] == ["fp32"]


# Work that does not end at an interrupt.
STUBBORN = """
from weft.workbench import tune
from weft.cli import tune as command
command._gpu_name = lambda request: "Example GPU"
command._architecture = lambda: None
def measure_planned(planned, device, *, on_event):
    try:
        on_event("[1/1] gelu: timing")
        signal.pause()
    finally:
        on_stderr = __import__("sys").stderr
        print("cleaning up", file=on_stderr, flush=True)
        while True:
            signal.pause()
    yield
tune.measure_planned = measure_planned
"""


@pytest.mark.pooled(4, "stopped commands")
def test_a_second_interrupt_ends_at_once() -> None:
    done = stop("gelu: timing", signal.SIGINT, "tune", "gelu", patch=STUBBORN, again_at="cleaning up")
    assert done.code == 130 and done.out == "", done.err
