"""Who is alone is alone, and gets its turn."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from helpers import alone as rooms
from helpers.alone import place


def _visit(folder: Path, alone: bool, times: int, told: str) -> None:
    rooms.settle = lambda: None  # whether others work is none of this test's business
    for _ in range(times):
        with place(alone, folder):
            came = time.monotonic()
            time.sleep(0.02)
            with Path(told).open("a") as file:
                file.write(f"{int(alone)} {came} {time.monotonic()}\n")


def test_who_is_alone_has_nobody_beside_it_and_is_not_kept_waiting(tmp_path: Path) -> None:
    start = multiprocessing.get_context("spawn").Process
    told = str(tmp_path / "told")
    visitors = [start(target=_visit, args=(tmp_path, False, 30, told)) for _ in range(2)]
    visitors.append(start(target=_visit, args=(tmp_path, True, 3, told)))
    for one in visitors:
        one.start()
    for one in visitors:
        one.join(60)
    stays = [tuple(map(float, line.split())) for line in Path(told).read_text().splitlines()]
    assert len(stays) == 63
    for _, came, left in [s for s in stays if s[0]]:
        beside = [s for s in stays if s[1] < left and s[2] > came]
        assert len(beside) == 1
    others = [s for s in stays if not s[0]]
    assert any(a[1] < b[2] and b[1] < a[2] for a in others for b in others if a is not b)


def test_a_measurement_waits_for_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([1.5, 0.9, 0.1, 0.1])
    monkeypatch.setattr(rooms, "_busy", lambda seconds: next(busy))
    rooms.settle()
    assert list(busy) == [0.1]
    monkeypatch.setattr(rooms, "_busy", lambda seconds: time.sleep(seconds) or 1.0)
    began = time.monotonic()
    rooms.settle(0.3)
    assert 0.3 < time.monotonic() - began < 5
