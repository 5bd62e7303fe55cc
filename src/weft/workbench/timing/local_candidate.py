"""Timed candidate of this process: a runner together with the buffers that it was bound to.

It overwrites inputs in place, poisons old outputs and inspects the memory of new ones, which only the
process that holds them can do. The same code runs in a worker process, which sends the outputs that
are picked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.workbench.calls.buffers import (
    InputBuffers,
    LeadingOutputs,
    MakeBuffers,
    Outputs,
    has_poison,
    overwrite_buffers,
    poison,
    shares_memory,
    storages,
    tensors_of,
    values_equal,
)
from weft.workbench.timing.altered_inputs import alter
from weft.workbench.timing.integrity import replaced_functions
from weft.workbench.timing.plan import IntegrityError, Plan, Runner

HELD_OUTPUTS = 4  # outputs of plain calls that stay alive through the re-check
MAX_HELD_BYTES = 1 << 28
LATE_WRITE_SECONDS = 0.02  # work that a call left running has this long to change its output
CACHED_SEEDS = 2  # sets of contents that stay in memory for the next candidate
MAX_CACHED_BYTES = 1 << 26  # larger contents are made again: they would be much of a large problem's memory
_random = random.SystemRandom()  # a candidate could reproduce a seeded generator


class BufferCache:
    """Buffers by seed, the last two cached: all candidates of a session get the same contents."""

    def __init__(self, make_buffers: MakeBuffers) -> None:
        self.make_buffers = make_buffers
        self._by_seed: dict[int, InputBuffers] = {}

    def __call__(self, seed: int) -> InputBuffers:
        if seed not in self._by_seed:
            while len(self._by_seed) >= CACHED_SEEDS:
                del self._by_seed[next(iter(self._by_seed))]
            buffers = self.make_buffers(seed)
            if buffers.nbytes > MAX_CACHED_BYTES:
                return buffers
            self._by_seed[seed] = buffers
        return self._by_seed[seed]


@dataclass(frozen=True)
class LocalOutputs:
    """Outputs in the memory of this process."""

    label: str
    outputs: Sequence[Outputs]

    def __len__(self) -> int:
        return len(self.outputs)

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]:
        return {i: self.outputs[i] for i in indexes}


class LocalTimedCandidate:
    """Runner of this process and its buffers; ``contents(seed)`` makes what overwrites them."""

    is_local = True
    asleep_seconds = None  # its calls are made by this process

    def __init__(self, runner: Runner, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers) -> None:
        self.runner, self.buffer_sets, self.contents = runner, buffer_sets, contents
        self.protected = storages(buffer_sets)
        self._held: dict[int, Outputs] = {}  # outputs of plain calls by address
        self.plan: Plan = runner.plan
        self.flags = runner.flags
        self.sample, self.sample_warm = runner.sample, runner.sample_warm
        self.sample_host, self.cross_check = runner.sample_host, runner.cross_check

    @property
    def calls(self) -> int:
        return self.runner.calls

    @property
    def audit_calls(self) -> int:
        return self.runner.audit_calls

    @property
    def violations(self) -> Mapping[str, str]:
        return {"outputs": self.runner.violation} if self.runner.violation else {}

    def sampled_outputs(self) -> LocalOutputs:
        return LocalOutputs("sampled", self.runner.outputs)

    def replaced_functions(self) -> list[str]:
        return replaced_functions()

    def audit(self, seeds: Sequence[int]) -> tuple[float | None, LocalOutputs]:
        """Time calls on contents of unused seeds; return us for each call and the outputs.

        Raises :class:`IntegrityError` for outputs that share memory.
        """
        for buffers, seed in zip(self.buffer_sets, seeds, strict=False):
            overwrite_buffers(buffers, self.contents(seed))
        return self.audit_loaded(len(seeds))

    def audit_loaded(self, calls: int) -> tuple[float | None, LocalOutputs]:
        """Time the first calls, whose inputs were overwritten before."""
        us, outputs = self.runner.run_once(calls)
        self.runner.wait()
        _refuse_shared_memory(outputs)
        return us, LocalOutputs("timed", outputs)

    def repeat_audit(self, calls: int) -> float | None:
        """Time the same calls once more, on contents that they have now seen."""
        us, _ = self.runner.run_once(calls)
        self.runner.wait()
        return us

    def rerun(
        self, seeds: Sequence[int], round_number: int, alteration: int | None = None
    ) -> Iterator[LocalOutputs]:
        """Overwrite the inputs, run the timed path and yield its outputs; then plain calls and theirs.

        Neighbouring buffers get different contents, and each gets other contents than in the round
        before. With ``alteration`` a few elements of them change. Raises :class:`IntegrityError` for
        outputs that share memory, change later or were never written.
        """
        for i, buffers in enumerate(self.buffer_sets):
            index = (i + round_number) % len(seeds)
            overwrite_buffers(buffers, self.contents(seeds[index]))
            if alteration is not None:
                other = self.contents(seeds[(index + 1) % len(seeds)])
                alter(buffers, other, alteration, many=index % 2 == 1)
        yield from self.rerun_loaded(round_number)

    def rerun_loaded(self, round_number: int) -> Iterator[LocalOutputs]:
        """Run the timed path and plain calls on inputs that were overwritten before; see :meth:`rerun`."""
        outputs = self.runner.replay()
        # Copied before the wait: work that another thread or stream still does shows as a change.
        ends = [outputs[0], *outputs[1:][-1:]]  # of a single call once: its output may be gigabytes
        copies = [_copy(o) for o in ends]
        self.runner.wait()
        _refuse_shared_memory(outputs)
        yield LocalOutputs("timed", outputs)
        _refuse_unwritten("timed", outputs)
        if round_number == 0 and self._changes_later(copies, ends):
            raise IntegrityError("the output changed after the timed calls had returned")
        # A plain call that returns the timed path's memory untouched would show this poison.
        for output in outputs:
            poison(output, self.protected)
        del outputs, output, ends, copies  # memory that the plain calls need
        yield from self._plain_calls(round_number)

    def _plain_calls(self, round_number: int) -> Iterator[LocalOutputs]:
        """Make plain calls; each output is copied when its call returns, as a host loop would."""
        copies: list[tuple[torch.Tensor, ...]] = []
        first_output: Outputs | None = None
        for i in range(self.calls):
            output = self.runner.call(i)
            self._refuse_held_memory(output)
            copies.append(_copy(output))
            if i == 0:
                first_output = output
                continue
            poison(output, self.protected)  # a later call that returns this memory again is noticed
            self._hold(output)
            del output
        self.runner.wait()
        assert first_output is not None
        is_tensor = isinstance(first_output, torch.Tensor)
        outputs: list[Outputs] = [c[0] if is_tensor else c for c in copies]
        yield LocalOutputs("plain", outputs)
        _refuse_unwritten("plain", outputs)
        if round_number == 0 and self._changes_later(copies[:1], [first_output]):
            raise IntegrityError("the output changed after the call had returned")

    def _hold(self, output: Outputs) -> None:
        """Keep a random few outputs alive: a call that returns their memory again does not own it."""
        tensors = tensors_of(output)
        nbytes = sum(t.nbytes for t in tensors)
        due = _random.randrange(self.calls) < HELD_OUTPUTS and len(self._held) < HELD_OUTPUTS
        if any(t.untyped_storage().data_ptr() in self.protected for t in tensors):
            return  # a view of the incoming gradient, which stays where it is
        if due and HELD_OUTPUTS * nbytes <= MAX_HELD_BYTES and tensors[0].numel():
            self._held[tensors[0].data_ptr()] = output

    def _refuse_held_memory(self, output: Outputs) -> None:
        if any(t.numel() and t.data_ptr() in self._held for t in tensors_of(output)):
            raise IntegrityError("a call returned the memory of an earlier output that is still in use")

    def _changes_later(self, copies: Sequence[Outputs], outputs: Sequence[Outputs]) -> bool:
        """Return True if outputs change while no call is made."""
        time.sleep(LATE_WRITE_SECONDS)
        self.runner.wait()
        return not all(values_equal(a, b) for a, b in zip(copies, outputs, strict=True))


def _copy(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    copied = tuple(t.clone() for t in tensors_of(outputs))
    return LeadingOutputs(copied) if isinstance(outputs, LeadingOutputs) else copied


def _refuse_shared_memory(outputs: Sequence[Outputs]) -> None:
    if shares_memory(outputs):
        raise IntegrityError("two timed calls returned the same memory: one overwrites the other's answer")


def _refuse_unwritten(label: str, outputs: Sequence[Outputs]) -> None:
    for i, output in enumerate(outputs):
        if has_poison(output):
            raise IntegrityError(f"{label} call {i + 1} of {len(outputs)} left its output unwritten")
