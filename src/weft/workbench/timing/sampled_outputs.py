"""Outputs of timed samples, picked at random over the whole run and judged afterwards.

The re-check makes calls of its own, after the samples. A candidate that can tell a sample from them (by a
count, or since it has seen the contents before) could compute there and skip work in the
samples. So outputs of the samples themselves are judged. Which ones is chosen after their clock has stopped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    release_unused_memory,
    values_equal,
)
from weft.workbench.timing.plan import ContentSource, TimedCandidate
from weft.workbench.timing.recheck import (
    UNUSED_BYTES,
    FetchedOutput,
    LargeJudge,
    MakeJudge,
    take_or_pick,
)
from weft.workbench.timing.unseen_inputs import wrong_on_unseen

_now = time.perf_counter_ns

JUDGED_BUFFERS = 2  # whose outputs are picked, at one set of contents: each costs an answer of the oracle
MAX_PICKS = 120  # samples of which outputs are picked
PICK_PROBABILITY = 0.75  # for a sample, while picking has taken little time
TIME_SHARE = 0.1  # of the sampling time that picking may take, beyond the free time
FREE_NS = 50_000_000  # for the first picks of a short run
# Looks at the memory map of the candidate's process, each some milliseconds: a candidate gains nothing unless
# most of its samples are shortened, so half of the picks show it.
MAX_LOOKS, LOOK_PROBABILITY = 8, 0.5
MAX_KEPT = 16  # different outputs of one buffer that are judged; a deterministic candidate has one
# Of the rows of a large output, compared at random; a candidate's first is compared as a whole. Such an
# output is judged at once, and only its digest is kept.
LARGE_SHARE = 0.125
JUDGE_NS = 2_000_000_000  # once judging has taken this, contents that only later samples had are left out


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Output of call ``index`` in sample ``number``, or a digest of one that was right.

    ``audit_us`` is the time of an audit, in place of a sample's number, and ``calls`` its calls.
    """

    index: int
    source: ContentSource
    output: Outputs | None
    digests: tuple[object, ...] = ()
    number: int = 0
    audit_us: float | None = None
    calls: int = 0

    @property
    def is_audit(self) -> bool:
        return self.calls > 0

    def why(self, reason: str) -> str:
        if self.is_audit:
            return f"recheck: {wrong_on_unseen(self.index, self.calls, reason)}"
        return f"sampled: call {self.index + 1} of sample {self.number} is wrong: {reason}"


@dataclass
class SampledOutputs:
    """Outputs picked from the samples and audits of one candidate; equal ones are kept once.

    ``contents`` and ``buffer_seeds`` generate the inputs again. Without ``make_judge`` nothing is judged.
    ``samples`` and ``audits``: whether outputs of these are judged. ``memory``: whether the memory of an
    output is looked at before it is read.
    """

    make_judge: MakeJudge | None = None
    contents: MakeBuffers | None = None
    buffer_seeds: Sequence[int] = ()
    samples: bool = True
    audits: bool = True
    memory: bool = True
    indexes: list[int] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    refusal: str = ""
    has_judged_whole: bool = False  # a large output
    n_samples: int = 0
    n_picked: int = 0
    n_looks: int = 0
    spent_ns: int = 0
    # From the operating system: no candidate can predict which outputs are picked.
    random: random.Random = field(default_factory=random.SystemRandom)

    def take(self, candidate: TimedCandidate, sampling_seconds: float) -> None:
        """Pick outputs of the candidate's last sample, or none: at random, within the time's share."""
        self.n_samples += 1
        in_time = self.spent_ns <= FREE_NS + TIME_SHARE * 1e9 * sampling_seconds
        if not (self.samples and in_time) or self.n_picked >= MAX_PICKS:
            return
        if self.random.random() >= PICK_PROBABILITY:
            return
        start = _now()
        # The plan is final once the warm-up is over: the buffers stay the same from here on.
        count = min(JUDGED_BUFFERS, candidate.calls)
        self.indexes = self.indexes or self.random.sample(range(candidate.calls), count)
        for index, fetched in self._pick(candidate, self.indexes).items():
            source = candidate.sources[index]
            self._keep(fetched, Pick(index=index, source=source, output=None, number=self.n_samples))
        self.n_picked += 1
        self.spent_ns += _now() - start

    def take_audit(self, candidate: TimedCandidate, calls: int, us: float | None) -> None:
        """Pick an output of an audit of this many calls, always: an audit that is not judged says nothing.

        Later samples on these contents are judged for the same buffer.
        """
        if not self.audits:
            return
        index = self.random.randrange(calls)
        # Buffers that the audit left alone are judged too, one of them for each audit.
        rest = [self.random.randrange(calls, candidate.calls)] if calls < candidate.calls else []
        self.indexes = [index, *rest]
        for fetched in self._pick(candidate, [index]).values():
            source = candidate.sources[index]
            self._keep(fetched, Pick(index=index, source=source, output=None, audit_us=us, calls=calls))

    def _pick(self, candidate: TimedCandidate, indexes: Sequence[int]) -> Mapping[int, FetchedOutput]:
        """Return outputs of the last calls; none of a candidate whose outputs may not be read."""
        looks = self.memory and self.n_looks < MAX_LOOKS
        if looks and self.refusal == "" and (not self.n_looks or self.random.random() < LOOK_PROBABILITY):
            self.n_looks += 1
            if why := candidate.lazy_memory(indexes):
                self.refusal = f"outputs: a timed call {why}"
        if self.refusal:
            return {}
        outputs = candidate.sampled_outputs()
        picked = dict(outputs.pick(indexes))
        return {i: FetchedOutput(partial(take_or_pick, picked, outputs, i)) for i in indexes}

    def _keep(self, fetched: FetchedOutput, pick: Pick) -> None:
        same = [p for p in self.picks if p.index == pick.index and p.source == pick.source]
        if any(_is_equal(p, fetched) for p in same):
            return
        if fetched.digests is not None:
            pick = replace(pick, digests=fetched.digests)
            self._judge([(pick, fetched)])
        else:
            pick = replace(pick, output=fetched.output)
        if len(same) >= MAX_KEPT:  # nondeterministic: any of the others makes room
            self.picks.remove(self.random.choice(same))
        self.picks.append(pick)

    def judge(self) -> str:
        """Judge the picked outputs; return the refusal for a wrong one, or an empty string.

        The quickest audit comes first, since no other may be accepted, and then the contents of the first
        samples. The others come in random order, as long as there is time.
        """
        groups: dict[tuple[int, ContentSource], list[Pick]] = {}
        for pick in self.picks:
            groups.setdefault((pick.index, pick.source), []).append(pick)
        quickest = min(
            (p for p in self.picks if p.audit_us is not None), key=lambda p: p.audit_us or 0.0, default=None
        )
        first = [(quickest.index, quickest.source)] if quickest is not None else []
        first += [k for k in groups if self.buffer_seeds and k[1].seed == self.buffer_seeds[k[0]]]
        others = [k for k in groups if k not in first]
        self.random.shuffle(others)
        start = _now()
        for number, key in enumerate(dict.fromkeys([*first, *others])):
            if self.refusal or (number >= len(first) and _now() - start > JUDGE_NS):
                break
            self._judge([(p, _stored(p.output)) for p in groups[key] if p.output is not None])
        return self.refusal

    def _judge(self, picks: Sequence[tuple[Pick, FetchedOutput]]) -> None:
        """Judge outputs of one buffer at one set of contents."""
        if self.refusal or not picks or self.make_judge is None:
            return
        judge = self.make_judge(self._buffers(picks[0][0]))
        if isinstance(judge, LargeJudge):
            if self.has_judged_whole:
                judge = judge.of_share(LARGE_SHARE)
            self.has_judged_whole = True
        for pick, fetched in picks:
            if (reason := fetched.judge(judge)) is not None:
                self.refusal = pick.why(reason)
                break
        del judge
        release_unused_memory(UNUSED_BYTES)

    def _buffers(self, pick: Pick) -> InputBuffers:
        assert self.contents is not None, "contents are needed to judge"
        buffers = self.contents(pick.source.seed)
        if buffers.grad is not None:  # a backward keeps the inputs of the buffer's own seed
            buffers = replace(self.contents(self.buffer_seeds[pick.index]), grad=buffers.grad)
        return buffers


def _stored(output: Outputs) -> FetchedOutput:
    return FetchedOutput(lambda: output)


def _is_equal(pick: Pick, fetched: FetchedOutput) -> bool:
    if pick.output is None or fetched.output is None:
        return pick.digests == fetched.digests
    try:
        return values_equal(pick.output, fetched.output)
    except (RuntimeError, ValueError):  # other shapes or another number of outputs
        return False
