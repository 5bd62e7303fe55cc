"""The table of the cost of batch invariance."""

from __future__ import annotations

from pathlib import Path

from helpers.sample_records import record
from weft.core.record import append
from weft.workbench.report import invariance_prices


def test_each_variant_has_a_row_with_both_times_and_their_ratio(tmp_path: Path) -> None:
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    times = {
        "torch": 90.0,
        "cuda": 100.0,
        "cuda/invariant": 103.0,
        "triton": 120.0,
        "triton/invariant": 120.0,
    }
    append(folder / invariance_prices.FILE, [record(implementation=n, cold=t) for n, t in times.items()])
    lines = invariance_prices.markdown(tmp_path).splitlines()
    assert lines[0].startswith("**Example GPU 9000**, 2026-01-02, commit 0123456789")
    assert [line.split(" | ")[3:] for line in lines[4:]] == [
        ["cuda", "100 µs", "103 µs", "1.03× |"],
        ["triton", "120 µs", "120 µs", "1.00× |"],
    ]


def test_without_a_record_the_command_is_named(tmp_path: Path) -> None:
    assert "weft bench" in invariance_prices.markdown(tmp_path)
