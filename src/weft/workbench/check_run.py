"""One call of a candidate: its inputs staged between guards, its memory poisoned, what it left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weft.core import BACKWARD, Implementation, Input
from weft.workbench import inputs as drawing
from weft.workbench.bind import bind
from weft.workbench.memory import NAN, Arena, prepoison, served_from
from weft.workbench.oracle import Oracle
from weft.workbench.tolerance import Measured, measure


class Stage:
    """The inputs of a case (and the gradient, in the backward) at fixed addresses, between guards.

    Every seed is drawn into the same addresses, so an answer kept by address is an old answer.
    """

    def __init__(self, oracle: Oracle, poison: int = NAN) -> None:
        self.oracle, self.poison = oracle, poison
        self.arena = Arena(oracle.device, poison)
        self.inputs = [drawing.place(i, oracle.device, self.arena) for i in oracle.case.inputs]
        self.grad = None
        if oracle.direction == BACKWARD:
            form = oracle.forward_form
            dtype = str(form.dtype).removeprefix("torch.")
            spec = Input(name="grad", shape=form.shape, dtype=dtype)
            self.grad = drawing.place(spec, oracle.device, self.arena)
        self.originals: list[torch.Tensor] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one.tensor for one in self.inputs]

    def fill(self, seed: int) -> None:
        """Draw this seed's values into the inputs, and keep a copy of every byte, gaps included."""
        for index, one in enumerate(self.inputs):
            drawing.fill(one, seed, index)
        if self.grad is not None:
            drawing.fill(self.grad, seed, -1)
        self.originals = [block.payload.clone() for block in self.arena.blocks]

    def spoil(self) -> None:
        """Put poison where the inputs are, for :meth:`restore` to undo on another stream."""
        for block in self.arena.blocks:
            block.spoil()

    def restore(self) -> None:
        for block, original in zip(self.arena.blocks, self.originals, strict=True):
            block.payload.copy_(original)

    def changed(self) -> list[str]:
        """The names of the inputs that are not, bit for bit, what they were."""
        pairs = zip(self.arena.blocks, self.originals, strict=True)
        return [block.name for block, original in pairs if not torch.equal(block.payload, original)]


@dataclass
class Run:
    """One call: what it returned or raised, and the memory it was given.

    ``bound`` holds what was allocated while binding (the forward before a backward), ``served``
    what the call itself allocated. ``label`` says which call this was, for a reader; ``notes`` what
    a rule could not look at, by the rule's name.
    """

    oracle: Oracle
    stage: Stage
    seed: int
    label: str
    result: Any = None
    raised: str = ""
    seconds: float = 0.0
    bound: Arena | None = None
    served: Arena | None = None
    kept: list[torch.Tensor] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What came back, as a tuple."""
        return self.result if isinstance(self.result, tuple) else (self.result,)

    @cached_property
    def errors(self) -> list[Measured]:
        """The error of each output against the oracle's answer at this seed."""
        answers = self.oracle.answer(self.seed)
        pairs = [torch.broadcast_tensors(o, a) for o, a in zip(self.outputs, answers, strict=True)]
        both = zip(pairs, self.oracle.bounds, strict=True)
        terms = self.oracle.terms(self.seed)
        return [measure(out, answer, bound, terms) for (out, answer), bound in both]

    @property
    def share(self) -> float:
        """The largest share of the tolerance that an output uses."""
        return max(b.share(e) for b, e in zip(self.oracle.bounds, self.errors, strict=True))


def call(
    implementation: Implementation,
    stage: Stage,
    seed: int,
    label: str,
    stream: torch.cuda.Stream | None = None,
) -> Run:
    """Call the implementation on the staged inputs; whatever it raises is kept, not passed on.

    With a stream the inputs are poison until that stream, after some idling, restores them: work
    queued anywhere else reads the poison.
    """
    oracle, cuda = stage.oracle, stage.oracle.device.startswith("cuda")
    run = Run(oracle, stage, seed, label)
    if implementation.backend != "compile":  # compiled code allocates below any mode
        limit = _arena_limit(oracle.device)
        run.bound = Arena(oracle.device, stage.poison, limit)
        run.served = Arena(oracle.device, stage.poison, limit)
    prepoison(oracle.device, _output_sizes(oracle), stage.poison)
    try:
        with _on(stream, stage):
            grad = None if stage.grad is None else stage.grad.tensor
            with served_from(run.bound):
                closure = bind(
                    oracle.operator,
                    implementation,
                    oracle.case,
                    oracle.direction,
                    stage.tensors,
                    grad,
                )
            if run.bound is not None:
                run.kept = [block.payload.clone() for block in run.bound.blocks]
            began = time.perf_counter()
            with served_from(run.served):
                run.result = closure()
        if cuda:
            torch.cuda.synchronize()  # a failed launch shows here, and here it is the candidate's
        run.seconds = time.perf_counter() - began
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the candidate's, and reported
        text = " ".join(str(error).split())
        run.raised = f"{type(error).__name__}: {text[:300]}"
    return run


@contextmanager
def _on(stream: torch.cuda.Stream | None, stage: Stage) -> Iterator[None]:
    if stream is None:
        yield
        return
    stage.spoil()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles: some 10 ms, in which another stream would be done
        stage.restore()
        yield
        stream.synchronize()


def _output_sizes(oracle: Oracle) -> list[int]:
    sizes = []
    for form in oracle.forms:
        numel = 1
        for n in form.shape:
            numel *= n
        sizes.append(numel * form.dtype.itemsize)
    return sizes


def _arena_limit(device: str) -> int:
    """Bytes that may be held, guarded, for one call; past it memory comes unguarded."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory // 4
    return 2 << 30
