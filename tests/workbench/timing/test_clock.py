"""Timing on a CPU: the reported numbers, and the cheats that it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.toy_clock import ToyClock
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.timing import cpu as cpu_timing
from weft.workbench.timing.gpu_clocks import Readings, is_throttled, summarise_clocks
from weft.workbench.timing.integrity import ClockReplaced, replaced_functions
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import (
    MIN_SAMPLE_US,
    Budget,
    Candidate,
    Outcome,
    Plan,
    is_by_time_alone,
    make_plan,
)
from weft.workbench.timing.recheck import rounds_needed
from weft.workbench.timing.stats import drift, is_decided, is_steady, median_interval, summarise

Call = Callable[[], torch.Tensor]
QUICK = Budget(seconds=0.4, warmup=0.04, min_samples=8, max_rounds=30, side_samples=3)
SIZE = 128
pytestmark = pytest.mark.usefixtures("small_machine")


def make_buffers(seed: int) -> InputBuffers:
    generator = torch.Generator().manual_seed(seed)
    return InputBuffers([torch.randn(SIZE, SIZE, generator=generator)])


def make_judge(buffers: InputBuffers) -> Callable[[object], str | None]:
    expected = torch.tanh(buffers.inputs[0].double())

    def judge(output: object) -> str | None:
        assert isinstance(output, torch.Tensor)
        error = (output.double() - expected).abs().max().item()
        return None if error < 1e-5 else f"off by {error}"

    return judge


def honest(buffers: InputBuffers) -> Call:
    return lambda: torch.tanh(buffers.inputs[0])


def run(
    *binds: Callable[[InputBuffers], Call],
    judged: bool = True,
    budget: Budget = QUICK,
    without: Sequence[str] = (),
) -> list[Outcome]:
    candidates = [Candidate(name=str(i), bind=b) for i, b in enumerate(binds)]
    judge = make_judge if judged else None
    outcomes = measure(
        candidates, make_buffers, device="cpu", budget=budget, make_judge=judge, without=without
    )
    return list(outcomes.values())


def test_an_honest_candidate_gets_every_number() -> None:
    (outcome,) = run(honest)
    assert not outcome.refusal and not outcome.trouble and outcome.timing is not None
    t = outcome.timing
    assert t.cold > 0 and t.warm and t.host and t.minimum <= t.p10 <= t.cold <= t.p90
    assert t.interval[0] <= t.cold <= t.interval[1]
    assert len(t.samples) >= 3 and t.clocks["overhead_us"] >= 0
    # The clock is real: only other work on the machine may make a time suspect.
    doubts = [f for f in t.flags if f.startswith(("suspect", "threads"))]
    assert all(map(is_by_time_alone, doubts)), doubts


def skips_every_tenth(buffers: InputBuffers, count: list[int]) -> Call:
    def call() -> torch.Tensor:
        count[0] += 1
        x = buffers.inputs[0]
        return torch.empty_like(x) if count[0] % 10 == 0 else torch.tanh(x)

    return call


def test_skipping_the_tenth_call_is_refused() -> None:
    count = [0]
    (outcome,) = run(lambda s: skips_every_tenth(s, count))
    assert "is wrong" in outcome.refusal and outcome.timing is None


def test_returning_the_previous_output_again_is_refused() -> None:
    cached: list[torch.Tensor] = []

    def bind(buffers: InputBuffers) -> Call:
        def call() -> torch.Tensor:
            if len(cached) < 9:
                cached.append(torch.tanh(buffers.inputs[0]))
                return cached[-1]
            return cached[-1].clone()

        return call

    (outcome,) = run(bind)
    assert "is wrong" in outcome.refusal


def test_an_output_cached_by_address_and_version_is_refused() -> None:
    cached: dict[tuple[int, int], torch.Tensor] = {}

    def bind(buffers: InputBuffers) -> Call:
        def call() -> torch.Tensor:
            x = buffers.inputs[0]
            key = (x.data_ptr(), x._version)
            if key not in cached:
                cached[key] = torch.tanh(x)
            return cached[key].clone()

        return call

    (outcome,) = run(bind)
    assert "is wrong" in outcome.refusal


def test_one_output_for_all_calls_is_refused() -> None:
    out = torch.empty(SIZE, SIZE)
    (outcome,) = run(lambda s: lambda: torch.tanh(s.inputs[0], out=out))
    assert "same memory" in outcome.refusal


def leaves_work_to_a_thread(buffers: InputBuffers) -> Call:
    def call() -> torch.Tensor:
        out = torch.zeros_like(buffers.inputs[0])

        def later() -> None:
            time.sleep(0.002)
            torch.tanh(buffers.inputs[0], out=out)

        threading.Thread(target=later, daemon=True).start()
        return out

    return call


def test_work_left_to_a_thread_is_refused() -> None:
    (outcome,) = run(leaves_work_to_a_thread)
    assert outcome.refusal


@pytest.mark.parametrize(("cpu_share", "suspect"), [(0.9, False), (1.9, False), (3.0, True)])
def test_cpu_time_beyond_the_wall_time_is_suspect(
    cpu_share: float, suspect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores use at most twice the wall time; any more was used after the calls had returned."""
    clock = ToyClock(monkeypatch)
    backend = cpu_timing.CpuTimingBackend()
    backend.cores, backend.spin_ns = 2, 0
    candidate = Candidate(name="x", bind=costs(clock, lambda n: 100.0))
    timed = backend.prepare(candidate, [make_buffers(0)], make_buffers, Plan(calls=1, flush=False))
    monkeypatch.setattr(cpu_timing, "wait_until_idle", lambda: None)
    monkeypatch.setattr(cpu_timing, "_cpu_now", lambda: int(cpu_share * clock.ns))
    timed.sample()
    assert bool(timed.cross_check()) == suspect


def costs(clock: ToyClock, us: Callable[[int], float]) -> Callable[[InputBuffers], Call]:
    """Correct candidate whose call number n takes ``us(n)`` of the toy clock."""
    count = [0]

    def bind(buffers: InputBuffers) -> Call:
        def call() -> torch.Tensor:
            count[0] += 1
            clock.advance(us(count[0]))
            return torch.tanh(buffers.inputs[0])

        return call

    return bind


def test_sleeping_through_the_warm_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 60 calls take 1 ms and the later ones 1 us: the warm-up sees both, no sample the first.

    The plan made from the slow calls has samples of 16 us, so it must be made again.
    """
    clock = ToyClock(monkeypatch)
    budget = Budget(seconds=0.6, warmup=0.3, min_samples=8, max_rounds=40, side_samples=3)
    sleepy, plain = run(
        costs(clock, lambda n: 1000.0 if n <= 60 else 1.0),
        costs(clock, lambda n: 1.0),
        budget=budget,
        without=["replaced"],
    )
    assert sleepy.timing and plain.timing
    assert max(sleepy.timing.samples) == pytest.approx(1.0, rel=0.01), "a sleeping call is in a sample"
    for outcome in (sleepy, plain):
        assert outcome.timing and outcome.timing.calls_per_sample * 1.0 >= MIN_SAMPLE_US


def test_a_candidate_that_raises_leaves_the_others_alone() -> None:
    count = [0]

    def bind(buffers: InputBuffers) -> Call:
        def call() -> torch.Tensor:
            count[0] += 1
            if count[0] > 40:
                raise RuntimeError("no more")
            return torch.tanh(buffers.inputs[0])

        return call

    raising, plain = run(bind, honest)
    assert "no more" in raising.trouble and raising.timing is None
    assert plain.timing is not None


def test_out_of_memory_is_reported() -> None:
    def bind(buffers: InputBuffers) -> Call:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (outcome,) = run(bind)
    assert outcome.trouble == "out of memory"


def test_replacing_the_clocks_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.perf_counter_ns

    def bind(buffers: InputBuffers) -> Call:
        def call() -> torch.Tensor:
            time.perf_counter_ns = lambda: real() // 2
            return torch.tanh(buffers.inputs[0])

        return call

    monkeypatch.setattr(time, "perf_counter_ns", real)
    (outcome,) = run(bind)
    assert "time.perf_counter_ns" in outcome.refusal
    with pytest.raises(ClockReplaced):
        run(honest)
    monkeypatch.undo()
    assert replaced_functions() == []


def test_a_backward_is_rechecked_with_fresh_gradients() -> None:
    def with_grad(seed: int) -> InputBuffers:
        return InputBuffers(make_buffers(seed).inputs, make_buffers(seed + 1000).inputs[0])

    def judge(buffers: InputBuffers) -> Callable[[object], str | None]:
        assert buffers.grad is not None
        expected = buffers.grad.double() * (1 - torch.tanh(buffers.inputs[0].double()) ** 2)

        def decide(output: object) -> str | None:
            assert isinstance(output, tuple)
            return None if (output[0] - expected).abs().max() < 1e-5 else "off"

        return decide

    def right(buffers: InputBuffers) -> Callable[[], tuple[torch.Tensor, ...]]:
        y = torch.tanh(buffers.inputs[0])
        grad = buffers.grad
        assert grad is not None
        return lambda: (grad * (1 - y * y),)

    def stale(buffers: InputBuffers) -> Callable[[], tuple[torch.Tensor, ...]]:
        (cached,) = right(buffers)()
        return lambda: (cached.clone(),)

    candidates = [Candidate(name="right", bind=right), Candidate(name="stale", bind=stale)]
    outcome = measure(candidates, with_grad, device="cpu", budget=QUICK, make_judge=judge)
    assert outcome["right"].timing is not None, outcome["right"]
    assert "is wrong" in outcome["stale"].refusal


def test_a_a_on_a_machine_that_becomes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal candidates get overlapping intervals, since rounds spread a drift over both.

    The toy machine slows down by about a tenth while the samples are taken; one candidate after the
    other would differ by half of that.
    """
    clock = ToyClock(monkeypatch)

    def us(_: int) -> float:
        return 20.0 * (1.0 + clock.ns / 2e8)

    first, second = run(costs(clock, us), costs(clock, us), judged=False, without=["replaced"])
    assert first.timing and second.timing
    assert first.timing.samples[-1] > 1.03 * first.timing.samples[0], "the drift is there"
    assert first.timing.interval[0] <= second.timing.interval[1]
    assert second.timing.interval[0] <= first.timing.interval[1]


@given(
    footprint=st.integers(1, 1 << 34),
    call_us=st.floats(0.01, 1e7),
    fits=st.integers(1, 1000),
)
def test_a_plan_without_a_flush_outgrows_the_cache(footprint: int, call_us: float, fits: int) -> None:
    cache = 60 << 20
    outcome = make_plan(footprint, cache, call_us, slow_us=50_000, fits=fits)
    assert 1 <= outcome.calls <= max(1, fits)
    if not outcome.flush:
        assert outcome.calls >= 2 and outcome.calls * footprint >= 2 * cache


SAMPLES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60)


@given(SAMPLES)
def test_the_interval_holds_the_median_and_stays_within_the_samples(samples: list[float]) -> None:
    outcome = summarise(samples)
    low, high = outcome.interval
    assert min(samples) <= low <= outcome.median * (1 + 1e-9)
    assert outcome.median <= high * (1 + 1e-9) and high <= max(samples)
    assert outcome.minimum <= outcome.p10 <= outcome.median <= outcome.p90
    assert median_interval(samples) == median_interval(samples), "seeded"


@given(st.floats(1.0, 1e6), st.integers(1, 50))
def test_equal_samples_have_no_width_and_no_drift(value: float, n: int) -> None:
    outcome = summarise([value] * n)
    assert outcome.width == 0 and drift([value] * n) == 0


@given(SAMPLES, st.floats(0.1, 10.0))
def test_the_interval_scales_with_the_unit(samples: list[float], factor: float) -> None:
    low, high = median_interval(samples)
    scaled = median_interval([s * factor for s in samples])
    assert scaled == pytest.approx((low * factor, high * factor))


def test_the_interval_covers_the_true_median_at_its_level() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        low, high = median_interval(torch.randn(40, generator=generator).tolist(), resamples=400)
        hits += low <= 0.0 <= high
    assert 0.88 <= hits / 200 <= 1.0


def test_drift_and_steadiness() -> None:
    assert drift([1.0] * 10 + [1.1] * 10) == pytest.approx(0.1 / 1.05)
    assert is_steady([5.0, 4.0, 3.0, 2.0, 1.0] + [1.0] * 10)
    assert not is_steady([1.0] * 5 + [1.2] * 5) and not is_steady([1.0] * 9)
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


def test_neighbouring_buffers_and_rounds_have_different_contents() -> None:
    buffer_sets = [make_buffers(i) for i in range(4)]
    backend = cpu_timing.CpuTimingBackend()
    plan = Plan(calls=4, flush=False)
    local = backend.prepare(Candidate(name="x", bind=honest), buffer_sets, make_buffers, plan)
    next(local.rerun([100, 200], round_number=0))
    first = [s.inputs[0].clone() for s in buffer_sets]
    assert torch.equal(first[0], first[2]) and torch.equal(first[0], make_buffers(100).inputs[0])
    next(local.rerun([100, 200], round_number=1))
    assert not torch.equal(first[0], first[1])
    assert all(not torch.equal(a, s.inputs[0]) for a, s in zip(first, buffer_sets, strict=True))
    assert [rounds_needed(n) for n in (1, 5, 12, 64)] == [12, 3, 1, 1]
    assert [rounds_needed(n, is_local=False) for n in (1, 5, 12, 64)] == [12, 6, 4, 2]


def test_throttling_differs_from_a_power_cap() -> None:
    assert is_throttled({"throttle": ["hw_thermal"]}) and is_throttled({"throttle": ["hw_slowdown"]})
    assert not is_throttled({"throttle": ["sw_power_cap"]}) and not is_throttled({})
    summary = summarise_clocks([{"sm_mhz": 1900, "throttle": ["sw_power_cap"]}, {"sm_mhz": 1700}])
    assert summary["sm_mhz"] == [1700, 1800, 1900] and summary["throttle"] == {"sw_power_cap": 1}


class Hot:
    """Sampler whose GPU is too hot at every second reading."""

    def __init__(self) -> None:
        self.n = 0

    def read(self) -> dict[str, object]:
        self.n += 1
        return {"throttle": ["sw_thermal"] if self.n % 2 else []}


def test_throttled_samples_are_stored_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Hot()
    monkeypatch.setattr("weft.machine.clocks.Sampler.read", lambda self: hot.read())
    monkeypatch.setattr("weft.workbench.timing.gpu_clocks.READ_INTERVAL_NS", 0)
    (outcome,) = run(honest, judged=False)
    assert outcome.timing is not None
    t = outcome.timing
    assert 0 < t.throttled < len(t.samples) and "throttled" in t.flags
    assert t.clocks["throttle"]["sw_thermal"] >= t.throttled


def test_a_sampler_is_read_at_most_every_5_ms() -> None:
    hot = Hot()
    readings = Readings(hot)  # type: ignore[arg-type]
    assert readings.read() == readings.read() and hot.n == 1


def test_samples_are_decided_where_more_of_them_change_nothing() -> None:
    rng = np.random.default_rng(3)

    def draw(spread: float, median: float = 100.0) -> list[float]:
        return [float(v) for v in rng.normal(median, spread, 60)]

    steady, noisy, wild = draw(0.1), [draw(1.5) for _ in range(3)], draw(20.0)
    pair = [(noisy[0], noisy[1]), (noisy[2], [])]
    assert is_decided(pair, 0.005, spent=0.9), "known to 2 %, and 0.5 % cannot be reached"
    assert not is_decided(pair, 0.005, spent=0.02), "with fifty times as many it can"
    assert not is_decided([(noisy[0], noisy[1]), (wild, [])], 0.005, spent=0.9), "the ratio is not known"
    assert not is_decided([(noisy[0], wild), (noisy[2], [])], 0.005, spent=0.9), "nor the machine's own noise"
    assert not is_decided([(steady, steady), (steady, [])], 0.005, spent=0.9), "that is converged"
    for few in ([], [(noisy[0], [])], [(noisy[0], noisy[1])], [(noisy[0], noisy[1]), ([], [])], pair[1:] * 2):
        assert not is_decided(few, 0.005, spent=0.9)
