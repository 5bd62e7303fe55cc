"""Seconds of the parts of a step: each counts for itself alone, also when it raises."""

from __future__ import annotations

import pytest

from weft.workbench.calls import part_times
from weft.workbench.calls.part_times import PartTimes, part, recording


def test_a_part_does_not_count_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(part_times.time, "perf_counter", lambda: now)
    times, others = PartTimes(), PartTimes()
    with recording(times), part("phase"):
        now += 1.0
        for _ in range(2):
            with pytest.raises(ValueError, match="lost"), part("request"):
                now += 10.0
                raise ValueError("lost")
        with recording(others), part("elsewhere"):
            now += 100.0
        now += 1.0
    with part("after"):
        now += 1000.0
    assert times.calls == {"request": 2, "phase": 1}
    assert times.seconds == {"request": 20.0, "phase": 102.0}
    assert others.seconds == {"elsewhere": 100.0}
