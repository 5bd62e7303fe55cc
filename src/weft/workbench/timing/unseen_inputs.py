"""Audit on unseen inputs: time the candidate once on contents that it has never seen.

A candidate that looks its output up by a hash of the contents, or by their first bytes, is right and
fast on inputs that come again, as a timing's do. The audit overwrites the buffers with contents of
unused seeds, poisons old outputs and fills the cache with clean lines (it reads a buffer and does not
write it, so that no write-back remains), then times the calls once. An honest call takes the usual
time; a call that must now compute its output takes longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.workbench.calls.buffers import MakeBuffers
from weft.workbench.timing.plan import IntegrityError, TimedCandidate, TimedOutputs
from weft.workbench.timing.recheck import Judge, MakeJudge

# Allowed time of the quickest audit: a factor of the headline plus some us. Other work disturbs the
# calls of a CPU; those of a GPU are disturbed only by a cold instruction cache.
ALLOWED = {"cuda": (1.25, 2.0), "cpu": (1.5, 20.0)}
MAX_AUDITS = 12  # the first audit that is quick enough ends them
CONTROLS = 3  # repeats on the same contents after a slow audit
FIRST_CONTROLLED = 2  # audits before a control counts, so that both had several chances
JUDGED_AUDITS = 2  # an output of each of the first audits is judged too
PAUSE_SECONDS = 0.01  # grows with each audit, to outlast other work on the machine


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Least time (us) of the audits and whether it is too slow, or why an output is wrong."""

    least: float | None
    slower: bool = False
    refusal: str = ""


class UnseenInputs:
    """Audits of one session. ``next_seed()`` returns a seed that was never used."""

    def __init__(
        self,
        buffer_seeds: list[int],
        contents: MakeBuffers,
        make_judge: MakeJudge | None,
        next_seed: Callable[[], int],
        device: str,
    ) -> None:
        self.buffer_seeds, self.contents, self.make_judge = buffer_seeds, contents, make_judge
        self.next_seed, self.allowed = next_seed, ALLOWED[device]
        self.audit_seeds: list[list[int]] = []
        self.judges: dict[tuple[int, int], Judge] = {}
        self.random = random.SystemRandom()  # a candidate could reproduce a seeded generator

    def limit(self, us: float) -> float:
        factor, extra_us = self.allowed
        return factor * us + extra_us

    def _seeds(self, number: int, calls: int) -> list[int]:
        """Return the seeds of audit ``number``: the same for all candidates, unseen by each."""
        while len(self.audit_seeds) <= number:
            self.audit_seeds.append([])
        seeds = self.audit_seeds[number]
        while len(seeds) < calls:
            seeds.append(self.next_seed())
        return seeds[:calls]

    def audit(self, candidate: TimedCandidate, best: float, busy: float) -> AuditResult:
        """Audit a candidate against the ``best`` of its samples, as often as it takes to be sure.

        The least audit is compared with the least sample: other work makes a time longer, never
        shorter. A control tells a machine that has become busier since: it times the same calls on
        the same contents. From the third audit on, the least control replaces the best sample, up
        to ``busy`` times the best.
        """
        least, control = float("inf"), float("inf")
        for number in range(MAX_AUDITS):
            # New seeds for each audit: a cache filled by the last one must not help.
            seeds = self._seeds(number, candidate.audit_calls)
            try:
                us, outputs = candidate.audit(seeds)
            except IntegrityError as error:
                return AuditResult(least=None, refusal=str(error))
            if self.make_judge is not None and number < JUDGED_AUDITS:
                reason = self._wrong_output(seeds, outputs, self.make_judge)
                if reason is not None:
                    return AuditResult(least=None, refusal=reason)
            if us is not None:
                least = min(least, us)
                if least <= self.limit(best):
                    return AuditResult(least=least)
                # The control has the same contents, so a cached output is fast here and slow above.
                repeats = [candidate.repeat_audit(len(seeds)) for _ in range(CONTROLS)]
                control = min(control, *(s for s in repeats if s is not None), float("inf"))
                reference = min(max(control, best), busy * best)
                if number >= FIRST_CONTROLLED and least <= self.limit(reference):
                    return AuditResult(least=least)
            time.sleep(number * PAUSE_SECONDS)
        return AuditResult(least=least if least < float("inf") else None, slower=True)

    def _wrong_output(self, seeds: list[int], outputs: TimedOutputs, make_judge: MakeJudge) -> str | None:
        """Judge one output, picked at random; return why it is wrong, or None."""
        index = self.random.randrange(len(seeds))
        (output,) = outputs.pick([index]).values()
        reason = self._judge(index, seeds[index], make_judge)(output)
        if reason is None:
            return None
        return f"call {index + 1} of {len(seeds)} on contents it had not seen is wrong: {reason}"

    def _judge(self, index: int, seed: int, make_judge: MakeJudge) -> Judge:
        key = (index, seed)
        if key not in self.judges:
            buffers = self.contents(seed)
            if buffers.grad is not None:  # a backward keeps the inputs of the buffer's own seed
                buffers = replace(self.contents(self.buffer_seeds[index]), grad=buffers.grad)
            self.judges[key] = make_judge(buffers)
        return self.judges[key]
