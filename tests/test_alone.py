"""Tests marked ``alone``: no other test runs beside them, and they are not delayed for ever."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from helpers import alone
from helpers.alone import execution_lock


def _hold_lock(folder: Path, exclusive: bool, times: int, log: str) -> None:
    alone.settle = lambda others: None  # this test is about the locks, not about the load of the machine
    for _ in range(times):
        with execution_lock(exclusive, folder):
            start = time.monotonic()
            time.sleep(0.02)
            with Path(log).open("a") as file:
                file.write(f"{int(exclusive)} {start} {time.monotonic()}\n")


def test_an_alone_test_runs_by_itself_and_is_not_starved(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process
    log = str(tmp_path / "log")
    workers = [process(target=_hold_lock, args=(tmp_path, False, 30, log)) for _ in range(2)]
    workers.append(process(target=_hold_lock, args=(tmp_path, True, 3, log)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    intervals = [tuple(map(float, line.split())) for line in Path(log).read_text().splitlines()]
    assert len(intervals) == 63
    for _, start, end in [i for i in intervals if i[0]]:
        overlapping = [i for i in intervals if i[1] < end and i[2] > start]
        assert len(overlapping) == 1
    shared = [i for i in intervals if not i[0]]
    assert any(a[1] < b[2] and b[1] < a[2] for a in shared for b in shared if a is not b)


def test_a_measurement_waits_for_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([1.5, 0.9, 0.1, 0.1])
    monkeypatch.setattr(alone, "_busy", lambda seconds: next(busy))
    alone.settle()
    assert list(busy) == [0.1]
    monkeypatch.setattr(alone, "_busy", lambda seconds: time.sleep(seconds) or 1.0)
    began = time.monotonic()
    alone.settle(0.3)
    assert 0.3 < time.monotonic() - began < 5
