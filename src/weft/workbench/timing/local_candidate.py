"""Steps of a timed candidate in this process: a runner together with the buffers that it was bound to.

They overwrite inputs in place, poison old outputs and look at the memory of new ones, which only the
process that holds them can do. The same code runs in a worker process, which sends the outputs that
are picked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    has_poison,
    overwrite_buffers,
    poison,
    shares_memory,
    storages,
    tensors_of,
)
from weft.workbench.calls.guarded_memory import digest
from weft.workbench.timing.altered_inputs import ElementChoices, alter, choose
from weft.workbench.timing.call_rows import FOREIGN, RETAINED
from weft.workbench.timing.composed_candidate import ComposedCandidate
from weft.workbench.timing.integrity import replaced_functions
from weft.workbench.timing.plan import COLD, ContentSource, Plan, Runner, RunTimes

MAX_HELD_BYTES = 1 << 28  # of outputs that stay alive through the re-check
HELD_OUTPUTS = 4  # for which that must be enough, or none is held
CACHED_SEEDS = 2  # sets of contents that stay in memory for the next candidate
MAX_CACHED_BYTES = 1 << 26  # larger contents are made again: they would be much of a large problem's memory


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


class LocalSteps:
    """Runner of this process and its buffers; ``contents(seed)`` makes what overwrites them."""

    is_local = True

    def __init__(
        self, runner: Runner, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, device: str = "cpu"
    ) -> None:
        self.runner, self.buffer_sets, self.contents, self.device = runner, buffer_sets, contents, device
        self.protected = storages(buffer_sets)
        self.call_bytes = buffer_sets[0].nbytes
        self.plan: Plan = runner.plan
        self.flags = runner.flags
        self._held: dict[int, Outputs] = {}  # outputs by address
        self._digests_before: list[tuple[int, list[tuple[int, int]]]] = []  # index and digests of its tensors

    @property
    def calls(self) -> int:
        return self.runner.calls

    @property
    def violations(self) -> Mapping[str, str]:
        return {"outputs": self.runner.violation} if self.runner.violation else {}

    @property
    def output_bytes(self) -> int:
        """Bytes of an output of the last run."""
        return next((sum(t.nbytes for t in tensors_of(output)) for _, output in self._outputs()), 0)

    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes:
        """Make calls and keep their outputs; see :class:`Runner`."""
        return self.runner.run(indexes, repeats, mode, kept_positions)

    def load(self, sources: Mapping[int, ContentSource]) -> None:
        """Write contents into the buffers of these indexes; in the backward, gradients alone."""
        self._digests_before.clear()
        for index, source in sources.items():
            choices: list[ElementChoices] = []
            if source.alteration is not None:
                other, seed, many = source.alteration
                choices = choose(self.contents(other), seed, many)
            overwrite_buffers(self.buffer_sets[index], self.contents(source.seed))
            alter(self.buffer_sets[index], choices)

    def poison(self) -> None:
        """Overwrite all outputs that are kept: a call that returns one again does not go unnoticed."""
        for output in self.runner.kept_outputs():
            if output is not None:
                poison(output, self.protected)

    def drop_spare_outputs(self) -> None:
        """Poison all outputs, and free those that no later step reads: new contents need the memory."""
        # Poison first: a candidate that keeps such an output and returns it again is noticed as before.
        self.poison()
        self.runner.drop_spare_outputs()

    def rest(self) -> None:
        self.runner.rest()

    def evict(self) -> None:
        self.runner.evict()

    def wait(self) -> int:
        return self.runner.wait()

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]:
        """Return outputs of the last run by index."""
        return {i: self._output(i) for i in indexes}

    def _output(self, index: int) -> Outputs:
        output = self.runner.outputs()[index]
        assert output is not None, "no call of this index was made"
        return output

    def _outputs(self) -> Iterator[tuple[int, Outputs]]:
        return ((i, output) for i, output in enumerate(self.runner.outputs()) if output is not None)

    def shared_memory(self) -> str:
        """Return that an output has the memory of another output that is in use, or an empty string."""
        # A gradient may be a view of the incoming one, which is the same for several calls of a row.
        own = (
            [t for t in tensors_of(output) if t.untyped_storage().data_ptr() not in self.protected]
            for _, output in self._outputs()
        )
        outputs = [tuple(tensors) for tensors in own]
        if shares_memory(outputs):
            return "two timed calls returned the same memory: one overwrites the other's answer"
        if any(t.numel() and t.data_ptr() in self._held for output in outputs for t in tensors_of(output)):
            return "a call returned the memory of an earlier output that is still in use"
        return ""

    def lazy_memory(self, indexes: Sequence[int]) -> str:
        """Return nothing: a candidate of this process is one of Weft's own."""
        return ""

    def outputs_of(self, indexes: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors that the calls of these indexes returned."""
        return [t for i in indexes for t in tensors_of(self._output(i))]

    def unwritten(self) -> int | None:
        """Return the index of an output that still holds poison."""
        return next((i for i, output in self._outputs() if has_poison(output)), None)

    def ring_suspicion(self) -> str:
        """Return RETAINED if other code refers to all outputs that are kept, or to their memory.

        A candidate with a ring of buffers does, and so do an honest one that stores its outputs and a
        function of autograd that needs its output for the gradient. FOREIGN: torch did not allocate any
        of that memory, so that its references are unknown.
        """
        usual = next(_references([torch.empty(1).view(1)]))
        counts = list(_references(self.runner.outputs()))
        if counts and all(any(n > u for n, u in zip(each, usual, strict=True)) for each in counts):
            return RETAINED
        storages = (t.untyped_storage() for _, output in self._outputs() for t in tensors_of(output))
        return FOREIGN if counts and not any(s.resizable() for s in storages) else ""

    def hold(self, indexes: Sequence[int]) -> None:
        """Keep outputs alive while they are not too large: a later call may not return their memory."""
        for output in map(self._output, indexes):
            tensors = tensors_of(output)
            nbytes = sum(t.nbytes for t in tensors)
            if any(t.untyped_storage().data_ptr() in self.protected for t in tensors):
                continue  # a view of the incoming gradient, which stays where it is
            count = max(len(self._held) + 1, HELD_OUTPUTS)
            if count * nbytes <= MAX_HELD_BYTES and tensors[0].numel():
                self._held[tensors[0].data_ptr()] = output

    def store_digests(self, indexes: Sequence[int]) -> None:
        """Store digests of these outputs: copies of gigabytes would not fit beside them."""
        self._digests_before += [(i, _digests(self._output(i))) for i in dict.fromkeys(indexes)]

    def has_changed(self) -> bool:
        """Return True if an output differs from its stored digest; forget all digests."""
        before, self._digests_before = self._digests_before, []
        return any(_digests(self._output(i)) != digests for i, digests in before)

    def digests(self, indexes: Sequence[int]) -> Sequence[object]:
        """Return digests of these outputs, equal for outputs of the same bytes."""
        return [tuple(_digests(self._output(i))) for i in indexes]

    def cpu_limits(self) -> tuple[int, int]:
        """Return the number of cores, and the ns of CPU time that torch's threads spin after a call."""
        backend = getattr(self.runner, "backend", None)
        return getattr(backend, "cores", 1), getattr(backend, "spin_ns", 0)

    def replaced_functions(self) -> list[str]:
        return replaced_functions()


def _references(outputs: Sequence[Outputs | None]) -> Iterator[tuple[int, int, int]]:
    """Yield how many references there are to each tensor, to its memory, and to the tensor it is a view of.

    Those of this function count as well. A view itself refers to its base, which refers to the memory.
    """
    for index in range(len(outputs)):
        output = outputs[index]
        tensors = tensors_of(output) if output is not None else []
        output = None
        for tensor in tensors:
            storage, base = tensor.untyped_storage(), tensor._base
            in_memory = torch._C._storage_Use_Count(storage._cdata) - (base is not None)
            yield sys.getrefcount(tensor), in_memory, 0 if base is None else sys.getrefcount(base)


def _digests(output: Outputs) -> list[tuple[int, int]]:
    return [digest(t) for t in tensors_of(output)]


def prepare(
    runner: Runner, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, device: str
) -> ComposedCandidate:
    """Return the timed candidate of a runner in this process."""
    return ComposedCandidate(LocalSteps(runner, buffer_sets, contents, device), [b.seed for b in buffer_sets])
