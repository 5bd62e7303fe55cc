"""Table of a patched and an unpatched training step, from committed records of ``weft.nn.measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.workbench.report.markdown import RESULTS, dates_and_commits, table
from weft.workbench.report.scales import NONE

RECORDS = ("nn-gpt2.json", "nn-llama.json")
COMMAND = "python3 -m weft.nn.measure --save results/<device>/nn-gpt2.json"
HEAD = ("a training step", "ms", "of unpatched", "peak memory, MiB", "of unpatched")


def all_records(results: Path = RESULTS) -> str:
    """Return every committed record as Markdown; the command that measures if there is none."""
    records = [read_json(f) for name in RECORDS for f in sorted(results.glob(f"*/{name}"))]
    return "\n".join(map(to_markdown, records)) if records else f"not measured yet: `{COMMAND}`\n"


def to_markdown(record: dict[str, Any]) -> str:
    """Return one record: what was measured and where, and a row for each variant of the model."""
    machine, model = record["machine"], record["model"]
    name = model.get("name", "GPT-2")
    liger = f", liger {record['liger']}" if "liger" in record else ""
    caption = (
        f"**{machine['device']}**, {dates_and_commits([machine])}, "
        f"torch {machine['versions']['torch']}, transformers {record['transformers']}{liger}: "
        f"{name} of {model['parameters'] / 1e6:.4g} M parameters, "
        f"{record['batch']} x {record['length']} tokens a step, {record['dtype']}; medians.\n"
    )
    unpatched = record["ways"]["unpatched"]
    rows = [
        (
            variant,
            f"{data['median_ms']:.4g}",
            _percentage(data["median_ms"], unpatched["median_ms"]),
            NONE if data["peak_bytes"] is None else f"{data['peak_bytes'] / 2**20:.0f}",
            _percentage(data["peak_bytes"], unpatched["peak_bytes"]),
        )
        for variant, data in record["ways"].items()
    ]
    return f"{caption}\n{table(HEAD, rows, ' rrrr')}"


def _percentage(value: float | None, whole: float | None) -> str:
    return NONE if value is None or whole is None else f"{100 * value / whole:.1f} %"
