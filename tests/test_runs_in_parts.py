"""The suite in parts: every test is in exactly one shard, and a run continues a stopped one."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KINDS = {  # of test runs, by the marker that they are asked for
    "gpu and not alone and not two_gpus and not large": "small",
    "gpu and not alone and not two_gpus and large": "large",
    "gpu and not alone and not two_gpus": "others",
    "gpu and alone": "timings",
    "two_gpus": "pair",
}
NOT_INHERITED = ("WEFT_TESTS_DONE", "WEFT_SAMPLE", "PYTEST_")
SUITE = """
import os, pytest
from helpers import sampling
@pytest.mark.parametrize("sampled", sampling.sample(range(1000), 100, "another one each run"))
def test_sampled(sampled):
    pass
@pytest.mark.parametrize("n", range(100))
def test_number(n):
    assert n != int(os.environ["BROKEN"])
def test_skipped():
    pytest.skip("not here")
@pytest.mark.alone
@pytest.mark.skip(reason="is only dealt to a shard")
@pytest.mark.parametrize("n", range(5))
def test_time(n):
    pass
"""
# Prints which tests it was asked for on which GPUs; no test is large. EMPTY: none is selected.
FAKE_PYTEST = """
import os, sys
marker = sys.argv[sys.argv.index("-m") + 1]
client = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
print("ran", os.environ["CUDA_VISIBLE_DEVICES"], "of MPS" if client else "apart", *sys.argv[1:])
empty = marker.endswith("and large") or "EMPTY" in os.environ
sys.exit(5 if empty else int(os.environ["FAILS"] in marker))
"""


def run(folder: Path, *arguments: str, commit: str = "aaa", broken: int = 999) -> tuple[dict[str, int], str]:
    """Run a small suite by the project's own conftest; return the counts of outcomes, and the output.

    The test of the number ``broken`` fails.
    """
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "conftest", str(folder)]
    environment = {n: v for n, v in os.environ.items() if not n.startswith(NOT_INHERITED)}
    environment |= {"BROKEN": str(broken), "WEFT_COMMIT": commit, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, cwd=folder)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {outcome: int(n) for n, outcome in re.findall(r"(\d+) (passed|failed|skipped)", last)}
    return counts, done.stdout + done.stderr


def test_every_test_is_in_exactly_one_shard(tmp_path: Path) -> None:
    """The samples of two runs differ otherwise, and with them the places of all tests behind them."""
    names = [
        re.findall(r"::(test_\S+) (?:PASSED|SKIPPED)", run(tmp_path, "--shard", f"{i}/2")[1]) for i in (0, 1)
    ]
    assert min(map(len, names)) > 80
    both = Counter(names[0] + names[1])
    assert set(both.values()) == {1} and len(both) == 206
    assert sorted(sum("test_time" in name for name in part) for part in names) == [2, 3]
    assert {f"test_number[{n}]" for n in range(100)} < set(both)


# The daemon of a Multi-Process Service: it keeps what it is asked, and may have no server.
FAKE_CONTROL = """#!{python}
import os, pathlib, sys
asked = sys.argv[1:] or [sys.stdin.read().strip()]
with open(pathlib.Path(__file__).with_name("asked"), "a") as file:
    print(*asked, os.path.isdir(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), file=file)
if asked == ["get_server_list"]:
    print("{servers}")
"""


@pytest.mark.parametrize(
    ("gpus", "fails", "servers", "expected"),
    [
        ("3", "", None, ["3 apart large", "3 apart others", "3 apart small", "3 apart timings"]),
        ("3", "", "", ["3 apart large", "3 apart others", "3 apart small", "3 apart timings"]),
        ("3", "", "4711", ["3 apart others", "3 apart timings", "3 of MPS large", "3 of MPS small"]),
        (
            "0,1",
            "two_gpus",
            "4711",
            [
                *("0 apart others", "0 apart timings", "0 of MPS large", "0 of MPS small", "0,1 apart pair"),
                *("1 apart others", "1 apart timings", "1 of MPS large", "1 of MPS small"),
            ],
        ),
    ],
)
def test_the_script_runs_every_kind_of_test_on_every_gpu(
    gpus: str,
    fails: str,
    servers: str | None,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = runpy.run_path(str(TESTS.parent / "tools" / "gpu_tests.py"))
    main = script["main"]
    main.__globals__.update(PYTEST=[sys.executable, "-c", FAKE_PYTEST], PROBE="pass")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("FAILS", fails or "nothing")
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--jobs", "4", "-k", "softmax"])
    monkeypatch.setenv("PATH", str(tmp_path))
    if servers is not None:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(FAKE_CONTROL.format(python=sys.executable, servers=servers))
        control.chmod(0o755)
    assert main() == bool(fails)
    output = capfd.readouterr().out
    assert ("without MPS: " in output) == (not servers)
    if servers is not None:  # the daemon was started with its folder, and ended
        lines = (tmp_path / "asked").read_text().splitlines()
        assert lines == ["-d True", "get_server_list True", "quit -t 5 True"]
    runs = []
    for line in re.findall(r"^ran (.*)$", output, re.MULTILINE):
        marker = line.partition(" -m ")[2].partition(" -")[0]
        kind = KINDS[marker]
        gpu, _, rest = line.partition(" ")
        assert line.endswith("-k softmax") and ("-n 4" in line) == (kind in ("small", "others", "pair"))
        assert (f"{TESTS}/ops {TESTS}/dispatch {TESTS}/scaffold -m" in line) == (kind in ("small", "large"))
        ignored = " ".join(f"--ignore={TESTS}/{name}" for name in ("ops", "dispatch", "scaffold"))
        assert (ignored in line) == (kind == "others")
        shard = f"--shard {gpu}/2" if len(gpus) > 1 else "--shard 0/1"
        assert (shard in line) == (kind != "pair")
        runs.append(f"{gpu} {'apart' if rest.startswith('apart') else 'of MPS'} {kind}")
    assert sorted(runs) == expected
    assert ("not run: the tests that need two GPUs" in output) == (len(gpus) == 1)
    if not fails:  # where no run selects a test, the script fails, unless it resumes
        monkeypatch.setenv("EMPTY", "1")
        assert main() == 1
        monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--no-mps", "--resume", "outcomes"])
        assert main() == 0 and "without MPS: --no-mps" in capfd.readouterr().out


def test_a_run_continues_a_stopped_one(tmp_path: Path) -> None:
    file = tmp_path / "outcomes"
    arguments = ("--resume", str(file), "-n", "2", "-k", "number or skipped")
    first, output = run(tmp_path, *arguments[:-1], "number and (7 or 1)", broken=7)
    assert first == {"failed": 1, "passed": 35}, output
    second, output = run(tmp_path, *arguments)
    assert second == {"passed": 65, "skipped": 1}, output
    lines = file.read_text().splitlines()
    assert lines[0] == "commit aaa"
    assert Counter(line.split()[0] for line in lines[1:]) == {"passed": 100, "failed": 1, "skipped": 1}
    other, output = run(tmp_path, *arguments, commit="bbb")
    assert other == {} and "expected outcomes of commit bbb, got 'commit aaa'" in output


STOPPED_RUN = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    print("a failure of", sys.argv[1][-1])
"""
STOPPED_SCRIPT = """
import os, runpy, sys
script = runpy.run_path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], sys.argv[3]]
script["together"]([script["Run"](gpu, [*command[:-1], command[-1] + gpu], dict(os.environ)) for gpu in "01"])
"""


def heed_interrupts() -> None:
    """Undo that a process in the background ignores them, as its children would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_stopped_run_still_prints_its_failures(tmp_path: Path) -> None:
    script = str(TESTS.parent / "tools" / "gpu_tests.py")
    command = [sys.executable, "-c", STOPPED_SCRIPT, script, STOPPED_RUN, str(tmp_path / "begun-")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal, and `timeout`, do
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "a failure of 0" in output and "a failure of 1" in output
