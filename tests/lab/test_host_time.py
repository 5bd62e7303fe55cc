"""Host time of calls: measured, saved and reported with the difference to the aten call."""

from __future__ import annotations

import json
from pathlib import Path

from weft import machine
from weft.lab import host_time


def test_every_operator_is_measured_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "some device" / host_time.RECORD
    assert host_time.main(["--device", "cpu", "--save", str(file), "--rounds", "1"]) == 0
    record = json.loads(file.read_text())
    assert set(record["us"]) == set(host_time.operators("cpu", host_time.torch.float32))
    assert all(us["aten"] > 0 and us["dispatched"] > 0 for us in record["us"].values())
    text = host_time.markdown(tmp_path)
    us = record["us"]["softmax"]
    assert f"| softmax | {us['aten']:.1f} | {us['dispatched']:.1f} |" in text
    assert f"{us['dispatched'] - us['aten']:+.1f}" in text


def test_without_a_record_the_command_is_shown(tmp_path: Path) -> None:
    assert host_time.COMMAND in host_time.markdown(tmp_path)
    if not machine.has_gpu():
        assert host_time.main(["--device", "cuda"]) == 2
