"""Audits on unseen inputs: samples of a candidate on contents that it has never seen.

A candidate that looks its output up by a hash of the contents, or by their first bytes, is right and
fast on inputs that come again, as a timing's do. An audit overwrites the buffers with contents of
unused seeds, poisons old outputs and fills the cache with clean lines (it reads a buffer and does not
write it, so that no write-back remains), then takes a sample. An honest call takes the usual
time; a call that must now compute its output takes longer.

The contents stay: the samples after an audit are on contents that have been seen. Audits of an external
candidate come at random places among its samples, so that it can neither prepare for one nor be slow in
those alone with which it is compared: these are the samples of its headline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.workbench.calls.buffers import MakeBuffers
from weft.workbench.timing.plan import IntegrityError, TimedCandidate
from weft.workbench.timing.recheck import Judge, MakeJudge

_now = time.perf_counter_ns
_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

# Allowed time of the quickest audit: a factor of the headline plus some us. Other work disturbs the
# calls of a CPU; those of a GPU are disturbed only by a cold instruction cache.
ALLOWED = {"cuda": (1.25, 2.0), "cpu": (1.5, 20.0)}
MAX_AUDITS = 12  # a candidate whose audits are quick enough needs fewer
CONTROLS = 3  # samples on the same contents after a slow audit of Weft's own implementations
FIRST_CONTROLLED = 2  # audits before a control counts, so that both had several chances
PAUSE_SECONDS = 0.01  # grows with each audit, to outlast other work on the machine

AUDITS_AMONG_SAMPLES = 6  # of an external candidate at least, unless they take too long
LEAST_AUDITS = 2  # however long they take
EARLY_GAP = 4  # samples between two of the first audits, at most; any number from none on
LATER_SHARE = 0.3  # of all samples so far, which pass at most before the next one
FREE_NS = 250_000_000  # audits may take this time, and
TIME_SHARE = 0.5  # this share of the time of the samples


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Least time (us) of the audits and whether it is too slow, or why an output is wrong."""

    least: float | None
    slower: bool = False
    refusal: str = ""


def limit(device: str, us: float) -> float:
    """Return the time (us) that the quickest audit may take, if samples take ``us``."""
    factor, extra_us = ALLOWED[device]
    return factor * us + extra_us


class UnseenInputs:
    """Seeds of a session's audits, and audits of Weft's own implementations.

    ``next_seed()`` returns a seed that was never used.
    """

    def __init__(
        self, buffer_seeds: list[int], contents: MakeBuffers, next_seed: Callable[[], int], device: str
    ) -> None:
        self.buffer_seeds, self.contents = buffer_seeds, contents
        self.next_seed, self.device = next_seed, device
        self.audit_seeds: list[list[int]] = []
        self.judges: dict[tuple[int, int], Judge] = {}

    def seeds(self, number: int, calls: int) -> list[int]:
        """Return the seeds of audit ``number``: the same for all candidates, unseen by each."""
        while len(self.audit_seeds) <= number:
            self.audit_seeds.append([])
        seeds = self.audit_seeds[number]
        while len(seeds) < calls:
            seeds.append(self.next_seed())
        return seeds[:calls]

    def audit(
        self, candidate: TimedCandidate, best: float, busy: float, make_judge: MakeJudge | None
    ) -> AuditResult:
        """Audit one of Weft's own against the ``best`` of its samples, as often as it takes to be sure.

        The least audit is compared with the least sample: other work makes a time longer, never
        shorter. A control tells a machine that has become busier since: samples on the same contents.
        From the third audit on, the least control replaces the best sample, up to ``busy`` times the best.
        """
        least, control = float("inf"), float("inf")
        for number in range(MAX_AUDITS):
            # New seeds for each audit: a cache filled by the last one must not help.
            seeds = self.seeds(number, candidate.audit_calls)
            try:
                us = candidate.sample_unseen(seeds)
            except IntegrityError as error:
                return AuditResult(least=None, refusal=str(error))
            reason = self._wrong_output(candidate, seeds, make_judge) if make_judge is not None else None
            if reason is not None:
                return AuditResult(least=None, refusal=reason)
            if us is not None:
                least = min(least, us)
                if least <= limit(self.device, best):
                    return AuditResult(least=least)
                # The control has the same contents, so a cached output is fast here and slow above.
                control = min(control, *(candidate.sample() for _ in range(CONTROLS)))
                reference = min(max(control, best), busy * best)
                if number >= FIRST_CONTROLLED and least <= limit(self.device, reference):
                    return AuditResult(least=least)
            time.sleep(number * PAUSE_SECONDS)
        return AuditResult(least=least if least < float("inf") else None, slower=True)

    def _wrong_output(self, candidate: TimedCandidate, seeds: list[int], make_judge: MakeJudge) -> str | None:
        """Judge one output, picked at random; return why it is wrong, or None."""
        index = _random.randrange(len(seeds))
        (output,) = candidate.sampled_outputs().pick([index]).values()
        key = (index, seeds[index])
        if key not in self.judges:
            buffers = self.contents(seeds[index])
            if buffers.grad is not None:  # a backward keeps the inputs of the buffer's own seed
                buffers = replace(self.contents(self.buffer_seeds[index]), grad=buffers.grad)
            self.judges.clear()  # another candidate of a single call asks for the last one again
            self.judges[key] = make_judge(buffers)
        reason = self.judges[key](output)
        return wrong_on_unseen(index, len(seeds), reason) if reason is not None else None


def wrong_on_unseen(index: int, calls: int, reason: str) -> str:
    return f"call {index + 1} of {calls} on contents it had not seen is wrong: {reason}"


@dataclass
class SampleAudits:
    """Audits of one external candidate, at random places among its samples."""

    unseen: UnseenInputs
    times: list[float] = field(default_factory=list)
    n_audits: int = 0
    n_samples: int = 0
    spent_ns: int = 0
    _wait: int = 0  # samples until the next audit

    def __post_init__(self) -> None:
        self._wait = _random.randrange(EARLY_GAP + 1)

    @property
    def least(self) -> float | None:
        return min(self.times, default=None)

    def is_due(self, sampling_seconds: float) -> bool:
        """Return True if an audit comes before the next sample; count that sample."""
        self.n_samples += 1
        self._wait -= 1
        return self._wait < 0 and self._in_time(sampling_seconds)

    def _in_time(self, sampling_seconds: float) -> bool:
        return self.spent_ns <= FREE_NS + TIME_SHARE * 1e9 * sampling_seconds

    def take(self, candidate: TimedCandidate) -> float | None:
        """Take one audit; return its time. Raises :class:`IntegrityError` for outputs that share memory."""
        start = _now()
        few = self.n_audits < AUDITS_AMONG_SAMPLES
        gap = EARLY_GAP if few else max(EARLY_GAP, round(LATER_SHARE * self.n_samples))
        self._wait = _random.randrange(gap + 1)
        # New seeds for each audit: a cache filled by the last one must not help.
        seeds = self.unseen.seeds(self.n_audits, candidate.audit_calls)
        self.n_audits += 1
        try:
            us = candidate.sample_unseen(seeds)
        finally:
            self.spent_ns += _now() - start
        if us is not None:
            self.times.append(us)
        return us

    def is_quick(self, median: float, best: float) -> bool:
        """Return True if the quickest audit took no longer than samples do.

        At first the best sample counts. After several audits it is the ``median`` of all samples, which is
        the headline: audits and samples alternate, so that other work on the machine slows both alike, and a
        candidate that makes the samples slow with which it is compared gains nothing.
        """
        reference = best if self.n_audits <= FIRST_CONTROLLED else median
        return self.least is not None and self.least <= limit(self.unseen.device, reference)

    def needs_more(self, median: float, best: float, sampling_seconds: float) -> bool:
        """Return True while there are too few audits, or while none was quick enough and more may show it."""
        if self.n_audits >= MAX_AUDITS:
            return False
        few = self.n_audits < AUDITS_AMONG_SAMPLES and self._in_time(sampling_seconds)
        return self.n_audits < LEAST_AUDITS or few or not self.is_quick(median, best)
