"""Re-check of timed calls: overwrite the inputs in place, poison the outputs, run again, compare.

A candidate that is right when checked and skips work when timed fails here. The contents of its
inputs change under it, neighbouring calls get different contents, old outputs hold poison, and at
least ``COMPARED_CALLS`` calls are compared. In the last rounds the inputs are those of the rounds before
with a few elements altered, which exposes outputs that are cached by a part of the inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    release_unused_memory,
    tensors_of,
    values_equal,
)
from weft.workbench.calls.guarded_memory import digest
from weft.workbench.timing.altered_inputs import altered, choose
from weft.workbench.timing.plan import IntegrityError, TimedCandidate, TimedOutputs

Judge = Callable[[Outputs], str | None]  # the reason why outputs are wrong, or None
MakeJudge = Callable[[InputBuffers], Judge]


@runtime_checkable
class LargeJudge(Protocol):
    """Judge of a large problem's outputs, which computes the answers when it is asked.

    ``of_share`` returns one that compares a random share of the rows, where answers are computed by rows.
    Where they are not, ``prepare`` computes them: there is no room for an output meanwhile.
    """

    @property
    def by_rows(self) -> bool: ...
    def __call__(self, outputs: Outputs) -> str | None: ...
    def of_share(self, share: float) -> LargeJudge: ...
    def prepare(self) -> None: ...


class FetchedOutput:
    """Output of a timed call as it came from its process; a large one has ``digests`` and can come again.

    ``fetch`` returns it, until the next call is made.
    """

    def __init__(self, fetch: Callable[[], Outputs]) -> None:
        self.fetch = fetch
        self.output: Outputs | None = fetch()
        self.digests = large_digest(self.output)

    def judge(self, judge: Judge) -> str | None:
        """Return why the output is wrong, or None; a large one is dropped."""
        output, is_large = self.output, self.digests is not None
        if is_large:
            self.output = None
        if is_large and isinstance(judge, LargeJudge) and not judge.by_rows:
            output = None
            judge.prepare()
            output = self.fetch()
            if large_digest(output) != self.digests:
                return "the output changed while no call was made"
        assert output is not None, "a large output is judged once"
        return judge(output)


@runtime_checkable
class BoundsSharer(Protocol):
    """Maker of judges whose bounds are the same for all contents of a large problem."""

    def share_bounds(self, buffers: InputBuffers) -> None: ...


COMPARED_CALLS = 12  # more than ten, so that a skip on every tenth call is among them
UNUSED_BYTES = 1 << 30  # of GPU memory that the allocator may keep when outputs were judged
MAX_KEPT_BYTES = 1 << 26  # of an output, above which a digest stands for it
MAX_CACHED_BYTES = 1 << 26  # of contents, above which answers are computed again when they are needed
SEED_COUNT = 2  # sets of contents that the buffers alternate between


class Recheck:
    """Contents that overwrite the buffers and the oracle's judges, shared by a session's candidates.

    Forward: the inputs are overwritten from ``SEED_COUNT`` sets of contents, so the right output of
    every call is known, and all outputs in this process are compared. Backward: only the gradient
    is overwritten, since what the forward saved belongs to the old inputs; the first, the last and a
    random tenth of the outputs are judged, and no output may hold poison. The same sample is judged
    of outputs in another process.

    ``buffer_seeds`` are the seeds of the buffers, ``content_seeds`` those of the new contents, and
    ``alteration_seed`` that of the altered elements. With ``has_rows`` rounds make rows of
    calls, too.
    """

    def __init__(
        self,
        buffer_seeds: Sequence[int],
        contents: MakeBuffers,
        make_judge: MakeJudge,
        content_seeds: Sequence[int],
        backward: bool,
        alteration_seed: int = 0,
    ) -> None:
        self.buffer_seeds, self.content_seeds = list(buffer_seeds), list(content_seeds)
        self.contents, self.make_judge, self.backward = contents, make_judge, backward
        self.judges: dict[Hashable, Judge] = {}
        # Digests of large outputs that were right, by contents: an equal one need not be judged again.
        self.right_digests: dict[Hashable, set[tuple[object, ...]]] = {}
        self.round_number = 0
        self.alteration_seed = alteration_seed
        self.alters = False  # in this round
        self.has_rows = True
        # From the operating system: no candidate can predict which calls are compared.
        self.random = random.SystemRandom()
        self.positions: list[float] = []

    def begin_round(self, round_number: int, alters: bool = False) -> None:
        """Assign other contents to each buffer and choose other calls to compare."""
        self.round_number, self.alters = round_number, alters
        self.positions = [self.random.random() for _ in range(1 + len(self.buffer_seeds) // 10)]
        if self.backward:
            self.judges.clear()  # keyed by call and seed: the pairs change with the round
            self.right_digests.clear()

    def _content_index(self, index: int) -> int:
        return (index + self.round_number) % len(self.content_seeds)

    def _content_seed(self, index: int) -> int:
        return self.content_seeds[self._content_index(index)]

    def _key(self, index: int) -> Hashable:
        """Return what the right output of call ``index`` depends on."""
        seed = self._content_seed(index)
        return (index, seed, self.alters) if self.backward else (seed, self.alters)

    def _judge(self, index: int) -> Judge:
        key = self._key(index)
        if key not in self.judges:
            # The judge computes its answers here, so that the contents may be restored afterwards.
            with self._contents_of(index) as buffers:
                if self.backward:
                    grad = buffers.grad
                    buffers = replace(self.contents(self.buffer_seeds[index]), grad=grad)
                if buffers.nbytes > MAX_CACHED_BYTES and len(self.buffer_seeds) == 1:
                    self.judges.clear()  # answers in float64: one at a time of a large problem
                self.judges[key] = self.make_judge(buffers)
        return self.judges[key]

    def _contents_of(self, index: int) -> AbstractContextManager[InputBuffers]:
        """Return the contents of call ``index``, with a few elements altered in a round that alters."""
        number = self._content_index(index)
        seed, other = (self.content_seeds[n % len(self.content_seeds)] for n in (number, number + 1))
        if not self.alters:
            return nullcontext(self.contents(seed))
        choices = choose(self.contents(other), self.alteration_seed, many=number % 2 == 1)
        return altered(self.contents(seed), choices)

    def compared_calls(self, calls: int, is_local: bool) -> list[int]:
        """Return the indexes of the calls whose outputs are compared."""
        if is_local and not self.backward:
            return list(range(calls))
        sample = self.positions[: 1 + calls // 10]
        return sorted({0, calls - 1, *(int(p * calls) for p in sample)})

    def refusal(self, candidate: TimedCandidate) -> str:
        """Return why a candidate is refused in this round, behind the check's name, or an empty string."""
        if reason := self.check(candidate):
            changed = "altered: after a few elements of its inputs changed, "
            return f"{changed if self.alters else 'recheck: '}{reason}"
        if not self.has_rows or self.alters:
            return ""
        try:
            outputs = candidate.run_in_a_row(self.content_seeds, self.round_number)
            reason = self._verify(outputs, candidate.is_local) if outputs is not None else None
        except IntegrityError as error:
            reason = str(error)
        return f"rows: {reason}" if reason else ""

    def check(self, candidate: TimedCandidate) -> str | None:
        """Run the candidate's timed path and its plain calls again; return why it is refused."""
        try:
            alteration = self.alteration_seed if self.alters else None
            for outputs in candidate.rerun(self.content_seeds, self.round_number, alteration):
                reason = self._verify(outputs, candidate.is_local)
                release_unused_memory(UNUSED_BYTES)  # the candidate's process needs it for what follows
                if reason is not None:
                    return reason
        except IntegrityError as error:
            return str(error)
        return None

    def _verify(self, outputs: TimedOutputs, is_local: bool) -> str | None:
        """Return why one of these outputs is wrong, or None."""
        right_outputs: dict[Hashable, Outputs] = {}  # of this run: later ones may be in the same memory
        count, judged = len(outputs), outputs.judged
        picked = dict(outputs.pick(self.compared_calls(count, is_local) if judged is None else judged))
        for i in sorted(picked):
            buffer = outputs.buffer_of(i)
            key = self._key(buffer)
            fetched = FetchedOutput(partial(take_or_pick, picked, outputs, i))
            output = fetched.output if fetched.digests is None else None  # a large one is not held here
            # The judge computes in float64; equality with an output already judged costs far less.
            if output is not None and key in right_outputs and values_equal(right_outputs[key], output):
                continue
            if fetched.digests is not None and fetched.digests in self.right_digests.get(key, ()):
                continue
            reason = fetched.judge(self._judge(buffer))
            if reason is not None:
                return f"{outputs.label} call {i + 1} of {count} is wrong: {reason}"
            if fetched.digests is not None:  # it is not kept: gigabytes, until the next one
                self.right_digests.setdefault(key, set()).add(fetched.digests)
            elif output is not None and not self.backward:
                right_outputs[key] = output
        return None


def take_or_pick(picked: dict[int, Outputs], outputs: TimedOutputs, index: int) -> Outputs:
    """Return a picked output, of which ``picked`` then holds none, or pick it again."""
    return picked.pop(index) if index in picked else outputs.pick([index])[index]


def share_bounds(make_judge: MakeJudge | None, buffers: InputBuffers) -> None:
    """Let a maker of judges compute the bounds that it shares between contents, at these."""
    if isinstance(make_judge, BoundsSharer):
        # Where that fails a judge computes its own bounds later, and the failure is its candidate's trouble.
        with suppress(RuntimeError):
            make_judge.share_bounds(buffers)


def large_digest(output: Outputs) -> tuple[object, ...] | None:
    """Return shapes, dtypes and digests of an output's tensors; None for one that is small enough to keep."""
    tensors = tensors_of(output)
    if sum(t.nbytes for t in tensors) <= MAX_KEPT_BYTES:
        return None
    return tuple((t.shape, t.dtype, digest(t)) for t in tensors)


def altered_rounds(calls: int) -> int:
    """Return how many rounds show the first or the last call both kinds of altered contents."""
    # The contents alternate: with an even number of calls the first and the last have different ones.
    return 2 if calls % SEED_COUNT else 1


def rounds_needed(calls: int, is_local: bool = True) -> int:
    """Return how many rounds compare at least ``COMPARED_CALLS`` calls."""
    # Of a worker's outputs only a sample travels here: the first, the last and a tenth.
    compared = calls if is_local else min(calls, 2 + calls // 10)
    return max(1, -(-COMPARED_CALLS // compared))
