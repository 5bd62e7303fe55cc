"""Types of a timing: candidate, budget, plan and outcome, and the protocols of backends and candidates.

A ``TimingBackend`` knows one device, in this process or in a worker process. It prepares a
``TimedCandidate`` on the buffers of a case; a ``TimingSession`` samples and re-checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.core import Timing
from weft.workbench.calls.buffers import InputBuffers, MakeBuffers, Outputs
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.staging import TensorForm
from weft.workbench.timing.conditions import Worker
from weft.workbench.timing.hooks import HookMonitor

# The timing's own checks by the names that `without` takes, each with the first words of the flags
# and refusals that it makes. Records hold these words: a reader must still find the check by them.
CHECKS: dict[str, tuple[str, ...]] = {
    "recheck": ("recheck:",),
    "outputs": ("outputs:",),
    "sampled": ("sampled:",),
    "hooks": ("hooks:",),
    "altered": ("altered:",),
    "rows": ("rows:",),
    "fresh": ("suspect: slower on contents", "suspect: never timed on contents"),
    "clocks": ("suspect: clocks disagree", "suspect: side-stream"),
    "wall": ("suspect: the parent's clock disagrees",),
    "replaced": ("replaced:",),
    "samples": ("suspect: too few samples",),
    "threads": ("suspect: threads",),
    "cache": ("suspect: L2 set aside",),
    "conditions": ("suspect: conditions:",),
}

# Suspicions that rest on a comparison of times alone. Other processes can cause them too.
_BY_TIME_ALONE = (*CHECKS["fresh"], "suspect: clocks disagree", *CHECKS["wall"])
_NOT_BY_LOAD = ("suspect: the parent's clock disagrees (the worker's reading",)

MIN_SAMPLE_US = 50.0  # a sample lasts at least this long: below it the clock's resolution shows
TARGET_SAMPLE_US = 200.0  # a sample is planned to last this long
MAX_CALLS = 256  # calls in one sample, and nodes in one graph
# A call may take this many times its sampled time a moment later, because other work runs on the
# machine. The factor grows with the width of the samples' interval, up to MAX_BUSY_FACTOR.
BUSY_FACTOR = {"cuda": 1.25, "cpu": 2.0}
MAX_BUSY_FACTOR = 8.0
CROSS_CHECK_TRIES = 3  # two clocks may disagree this often before the candidate is suspect
# A call that touches more bytes is sampled alone, after a flush: each further call would need as much memory
# again. It takes half a millisecond on the fastest memory, so that the gap before a launch does not count.
SINGLE_CALL_BYTES = 1 << 31
# Buffers that calls in a row alternate between, so that no answer is right for two calls in turn. Where a
# sample has fewer, the others are spare ones; calls that touch more bytes get none.
ROW_BUFFERS, MAX_SPARE_BYTES = 2, 1 << 28
MAX_OVERTIME = 3.0  # multiple of a budget's seconds for a candidate that has too few samples


class CannotTime(RuntimeError):
    """Raised for a candidate that can be checked but not timed; the message says why."""


class IntegrityError(Exception):
    """Raised when a candidate's outputs share memory, change later or were never written."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An implementation to time: ``bind(buffers)`` returns the closure that makes one call on them.

    ``first_call_us`` is the wall time of the first call in this process, measured by the caller of
    the session. A candidate in a worker process has a ``backend`` of its own there; its ``bind`` is
    never called in this process. In the worker it is ``inspected``: each output of a timed call must be
    a plain tensor, in the form of ``output_forms`` where those are known, and ``hooks`` looks for code
    that runs when the clock has stopped.

    ``worker`` is that process, which is stopped while it is not this candidate's turn. A ``trusted``
    candidate is a reference in such a process: it is timed and nothing of it is doubted.
    """

    name: str
    bind: Callable[[InputBuffers], Callable[[], Outputs]]
    first_call_us: float | None = None
    backend: TimingBackend | None = None
    inspected: bool = False
    output_forms: Sequence[TensorForm] | None = None
    hooks: HookMonitor | None = None
    worker: Worker | None = None
    trusted: bool = False

    @property
    def is_external(self) -> bool:
        """True for code that may try to deceive: it is in another process, and not trusted."""
        return self.backend is not None and not self.trusted


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Time and samples for one case in one direction, for all candidates together.

    Sampling of a candidate ends when its interval is narrower than ``target_width`` (a share of the
    median) and it has at least ``min_samples``. Sampling of all ends after ``seconds`` or
    ``max_rounds``; candidates that are still wider are flagged ``noisy``. A candidate with fewer than
    ``min_samples`` by then is sampled further, up to ``MAX_OVERTIME`` times ``seconds`` (for an
    external candidate: of its own time), so that wasting the time wins nothing. Once the re-check of
    one candidate has taken ``recheck_seconds``, two rounds of it are enough. Where the power limit holds the
    clock down, each candidate runs for ``sustained_seconds`` more, twice (:mod:`sustained`).
    """

    seconds: float = 20.0
    warmup: float = 1.0
    min_samples: int = 20
    max_rounds: int = 400
    target_width: float = 0.005
    side_samples: int = 10
    recheck_seconds: float = 10.0
    sustained_seconds: float = 0.0

    @staticmethod
    def for_device(device: str, quick: bool = False) -> Budget:
        """Return the default budget of a device ('cuda' or 'cpu')."""
        if device == "cuda":
            return Budget(seconds=3.0, warmup=0.3) if quick else Budget(sustained_seconds=1.0)
        seconds, warmup = (0.5, 0.05) if quick else (1.2, 0.1)
        return Budget(seconds=seconds, warmup=warmup, max_rounds=200, side_samples=5, recheck_seconds=1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Number of calls in one sample, and whether the cache is flushed before it.

    Without a flush the inputs and outputs of all calls are at least twice the cache, so that each
    call finds other calls' lines in the cache and none of its own. ``spare`` is the number of buffers
    that samples do not use.
    """

    calls: int
    flush: bool
    spare: int = 0

    @property
    def buffers(self) -> int:
        return self.calls + self.spare


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of timing one candidate.

    ``refusal``: a timed call was wrong, so the verdict becomes fail. ``trouble``: the candidate
    could not be timed (out of memory, raised); its verdict stands.
    """

    timing: Timing | None = None
    refusal: str = ""
    trouble: str = ""


class TimedOutputs(Protocol):
    """Outputs of one pass over the buffers, one for each call; ``label`` names the kind of pass.

    Of calls in a worker process only the outputs that are picked travel to this process. ``judged`` are the
    calls of a row whose outputs are judged, None where the caller chooses; ``buffer_of`` a call is its
    buffer's index.
    """

    @property
    def label(self) -> str: ...
    @property
    def judged(self) -> Sequence[int] | None: ...
    def buffer_of(self, call: int) -> int: ...
    def __len__(self) -> int: ...
    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]: ...


# How :meth:`Runner.run` makes calls. COLD: as a sample does, after the plan's flush or behind a call that
# precedes it. WARM: with what the last calls left in the cache. REPEATED: many times in a row, also by the
# wall clock. PLAIN: as a loop on the host does, outside of any graph. On a CPU the last three are the same.
COLD, WARM, REPEATED, PLAIN = "cold", "warm", "repeated", "plain"


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Times of one run: ``us`` for a call without the clock's own cost (None: the sample was spoilt).

    ``total_us`` is the time of all calls and ``wall_us`` their wall time; ``cpu_ns`` is the CPU clock of the
    process when they began.
    """

    us: float | None
    total_us: float
    wall_us: float
    cpu_ns: int = 0


@dataclass(frozen=True)
class ContentSource:
    """Source of the contents of a buffer: the seed that generated them.

    ``alteration``: the seed of other contents, the seed of positions, and whether many elements are those of
    the others (:mod:`altered_inputs`).
    """

    seed: int
    alteration: tuple[int, int, bool] | None = None


class Runner(Protocol):
    """Candidate bound to its buffers in this process: the only code that calls it while it is timed.

    ``run`` makes the calls of these indexes and keeps their outputs, of which ``violation`` says how one
    differed from a plain tensor of the form that is due. With ``kept_positions``, a PLAIN run keeps the
    outputs at these positions of the run instead. ``outputs`` are those of the last run by index or
    position, ``kept_outputs`` all that are alive. ``drop_spare_outputs`` frees those that no later step
    reads, once new contents are about to be written. ``rest`` frees all memory but the inputs' until the
    next run. The flags are for a record.
    """

    plan: Plan
    flags: set[str]

    @property
    def calls(self) -> int: ...
    @property
    def violation(self) -> str: ...
    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes: ...
    def outputs(self) -> Sequence[Outputs | None]: ...
    def kept_outputs(self) -> Sequence[Outputs | None]: ...
    def drop_spare_outputs(self) -> None: ...
    def rest(self) -> None: ...
    def evict(self) -> None: ...
    def wait(self) -> int: ...


class CandidateSteps(Protocol):
    """Steps that a timing is composed of, for a candidate in this process or in another.

    Only ``run`` makes calls of the candidate. ``pick`` returns outputs of the last run, by index or by
    position (:class:`Runner`); ``output_bytes`` is the size of one. ``ring_suspicion`` says why all
    of them may be in a ring of buffers (:mod:`call_rows`).
    ``load`` writes contents into the buffers of these indexes, ``poison`` overwrites old outputs, ``evict``
    fills the cache with clean lines, ``wait`` waits until all work is done and returns the CPU clock (ns).
    ``shared_memory`` says that two outputs, or an output and one that ``hold`` keeps, have the same memory;
    ``lazy_memory`` says why a read of the memory of these outputs could run code of the candidate.
    ``unwritten`` returns the index of an output that still holds poison. ``store_digests`` stores digests of
    outputs, with which ``has_changed`` compares; ``digests`` returns them.
    """

    is_local: bool
    plan: Plan
    flags: set[str]
    device: str
    call_bytes: int  # of the contents of one call

    @property
    def calls(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def violations(self) -> Mapping[str, str]: ...
    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes: ...
    def load(self, sources: Mapping[int, ContentSource]) -> None: ...
    def poison(self) -> None: ...
    def evict(self) -> None: ...
    def wait(self) -> int: ...
    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]: ...
    def shared_memory(self) -> str: ...
    def lazy_memory(self, indexes: Sequence[int]) -> str: ...
    def unwritten(self) -> int | None: ...
    def ring_suspicion(self) -> str: ...
    def hold(self, indexes: Sequence[int]) -> None: ...
    def store_digests(self, indexes: Sequence[int]) -> None: ...
    def has_changed(self) -> bool: ...
    def digests(self, indexes: Sequence[int]) -> Sequence[object]: ...
    def cpu_limits(self) -> tuple[int, int]: ...
    def replaced_functions(self) -> list[str]: ...


class TimedCandidate(Protocol):
    """Candidate as a session sees it: sampled, audited on unseen inputs, and run again. Times are us a call.

    ``sample_unseen(seeds)`` overwrites the first buffers with the contents of seeds that were never used
    and takes a sample of those calls; the time is None where it was spoilt. The contents stay: ``sources``
    says what each buffer holds. ``audit_calls`` is the number of calls that one audit times. ``rerun``
    overwrites all buffers with the contents of a few seeds and yields the outputs of the timed path, then
    those of plain calls; it raises :class:`IntegrityError` for faults that show only in the memory itself.
    With ``alteration``, a seed, a few elements of these contents change (``altered_inputs``).
    ``run_in_a_row`` makes calls on the contents that ``rerun`` of this round wrote, one directly after the
    other and on other contents than the one before, and returns outputs of these (:mod:`call_rows`).
    ``cross_check`` compares two clocks or more and returns flags; ``cold`` is the headline time and
    ``busy`` the factor by which a call may be slower by now.
    ``asleep_seconds`` is the time of the samples in which no thread of an external candidate ran or
    waited for a core; None if it is unknown.
    ``is_local`` is true where outputs are in this process, so that every one can be compared.
    ``sampled_outputs`` are the outputs of the last sample, until the next call. ``lazy_memory`` says why a
    read of the memory of such an output could run code of the candidate. ``violations`` are the
    reasons to refuse the candidate that its process reported, by the name of the check. ``release`` frees
    the memory of a candidate of which no further call is made.
    """

    plan: Plan
    flags: set[str]
    is_local: bool
    sources: list[ContentSource]

    @property
    def calls(self) -> int: ...
    @property
    def audit_calls(self) -> int: ...
    @property
    def violations(self) -> Mapping[str, str]: ...
    @property
    def asleep_seconds(self) -> float | None: ...
    def sample(self) -> float: ...
    def sample_warm(self) -> float: ...
    def sample_host(self) -> float: ...
    def repeat(self, repeats: int, warm: bool) -> RunTimes: ...
    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]: ...
    def sampled_outputs(self) -> TimedOutputs: ...
    def lazy_memory(self, indexes: Sequence[int]) -> str: ...
    def sample_unseen(self, seeds: Sequence[int]) -> float | None: ...
    def rerun(
        self, seeds: Sequence[int], round_number: int, alteration: int | None = None
    ) -> Iterator[TimedOutputs]: ...
    def run_in_a_row(self, seeds: Sequence[int], round_number: int) -> TimedOutputs | None: ...
    def replaced_functions(self) -> list[str]: ...
    def release(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Least time (us) of a few calls, and the bytes that one call returns."""

    us: float
    output_bytes: int


class TimingBackend(Protocol):
    """Device on which candidates are prepared for timing, in this process or in a worker.

    ``overhead_us`` is the cost of a sample itself and already subtracted. Above ``slow_us`` a pass
    over distinct buffers takes too long, and a flush replaces it.
    """

    cache_bytes: int
    overhead_us: float
    slow_us: float

    def context(self) -> AbstractContextManager[None]: ...
    def available_memory(self) -> int: ...
    def estimate(self, candidate: Candidate, buffers: InputBuffers) -> Estimate: ...
    def prepare(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, plan: Plan
    ) -> TimedCandidate: ...


class LocalTimingBackend(TimingBackend, Protocol):
    """Backend of this process, which binds candidates itself."""

    def make_runner(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], plan: Plan
    ) -> Runner: ...


def timing_check_of(flag: str) -> str:
    """Return the name of the check that made a flag or refusal; '' for any other flag.

    >>> timing_check_of("suspect: slower on contents it had not seen: 9 us against 1 us")
    'fresh'
    """
    return next((name for name, prefixes in CHECKS.items() if flag.startswith(prefixes)), "")


def is_by_time_alone(flag: str) -> bool:
    """Return True for a suspicion that a busy machine can cause.

    >>> is_by_time_alone("suspect: slower on contents it had not seen: 9 us against 1 us")
    True
    """
    return flag.startswith(_BY_TIME_ALONE) and not flag.startswith(_NOT_BY_LOAD)


def calls_that_fit(available: int, call_bytes: int, footprint: int) -> int:
    """Return how many calls of one sample have their buffers in ``available`` bytes, ``call_bytes`` each.

    One is enough for a call that touches more than ``SINGLE_CALL_BYTES`` (its ``footprint``).
    """
    if footprint > SINGLE_CALL_BYTES:
        return 1
    return max(1, int(0.6 * available / max(1, call_bytes)))


def make_plan(footprint: int, cache: int, call_us: float, *, slow_us: float, fits: int) -> Plan:
    """Plan the samples of a call of ``call_us`` that touches ``footprint`` bytes.

    The calls rotate over distinct buffers if ``fits`` of them are enough for twice the ``cache`` and
    one rotation lasts at most ``slow_us`` (two calls always may). Otherwise a sample has fewer calls
    and a flush before it.
    """
    # Twice the cache: a buffer's lines are gone before its turn comes again, whatever the replacement.
    rotation = max(2, -(-2 * cache // max(1, footprint)))
    least_buffers = ROW_BUFFERS if footprint <= MAX_SPARE_BYTES else 1
    target = max(1, int(-(-TARGET_SAMPLE_US // max(call_us, 0.1))))
    limit = max(1, min(MAX_CALLS, fits))
    # Rotation is preferred to a flush: it leaves the cache as a long run of calls does.
    flush = rotation > limit or max(rotation - 1, 1) * call_us > slow_us
    calls = min(target if flush else max(rotation, target), limit)
    return Plan(calls=calls, flush=flush, spare=max(0, min(least_buffers, limit) - calls))


def describe_trouble(error: Exception) -> str:
    """Return in one line why a candidate could not be timed."""
    if isinstance(error, SandboxDied):
        return f"its process {error.reason}"
    if isinstance(error, WorkerError):
        return "out of memory" if "OutOfMemoryError" in str(error) else f"raised {error}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    return message if isinstance(error, CannotTime) else f"raised {type(error).__name__}: {message}"
