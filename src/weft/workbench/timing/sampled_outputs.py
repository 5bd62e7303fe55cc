"""Outputs of timed samples, picked at random over the whole run and judged afterwards.

The re-check makes calls of its own, after the samples. A candidate that can tell a sample from them (by its
callers, by a count, or since it has seen the contents before) could compute there and skip work in the
samples. So outputs of the samples themselves are judged. Which ones is chosen after their clock has stopped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.workbench.calls.buffers import MakeBuffers, Outputs, values_equal
from weft.workbench.timing.plan import TimedCandidate
from weft.workbench.timing.recheck import MakeJudge

_now = time.perf_counter_ns

JUDGED_BUFFERS = 2  # whose outputs are picked: each costs an answer of the oracle
MAX_PICKS = 120  # samples of which outputs are picked
PICK_PROBABILITY = 0.75  # for a sample, while picking has taken little time
TIME_SHARE = 0.1  # of the sampling time that picking may take, beyond the free time
FREE_NS = 50_000_000  # for the first picks of a short run
MAX_KEPT = 16  # different outputs of one buffer that are judged; a deterministic candidate has one


@dataclass(frozen=True)
class Pick:
    """Output of call ``index`` in sample ``number``."""

    index: int
    number: int
    output: Outputs


@dataclass
class SampledOutputs:
    """Outputs picked from the samples of one candidate; equal ones are kept once."""

    indexes: list[int] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    n_samples: int = 0
    n_picked: int = 0
    spent_ns: int = 0
    # From the operating system: no candidate can predict which outputs are picked.
    random: random.Random = field(default_factory=random.SystemRandom)

    def take(self, candidate: TimedCandidate, sampling_seconds: float) -> None:
        """Pick outputs of the candidate's last sample, or none: at random, within the time's share."""
        self.n_samples += 1
        in_time = self.spent_ns <= FREE_NS + TIME_SHARE * 1e9 * sampling_seconds
        if not in_time or self.n_picked >= MAX_PICKS or self.random.random() >= PICK_PROBABILITY:
            return
        start = _now()
        # The plan is final once the warm-up is over: the buffers stay the same from here on.
        count = min(JUDGED_BUFFERS, candidate.calls)
        self.indexes = self.indexes or self.random.sample(range(candidate.calls), count)
        for index, output in candidate.sampled_outputs().pick(self.indexes).items():
            self._keep(Pick(index, self.n_samples, output))
        self.n_picked += 1
        self.spent_ns += _now() - start

    def _keep(self, pick: Pick) -> None:
        same_buffer = [p for p in self.picks if p.index == pick.index]
        if any(_equal(p.output, pick.output) for p in same_buffer):
            return
        if len(same_buffer) >= MAX_KEPT:  # nondeterministic: any of the others makes room
            self.picks.remove(self.random.choice(same_buffer))
        self.picks.append(pick)

    def judge(self, make_judge: MakeJudge, contents: MakeBuffers, seeds: Sequence[int]) -> str:
        """Judge the picked outputs; return why one is wrong, or an empty string.

        ``seeds`` are those of the candidate's buffers: their contents do not change while samples are taken.
        """
        for index in self.indexes:
            picks = [p for p in self.picks if p.index == index]
            judge = make_judge(contents(seeds[index])) if picks else None
            for pick in picks:
                if judge is not None and (reason := judge(pick.output)) is not None:
                    return f"call {index + 1} of sample {pick.number} is wrong: {reason}"
        return ""


def _equal(one: Outputs, other: Outputs) -> bool:
    try:
        return values_equal(one, other)
    except (RuntimeError, ValueError):  # other shapes or another number of outputs
        return False
