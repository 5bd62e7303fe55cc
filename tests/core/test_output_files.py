"""Files that a command writes: refused before the work if they cannot be, and never a forged result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.core import WeftError
from weft.core.output_files import ResultFile, require_folder, require_writable


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text("x")
    require_writable(old, "--save")
    require_writable(tmp_path / "new" / "file", "--save")
    require_folder(tmp_path / "new" / "folder", "--out")
    assert old.read_text() == "x" and [p.name for p in (tmp_path / "new").iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["/dev/full", "folder", "pipe", "old/file", "n" * 300])
def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeftError, match="--save: expected a file"):
        require_writable(tmp_path / name, "--save")


def test_every_command_tries_its_file_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.workbench import bench

    monkeypatch.setattr(bench, "run_points", lambda **_: pytest.fail("the work began"))
    result = CliRunner().invoke(app, ["bench", "gelu", "--save", "/dev/full"])
    assert isinstance(result.exception, WeftError) and "--save" in str(result.exception)


def test_a_result_file_is_new_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with ResultFile(path) as file:
        assert path.read_text() == "" and file.is_untouched()
        file.write({"correct": True})
    assert json.loads(path.read_text()) == {"correct": True} and os.listdir(tmp_path) == ["result.json"]
    with pytest.raises(WeftError, match="a file that does not exist"):
        ResultFile(path)
    with pytest.raises(WeftError, match="can be created"):
        ResultFile(tmp_path / "missing" / "result.json")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeftError):
        ResultFile(tmp_path / "link")


def test_without_a_result_the_name_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(KeyError), ResultFile(path):
        raise KeyError
    assert not path.exists()


def _replace(path: Path) -> None:
    path.unlink()
    path.write_text("")


@pytest.mark.parametrize("forge", [lambda p: p.write_text("{}"), _replace, Path.unlink])
def test_a_forged_result_is_seen_and_replaced(tmp_path: Path, forge: Callable[[Path], object]) -> None:
    path = tmp_path / "result.json"
    with ResultFile(path) as file:
        forge(path)
        assert not file.is_untouched()
        file.write({"correct": False})
    assert json.loads(path.read_text()) == {"correct": False}
