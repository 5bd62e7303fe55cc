"""The clock on a CPU: what it reports, and what it does not let pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.workbench import clock_cpu
from weft.workbench.clock import measure
from weft.workbench.guard import ClockReplaced, replaced
from weft.workbench.local_rig import LocalRig
from weft.workbench.plan import Budget, Candidate, Outcome, Plan, plan
from weft.workbench.readings import Readings, is_throttled, summarise_clocks
from weft.workbench.recheck import turns
from weft.workbench.slots import Slot
from weft.workbench.statistics import drift, is_steady, median_interval, summarise

Call = Callable[[], torch.Tensor]
QUICK = Budget(seconds=0.4, warmup=0.04, minimum=8, maximum=30, side_samples=3)
SIZE = 128


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, since two on a shared core measure the scheduler, and a small cache to flush."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("weft.machine.l2_bytes", lambda kind: 1 << 20)
    yield
    torch.set_num_threads(before)


def make_slot(seed: int) -> Slot:
    generator = torch.Generator().manual_seed(seed)
    return Slot([torch.randn(SIZE, SIZE, generator=generator)])


def make_judge(slot: Slot) -> Callable[[object], str | None]:
    wanted = torch.tanh(slot.inputs[0].double())

    def judge(output: object) -> str | None:
        assert isinstance(output, torch.Tensor)
        error = (output.double() - wanted).abs().max().item()
        return None if error < 1e-5 else f"off by {error}"

    return judge


def honest(slot: Slot) -> Call:
    return lambda: torch.tanh(slot.inputs[0])


def run(
    *binds: Callable[[Slot], Call], judged: bool = True, budget: Budget = QUICK
) -> list[Outcome]:
    candidates = [Candidate(name=str(i), bind=b) for i, b in enumerate(binds)]
    judge = make_judge if judged else None
    found = measure(candidates, make_slot, device="cpu", budget=budget, make_judge=judge)
    return list(found.values())


def test_an_honest_candidate_gets_every_number() -> None:
    (found,) = run(honest)
    assert not found.refusal and not found.trouble and found.timing is not None
    t = found.timing
    assert t.cold > 0 and t.warm and t.host and t.minimum <= t.p10 <= t.cold <= t.p90
    assert t.interval[0] <= t.cold <= t.interval[1]
    assert t.cold * t.calls_per_sample >= 25, "a sample lasts long enough"
    assert len(t.samples) >= 3 and t.clocks["overhead_us"] >= 0
    assert not [f for f in t.flags if f.startswith(("suspect", "threads"))]


def skips_every_tenth(slot: Slot, count: list[int]) -> Call:
    def call() -> torch.Tensor:
        count[0] += 1
        x = slot.inputs[0]
        return torch.empty_like(x) if count[0] % 10 == 0 else torch.tanh(x)

    return call


def test_skipping_the_tenth_call_is_refused() -> None:
    count = [0]
    (found,) = run(lambda s: skips_every_tenth(s, count))
    assert "is wrong" in found.refusal and found.timing is None


def test_returning_the_last_answer_again_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def bind(slot: Slot) -> Call:
        def call() -> torch.Tensor:
            if len(kept) < 9:
                kept.append(torch.tanh(slot.inputs[0]))
                return kept[-1]
            return kept[-1].clone()

        return call

    (found,) = run(bind)
    assert "is wrong" in found.refusal


def test_an_answer_kept_by_address_and_version_is_refused() -> None:
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def bind(slot: Slot) -> Call:
        def call() -> torch.Tensor:
            x = slot.inputs[0]
            key = (x.data_ptr(), x._version)
            if key not in kept:
                kept[key] = torch.tanh(x)
            return kept[key].clone()

        return call

    (found,) = run(bind)
    assert "is wrong" in found.refusal


def test_one_output_for_all_calls_is_refused() -> None:
    out = torch.empty(SIZE, SIZE)
    (found,) = run(lambda s: lambda: torch.tanh(s.inputs[0], out=out))
    assert "same memory" in found.refusal


def handed_to_a_thread(slot: Slot) -> Call:
    def call() -> torch.Tensor:
        out = torch.zeros_like(slot.inputs[0])

        def later() -> None:
            time.sleep(0.002)
            torch.tanh(slot.inputs[0], out=out)

        threading.Thread(target=later, daemon=True).start()
        return out

    return call


def test_work_handed_to_a_thread_is_refused() -> None:
    (found,) = run(handed_to_a_thread)
    assert found.refusal


@pytest.mark.parametrize(("cpu_share", "suspect"), [(0.9, False), (1.9, False), (3.0, True)])
def test_cpu_time_that_the_wall_clock_did_not_see_is_suspect(
    cpu_share: float, suspect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores burn twice the wall time at most: more was burnt after the calls returned."""
    stand = clock_cpu.CpuStand()
    stand.cores, stand.tail = 2, 0
    rig = stand.rig(Candidate(name="x", bind=honest), [make_slot(0)], Plan(calls=1, flush=False))
    began = time.perf_counter_ns()
    monkeypatch.setattr(clock_cpu, "wait_until_idle", lambda: None)
    monkeypatch.setattr(
        clock_cpu, "_cpu_now", lambda: int(cpu_share * (time.perf_counter_ns() - began))
    )
    assert bool(rig.cross_check()) == suspect


def test_sleeping_through_the_warm_up_changes_nothing() -> None:
    count = [0]

    def bind(slot: Slot) -> Call:
        def call() -> torch.Tensor:
            count[0] += 1
            if count[0] < 20:
                time.sleep(0.003)
            return torch.tanh(slot.inputs[0])

        return call

    budget = Budget(seconds=0.6, warmup=0.3, minimum=8, maximum=40, side_samples=3)
    sleepy, plain = run(bind, honest, budget=budget)
    assert sleepy.timing and plain.timing
    assert sleepy.timing.cold < 2_000, "the sleep is over before timing begins"
    assert sleepy.timing.cold * sleepy.timing.calls_per_sample >= 25


def test_a_candidate_that_raises_leaves_the_others_alone() -> None:
    count = [0]

    def bind(slot: Slot) -> Call:
        def call() -> torch.Tensor:
            count[0] += 1
            if count[0] > 40:
                raise RuntimeError("no more")
            return torch.tanh(slot.inputs[0])

        return call

    raising, plain = run(bind, honest)
    assert "no more" in raising.trouble and raising.timing is None
    assert plain.timing is not None


def test_out_of_memory_is_told_as_such() -> None:
    def bind(slot: Slot) -> Call:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (found,) = run(bind)
    assert found.trouble == "out of memory"


def test_replacing_the_clocks_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.perf_counter_ns

    def bind(slot: Slot) -> Call:
        def call() -> torch.Tensor:
            time.perf_counter_ns = lambda: real() // 2
            return torch.tanh(slot.inputs[0])

        return call

    monkeypatch.setattr(time, "perf_counter_ns", real)
    (found,) = run(bind)
    assert "time.perf_counter_ns" in found.refusal
    with pytest.raises(ClockReplaced):
        run(honest)
    monkeypatch.undo()
    assert replaced() == []


def test_a_backward_is_rechecked_with_fresh_gradients() -> None:
    def with_grad(seed: int) -> Slot:
        return Slot(make_slot(seed).inputs, make_slot(seed + 1000).inputs[0])

    def judge(slot: Slot) -> Callable[[object], str | None]:
        assert slot.grad is not None
        wanted = slot.grad.double() * (1 - torch.tanh(slot.inputs[0].double()) ** 2)

        def decide(output: object) -> str | None:
            assert isinstance(output, tuple)
            return None if (output[0] - wanted).abs().max() < 1e-5 else "off"

        return decide

    def right(slot: Slot) -> Callable[[], tuple[torch.Tensor, ...]]:
        y = torch.tanh(slot.inputs[0])
        grad = slot.grad
        assert grad is not None
        return lambda: (grad * (1 - y * y),)

    def stale(slot: Slot) -> Callable[[], tuple[torch.Tensor, ...]]:
        (kept,) = right(slot)()
        return lambda: (kept.clone(),)

    candidates = [Candidate(name="right", bind=right), Candidate(name="stale", bind=stale)]
    found = measure(candidates, with_grad, device="cpu", budget=QUICK, make_judge=judge)
    assert found["right"].timing is not None, found["right"]
    assert "is wrong" in found["stale"].refusal


def test_a_a_on_a_cpu() -> None:
    """The same thing twice, side by side: their intervals, widened by the noise, overlap."""
    one, other = run(honest, honest, judged=False)
    assert one.timing and other.timing
    assert one.timing.p10 <= other.timing.p90 * 1.05
    assert other.timing.p10 <= one.timing.p90 * 1.05


@given(
    footprint=st.integers(1, 1 << 34),
    call_us=st.floats(0.01, 1e7),
    fits=st.integers(1, 1000),
)
def test_a_plan_without_a_flush_outgrows_the_cache(
    footprint: int, call_us: float, fits: int
) -> None:
    cache = 60 << 20
    found = plan(footprint, cache, call_us, slow_us=50_000, fits=fits)
    assert 1 <= found.calls <= max(1, fits)
    if not found.flush:
        assert found.calls >= 2 and found.calls * footprint >= 2 * cache


SAMPLES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60)


@given(SAMPLES)
def test_the_interval_holds_the_median_and_stays_within_the_samples(samples: list[float]) -> None:
    found = summarise(samples)
    low, high = found.interval
    assert min(samples) <= low <= found.median * (1 + 1e-9)
    assert found.median <= high * (1 + 1e-9) and high <= max(samples)
    assert found.minimum <= found.p10 <= found.median <= found.p90
    assert median_interval(samples) == median_interval(samples), "seeded"


@given(st.floats(1.0, 1e6), st.integers(1, 50))
def test_equal_samples_have_no_width_and_no_drift(value: float, n: int) -> None:
    found = summarise([value] * n)
    assert found.width == 0 and drift([value] * n) == 0


@given(SAMPLES, st.floats(0.1, 10.0))
def test_the_interval_scales_with_the_unit(samples: list[float], factor: float) -> None:
    low, high = median_interval(samples)
    scaled = median_interval([s * factor for s in samples])
    assert scaled == pytest.approx((low * factor, high * factor))


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
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


def test_neighbours_and_turns_hold_different_contents() -> None:
    slots = [make_slot(i) for i in range(4)]
    stand = clock_cpu.CpuStand()
    rig = stand.rig(Candidate(name="x", bind=honest), slots, Plan(calls=4, flush=False))
    local = LocalRig(rig, slots, make_slot)
    next(local.rerun([100, 200], turn=0))
    first = [s.inputs[0].clone() for s in slots]
    assert torch.equal(first[0], first[2]) and torch.equal(first[0], make_slot(100).inputs[0])
    next(local.rerun([100, 200], turn=1))
    assert not torch.equal(first[0], first[1])
    assert all(not torch.equal(a, s.inputs[0]) for a, s in zip(first, slots, strict=True))
    assert [turns(n) for n in (1, 5, 12, 64)] == [12, 3, 1, 1]
    assert [turns(n, near=False) for n in (1, 5, 12, 64)] == [12, 6, 4, 2]


def test_throttling_is_told_from_a_power_cap() -> None:
    assert is_throttled({"throttle": ["hw_thermal"]}) and is_throttled(
        {"throttle": ["hw_slowdown"]}
    )
    assert not is_throttled({"throttle": ["sw_power_cap"]}) and not is_throttled({})
    told = summarise_clocks([{"sm_mhz": 1900, "throttle": ["sw_power_cap"]}, {"sm_mhz": 1700}])
    assert told["sm_mhz"] == [1700, 1800, 1900] and told["throttle"] == {"sw_power_cap": 1}


class Hot:
    """A sampler whose card is too hot at every second reading."""

    def __init__(self) -> None:
        self.n = 0

    def read(self) -> dict[str, object]:
        self.n += 1
        return {"throttle": ["sw_thermal"] if self.n % 2 else []}


def test_throttled_samples_are_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = Hot()
    monkeypatch.setattr("weft.machine.clocks.Sampler.read", lambda self: hot.read())
    monkeypatch.setattr("weft.workbench.readings.APART", 0)
    (found,) = run(honest, judged=False)
    assert found.timing is not None
    t = found.timing
    assert 0 < t.throttled < len(t.samples) and "throttled" in t.flags
    assert t.clocks["throttle"]["sw_thermal"] >= t.throttled


def test_a_sampler_is_not_asked_too_often() -> None:
    hot = Hot()
    readings = Readings(hot)  # type: ignore[arg-type]
    assert readings.read() == readings.read() and hot.n == 1
