"""weft compare as a gate: two commits in one file, exit codes, output formats, measured noise, CI script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from helpers.sample_records import CPU, GPU, record
from weft.cli import app
from weft.core import Record, WeftError
from weft.core.record import append
from weft.workbench.compare import noise as noises
from weft.workbench.compare.sides import commits, select_commit, split_records

CI = ROOT / "examples" / "ci"
OLD, NEW = "1" * 40, "12" + "3" * 38


def at(commit: str, cold: float | None = 100.0, machine: dict[str, Any] = GPU, **changes: Any) -> Record:
    """Return a record of a commit without drift, so that drift is never the largest noise."""
    day = "2026-01-02" if commit == OLD else "2026-01-05"
    source = {"commit": commit, "date": f"{day}T03:04:05Z", "dirty": changes.pop("dirty", False)}
    base = record(cold=cold, machine=machine | source, **changes)
    steady = base.timing and replace(base.timing, samples=(base.timing.cold,) * 20)
    return replace(base, timing=steady)


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the noise of other tests. Tests that run bench share the measured ceilings, which take long."""
    if not request.node.get_closest_marker("exhaustive"):
        monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def two_commits(tmp_path: Path) -> Path:
    """Return a file with two commits: one implementation got slower, one faster, one is the same."""
    path = tmp_path / "two_commits.jsonl"
    for commit, colds in ((OLD, (100.0, 100.0, 100.0)), (NEW, (120.0, 80.0, 100.0))):
        names = ("triton", "cuda", "torch")
        append(path, [at(commit, c, implementation=n) for c, n in zip(colds, names, strict=True)])
    return path


def test_earlier_commit_of_one_file_is_the_baseline(two_commits: Path) -> None:
    code, out, err = invoke(two_commits)
    assert code == 1 and "slower" in out and "faster" in out
    assert "A: 111111111111, 2026-01-02 03:04, 3 records" in err
    assert "1 faster, 1 slower, 1 same" in out
    answer = json.loads(invoke(two_commits, "--json")[1])
    assert answer["commits"]["a"][0]["commit"] == OLD
    assert answer["counts"]["slower"] == 1 and answer["failed"] is True
    assert answer["machine"] == "Example GPU 9000 (sm_90)"
    assert answer["noise"][0]["origin"] == "default" and answer["noise"][0]["share"] == 0.01


def test_commits_are_selected_by_their_first_digits(two_commits: Path, tmp_path: Path) -> None:
    assert invoke(two_commits, "--commits", "11", "12")[0] == 1
    code, _, err = invoke(two_commits, "--commits", "12", "11", "--markdown")
    assert code == 1 and "B: 111111111111" in err
    for prefixes, message in (
        (("11", "9"), "no records of this commit"),
        (("1", "12"), "several commits begin like this"),
        (("11", "111"), "with itself"),
        (("11", ""), "no records of this commit"),
    ):
        with pytest.raises(WeftError, match=message):
            invoke(two_commits, "--commits", *prefixes)
    append(tmp_path / "more.jsonl", [at("5" * 40)])
    assert invoke(two_commits, tmp_path / "more.jsonl", "--commits", "11", "55")[0] == 1


def test_clean_records_are_preferred_to_dirty_ones() -> None:
    mixed = [at(OLD), at(OLD, dirty=True), at(NEW, dirty=True)]
    assert len(select_commit(mixed, "11")) == 1 and select_commit(mixed, "11")[0].machine["dirty"] is False
    assert select_commit(mixed, "11-dirty")[0].machine["dirty"] is True
    assert select_commit(mixed, "12")[0].machine["dirty"] is True
    assert [c.short for c in commits(mixed)][1].endswith("-dirty")
    assert len(split_records([mixed], ("11", "11-dirty"))[1]) == 1


def test_one_file_with_one_commit_or_three_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, [at(OLD)])
    with pytest.raises(WeftError, match="two commits in it, got 1: 111111111111"):
        invoke(path)
    append(path, [at(NEW), at("7" * 40)])
    with pytest.raises(WeftError, match="got 3"):
        invoke(path)
    with pytest.raises(WeftError, match="nothing to compare"):
        invoke()
    with pytest.raises(WeftError, match="cannot tell which file is before"):
        invoke(path, path, path)


def test_two_files_of_several_commits_are_pooled_with_a_note(two_commits: Path) -> None:
    _, _, err = invoke(two_commits, two_commits)
    assert "note: A pools several commits" in err and "111111111111, 123333333333" in err


def test_missing_implementation_fails_the_gate_unless_allowed(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append(a, [at(OLD), at(OLD, implementation="cuda")])
    append(b, [at(NEW)])
    code, out, err = invoke(a, b)
    assert code == 1 and "broken: not in B" in out and "--fail-on slower" in err
    assert invoke(a, b, "--fail-on", "slower")[0] == 0
    assert invoke(b, a)[0] == 0
    with pytest.raises(WeftError, match="--fail-on"):
        invoke(a, b, "--fail-on", "everything")
    append(tmp_path / "c.jsonl", [at(NEW, implementation="numba")])
    assert invoke(b, tmp_path / "c.jsonl")[0] == 1
    with pytest.raises(WeftError, match="nothing in common"):
        invoke(b, tmp_path / "c.jsonl", "--fail-on", "slower")


def test_ambiguous_fails_the_gate_on_request_only(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append(a, [at(OLD, 100.0)])
    append(b, [at(NEW, 101.5)])
    code, out, err = invoke(a, b)
    assert code == 0 and "inconclusive: " in out and "measure both commits again" in err
    assert invoke(a, b, "--fail-on", "ambiguous")[0] == 1
    assert invoke(a, b, "--fail-on", "ambiguous", "--threshold", "0.1")[0] == 0


def test_unlike_machines_exit_2_in_one_line(two_commits: Path, tmp_path: Path) -> None:
    other = tmp_path / "cpu.jsonl"
    append(other, [at(NEW, machine=CPU)])
    command = [sys.executable, "-m", "weft", "compare", str(two_commits), str(other)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: times of unlike machines") and "--force" in done.stderr
    assert subprocess.run([*command, "--force"], capture_output=True).returncode in (0, 1)


def test_markdown_shows_changes_and_folds_the_rest(two_commits: Path) -> None:
    page = invoke(two_commits, "--markdown")[1]
    open_part, _, folded = page.partition("<details>")
    assert page.startswith("### Speed, stopped: Example GPU 9000 (sm\\_90)\n")
    assert "1 slower, 1 faster, 1 same of 3 compared" in page and "1.20 times as long" in page
    for text in ("111111111111", "123333333333", "2026-01-02", "2026-01-05", "torch 2.11.0"):
        assert text in open_part
    assert re.search(r"\| triton .*slower", open_part) and re.search(r"\| cuda .*faster", open_part)
    assert open_part.index("| triton") < open_part.index("| cuda")
    assert "1 unchanged" in folded and re.search(r"\| torch .*\| same \|", folded)
    assert "the default for this kind of device" in folded
    lines = [line for line in page.splitlines() if line.startswith("| gelu")]
    assert len(lines) == 3 and {line.count(" | ") for line in lines} == {8}


def test_names_from_records_are_escaped_in_markdown(tmp_path: Path) -> None:
    path, name = tmp_path / "x.jsonl", "a|b `c` <img src=x> @everyone\n| d"
    append(path, [at(OLD, implementation=name), at(NEW, 150.0, implementation=name)])
    page = invoke(path, "--markdown")[1]
    assert "<img" not in page and "@everyone" not in page and "\n| d" not in page
    (row,) = [line for line in page.splitlines() if line.startswith("| gelu")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 10


def test_invalid_arguments_are_errors(two_commits: Path, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="one output format"):
        invoke(two_commits, "--json", "--markdown")
    with pytest.raises(WeftError, match="no such records file"):
        invoke(two_commits, tmp_path / "none.jsonl")
    with pytest.raises(WeftError, match="threshold"):
        invoke(two_commits, "--threshold", "7")


def fake_bench(calls: list[list[str]]) -> Any:
    """Return a replacement for a run of `weft bench`; times of successive runs differ by 3 %."""

    def run(arguments: list[str], path: Path) -> list[Record]:
        calls.append(list(arguments))
        nth = sum(c[0] == arguments[0] for c in calls)  # count runs of this operator: the order is random
        return [at(NEW, 100.0 * (1 + 0.03 * (nth % 2)), operator=arguments[0])]

    return run


def test_noise_is_measured_in_pairs_saved_by_machine_and_used(
    two_commits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(noises, "_bench", fake_bench(calls))
    code, out, err = invoke("--measure-noise", "--pairs", "2", "--", "gelu", "sum", "--quick")
    assert code == 0 and "typical" in out and "pair 2 of 2" in err
    assert sorted(map(tuple, calls)) == [("gelu", "--quick")] * 4 + [("sum", "--quick")] * 4
    cached = noises.load_cached(GPU)
    assert cached is not None and cached.runs == 4 and cached.machine["commit"] == NEW
    assert cached.arguments == ("gelu", "sum", "--quick") and noises.load_cached(CPU) is None
    answer = json.loads(invoke(two_commits, "--json")[1])
    assert answer["noise"][0]["origin"] == "measured" and answer["noise"][0]["runs"] == 4
    assert answer["comparisons"][0]["noise_from"] == "measured"
    assert "A/A noise of Example GPU 9000: 3.0%, measured (4 runs" in invoke(two_commits)[2]


def test_noise_file_must_match_the_machine_of_the_records(two_commits: Path, tmp_path: Path) -> None:
    matching, other = tmp_path / "mine.json", tmp_path / "other.json"
    noises.save(matching, noises.from_runs([[at(OLD)], [at(OLD, 140.0)]]))
    noises.save(other, noises.from_runs([[at(OLD, machine=CPU)], [at(OLD, 101.0, machine=CPU)]]))
    code, _, err = invoke(two_commits, "--noise", matching)
    assert code == 0 and "A/A noise of Example GPU 9000: 40.0%" in err
    with pytest.raises(WeftError, match="noise was measured on another machine"):
        invoke(two_commits, "--noise", other)
    assert invoke(two_commits, "--noise", other, "--force")[0] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "spreads": []}'])
def test_invalid_noise_file_is_refused(text: str, two_commits: Path, tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    path.write_text(text)
    with pytest.raises(WeftError, match="holds no measured noise"):
        invoke(two_commits, "--noise", path)
    with pytest.raises(WeftError, match="no measured noise"):
        invoke(two_commits, "--noise", tmp_path / "nowhere.json")


def test_failed_noise_measurement_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeftError, match=r"nosuch did not run.*exit code 2: unknown"):
        invoke("--measure-noise", "--pairs", "1", "nosuch")
    with pytest.raises(WeftError, match="--pairs"):
        invoke("--measure-noise", "--pairs", "0", "gelu")
    failed = record(cold=None, verdict={"status": "fail"})
    monkeypatch.setattr(noises, "_bench", lambda *_: [failed])
    with pytest.raises(WeftError, match="0 points timed twice"):
        invoke("--measure-noise", "gelu")


# A stub of `weft` for the CI script: bench writes the time in time.txt of the commit it runs in.
STUB = f"""import json, os, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT / "tests")!r}]
if sys.argv[1] == "bench":
    from helpers.sample_records import GPU, record
    from weft.core.record import append
    path = sys.argv[sys.argv.index("--save") + 1]
    here = GPU | {{"commit": os.environ["WEFT_COMMIT"], "device": sys.argv[2]}}
    print("noise on stdout")
    append(Path(path), [record(cold=float(Path("time.txt").read_text()), machine=here)])
    sys.exit(1)
from weft.cli import main
main()
"""


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def repository(folder: Path, name: str, *versions: str) -> list[str]:
    """Create a repository with one commit for each version of a file; return the commits."""
    folder.mkdir()
    git(folder, "init", "-q")
    hashes = []
    for text in versions:
        (folder / name).write_text(text)
        git(folder, "add", name)
        git(folder, "commit", "-q", "-m", "a version")
        hashes.append(git(folder, "rev-parse", "HEAD"))
    return hashes


def script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(CI / "compare_commits.sh"), *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_ci_script_alternates_commits_and_compares(tmp_path: Path) -> None:
    stub, folder = tmp_path / "stub.py", tmp_path / "repo"
    stub.write_text(STUB)
    base, head, third = repository(folder, "time.txt", "100", "120", "90")
    weft = {"WEFT": f"{sys.executable} {stub}", "TMPDIR": str(tmp_path)}
    done = script(folder, base, head, "dev", **weft)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("### Speed, stopped: dev") and "noise on" not in done.stdout
    assert f"round 4 of 4: {head[:12]}" in done.stderr
    assert len((folder / "weft-records.jsonl").read_text().splitlines()) == 8
    again = script(folder, base, third, "dev", **weft)
    assert again.returncode == 2 and "already exists" in again.stderr
    weft["RECORDS"], weft["ROUNDS"] = "other.jsonl", "1"
    assert script(folder, base, third, "dev", **weft).returncode == 0
    weft |= {"RECORDS": "third.jsonl", "COMPARE": "--threshold 0.5"}
    assert script(folder, base, head, "dev", **weft).returncode == 0
    assert git(folder, "worktree", "list").count("\n") == 0
    assert {p.name for p in tmp_path.iterdir()} == {"stub.py", "repo"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "expected BASE HEAD"), (("HEAD", "nosuch"), "no such commit"), (("HEAD", "HEAD"), "one")],
)
def test_ci_script_rejects_invalid_arguments(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    repository(tmp_path / "repo", "time.txt", "100")
    done = script(tmp_path / "repo", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_ci_script_fails_if_bench_cannot_run(tmp_path: Path) -> None:
    base, head = repository(tmp_path / "repo", "time.txt", "100", "120")
    done = script(tmp_path / "repo", base, head, WEFT="false --", ROUNDS="1")
    assert done.returncode == 2 and "nothing was measured" in done.stderr
    done = script(tmp_path / "repo", base, head, WEFT="nosuchcommand", ROUNDS="1")
    assert done.returncode == 2 and "ended with 127" in done.stderr


KERNEL = """import torch
import weft

@weft.implementation("softmax", backend="torch", directions=("forward",))
def mine(x):
    for _ in range({repeats}):
        y = torch.softmax(x, -1)
    return y
"""


@pytest.mark.exhaustive
def test_ci_script_with_a_real_bench_detects_a_kernel_that_works_six_times(
    tmp_path: Path,
) -> None:
    versions = [KERNEL.format(repeats=n) for n in (1, 6)]
    base, head = repository(tmp_path / "repo", "mine.py", *versions)
    weft = {"WEFT": f"{sys.executable} -m weft", "ROUNDS": "1", "COMPARE": "--threshold 0.2"}
    bench = ("softmax", "--with", "mine.py", "--impl", "mine", "--device", "cpu", "--quick")
    done = script(tmp_path / "repo", base, head, *bench, "--direction", "forward", **weft)
    assert done.returncode == 1, done.stderr + done.stdout
    assert re.search(r"\| softmax \| mine .*\| slower", done.stdout), done.stdout


@pytest.mark.exhaustive
def test_noise_measurement_with_a_real_bench() -> None:
    options = ("--device", "cpu", "--quick", "--impl", "torch", "--direction", "forward")
    code, out, _ = invoke("--measure-noise", "--pairs", "1", "--json", "--", "softmax", *options)
    answer = json.loads(out)
    assert code == 0 and answer["runs"] == 2 and len(answer["points"]) >= 1
    assert noises.load_cached(answer["machine"]) is not None


def test_example_workflow_calls_the_script_with_both_commits() -> None:
    text = (CI / "github-actions.yml").read_text()
    assert "examples/ci/compare_commits.sh" in text and "fetch-depth: 0" in text
    assert "pull_request.base.sha" in text and "pull_request.head.sha" in text
    assert "pull_request_target" not in text and "\t" not in text
    for block in re.findall(r"run: \|\n((?: {10}.*\n)+)", text):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
