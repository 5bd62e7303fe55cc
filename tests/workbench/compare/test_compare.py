"""Verdicts of compare: the matrix, A/A simulations, symmetry, pooled runs, unlike machines."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sample_records import CPU, GPU, record
from weft.core import Record, Timing, WeftError
from weft.workbench.compare.noise import Noise, Spread, from_runs, machine_key
from weft.workbench.compare.sides import unthrottled_samples
from weft.workbench.compare.verdict import AMBIGUOUS, FASTER, SAME, SLOWER, compare, decide, failures
from weft.workbench.timing.stats import drift, summarise


def timed(samples: np.ndarray, **changes: object) -> Record:
    """Return a record of these samples, as the timing would write it."""
    stats = summarise(samples.tolist())
    flags = ("noisy",) if stats.width > 0.005 else ()
    timing = Timing(
        cold=stats.median,
        warm=None,
        host=None,
        first=None,
        interval=stats.interval,
        p10=stats.p10,
        p90=stats.p90,
        minimum=stats.minimum,
        samples=tuple(samples.tolist()),
        calls_per_sample=4,
        flags=flags,
    )
    return record(timing=timing, **changes)


def noisy(seed: int, scale: float = 100.0, sigma: float = 0.003, n: int = 40) -> np.ndarray:
    """Return samples with the one-sided noise of a real clock and an offset of the whole run."""
    rng = np.random.default_rng(seed)
    offset = 1 + 0.002 * rng.standard_normal()
    return scale * offset * (1 + sigma * np.abs(rng.standard_normal(n)))


def verdict(a: Record, b: Record, **options: object) -> str | None:
    (one,) = compare([a], [b], **options)  # type: ignore[arg-type]
    return one.verdict


@pytest.mark.parametrize(
    ("scale", "expected"), [(90.0, FASTER), (111.0, SLOWER), (100.2, SAME), (101.0, AMBIGUOUS)]
)
def test_ratio_of_times_decides_the_verdict(scale: float, expected: str) -> None:
    assert verdict(timed(noisy(1)), timed(noisy(1, scale))) == expected


def test_twenty_a_a_comparisons_are_neither_faster_nor_slower() -> None:
    verdicts = {verdict(timed(noisy(2 * i)), timed(noisy(2 * i + 1))) for i in range(20)}
    assert verdicts <= {SAME, AMBIGUOUS}


def test_a_a_of_very_noisy_runs_is_neither_faster_nor_slower() -> None:
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
def test_interval_decides_the_verdict(interval: tuple[float, float], expected: str) -> None:
    assert decide(interval, interval, 0.01) == expected


def test_difference_below_the_threshold_is_same() -> None:
    a, b = timed(noisy(1)), timed(noisy(1, 90.0))
    assert verdict(a, b) == FASTER
    assert verdict(a, b, threshold=0.2) == SAME


def test_drift_within_a_run_counts_as_noise() -> None:
    drifting_samples = np.concatenate([np.full(10, v) for v in (100.0, 104.0, 108.0, 112.0)])
    (one,) = compare([timed(drifting_samples)], [timed(noisy(1, 100))])
    assert one.noise is not None and one.noise > 0.1
    assert one.verdict in (SAME, AMBIGUOUS)


@pytest.mark.parametrize(("threshold", "expected"), [(None, AMBIGUOUS), (0.02, AMBIGUOUS), (0.6, SAME)])
def test_same_requires_that_a_difference_would_have_been_seen(threshold: float | None, expected: str) -> None:
    """Runs that drift by about 10 % hide a difference of 2 % and of 5 %, but none of 60 %."""
    drifting = timed(np.concatenate([np.full(10, v) for v in (96.0, 100.0, 102.0, 106.0)]))
    (itself,) = compare([drifting], [drifting], threshold=threshold)
    assert itself.verdict == expected
    assert ("would not have been seen" in itself.reason) == (expected == AMBIGUOUS)


def test_a_record_compared_with_itself_is_never_the_same_above_the_visible_noise() -> None:
    samples = np.concatenate([np.full(10, v) for v in (100.0, 150.0, 300.0, 900.0)])
    (itself,) = compare([timed(samples)], [timed(samples)])
    assert itself.noise is not None and itself.noise > 3
    assert itself.verdict == AMBIGUOUS and "the noise is" in itself.reason
    assert decide((1.0, 1.0), (1.0, 1.0), 0.05) == SAME
    assert decide((1.0, 1.0), (1.0, 1.0), 0.051) == AMBIGUOUS
    assert decide((7.0, 8.0), (7.0, 8.0), 4.53) == SLOWER


def test_measured_noise_above_the_visible_difference_is_never_same() -> None:
    run = timed(noisy(1))
    spread = Spread(
        operator="gelu", implementation="triton", case="c", direction="forward", medians=(1.0, 1.2)
    )
    noise = Noise(machine=GPU, runs=2, arguments=(), spreads=(spread,))
    (one,) = compare([run], [run], noises={machine_key(GPU): noise})
    assert (one.verdict, one.noise_from) == (AMBIGUOUS, "measured")


def test_a_busy_machine_decides_only_differences_above_its_noise() -> None:
    busy = GPU | {"load": {"busy": "load 7.1 on 2 cores"}}
    quiet = timed(noisy(1))
    (same,) = compare([quiet], [timed(noisy(2), machine=busy)])
    assert (same.verdict, same.noise_from) == (AMBIGUOUS, "busy") and "busy" in same.reason
    assert verdict(quiet, timed(noisy(2, 130.0), machine=busy)) == AMBIGUOUS
    assert verdict(quiet, timed(noisy(2, 600.0), machine=busy)) == SLOWER


def test_distance_between_runs_counts_as_noise() -> None:
    runs = [timed(noisy(i, scale)) for i, scale in enumerate((98.0, 100.0, 104.0))]
    (one,) = compare(runs, [timed(noisy(9, 104))])
    assert one.noise is not None and one.noise >= 0.05
    assert one.verdict in (SAME, AMBIGUOUS)


def test_unlike_machines_are_refused_by_name_unless_forced() -> None:
    a, b = timed(noisy(1), machine=GPU), timed(noisy(2), machine=CPU)
    with pytest.raises(WeftError, match="unlike machines") as raised:
        compare([a], [b])
    assert "Example GPU 9000" in str(raised.value) and "--force" in str(raised.value)
    assert verdict(a, b, force=True) in (SAME, AMBIGUOUS)


def test_points_of_one_side_have_a_reason_and_failures_are_broken() -> None:
    good = timed(noisy(1))
    failed = record(cold=None, verdict={"status": "fail", "reason": "off by 3"})
    other = record(implementation="cuda", cold=None, verdict={"status": "unsupported"})
    (broken,) = compare([good], [failed])
    assert broken.verdict is None and broken.broken and "off by 3" in broken.reason
    comparisons = compare([good], [other])
    assert [c.reason.split(":")[0] for c in comparisons] == ["not in A", "not in B"]
    assert [(c.broken, c.missing) for c in comparisons] == [(False, False), (True, True)]


def test_throttled_samples_come_last_and_do_not_count_as_drift() -> None:
    timing = timed(np.concatenate([noisy(1), np.full(10, 500.0)])).timing
    assert timing is not None
    throttled = Timing(**{**vars(timing), "throttled": 10})
    assert max(unthrottled_samples(throttled)) < 200


MIRROR = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME, AMBIGUOUS: AMBIGUOUS}
runs = st.lists(
    st.builds(
        noisy,
        seed=st.integers(0, 50),
        scale=st.sampled_from((90.0, 98.0, 99.5, 100.0, 101.0, 104.0, 120.0)),
        sigma=st.sampled_from((0.001, 0.003, 0.05)),
        n=st.sampled_from((10, 20, 40)),
    ).map(timed),
    min_size=1,
    max_size=6,
)
thresholds = st.sampled_from((None, 0.0, 0.003, 0.02, 0.3))


@settings(max_examples=60)
@given(a=runs, b=runs, threshold=thresholds)
def test_swapping_the_sides_mirrors_the_verdict(
    a: list[Record], b: list[Record], threshold: float | None
) -> None:
    (one,) = compare(a, b, threshold=threshold)
    (other,) = compare(b, a, threshold=threshold)
    assert one.verdict is not None and other.verdict == MIRROR[one.verdict]
    assert one.noise == other.noise
    if one.verdict in (FASTER, SLOWER) and threshold is not None:
        assert one.ratio is not None
        assert max(one.ratio, 1 / one.ratio) > 1 + threshold


@settings(max_examples=40)
@given(a=runs, threshold=thresholds)
def test_a_side_is_neither_faster_nor_slower_than_itself(a: list[Record], threshold: float | None) -> None:
    (one,) = compare(a, a, threshold=threshold)
    assert one.verdict in (SAME, AMBIGUOUS)
    assert one.noise is not None and one.noise >= min(
        drift(unthrottled_samples(r.timing)) for r in a if r.timing
    )


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_five_percent_slower_with_tight_intervals_is_slower(seed: int) -> None:
    (one,) = compare([timed(noisy(seed))], [timed(noisy(seed + 1, 105.0))])
    assert one.verdict == SLOWER


def machine_noise(seed: int, offset: float, sigma: float, wander: float) -> np.ndarray:
    """Return a realistic run: an offset of the process, one-sided jitter, slow drift, and sometimes a
    stretch disturbed by another process."""
    rng = np.random.default_rng(seed)
    n = 40
    jitter = sigma * np.abs(rng.standard_t(4, n))
    slow = wander * np.sin(np.linspace(0, rng.uniform(1, 6), n) + rng.uniform(0, 6))
    busy = np.zeros(n)
    if rng.random() < 0.05:
        start = rng.integers(0, n)
        busy[start : start + n // 4] = 5 * sigma
    return 100 * (1 + offset * rng.standard_normal()) * (1 + jitter + slow + busy)


GPU_LIKE = {"offset": 0.0015, "sigma": 0.002, "wander": 0.001}
CPU_LIKE = {"offset": 0.02, "sigma": 0.03, "wander": 0.01}


@cache
def simulated(like: str, seed: int, scale: float) -> Record:
    """Return a record of GPU_LIKE or CPU_LIKE; all modes of judgement get the same records."""
    of, machine = (GPU_LIKE, GPU) if like == "gpu" else (CPU_LIKE, CPU)
    return timed(scale * machine_noise(seed, **of), machine=machine)


@pytest.mark.parametrize("mode", ["default", "measured", "pooled", "measured and pooled"])
@pytest.mark.parametrize(
    ("name", "like", "machine"),
    [("gpu", GPU_LIKE, GPU), ("cpu", CPU_LIKE, CPU)],
    ids=["gpu", "cpu"],
)
def test_false_alarms_of_a_a_by_simulation(
    name: str, like: dict[str, float], machine: dict[str, object], mode: str
) -> None:
    """Compare 150 pairs of runs of the same implementation: at most 2 are faster or slower. Count how many
    slowdowns of five times the offset are detected."""

    def several(seed: int, scale: float = 1.0) -> list[Record]:
        runs = 6 if "pooled" in mode else 1
        seeds = range(10 * seed, 10 * seed + runs)
        return [simulated(name, s, scale) for s in seeds]

    noises = {}
    if "measured" in mode:
        a_a_runs = [
            [
                timed(machine_noise(90_000 + 100 * i + c, **like), machine=machine, case=f"{c}")
                for c in range(8)
            ]
            for i in range(6)
        ]
        noises = {machine_key(machine): from_runs(a_a_runs)}
    worse = 1 + 5 * like["offset"]
    same = [compare(several(2 * i), several(2 * i + 1), noises=noises)[0] for i in range(150)]
    slowed = [compare(several(2 * i), several(2 * i + 1, worse), noises=noises)[0] for i in range(30)]
    alarms = sum(c.verdict in (FASTER, SLOWER) for c in same)
    hits = sum(c.verdict == SLOWER for c in slowed)
    wrong = sum(c.verdict == FASTER for c in slowed)
    print(f"{mode}: {alarms} false alarms of 150, {hits} of 30 slower by {worse - 1:.2%} found")
    assert alarms <= 2 and wrong == 0


def test_twelve_runs_decide_a_difference_that_three_leave_ambiguous() -> None:
    def several(seed: int, scale: float) -> list[Record]:
        scales = [scale * (1 + 0.01 * (i % 3 - 1)) for i in range(12)]
        return [timed(noisy(seed + i, one)) for i, one in enumerate(scales)]

    a, b = several(0, 100.0), several(50, 103.0)
    (three,) = compare(a[:3], b[:3])
    (many,) = compare(a, b)
    assert three.verdict == AMBIGUOUS and three.reason
    assert many.verdict == SLOWER and many.runs == (12, 12)


def measured(share: float, machine: dict[str, object] = GPU) -> dict[tuple[str, ...], Noise]:
    spread = Spread(
        operator="gelu",
        implementation="triton",
        case="c",
        direction="forward",
        medians=(100.0, 100.0 * (1 + share)),
    )
    return {machine_key(machine): Noise(machine=machine, runs=2, arguments=(), spreads=(spread,))}


def test_measured_noise_replaces_the_default_and_is_a_lower_bound() -> None:
    a, b = [timed(noisy(1, sigma=0.0005))], [timed(noisy(1, 100.8, sigma=0.0005))]
    assert compare(a, b)[0].verdict == SAME
    (fine,) = compare(a, b, noises=measured(0.001))
    assert fine.verdict == SLOWER and fine.noise_from == "measured" and fine.noise == 0.005
    (coarse,) = compare(a, b, noises=measured(0.2), threshold=0.0)
    # With 20 % of noise neither a difference nor its absence can be shown.
    assert coarse.verdict == AMBIGUOUS and coarse.noise == pytest.approx(0.2)
    (other,) = compare(a, b, noises=measured(0.2, CPU))
    assert other.noise_from == "default"
    drifting_samples = np.concatenate([np.full(10, v) for v in (100.0, 104.0, 108.0, 112.0)])
    (drifting,) = compare([timed(drifting_samples)], b, noises=measured(0.001))
    assert drifting.noise_from == "drift" and drifting.noise is not None and drifting.noise > 0.1


def test_unmeasured_point_has_the_noise_that_most_points_stay_within() -> None:
    noise = from_runs([[record(case=str(c), cold=100.0 + i * c) for c in range(10)] for i in (0, 1)])
    assert noise.of(("gelu", "triton", "3", "forward")) == pytest.approx(noise.usual)
    assert noise.of(("gelu", "triton", "9", "forward")) == pytest.approx(0.09)
    assert noise.of(("sum", "cuda", "c", "forward")) == noise.wide == pytest.approx(0.09)


def test_fewer_threads_are_another_machine() -> None:
    two, four = CPU | {"units": 2}, CPU | {"units": 4}
    with pytest.raises(WeftError, match=r"unlike machines.*2 units.*4 units"):
        compare([record(machine=two)], [record(machine=four)])


def test_suspect_time_is_not_compared_and_fails_the_gate() -> None:
    good, odd = timed(noisy(1)), timed(noisy(1, 50.0), flags=("suspect: side-stream",))
    (one,) = compare([good], [odd])
    assert one.verdict is None and one.broken and "side-stream" in one.reason
    assert failures([one], "slower") == [one]
    (before,) = compare([odd], [good])
    assert before.verdict is None and not before.broken


def test_each_fail_on_level_includes_the_levels_before_it() -> None:
    failed = record(cold=None, verdict={"status": "fail", "reason": "off by 3"})
    a = [timed(noisy(1), implementation=i) for i in ("slow", "vague", "gone", "fails", "fast")]
    b = [
        timed(noisy(1, 120.0), implementation="slow"),
        timed(noisy(1, 101.0), implementation="vague"),
        replace(failed, implementation="fails"),
        timed(noisy(1, 80.0), implementation="fast"),
        timed(noisy(1, 80.0), implementation="new"),
    ]
    comparisons = compare(a, b)
    assert {c.implementation for c in failures(comparisons, "slower")} == {"slow", "fails"}
    assert {c.implementation for c in failures(comparisons)} == {"slow", "fails", "gone"}
    assert {c.implementation for c in failures(comparisons, "ambiguous")} == {
        "slow",
        "fails",
        "gone",
        "vague",
    }
    with pytest.raises(WeftError, match="fail-on"):
        failures(comparisons, "faster")
