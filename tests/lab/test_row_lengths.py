"""The grid of row lengths: its points, its calls, its record as a table and as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import machine
from weft.lab import row_lengths


def _record() -> dict[str, Any]:
    shares = {"cuda": 0.9, "torch": 0.25}
    points = [
        {"operator": "softmax", "direction": "forward", "columns": n, "offset": k, "share": shares, "us": {}}
        for n, k in row_lengths.Selection().points()
    ]
    fingerprint = {"device": "Some GPU", "date": "2026-01-02T03:04:05", "commit": "abcdef0123456789"}
    return {"machine": fingerprint, "copy": 4e12, "elements": 1 << 26, "points": points}


@pytest.mark.parametrize("direction", row_lengths.DIRECTIONS)
@pytest.mark.parametrize("operator", row_lengths.OPERATORS)
def test_torch_is_called_at_a_shifted_point(operator: str, direction: str) -> None:
    """The calls of the other implementations need a GPU."""
    calls = row_lengths.calls_at(operator, direction, 65, 1, device="cpu", elements=650)
    assert set(calls) == set(row_lengths.IMPLEMENTATIONS)
    output = calls["torch"]()
    first = output if isinstance(output, torch.Tensor) else output[0]
    assert first.shape == (10, 65) and first.isfinite().all()


def test_a_part_of_the_grid_is_selected() -> None:
    assert row_lengths.Selection(columns=(64, 65)).points() == [(64, 0), (65, 0), (64, 1)]
    with pytest.raises(SystemExit):
        row_lengths.main(["--columns", "66"])


def test_a_wrong_gradient_of_the_weight_is_not_timed() -> None:
    dx, dw = torch.randn(20, 65), torch.randn(65)
    expected = row_lengths._sample((dx, dw))
    assert row_lengths._agrees((dx, dw * 1.01), expected)
    assert not row_lengths._agrees((dx, dw.roll(1)), expected)


def test_a_record_is_shown_as_a_table_and_drawn(tmp_path: Path) -> None:
    file = tmp_path / "some device" / row_lengths.RECORD
    file.parent.mkdir()
    file.write_text(json.dumps(_record()))
    text = row_lengths.record_table(_record())
    assert "| softmax | forward | 50257 | no | 90 | – | 25 |" in text
    assert "| softmax | forward | 1024 from 2 bytes on | no | 90 | – | 25 |" in text
    assert "| softmax | forward | not aligned | 90 / 90 | – | 25 / 25 |" in row_lengths.markdown(tmp_path)
    assert row_lengths.main(["--draw", str(file)]) == 0
    (picture,) = file.parent.glob("*.svg")
    assert f"![{picture.stem}]" in row_lengths.markdown(tmp_path)
    assert picture.name == "row-lengths-softmax-forward.svg" and "not aligned" in picture.read_text()


def test_without_a_record_the_command_is_shown(tmp_path: Path) -> None:
    assert row_lengths.COMMAND in row_lengths.markdown(tmp_path)
    if not machine.has_gpu():
        assert row_lengths.main([]) == 2
