"""Model of the memory that the processes of a timing take on one GPU, run on a CPU.

Each process has a caching allocator: it keeps the peak of its tensors' memory reserved until it releases
unused memory. The pool of a captured graph has a separate allocator. The model has no fragmentation and no
contexts.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.core import Case, Implementation, Operator
from weft.workbench.calls import guarded_memory
from weft.workbench.calls.buffers import InputBuffers, tensors_of
from weft.workbench.calls.make_calls import call_once
from weft.workbench.sandbox import worker_timing
from weft.workbench.sandbox.process import Reply
from weft.workbench.timing import cuda
from weft.workbench.timing.integrity import snapshot
from weft.workbench.timing.plan import Candidate, Estimate, Plan

CALL_US = 100.0  # duration of every call by the model's clock
JUDGE = "judge"


class AllocatorModel(TorchDispatchMode):
    """Bytes that each process has allocated and reserved; ``peak`` is the largest sum of the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.process = JUDGE
        self.is_replaying = False
        self.graphs: dict[str, int] = {}  # alive, by pool
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._storages: dict[int, list[Any]] = {}  # by address: process, bytes, tensors

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        known = self._tensors.get(id(tensor))
        address = tensor.untyped_storage().data_ptr()
        if not address or (known is not None and known() is tensor):
            return
        self._tensors[id(tensor)] = weakref.ref(tensor)
        if address not in self._storages:
            if self.is_replaying:  # a replay allocates nothing
                return
            nbytes = tensor.untyped_storage().nbytes()
            self._storages[address] = [self.process, nbytes, 0]
            self._add(self.process, nbytes)
        self._storages[address][2] += 1
        weakref.finalize(tensor, self._release, address, id(tensor))

    def _release(self, address: int, identity: int) -> None:
        self._tensors.pop(identity, None)
        storage = self._storages.get(address)
        if storage is None:
            return
        storage[2] -= 1
        if not storage[2]:
            del self._storages[address]
            self._add(storage[0], -storage[1])

    def _add(self, process: str, nbytes: int) -> None:
        self.allocated[process] = self.allocated.get(process, 0) + nbytes
        self.reserved[process] = max(self.reserved.get(process, 0), self.allocated[process])
        if (total := sum(self.reserved.values())) > self.peak:
            self.peak, self.at_peak = total, dict(self.reserved)

    def release(self, most: int = 0) -> None:
        """Release the memory that the current process has reserved and does not use (``empty_cache``)."""
        pool = f"{self.process}, graph"
        for process in (self.process, *(() if self.graphs.get(pool) else (pool,))):
            self.reserved[process] = self.allocated.get(process, 0)

    def capture(
        self, calls: Sequence[Callable[[], Any]], *, keep: bool, pool: Any = None
    ) -> tuple[ModelGraph, list[Any]]:
        """Make calls with the memory of a graph's pool, in place of :func:`cuda.capture`."""
        self.release()  # torch does so when a capture begins
        process, self.process = self.process, f"{self.process}, graph"
        try:
            outputs = []
            for call in calls:
                output = call()
                outputs.append(output if keep else None)
                del output
        finally:
            pool, self.process = self.process, process
        return ModelGraph(self, pool, calls, outputs), outputs if keep else []


class ModelGraph:
    """Captured calls; a replay writes their outputs again, in the same memory."""

    def __init__(
        self, model: AllocatorModel, pool: str, calls: Sequence[Callable[[], Any]], outputs: list[Any]
    ) -> None:
        self.model, self._pool, self.calls, self.outputs = model, pool, calls, outputs
        model.graphs[pool] = model.graphs.get(pool, 0) + 1

    def __del__(self) -> None:
        self.model.graphs[self._pool] -= 1

    def pool(self) -> str:
        return self._pool

    def replay(self) -> None:
        self.model.is_replaying = True
        try:
            for call, output in zip(self.calls, self.outputs, strict=True):
                if output is not None:
                    for target, source in zip(tensors_of(output), tensors_of(call()), strict=True):
                        target.data.copy_(source)
        finally:
            self.model.is_replaying = False


class ModelBackend:
    """Backend of a GPU in the model: every call takes as long as any other."""

    cache_bytes, slow_us, overhead_us, plain_overhead = 1 << 10, 50_000.0, 0.0, 0.0
    whole_cache, set_aside_bytes = False, 0

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def available_memory(self) -> int:
        return 1 << 40

    def flush(self) -> None:
        """Do nothing: the model has no cache."""

    evict = flush

    def timed(self, before: Callable[[], object], body: Callable[[], object], spin: int) -> float:
        before()
        body()
        return CALL_US

    def estimate(self, candidate: Candidate, buffers: InputBuffers) -> Estimate:
        call = candidate.bind(buffers)
        nbytes = sum(t.nbytes for t in tensors_of(call_once(call)))
        return Estimate(us=CALL_US, output_bytes=nbytes)

    def make_runner(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], plan: Plan
    ) -> cuda.CudaRunner:
        return cuda.CudaRunner(self, candidate, buffer_sets, plan)  # type: ignore[arg-type]


class ModelWorker:
    """Worker of one implementation in this process, whose tensors the model counts as its own."""

    def __init__(self, model: AllocatorModel, operator: Operator, implementation: Implementation) -> None:
        self.model, self.operator, self.implementation = model, operator, implementation
        self.verbs = worker_timing.TimingHandlers(self).handlers()

    def point(self, payload: Any) -> tuple[Operator, Implementation, Case, str, str]:
        return self.operator, self.implementation, self.operator.cases[0], "forward", "cpu"

    def output_forms(self, payload: Any) -> None:
        return None

    def request(self, verb: str, payload: Any = None, tensors: Sequence[Any] = (), **_: Any) -> Reply:
        process, self.model.process = self.model.process, self.implementation.name
        try:
            fields, sent = self.verbs[verb](json.loads(json.dumps(payload or {})), list(tensors))
        finally:
            self.model.process = process
        # The reply is copied into memory of the requesting process.
        return Reply(payload=json.loads(json.dumps(fields)), tensors=[t.clone() for t in sent])


def patch(monkeypatch: pytest.MonkeyPatch, model: AllocatorModel) -> None:
    """Handle problems of any size like large ones on a GPU, with the memory of the model."""
    snapshot()  # first: a later snapshot would contain the model's functions instead of the clock's own
    package = "weft.workbench"
    for module in ("sandbox.worker_timing", "timing.session", "timing.sampled_outputs", "timing.recheck"):
        monkeypatch.setattr(f"{package}.{module}.release_unused_memory", model.release)
    monkeypatch.setattr(f"{package}.check.oracle.return_freed_memory", model.release)
    for name, value in {
        "calls.buffers.MAX_SENT_BYTES": 0,
        "calls.guarded_memory._DIGEST_WORDS": 1 << 12,
        "check.by_rows.MIN_BYTES": 1,
        "check.by_rows.PIECE_ELEMENTS": (1, 1 << 27),
        "check.oracle.MIN_BYTES": 1,
        "check.output_judge.SHARED_ELEMENTS": 1,
        "check.tolerance.PIECES": {"cpu": 1 << 16, "cuda": 1 << 16},
        # An eighth of the problem, as of the smallest that is sampled by single calls.
        "timing.call_rows.KEPT_BYTES": 1 << 17,
        "timing.call_rows.SUSPECT_BYTES": 1 << 19,
        "timing.composed_candidate.LATE_WRITE_SECONDS": 0.0,
        "timing.cuda._synchronize": lambda: None,
        "timing.cuda.capture": model.capture,
        "timing.local_candidate.MAX_CACHED_BYTES": 1,
        "timing.local_candidate.MAX_HELD_BYTES": 0,
        "timing.plan.SINGLE_CALL_BYTES": 0,
        "sandbox.remote_timing.SINGLE_CALL_BYTES": 0,
        "timing.recheck.MAX_CACHED_BYTES": 1,
        "timing.recheck.MAX_KEPT_BYTES": 1,
        "sandbox.worker_timing.timing_backend": lambda device, without: ModelBackend(),
    }.items():
        monkeypatch.setattr(f"{package}.{name}", value)
    # The factors are cached by device: the next test must not get factors of this length.
    factors = cache(guarded_memory._digest_factors.__wrapped__)
    monkeypatch.setattr(guarded_memory, "_digest_factors", factors)
