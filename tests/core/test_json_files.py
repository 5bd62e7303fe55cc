"""JSON files from other programs: each damage gives one clear error, without a crash or a hang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.core import WeftError, record
from weft.core.json_files import loads, read_json, read_text
from weft.gpt2.train import metrics
from weft.machine.ceilings import load as load_ceilings
from weft.workbench.judge import json_fields

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = '{"seconds": 1' + "0" * 400 + "}"
DAMAGED = {
    "deep": DEEP.encode(),
    "huge": HUGE.encode(),
    "bytes": b"\xff\xfe{}",
    "torn": b'{"a": ',
    "empty": b"",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_json_is_a_value_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "file.json").write_bytes(DAMAGED[damage])
    with pytest.raises(ValueError):
        read_json(tmp_path / "file.json")


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="no regular file"):  # and returns: a FIFO has no writer here
            read_json(path)
    (tmp_path / "long").write_text("x" * 101)
    with pytest.raises(ValueError, match="101 bytes"):
        read_text(tmp_path / "long", limit=100)
    with pytest.raises(WeftError, match="no regular file"):
        json_fields.read_json(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")
    assert loads('{"seed": 18446744073709551615, "x": [1.5, null]}') == {"seed": 2**64 - 1, "x": [1.5, None]}


@pytest.mark.parametrize("damage", DAMAGED)
def test_readers_survive_damaged_files(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(WeftError):
        record.read(path)
    with pytest.raises(WeftError):
        json_fields.read_json(path)
    warnings: list[str] = []
    assert load_ceilings(path, warnings.append) is None and len(warnings) == 1
    if damage != "bytes":
        assert list(metrics.read_lines(path)) == []


def _a_record() -> dict[str, Any]:
    for file in sorted((ROOT / "results").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            data: dict[str, Any] = json.loads(line)
            if data.get("detail", {}).get("timing"):
                return data
    raise AssertionError("no committed record has a time")


@pytest.mark.parametrize(
    ("key_path", "value"),
    [
        (("detail", "timing", "cold"), "fast"),
        (("detail", "timing", "samples"), ["1", "2"]),
        (("detail", "timing", "interval"), [1.0]),
        (("detail", "timing", "calls_per_sample"), True),
        (("detail", "verdict", "status"), 3),
        (("efficiency",), "high"),
        (("machine",), "H200"),
    ],
)
def test_a_record_with_a_field_of_another_type_is_refused(
    tmp_path: Path, key_path: tuple[str, ...], value: object
) -> None:
    from weft.cli import app

    data = _a_record()
    record.Record.from_json(data)  # unchanged
    part = data
    for key in key_path[:-1]:
        part = part[key]
    part[key_path[-1]] = value
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(data) + "\n")
    result = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert isinstance(result.exception, WeftError) and key_path[-1] in str(result.exception)
