"""A mutant: a kernel that must not pass, planted to see that the check that should refuse it does.

It is wrong in one way and right in every other, so that what refuses it is the check that is named
and not an accident. A mutant is plain data around ``make``, which gives the candidate anew for
each judgement: caches, counters and buffers start empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.core import Implementation

PHASES = ("check", "bench")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted kernel.

    ``id`` reads row / operator / backend / what: ``W05/softmax/triton/no-store-mask``. It is killed
    if any check in ``killed_by`` fails; the first is the one that its row names, or a stronger one.
    ``phase`` is ``bench`` where it takes timing to catch it. ``devices`` is where it can be wrong,
    ``not_here`` why it cannot be elsewhere. ``only`` is the check, or the kind of cases, without
    which it survives: what that check earns its place by. ``honest`` is a control, which must pass.
    """

    id: str
    operator: str
    title: str
    killed_by: tuple[str, ...]
    make: Callable[[], Implementation]
    phase: str = "check"
    devices: tuple[str, ...] = ("cpu", "cuda")
    not_here: str = ""
    only: str = ""
    honest: bool = False

    def __post_init__(self) -> None:
        if self.id.count("/") < 3 or self.id.split("/")[1] != self.operator:
            raise ValueError(f"{self.id}: row/operator/backend/what, operator {self.operator}")
        if self.honest == bool(self.killed_by):
            raise ValueError(f"{self.id}: a control is killed by nothing, a mutant by something")
        if self.phase not in PHASES or not self.title or not self.devices:
            raise ValueError(f"{self.id}: a phase of {PHASES}, a title and a device are due")
        if set(self.devices) != {"cpu", "cuda"} and not self.not_here:
            raise ValueError(f"{self.id}: why it cannot be everywhere is due in not_here")

    @property
    def row(self) -> str:
        """The way of being wrong (W05) or of cheating (C01) that this is one case of."""
        return self.id.split("/")[0]

    @property
    def backend(self) -> str:
        return self.id.split("/")[2]
