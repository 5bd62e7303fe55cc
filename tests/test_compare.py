"""compare: the matrix of verdicts, A/A, unlike machines, several runs, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sample_records import CPU, GPU, record
from weft.cli import app
from weft.core import Record, Timing, WeftError
from weft.core.record import append
from weft.workbench.compare import AMBIGUOUS, FASTER, SAME, SLOWER, compare, decide
from weft.workbench.compare_side import clean
from weft.workbench.statistics import summarise


def timed(samples: np.ndarray, **changes: object) -> Record:
    """A record made of samples, as the clock would make it."""
    found = summarise(samples.tolist())
    flags = ("noisy",) if found.width > 0.005 else ()
    timing = Timing(
        cold=found.median,
        warm=None,
        host=None,
        first=None,
        interval=found.interval,
        p10=found.p10,
        p90=found.p90,
        minimum=found.minimum,
        samples=tuple(samples.tolist()),
        calls_per_sample=4,
        flags=flags,
    )
    return record(timing=timing, **changes)


def noisy(seed: int, scale: float = 100.0, sigma: float = 0.003, n: int = 40) -> np.ndarray:
    """Samples with the one-sided noise of a real clock, and an offset of the run as a whole."""
    rng = np.random.default_rng(seed)
    offset = 1 + 0.002 * rng.standard_normal()
    return scale * offset * (1 + sigma * np.abs(rng.standard_normal(n)))


def verdict(a: Record, b: Record, **how: object) -> str | None:
    (one,) = compare([a], [b], **how)  # type: ignore[arg-type]
    return one.verdict


@pytest.mark.parametrize(
    ("scale", "expected"), [(90.0, FASTER), (111.0, SLOWER), (100.2, SAME), (101.0, AMBIGUOUS)]
)
def test_each_verdict_is_given_where_it_is_due(scale: float, expected: str) -> None:
    assert verdict(timed(noisy(1)), timed(noisy(1, scale))) == expected


def test_twenty_a_a_comparisons_call_nothing_faster_or_slower() -> None:
    found = {verdict(timed(noisy(2 * i)), timed(noisy(2 * i + 1))) for i in range(20)}
    assert found <= {SAME, AMBIGUOUS}


def test_a_a_of_very_noisy_runs_calls_nothing_faster_or_slower() -> None:
    pairs = [(noisy(2 * i, sigma=0.2), noisy(2 * i + 1, sigma=0.2)) for i in range(20)]
    assert {verdict(timed(a), timed(b)) for a, b in pairs} <= {SAME, AMBIGUOUS}


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.90, 0.98), FASTER),
        ((1.02, 1.10), SLOWER),
        ((0.995, 1.005), SAME),
        ((0.98, 1.005), AMBIGUOUS),
        ((0.995, 1.02), AMBIGUOUS),
        ((0.9, 1.1), AMBIGUOUS),
        ((1 / 1.01, 1.01), SAME),
        ((0.99, 1.01), AMBIGUOUS),
    ],
)
def test_the_matrix_of_intervals(interval: tuple[float, float], expected: str) -> None:
    assert decide(interval, interval, 0.01) == expected


def test_a_threshold_swallows_a_smaller_difference() -> None:
    a, b = timed(noisy(1)), timed(noisy(1, 90.0))
    assert verdict(a, b) == FASTER
    assert verdict(a, b, threshold=0.2) == SAME


def test_drift_within_a_run_counts_as_noise() -> None:
    wandering = np.concatenate([np.full(10, v) for v in (100.0, 104.0, 108.0, 112.0)])
    (one,) = compare([timed(wandering)], [timed(noisy(1, 100))])
    assert one.noise is not None and one.noise > 0.1
    assert one.verdict in (SAME, AMBIGUOUS)


def test_several_runs_widen_the_noise_to_how_far_they_lie_apart() -> None:
    runs = [timed(noisy(i, scale)) for i, scale in enumerate((98.0, 100.0, 104.0))]
    (one,) = compare(runs, [timed(noisy(9, 104))])
    assert one.noise is not None and one.noise >= 0.05
    assert one.verdict in (SAME, AMBIGUOUS)


def test_unlike_machines_are_refused_by_name_and_forced() -> None:
    a, b = timed(noisy(1), machine=GPU), timed(noisy(2), machine=CPU)
    with pytest.raises(WeftError, match="unlike machines") as caught:
        compare([a], [b])
    assert "Example GPU 9000" in str(caught.value) and "--force" in str(caught.value)
    assert verdict(a, b, force=True) in (SAME, AMBIGUOUS)


def test_what_only_one_side_has_is_told_and_what_broke_is_told_apart() -> None:
    good = timed(noisy(1))
    failed = record(cold=None, verdict={"status": "fail", "reason": "off by 3"})
    other = record(implementation="cuda", cold=None, verdict={"status": "unsupported"})
    (broken,) = compare([good], [failed])
    assert broken.verdict is None and broken.broken and "off by 3" in broken.reason
    found = compare([good], [other])
    assert [c.reason.split(":")[0] for c in found] == ["not in A", "not in B"]
    assert [(c.broken, c.missing) for c in found] == [(False, False), (True, True)]


def test_throttled_samples_stand_last_and_are_left_out_of_the_drift() -> None:
    timing = timed(np.concatenate([noisy(1), np.full(10, 500.0)])).timing
    assert timing is not None
    kept = Timing(**{**vars(timing), "throttled": 10})
    assert max(clean(kept)) < 200


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append(a, [timed(noisy(1)), timed(noisy(2), implementation="cuda")])
    append(b, [timed(noisy(1, 90.0)), timed(noisy(3, 120.0), implementation="cuda")])
    return a, b


def test_the_command_exits_1_where_something_is_slower(files: tuple[Path, Path]) -> None:
    a, b = files
    code, out, err = invoke(a, b)
    assert code == 1 and "slower" in out and "faster" in out
    assert "1 faster, 1 slower" in err
    assert invoke(a, a)[0] == 0


def test_json_says_all_of_it(files: tuple[Path, Path]) -> None:
    code, out, _ = invoke(*files, "--json")
    answer = json.loads(out)
    assert code == 1 and answer["counts"]["slower"] == 1
    assert {c["verdict"] for c in answer["comparisons"]} == {"faster", "slower"}
    assert {"commits", "machine", "noise", "threshold", "failed"} <= set(answer)


def test_a_wrong_call_is_an_error(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="one form"):
        invoke(*files, "--json", "--markdown")
    with pytest.raises(WeftError, match="no such records file"):
        invoke(files[0], tmp_path / "none.jsonl")
    with pytest.raises(WeftError, match="threshold"):
        invoke(*files, "--threshold", "7")
