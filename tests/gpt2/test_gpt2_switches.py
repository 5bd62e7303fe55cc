"""tools/gpt2_switches.py: a record of steps with one operator switched, and its table."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from helpers.paths import SRC


def test_a_record_has_a_row_for_each_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gpt2_switches", SRC.parent / "tools/gpt2_switches.py")
    assert spec is not None and spec.loader is not None
    switches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(switches)
    monkeypatch.setattr(switches, "IMPLEMENTATIONS", ("eager", "cuda"))
    record = json.loads(json.dumps(switches.measure("tiny", 1, 1, ("layer_norm",))))
    eager, cuda = record["rows"]
    assert eager["base_ms"] > 0 and eager["switched_ms"] > 0
    assert ("reason" in cuda) == (not torch.cuda.is_available()) and "commit" in record["machine"]
    text = switches.switch_table(record)
    assert "| layer_norm | dispatch | eager |" in text and text.count("\n") == 6
