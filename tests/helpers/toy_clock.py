"""Clock that calls advance by themselves, so that no result depends on the speed of the machine."""

from __future__ import annotations

import pytest

from weft.workbench.sandbox import remote_timing
from weft.workbench.timing import cpu, sampled_outputs, session, unseen_inputs
from weft.workbench.timing.integrity import snapshot

READING_NS = 20  # cost of a reading: a loop that waits for the clock ends even if no call advances it


class ToyClock:
    """Clock of the CPU timing, of the session and of the parent process of a worker, in ns.

    Wall time and CPU time are the same. The replaced functions are the clock's own, so a timing with
    this clock leaves out the check ``replaced``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        snapshot()  # first: a later snapshot would contain the toy functions instead of the clock's own
        monkeypatch.setattr(cpu, "_cpu_now", self.read)
        for module in (cpu, session, remote_timing, sampled_outputs, unseen_inputs):
            monkeypatch.setattr(module, "_now", self.read)

    def read(self) -> int:
        self.ns += READING_NS
        return self.ns

    def advance(self, us: float) -> None:
        self.ns += round(us * 1000)
