"""Timing session: candidates are prepared, sampled in rounds of random order, cross-checked and
re-checked, all at one case and direction."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from weft.core import Timing
from weft.machine.clocks import Sampler
from weft.workbench.calls.buffers import InputBuffers, MakeBuffers, drop_values, release_unused_memory
from weft.workbench.timing.conditions import ConditionsMonitor
from weft.workbench.timing.gpu_clocks import Readings, is_throttled, summarise_clocks
from weft.workbench.timing.local_candidate import BufferCache
from weft.workbench.timing.plan import (
    BUSY_FACTOR,
    MAX_BUSY_FACTOR,
    MAX_CALLS,
    MAX_OVERTIME,
    MIN_SAMPLE_US,
    Budget,
    Candidate,
    IntegrityError,
    Outcome,
    Plan,
    TimedCandidate,
    TimingBackend,
    calls_that_fit,
    describe_trouble,
    make_plan,
    timing_check_of,
)
from weft.workbench.timing.recheck import (
    SEED_COUNT,
    MakeJudge,
    Recheck,
    altered_rounds,
    rounds_needed,
    share_bounds,
)
from weft.workbench.timing.sampled_outputs import SampledOutputs
from weft.workbench.timing.stats import Summary, drift, is_decided, is_steady, summarise
from weft.workbench.timing.sustained import Block, blocks_in_turn, is_power_bound, summarise_blocks
from weft.workbench.timing.threads import WORKED, ThreadMonitor
from weft.workbench.timing.unseen_inputs import PAUSE_SECONDS, AuditResult, SampleAudits, UnseenInputs

_now = time.perf_counter_ns

MAX_THROTTLED = 20  # throttled samples of one candidate that are taken again
MAX_ASLEEP_SHARE = 0.5  # of the sampling time, of an external candidate with too few samples
WINDOW = 5  # samples; the medians of two windows must agree before sampling begins
CONVERGENCE_ROUNDS = 5  # a bootstrap costs a millisecond, so intervals are computed this rarely
# First seeds of re-checks and of audits where the session's seed is fixed; far from those of the
# buffers (0, 1, 2, ...), so that no contents come twice.
RECHECK_SEED, ALTERATION_SEED, AUDIT_SEED = 7_000_000, 8_000_000, 9_000_000
UNUSED_BYTES = 1 << 30  # of GPU memory that the allocator of this process may keep between two steps
OnRound = Callable[[int, Mapping[str, float]], None]


@dataclass(kw_only=True)
class CandidateState:
    """A candidate in a session: its samples, its readings of the clocks and its refusal."""

    candidate: Candidate
    timed: TimedCandidate
    clean: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)  # of a trusted candidate: a second one in each round
    readings: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    warm: float | None = None
    host: float | None = None
    unseen_ratio: float | None = None  # time on unseen inputs over the least sample
    least: float = float("inf")  # us for a call, over all samples and the estimate
    footprint: int = 0  # bytes that one call touches
    fits: int = 1  # calls whose buffers fit into memory
    sampling_seconds: float = 0.0
    recheck_ns: int = 0
    n_in_time: int | None = None  # clean samples at the end of the sampling; the audits' end may add some
    sampled: SampledOutputs = field(default_factory=SampledOutputs)
    audits: SampleAudits | None = None  # at random places among the samples of an external candidate
    refusal: str = ""
    done: bool = False

    @property
    def samples(self) -> list[float]:
        """Clean samples, or the throttled ones where no sample was clean."""
        return self.clean or self.throttled

    @property
    def cold(self) -> float:
        return float(np.median(self.samples))

    @property
    def in_time(self) -> int:
        """Clean samples that were taken within the budget."""
        return len(self.clean) if self.n_in_time is None else self.n_in_time

    def busy(self, device: str) -> float:
        """Return the factor by which a call may honestly be slower a moment later.

        It grows with the width of the samples' interval: an unsteady machine stays unsteady.
        """
        width = summarise(self.samples).width
        return min(MAX_BUSY_FACTOR, BUSY_FACTOR[device] * (1.0 + 4.0 * width))

    def sample(self, readings: Readings | None, repeated: bool = False) -> None:
        """Take one sample; store it with a reading of the clocks, or drop it without ``readings``.

        A ``repeated`` one is stored apart, to compare the candidate with itself. An audit may come before
        a sample that is stored.
        """
        if readings is not None and self.audits is not None and self.audits.is_due(self.sampling_seconds):
            self._take_audit(self.audits)
        start = _now()
        us = self.timed.sample()
        self.sampling_seconds += (_now() - start) / 1e9
        self.least = min(self.least, us)  # also of a dropped sample: it shows the candidate's best speed
        if readings is None:
            return
        reading = readings.read()
        if repeated:
            self.repeated += [] if is_throttled(reading) else [us]
            return
        self.readings.append(reading)
        # Bounded, so that a GPU that is always too hot still gets a result, flagged `throttled`.
        retry = is_throttled(reading) and len(self.throttled) < MAX_THROTTLED
        (self.throttled if retry else self.clean).append(us)
        if self.candidate.is_external:  # the others do not try to deceive
            self.sampled.take(self.timed, self.sampling_seconds)
            self.refusal = self.refusal or self.sampled.refusal

    def wants_more_samples(self, budget: Budget) -> bool:
        """Return True while an external candidate has own sampling time left.

        Its time is counted apart, so that other candidates cannot use it up.
        """
        return self.candidate.is_external and self.sampling_seconds < MAX_OVERTIME * budget.seconds

    def stalled(self, budget: Budget) -> bool:
        """Return True if an external candidate took far fewer samples than its budget allowed.

        It did so if it slept: no thread of it ran or waited for a core, which is no fault of a busy
        machine. Where that is unknown, the budget is compared with the time that the missing samples would
        take at its best speed, times MAX_BUSY_FACTOR.
        """
        if not self.candidate.is_external or self.in_time >= budget.min_samples:
            return False
        asleep = self.timed.asleep_seconds
        if asleep is not None:
            return asleep > MAX_ASLEEP_SHARE * self.sampling_seconds
        seconds_at_best = budget.min_samples * self.timed.calls * self.least / 1e6
        return MAX_BUSY_FACTOR * seconds_at_best < MAX_OVERTIME * budget.seconds

    def _take_audit(self, audits: SampleAudits) -> None:
        """Take a sample on unseen contents; an output of it is judged like those of other samples."""
        if self.refusal:
            return
        calls = self.timed.audit_calls
        try:
            us = audits.take(self.timed)
            self.sampled.take_audit(self.timed, calls, us)
            self.refusal = self.sampled.refusal
        except IntegrityError as error:
            self.refusal = f"recheck: {error}"

    def finish_audits(self, readings: Readings) -> None:
        """Go on with audits and samples in turn until the audits show whether outputs are looked up."""
        audits, self.n_in_time = self.audits, len(self.clean)
        while audits is not None and not self.refusal and self.samples:
            if not audits.needs_more(self.cold, min(self.samples), self.sampling_seconds):
                return
            if not audits.is_quick(self.cold, min(self.samples)):
                time.sleep(audits.n_audits * PAUSE_SECONDS)
            self._take_audit(audits)
            self.sample(readings)

    def judge_samples(self) -> None:
        """Compare the outputs picked from samples and audits with the oracle."""
        self.refusal = self.refusal or self.sampled.judge()

    def measure_side_times(self, samples: int, device: str) -> None:
        """Measure the warm and host times, and compare the clocks."""
        self.warm = float(np.median([self.timed.sample_warm() for _ in range(samples)]))
        self.host = float(np.median([self.timed.sample_host() for _ in range(samples)]))
        self.timed.flags.update(self.timed.cross_check(self.cold, self.busy(device)))

    def add_block(self, run: Callable[[], Block]) -> None:
        self.blocks.append(run())

    def audit(self, unseen: UnseenInputs, device: str, make_judge: MakeJudge | None) -> None:
        """Time the candidate on unseen inputs, to expose outputs that it looks up."""
        best = min(self.samples)
        if self.audits is None:
            result = unseen.audit(self.timed, best, self.busy(device), make_judge)
        else:  # its audits are among its samples
            slower = not self.audits.is_quick(self.cold, best)
            result = AuditResult(least=self.audits.least, slower=slower)
        if result.refusal:
            self.refusal = f"recheck: {result.refusal}"
        elif result.least is None:
            self.timed.flags.add("suspect: never timed on contents it had not seen")
        if result.least is None:
            return
        self.unseen_ratio = result.least / best if best else None
        if result.slower:
            reference = best if self.audits is None else self.cold
            self.timed.flags.add(
                f"suspect: slower on contents it had not seen: {result.least:.1f} us "
                f"against {reference:.1f} us"
            )

    def recheck(self, recheck: Recheck) -> None:
        """Compare the outputs of this round's re-run with the oracle."""
        start = _now()
        self.refusal = recheck.refusal(self.timed)
        self.recheck_ns += _now() - start
        release_unused_memory(UNUSED_BYTES)

    def check_integrity(self, without: Collection[str]) -> None:
        """Refuse the candidate for what its process reports, replaced functions first."""
        names = self.timed.replaced_functions()
        names = names if "replaced" not in without else []
        violations = {name: why for name, why in self.timed.violations.items() if name not in without}
        if names:
            self.refusal = f"replaced: the clock's own functions: {', '.join(names)}"
        elif violations:
            # Before a wrong value: a lazy output is the cause of many of those.
            name, why = next(iter(violations.items()))
            self.refusal = f"{name}: {why}"

    def outcome(self, backend: TimingBackend, budget: Budget, without: Collection[str]) -> Outcome:
        """Return the refusal, or the timing with its flags."""
        if self.refusal:
            return Outcome(refusal=self.refusal)
        summary = summarise(self.samples)
        clocks = summarise_clocks(self.readings)
        flags = self._flags(summary, budget, without)
        if "sw_power_cap" in clocks.get("throttle", {}):
            flags.add("power-capped")
        clocks |= {
            "drift": round(drift(self.samples), 5),
            "flushed": self.timed.plan.flush,
            "overhead_us": round(backend.overhead_us, 3),
        }
        if self.blocks:
            clocks["sustained"] = summarise_blocks(self.blocks)
        if self.unseen_ratio is not None:
            clocks["fresh"] = round(self.unseen_ratio, 3)
        timing = Timing(
            cold=summary.median,
            warm=self.warm,
            host=self.host,
            first=self.candidate.first_call_us,
            interval=summary.interval,
            p10=summary.p10,
            p90=summary.p90,
            minimum=summary.minimum,
            samples=(*self.clean, *self.throttled),
            repeated=tuple(self.repeated),
            calls_per_sample=self.timed.calls,
            throttled=len(self.throttled),
            flags=tuple(sorted(flags)),
            clocks=clocks,
        )
        return Outcome(timing=timing)

    def _flags(self, summary: Summary, budget: Budget, without: Collection[str]) -> set[str]:
        flags = {f for f in self.timed.flags if timing_check_of(f) not in without}
        if summary.width >= budget.target_width or summary.n < budget.min_samples:
            flags.add("noisy")
        if "samples" not in without and self.stalled(budget):
            flags.add(
                f"suspect: too few samples: {self.in_time} of {budget.min_samples}; it has been quicker"
            )
        if self.throttled:
            flags.add("throttled")
        return flags


class TimingSession:
    """The candidates of one case and direction, from preparation to their outcomes.

    A candidate that raises at any step leaves the session with its trouble; the others go on. With
    ``seed`` None every seed comes from the operating system.
    """

    def __init__(
        self,
        backend: TimingBackend,
        candidates: Sequence[Candidate],
        make_buffers: MakeBuffers,
        budget: Budget,
        seed: int | None,
        *,
        device: str,
        without: Collection[str] = (),
        make_judge: MakeJudge | None = None,
    ) -> None:
        self.device, self.make_judge = device, make_judge
        self.backend, self.candidates, self.make_buffers = backend, candidates, make_buffers
        self.budget, self.seed, self.without = budget, seed, frozenset(without)
        self.rng = np.random.default_rng(seed)
        self.threads = ThreadMonitor()
        self.seeds: list[int] = []
        self.buffers: list[InputBuffers] = []
        self._local_buffers(1)  # the first buffers say how many bytes one call touches
        self.is_backward = self.buffers[0].grad is not None
        self.contents = BufferCache(make_buffers)
        self._audit_seed = AUDIT_SEED
        self.states: list[CandidateState] = []
        self.troubles: dict[str, str] = {}
        self.unseen = UnseenInputs(self.seeds, self.contents, self._next_audit_seed, device)
        self.local_names = {c.name for c in candidates if c.backend is None}
        self.new_threads: dict[str, set[str]] = {c.name: set() for c in candidates}
        workers = {c.name: c.worker for c in candidates if c.worker is not None}
        self.conditions = ConditionsMonitor(workers, [c.name for c in candidates if c.trusted])

    def _seed(self, index: int) -> int:
        """Return the session's seed at this index, or an unpredictable one."""
        # With a seed that it could predict an external candidate could prepare the outputs in advance.
        return secrets.randbelow(1 << 31) if self.seed is None else self.seed + index

    def _next_audit_seed(self) -> int:
        self._audit_seed += 1
        return self._seed(self._audit_seed)

    def _extend_seeds(self, count: int) -> None:
        self.seeds += [self._seed(index) for index in range(len(self.seeds), count)]

    def _local_buffers(self, count: int) -> list[InputBuffers]:
        """Return the first ``count`` buffers, allocating those that are missing."""
        self._extend_seeds(count)
        for seed in self.seeds[len(self.buffers) : count]:
            self.buffers.append(replace(self.make_buffers(seed), seed=seed))
        return self.buffers[:count]

    def _remote_buffers(self, count: int) -> list[InputBuffers]:
        """Return buffers without tensors: their seeds are enough for a worker process."""
        self._extend_seeds(count)
        return [InputBuffers([], seed=seed) for seed in self.seeds[:count]]

    def _try(self, name: str, step: Callable[[], None]) -> bool:
        """Run a candidate's step; store what it raises as trouble and the threads that work after it."""
        self.threads.accept_current()
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            self.troubles[name] = describe_trouble(error)
            return False
        finally:
            # Only the process whose turn it is runs: the others' idle threads would take its cores.
            self.conditions.end_turn(name)
            if not self.local_names:  # the next turn's process needs what the allocator here keeps unused
                release_unused_memory(UNUSED_BYTES)
            # Threads that start here during a worker's step belong to this process, not to it.
            if name in self.local_names:
                self.new_threads[name] |= self.threads.working_threads()
        return True

    @property
    def running(self) -> list[CandidateState]:
        return [s for s in self.states if s.candidate.name not in self.troubles]

    @property
    def doubted(self) -> list[CandidateState]:
        """The candidates whose outputs are examined: all but the trusted ones."""
        return [s for s in self.running if not s.candidate.trusted]

    def prepare(self) -> None:
        """Bind every candidate to its buffers and run it until its times are steady."""
        if not self.local_names:  # while no worker has buffers: bounds take more memory than a comparison
            share_bounds(self.make_judge, self.buffers[0])
            self.buffers[0] = drop_values(self.buffers[0], self.device)
            release_unused_memory(UNUSED_BYTES)
        for index, candidate in enumerate(self.candidates):
            self._try(candidate.name, partial(self._prepare_candidate, candidate, index))
        if any(s.candidate.trusted for s in self.running):
            self._share_plan()
        if not self.local_names:
            self.buffers.clear()  # workers have their own: these would be much of a large problem's memory

    def _prepare_candidate(self, candidate: Candidate, index: int) -> None:
        is_local, first = candidate.backend is None, self.buffers[0]
        backend = candidate.backend or self.backend
        estimate = backend.estimate(candidate, first)
        # Local candidates share the inputs, but each holds outputs of its own until the end.
        sharing = sum(c.backend is None for c in self.candidates[index:]) if is_local else 1
        bytes_per_call = first.nbytes + sharing * estimate.output_bytes
        footprint = first.nbytes + estimate.output_bytes
        fits = calls_that_fit(backend.available_memory(), bytes_per_call, footprint)
        timed, least = self._warm_up(candidate, estimate.us, footprint, fits)
        state = CandidateState(candidate=candidate, timed=timed, least=least, footprint=footprint, fits=fits)
        if candidate.is_external:
            self._watch_samples(state)
        self.states.append(state)

    def _share_plan(self) -> None:
        """Time a reference and its candidates by one plan, that of the slowest.

        On a busy machine estimates of the same code may differ a hundredfold. One call after a flush against
        a hundred in a row, with threads that are awake, would then show a speed-up that is none.
        """
        states = self.running
        if len({s.timed.plan for s in states}) == 1:
            return
        backends = [s.candidate.backend or self.backend for s in states]
        plan = make_plan(
            max(s.footprint for s in states),
            max(b.cache_bytes for b in backends),
            max(s.least for s in states),
            slow_us=min(b.slow_us for b in backends),
            fits=min(s.fits for s in states),
        )
        for state, backend in zip(states, backends, strict=True):
            if state.timed.plan != plan:
                step = partial(self._prepare_again, state, backend, plan)
                self._try(state.candidate.name, step)

    def _prepare_again(self, state: CandidateState, backend: TimingBackend, plan: Plan) -> None:
        is_local = state.candidate.backend is None
        make_buffers = self._local_buffers if is_local else self._remote_buffers
        state.timed = backend.prepare(state.candidate, make_buffers(plan.buffers), self.contents, plan)
        state.timed.sample()

    def _watch_samples(self, state: CandidateState) -> None:
        """Set up what looks at the samples of an external candidate while they are taken."""
        state.sampled = SampledOutputs(
            make_judge=self.make_judge,
            contents=self.contents,
            buffer_seeds=self.seeds,
            samples="sampled" not in self.without,
            audits="recheck" not in self.without,
            memory="outputs" not in self.without,
        )
        if "fresh" not in self.without:
            state.audits = SampleAudits(self.unseen)

    def _warm_up(
        self, candidate: Candidate, estimate: float, footprint: int, fits: int
    ) -> tuple[TimedCandidate, float]:
        """Plan, allocate and sample until two windows agree within 1 %; return the least time too.

        A candidate that was slow only at first gave a wrong estimate. Where its samples turn out too
        short, the plan is made again from them.
        """
        least = estimate
        backend = candidate.backend or self.backend
        make_buffers = self._local_buffers if candidate.backend is None else self._remote_buffers
        seconds = self.budget.warmup / len(self.candidates)
        for _ in range(3):
            plan = make_plan(footprint, backend.cache_bytes, estimate, slow_us=backend.slow_us, fits=fits)
            timed = backend.prepare(candidate, make_buffers(plan.buffers), self.contents, plan)
            samples: list[float] = []
            deadline = _now() + int(seconds * 1e9)
            while len(samples) < 2 or (_now() < deadline and not is_steady(samples, WINDOW)):
                samples.append(timed.sample())
            least = min(least, *samples)
            steady = float(np.median(samples[-WINDOW:]))
            if steady * timed.calls >= MIN_SAMPLE_US or plan.calls >= min(MAX_CALLS, fits):
                break
            estimate = steady
        return timed, least

    def sample(self, readings: Readings, on_round: OnRound | None) -> None:
        """Sample in rounds over all candidates in random order, until each is done or time is up.

        After the budget's seconds only candidates with too few samples go on, up to MAX_OVERTIME.
        """
        start = _now()
        self.conditions.is_settled = True
        least_samples = 2 if "samples" in self.without else self.budget.min_samples
        # The first sample after another candidate's warm-up differs from the rest: drop it.
        for state in self.running:
            self._try(state.candidate.name, partial(state.sample, None))
        for number in range(self.budget.max_rounds):
            active = [s for s in self.running if not s.done]
            audits_ns = sum(s.audits.spent_ns for s in self.states if s.audits)  # no time of the samples
            spent = (_now() - start - audits_ns) / 1e9 / self.budget.seconds
            if spent > 1.0 and number > 1:
                lacking = [s for s in active if len(s.clean) < least_samples]
                active = [s for s in lacking if spent < MAX_OVERTIME or s.wants_more_samples(self.budget)]
            if not active:
                break
            # Rounds over all candidates, in random order: a machine that becomes slower or hotter during
            # the session then slows all of them alike, and no one always follows the same neighbour.
            # A reference is sampled twice: both medians show what the machine's noise can feign.
            turns = [(s, False) for s in active] + [(s, True) for s in active if s.candidate.trusted]
            for index in self.rng.permutation(len(turns)):
                state, repeated = turns[index]
                self._try(state.candidate.name, partial(state.sample, readings, repeated))
            due = number % CONVERGENCE_ROUNDS == CONVERGENCE_ROUNDS - 1
            for state in active:
                enough = len(state.clean) >= self.budget.min_samples
                state.done = enough and due and summarise(state.clean).width < self.budget.target_width
            for state in active:  # it goes on beside the others: each of their samples has one of its own
                state.done &= not state.candidate.trusted or all(s.done for s in self.doubted)
            if on_round is not None:
                medians = {s.candidate.name: float(np.median(s.clean)) for s in self.running if s.clean}
                on_round(number, medians)
            samples = [(s.clean, s.repeated) for s in self.running if number + 1 >= self.budget.min_samples]
            if due and is_decided(samples, self.budget.target_width, spent):
                break

    def sustain(self, sampler: Sampler) -> None:
        """Run all candidates in blocks if the power limit held the clock down beside one's samples."""
        states = {s.candidate.name: s for s in self.doubted if not s.refusal}
        if not self.budget.sustained_seconds or not any(is_power_bound(s.readings) for s in states.values()):
            return
        order = [list(states)[i] for i in self.rng.permutation(len(states))]
        timed = {name: state.timed for name, state in states.items()}
        for name, run in blocks_in_turn(timed, order, sampler, self.budget.sustained_seconds):
            if name not in self.troubles:
                self._try(name, partial(states[name].add_block, run))

    def finish_audits(self, readings: Readings) -> None:
        """Complete the audits of external candidates, which began among their samples."""
        for state in self.running:
            self._try(state.candidate.name, partial(state.finish_audits, readings))

    def judge_samples(self) -> None:
        """Judge the outputs that were picked from the samples and audits of external candidates."""
        for state in self.doubted:
            self._try(state.candidate.name, state.judge_samples)

    def measure_side_times(self) -> None:
        """Measure ``warm`` and ``host``, compare the clocks, and flag threads that work after a call."""
        for state in self.running:
            step = partial(state.measure_side_times, self.budget.side_samples, self.device)
            # Of a reference only the samples count: no further call is made of it.
            self._try(state.candidate.name, state.timed.release if state.candidate.trusted else step)
        extra_os_threads = self.threads.extra_os_threads()
        for state in self.running:
            name = state.candidate.name
            if threads := sorted(self.new_threads[name]):
                state.timed.flags.add(f"suspect: threads: {', '.join(threads)} {WORKED}")
            if extra_os_threads and name in self.local_names:
                state.timed.flags.add(f"threads: {extra_os_threads} more of the system's than before")

    def audit(self) -> None:
        """Compare times on unseen inputs with those of samples; judge outputs of Weft's own there."""
        if "fresh" in self.without:
            return
        judge = None if "recheck" in self.without else self.make_judge
        for state in self.doubted:
            if not state.refusal:
                step = partial(state.audit, self.unseen, self.device, judge)
                self._try(state.candidate.name, step)

    def recheck(self, make_judge: MakeJudge) -> None:
        """Overwrite the buffers and compare each candidate's timed path and plain calls, in rounds."""
        if not self.doubted or "recheck" in self.without:
            return
        used = max(s.timed.plan.buffers for s in self.doubted)
        content_seeds = [self._seed(RECHECK_SEED + i) for i in range(SEED_COUNT)]
        alteration_seed = self._seed(ALTERATION_SEED)
        recheck = Recheck(
            self.seeds[:used], self.contents, make_judge, content_seeds, self.is_backward, alteration_seed
        )
        recheck.has_rows = "rows" not in self.without
        rounds = {s.candidate.name: rounds_needed(s.timed.calls, s.timed.is_local) for s in self.doubted}
        for number in range(max(rounds.values())):
            recheck.begin_round(number)
            for state in self.doubted:
                budget_spent = number > 1 and state.recheck_ns > self.budget.recheck_seconds * 1e9
                due = number < rounds[state.candidate.name]
                if due and not (state.refusal or budget_spent):
                    self._try(state.candidate.name, partial(state.recheck, recheck))
        if "altered" in self.without or not self.doubted:  # a re-check may have ended the last one
            return
        for number in range(max(altered_rounds(s.timed.calls) for s in self.doubted)):
            recheck.begin_round(number, alters=True)
            for state in self.doubted:
                if number < altered_rounds(state.timed.calls) and not state.refusal:
                    self._try(state.candidate.name, partial(state.recheck, recheck))

    def outcomes(self) -> dict[str, Outcome]:
        """Return one outcome for each candidate, in the order of the candidates."""
        for state in self.doubted:
            self._try(state.candidate.name, partial(state.check_integrity, self.without))
        self.conditions.watch_stopped()
        for state in self.doubted:
            if violation := self.conditions.violations.get(state.candidate.name):
                state.timed.flags.add(f"suspect: conditions: {violation}")
        outcomes = {name: Outcome(trouble=trouble) for name, trouble in self.troubles.items()}
        for state in self.running:
            backend = state.candidate.backend or self.backend
            outcomes[state.candidate.name] = state.outcome(backend, self.budget, self.without)
        for state in self.running:  # what follows needs the memory: other cases, the names of its kernels
            self._try(state.candidate.name, state.timed.release)
        return {c.name: outcomes[c.name] for c in self.candidates}
