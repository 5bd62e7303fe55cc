"""Memory that a judgement takes at most, and the words for too little of it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.workbench.calls.memory import GIB

# Peak of a judgement as a multiple of the problem's own inputs, outputs and weights, by design and
# as measured; docs/bring/suites.md has what it consists of.
PEAK_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory that ran out: ``where`` (reference, judge or candidate), needed and free bytes.

    ``message`` is what the process said that ran out.
    """

    where: str
    needed: int
    free: int
    message: str = ""

    @property
    def reason(self) -> str:
        detail = f"; {self.message}" if self.message else ""
        needed, free = self.needed / GIB, self.free / GIB
        return f"out of memory: needed about {needed:.3g} GiB, {free:.3g} GiB free ({self.where}{detail})"
