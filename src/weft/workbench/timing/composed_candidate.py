"""Timed candidate whose samples, audits and re-checks are composed of the same few steps.

The process of the candidate makes calls in one step alone, :meth:`CandidateSteps.run`, whatever their
outputs are used for. This process decides what comes before and after: unseen contents, poison, a wait, a
second look. So nothing in the candidate's process tells a sample from an audit or a re-check.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.workbench.calls.buffers import Outputs
from weft.workbench.timing.call_rows import LEAST_CALL_US, CallRow, plan_row, plan_suspect_row
from weft.workbench.timing.plan import (
    COLD,
    CROSS_CHECK_TRIES,
    MIN_SAMPLE_US,
    PLAIN,
    REPEATED,
    TARGET_SAMPLE_US,
    WARM,
    CandidateSteps,
    ContentSource,
    IntegrityError,
    RunTimes,
)

_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

# Least length of an audit's calls on a CPU, where there are enough. The first call after new contents is up
# to 300 us longer: threads sleep, and page tables have left the cache. In a sample it is one of many.
AUDIT_US = 10 * TARGET_SAMPLE_US
AUDIT_BYTES = 1 << 25  # contents up to this size are new for all calls of an audit
WARM_BATCH_US = 2_000.0  # a batch of warm calls on a CPU has ten calls, unless they take longer
WARM_CALLS = 10
MAX_WARM_CALLS = 4096
HOST_CALLS = 20  # calls in a batch on a GPU: far fewer than the launch queue holds
HOST_US = 10_000.0  # or as many as take this long, but not fewer than
LEAST_HOST_CALLS = 4
HELD_CALLS = 4  # calls of a re-check whose outputs stay alive
CHUNKS = 3  # runs that the plain calls of a re-check are divided into, at random
LATE_WRITE_SECONDS = 0.02  # work that a call left running has this long to change its output
CROSS_CHECK_US = {"cuda": 5_000.0, "cpu": 20_000.0}  # the two clocks are compared over this time
CPU_TIME_SLACK_NS = 5_000_000  # CPU time of the clock itself and the interpreter


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of the last runs, in the process that holds them."""

    steps: CandidateSteps
    label: str
    count: int
    # Where these are outputs of a row of calls: the row, and the positions whose outputs are judged.
    row: CallRow | None = None
    judged: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.count

    def buffer_of(self, call: int) -> int:
        return self.row.buffers[call] if self.row is not None else call

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]:
        return self.steps.pick(indexes)


class ComposedCandidate:
    """Candidate that a session times, by steps in this process or in a worker. Times are us for each call.

    ``seeds`` are those of the contents that the buffers hold at first.
    """

    asleep_seconds: float | None = None  # unknown: its calls are made by this process

    def __init__(self, steps: CandidateSteps, seeds: Sequence[int]) -> None:
        self.steps, self.is_local = steps, steps.is_local
        self.plan, self.flags, self.calls = steps.plan, steps.flags, steps.calls
        self.sources = [ContentSource(seed) for seed in seeds]
        self.on_gpu = steps.device == "cuda"
        self._all = list(range(self.calls))
        self._least = self._warm = float("inf")  # us for a call, of all samples and of the last warm one

    @property
    def violations(self) -> Mapping[str, str]:
        return self.steps.violations

    def replaced_functions(self) -> list[str]:
        return self.steps.replaced_functions()

    def release(self) -> None:
        """Free nothing: the buffers of a candidate of this process are the session's."""

    def sampled_outputs(self) -> RunOutputs:
        return RunOutputs(self.steps, "sampled", self.calls)

    def lazy_memory(self, indexes: Sequence[int]) -> str:
        return self.steps.lazy_memory(indexes)

    def sample(self) -> float:
        """Take a cold sample: one run of all calls, again where it was spoilt."""
        us = None
        while us is None:
            us = self.steps.run(self._all, 1, COLD).us
        self._least = min(self._least, us)
        return us

    @property
    def audit_calls(self) -> int:
        """Calls that get new contents in an audit: those of a sample, or fewer where they are large."""
        if self.on_gpu or self.calls * self.steps.call_bytes <= AUDIT_BYTES:
            return self.calls
        return min(self.calls, max(1, int(-(-AUDIT_US // max(self._least, 0.1)))))

    def sample_unseen(self, seeds: Sequence[int]) -> float | None:
        """Take a sample of the first calls on contents of these seeds, over poisoned outputs.

        Raises :class:`IntegrityError` for outputs that share memory.
        """
        self.load({i: ContentSource(seed) for i, seed in enumerate(seeds)})
        self.steps.poison()
        self.steps.evict()
        us = self.steps.run(self._all[: len(seeds)], 1, COLD).us
        if reason := self.steps.shared_memory():
            raise IntegrityError(reason)
        return us

    def load(self, sources: Mapping[int, ContentSource]) -> None:
        """Write contents into these buffers; in the backward, gradients alone."""
        self.steps.load(sources)
        for index, source in sources.items():
            self.sources[index] = source

    def sample_warm(self) -> float:
        """Take a sample of calls on one buffer, with what the call before it left in the cache."""
        calls = self.calls if self.on_gpu else self._warm_calls()
        us = None
        while us is None:
            us = self.steps.run([0] * calls, 1, WARM).us
        self._warm = us
        return us

    def _warm_calls(self) -> int:
        """Return how many warm calls are as long as a sample."""
        least = max(min(self._warm, self._least), 0.1)
        few = min(WARM_CALLS, max(2, int(WARM_BATCH_US / least)))
        # Random, so that no call can know that it is the last one, whose output is inspected.
        long = int(MIN_SAMPLE_US * (1.0 + _random.random()) / least) + 1
        return min(MAX_WARM_CALLS, max(few, long))

    def sample_host(self) -> float:
        """Take a sample of the host's time for a call, back to back, launch included."""
        if not self.on_gpu:
            return self.sample_warm()  # a CPU has no launch to leave out: a warm call is the host's time
        self.steps.run([0, 0], 1, PLAIN)  # of two calls the output before is released first
        most = max(LEAST_HOST_CALLS, min(HOST_CALLS, round(HOST_US / max(self._warm, 1.0))))
        calls = most - _random.randrange(most // 2)
        return self.steps.run([0] * calls, 1, PLAIN).wall_us / calls

    def repeat(self, repeats: int, warm: bool) -> RunTimes:
        """Repeat the timed calls back to back (``warm``: the first alone, as often)."""
        return self.steps.run([0] * self.calls if warm else self._all, repeats, REPEATED)

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """Compare two clocks around the same calls; return the flag of a disagreement, if there is one."""
        # More than one try: a host that waited for a core must not look like a cheat.
        disagreement = ""
        for _ in range(CROSS_CHECK_TRIES):
            disagreement = self._compare_events() if self.on_gpu else self._compare_cpu_time()
            if not disagreement:
                return []
        return [f"suspect: clocks disagree ({disagreement})"]

    def _compare_events(self) -> str:
        """Compare events around many samples with the wall clock around them.

        A synchronisation of the whole device ends the wall time, so the clocks differ where work
        runs on a stream that the events do not see.
        """
        sample_us = max(1.0, self.sample() * self.calls)
        times = self.repeat(min(1000, max(1, round(CROSS_CHECK_US["cuda"] / sample_us))), warm=False)
        # 30 us: a synchronisation and the launch of the first graph are in the wall time alone.
        if abs(times.wall_us - times.total_us) <= 0.1 * times.total_us + 30.0:
            return ""
        return f"{times.wall_us:.0f} us by the wall, {times.total_us:.0f} us by events"

    def _compare_cpu_time(self) -> str:
        """Compare CPU time with wall time, until the process is idle again.

        Work that continues after a call returned takes CPU time that the wall clock did not count.
        All cores together cannot take more CPU time than their number times the wall time.
        """
        cores, spin_ns = self.steps.cpu_limits()
        calls = min(1000, 1 + int(CROSS_CHECK_US["cpu"] / max(min(self._warm, self._least), 0.1)))
        times = self.steps.run([0] * calls, 1, WARM)
        cpu, wall = self.steps.wait() - times.cpu_ns, 1000 * times.wall_us
        # 10 % and 30 us for the resolution of the CPU clock, and twice the spinning of torch's pool.
        if cpu <= cores * (1.1 * wall + 30_000) + 2 * spin_ns + CPU_TIME_SLACK_NS:
            return ""
        return f"{cpu / 1e6:.1f} ms of CPU time in {wall / 1e6:.1f} ms"

    def rerun(
        self, seeds: Sequence[int], round_number: int, alteration: int | None = None
    ) -> Iterator[RunOutputs]:
        """Overwrite the inputs, run the timed path and yield its outputs; then plain calls and theirs.

        Neighbouring buffers get different contents, and each gets other contents than in the round
        before. With ``alteration`` a few elements of them change. Raises :class:`IntegrityError` for
        outputs that share memory, change later or were never written.
        """
        sources = {}
        for index in self._all:
            number = (index + round_number) % len(seeds)
            how = None
            if alteration is not None:
                how = (seeds[(number + 1) % len(seeds)], alteration, number % 2 == 1)
            sources[index] = ContentSource(seeds[number], how)
        self.load(sources)
        self.steps.poison()
        while self.steps.run(self._all, 1, COLD).us is None:
            pass  # spoilt as a sample, and made again as one
        if round_number == 0:
            # Before the wait: work that another thread or stream still does shows as a change.
            self.steps.store_digests([0, self.calls - 1])
        self._refuse_shared_memory()
        yield RunOutputs(self.steps, "timed", self.calls)
        self._refuse_unwritten("timed")
        if round_number == 0 and self._changes_later():
            raise IntegrityError("the output changed after the timed calls had returned")
        # A plain call that returns the timed path's memory untouched would show this poison.
        self.steps.poison()
        yield from self._plain_calls(round_number)

    def _plain_calls(self, round_number: int) -> Iterator[RunOutputs]:
        """Make the calls as a loop on the host does, in a few runs of random lengths, and yield the outputs.

        The last output of each run must be complete when its call has returned.
        """
        cuts = sorted(_random.sample(range(1, self.calls), min(CHUNKS, self.calls) - 1))
        for first, end in zip([0, *cuts], [*cuts, self.calls], strict=True):
            self.steps.run(self._all[first:end], 1, PLAIN)
            self.steps.store_digests([end - 1])
        self._refuse_shared_memory()
        yield RunOutputs(self.steps, "plain", self.calls)
        self._refuse_unwritten("plain")
        if self._changes_later(LATE_WRITE_SECONDS if round_number == 0 else 0.0):
            raise IntegrityError("the output changed after the call had returned")
        self.steps.poison()
        self.steps.hold([i for i in self._all if _random.randrange(self.calls) < HELD_CALLS])

    def run_in_a_row(self, seeds: Sequence[int], round_number: int) -> RunOutputs | None:
        """Make a row of calls, of this round's contents; return its outputs, None for a round without one.

        Raises :class:`IntegrityError` for outputs that share memory.
        """
        call_us = max(self._least, LEAST_CALL_US[self.steps.device])
        row = plan_row(self.plan.buffers, call_us, self.steps.output_bytes, round_number)
        if row is None:
            return None
        # The others hold this round's contents.
        spare = range(self.calls, self.plan.buffers)
        self.load({i: ContentSource(seeds[(i + round_number) % len(seeds)]) for i in spare})
        self._make_row(row)
        if round_number == 0 and (suspicion := self.steps.ring_suspicion()):
            longer = plan_suspect_row(self.plan.buffers, call_us, self.steps.output_bytes, suspicion)
            if len(longer.buffers) > len(row.buffers):
                row = longer
                self._make_row(row)
        judged = row.choose_judged(self.steps.digests(row.kept_positions))
        return RunOutputs(self.steps, "back-to-back", len(row.buffers), row, judged)

    def _make_row(self, row: CallRow) -> None:
        self.steps.run(row.buffers, 1, PLAIN, row.kept_positions)
        self._refuse_shared_memory()

    def _refuse_shared_memory(self) -> None:
        self.steps.wait()
        if reason := self.steps.shared_memory():
            raise IntegrityError(reason)

    def _refuse_unwritten(self, label: str) -> None:
        index = self.steps.unwritten()
        if index is not None:
            raise IntegrityError(f"{label} call {index + 1} of {self.calls} left its output unwritten")

    def _changes_later(self, seconds: float = LATE_WRITE_SECONDS) -> bool:
        """Return True if outputs with stored digests change while no call is made."""
        if seconds:
            time.sleep(seconds)
            self.steps.wait()
        return self.steps.has_changed()
