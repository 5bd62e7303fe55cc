"""Host time of calls: measured, saved and reported with the difference to the aten call."""

from __future__ import annotations

import json
from pathlib import Path

from weft import machine
from weft.lab import host_time

SHORT = ("--device", "cpu", "--rounds", "1", "--calls", "2")


def test_every_operator_is_measured_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "some device" / host_time.RECORD
    assert host_time.main(["--save", str(file), *SHORT]) == 0
    record = json.loads(file.read_text())
    assert set(record["us"]) == set(host_time.operators("cpu", host_time.torch.float32))
    assert all(us["aten"] > 0 and us["dispatched"] > 0 for us in record["us"].values())
    text = host_time.markdown(tmp_path)
    us = record["us"]["softmax"]
    assert f"| softmax | {us['aten']:.1f} | {us['dispatched']:.1f} |" in text
    assert f"{us['dispatched'] - us['aten']:+.1f}" in text


def test_calls_with_a_gradient_have_a_table_with_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "some device" / host_time.RECORD
    assert (
        host_time.main(["softmax", "--device", "cpu", "--save", str(file), "--rounds", "1", "--calls", "2"])
        == 0
    )
    record = json.loads(file.read_text())
    text = host_time.markdown(tmp_path)
    for direction in ("forward", "backward"):
        assert list(record[f"{direction}_us"]) == ["softmax"]
        us = record[f"{direction}_us"]["softmax"]
        assert set(us) == {"aten", "dispatched", "torch"} and all(t > 0 for t in us.values())
        dispatched = f"{us['dispatched']:.1f} ({us['dispatched'] / us['aten']:.1f}×)"
        assert f"| softmax | {direction} | {us['aten']:.1f} | {dispatched} |" in text


def test_a_record_of_format_1_has_the_first_table_alone() -> None:
    us = {"aten": 6.8, "dispatched": 9.1, "torch": 9.0, "cuda": 19.0}
    fingerprint = {"device": "a GPU", "date": "2026-11-22", "commit": "abc", "dirty": False}
    fingerprint["versions"] = {"torch": "2.11.0"}
    record = {"format": 1, "machine": fingerprint, "dtype": "bfloat16", "us": {"gelu": us}}
    text = host_time.record_table(record)
    assert "| gelu | 6.8 | 9.1 | +2.3 | 9.0 | – | 19.0 |" in text and "With a gradient" not in text


def test_without_a_record_the_command_is_shown(tmp_path: Path) -> None:
    assert host_time.COMMAND in host_time.markdown(tmp_path)
    if not machine.has_gpu():
        assert host_time.main(["--device", "cuda"]) == 2
