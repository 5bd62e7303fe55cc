"""Mutant: a kernel with one planted fault, which a named check must detect.

It has one fault and is otherwise correct, so that the named check refuses it and not another one by
accident. A mutant is plain data with a function ``make``, which creates a new candidate for each
judgement: its caches, counters and buffers start empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.core import Implementation

PHASES = ("check", "bench")


@dataclass(frozen=True, kw_only=True)
class ProblemFiles:
    """Texts of the files of a problem in another suite's format, and of a candidate for it.

    ``task`` is the text of a ``task.yml``. A problem that is ``timed`` is killed also if it gets no time.
    """

    reference: str
    candidate: str
    task: str = ""
    timed: bool = False


def _is_a_problem() -> Implementation:
    raise TypeError("a problem is judged by its files; it has no implementation of an operator")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Planted kernel.

    ``id`` is row / operator / backend / fault: ``W05/softmax/triton/no-store-mask``. The mutant is
    killed if any check in ``killed_by`` fails; the first is the one that its row names, or a stronger
    one. ``phase`` is ``bench`` if only timing can catch it. ``devices`` are those on which the fault
    shows, ``not_here`` is why it does not show on others. ``only`` is the check, or the kind of cases,
    without which it survives; it justifies that check. ``honest`` marks a control, which must pass.
    With a ``problem`` its files are judged as ``weft judge`` judges them, and ``make`` raises TypeError.
    """

    id: str
    operator: str
    title: str
    killed_by: tuple[str, ...]
    make: Callable[[], Implementation] = _is_a_problem
    problem: ProblemFiles | None = None
    phase: str = "check"
    devices: tuple[str, ...] = ("cpu", "cuda")
    not_here: str = ""
    only: str = ""
    honest: bool = False

    def __post_init__(self) -> None:
        if self.id.count("/") < 3 or self.id.split("/")[1] != self.operator:
            raise ValueError(f"{self.id}: row/operator/backend/fault, operator {self.operator}")
        if self.honest == bool(self.killed_by):
            raise ValueError(f"{self.id}: a control has no killed_by, a mutant has one")
        if self.phase not in PHASES or not self.title or not self.devices:
            raise ValueError(f"{self.id}: expected a phase of {PHASES}, a title and a device")
        if set(self.devices) != {"cpu", "cuda"} and not self.not_here:
            raise ValueError(f"{self.id}: not_here must say why it is not on every device")

    @property
    def row(self) -> str:
        """Kind of error (W05) or of cheating (C01)."""
        return self.id.split("/")[0]

    @property
    def backend(self) -> str:
        return self.id.split("/")[2]
