"""Tables of training runs, generated from records; empty without records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.gpt2.report import run_tables

MACHINE: dict[str, Any] = {
    "device": "One GPU", "date": "2026-11-21T22:30", "commit": "1a3e4f8000", "dirty": False,
    "versions": {"torch": "2.11.0"},
}  # fmt: skip


def record(folder: Path, name: str, **fields: Any) -> None:
    train = {"batch": 64, "length": 1024, "compile": False, "accumulate": 1, "dtype": "bfloat16"}
    content = {
        "machine": MACHINE, "model": {"ops": fields.pop("ops", "weft")}, "train": train,
        "parameters": 124e6, "steps": 60, "tokens_a_second": 600e3, "mfu": 0.487,
        "memory_bytes": 20 << 30, "first_loss": 10.9, "loss": 4.0, "validation": 4.1,
        "seconds": 30.0, "sample": "First Citizen:\nWe", "curve": [[1.0, 10.9], [2.0, 9.0]],
        "validations": [[0, 10.9], [60, 4.1]], **fields,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"train-{name}.json").write_text(json.dumps(content))


def rows(text: str) -> dict[str, list[str]]:
    split = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    return {cells[0]: cells[1:] for cells in split}


def test_tables_without_records_are_empty(tmp_path: Path) -> None:
    record(tmp_path / "gpu", "tiny")
    record(tmp_path / "gpu", "scale-ddp-2")  # without a run on one GPU to compare it with
    assert run_tables.plot_seeds(tmp_path, tmp_path / "x.svg") is None
    for block in ("seeds_table", "speed_table", "scaling_tables", "profile_tables"):
        assert getattr(run_tables, block)(tmp_path) == "", block
    assert list(rows(run_tables.run_table(tmp_path))) == ["run", "---", "tiny, 124 M"]


def test_comparison_tables(tmp_path: Path) -> None:
    gpu = tmp_path / "gpu"
    for seed, (ours, theirs) in enumerate(((1.50, 1.52), (1.53, 1.50), (1.48, 1.52))):
        record(gpu, f"shakespeare-weft-{seed}", validation=ours)
        record(gpu, f"shakespeare-torch-{seed}", validation=theirs, ops="torch")
    seeds_table = run_tables.seeds_table(tmp_path)
    cells = rows(seeds_table)
    assert cells["validation, weft"] == ["1.5000", "1.5300", "1.4800", "1.5033", "0.0500"]
    assert cells["validation, weft less torch"][:4] == ["-0.0200", "+0.0300", "-0.0400", "-0.0100"]
    assert "**One GPU**, 2026-11-21, commit 1a3e4f8000" in seeds_table and "First Citizen:" in seeds_table
    record(gpu, "124M-b32-torch", ops="torch", tokens_a_second=500e3)
    record(gpu, "124M-b64-weft")
    record(gpu, "1.5B-b8-weft", mfu=None)
    speeds = run_tables.speed_table(tmp_path)
    assert [line[:9] for line in speeds.splitlines()[4:]] == ["| 124M | ", "| 124M | ", "| 1.5B | "]
    assert "| 600,000 | 48.7 % | 20.0 GiB |" in speeds
    record(gpu, "scale-one")
    record(gpu, "scale-ddp-2", tokens_a_second=1.14e6)
    record(gpu, "same-one")
    record(gpu, "same-fsdp-4", curve=[[1.0, 10.9], [2.0, 9.02], [3.0, 8.0]])
    cells = rows(run_tables.scaling_tables(tmp_path))
    assert cells["ddp, 2 GPUs"][:2] == ["570,000", "95.0 %"]
    assert cells["fsdp, 4 GPUs"][:2] == ["0.0200", "0.0100"]
    row = {"what": "linear dx", "us": 12000.0, "launches": 48.0, "floor_us": 9000.0}
    profile = {"step_us": 100e3, "busy_us": 90e3, "beyond_us": 10e3, "gaps_us": 9e3, "rows": [row]}
    record(gpu, "profile-124M", profile=profile)
    cells = rows(run_tables.profile_tables(tmp_path))
    assert cells["linear dx"] == ["12.00 ms", "12.0 %", "48", "9.00 ms", "75 %"]
    assert cells["outside kernels"][:2] == ["10.00 ms", "10.0 %"]
    assert run_tables.run_table(tmp_path) == ""  # each run is in a table above


def test_plot_of_the_seeds(tmp_path: Path) -> None:
    record(tmp_path / "gpu", "shakespeare-weft-0")
    record(tmp_path / "gpu", "shakespeare-torch-0", ops="torch", validation=4.3)
    path = run_tables.plot_seeds(tmp_path, tmp_path / "x.svg")
    assert path is not None
    plot_svg = path.read_text()
    assert "validation, torch, seed 0" in plot_svg and "between 4.100 and 4.300" in plot_svg
