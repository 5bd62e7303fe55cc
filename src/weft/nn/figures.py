"""The table of a patched and an unpatched training step, drawn from committed records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.workbench.figures import RESULTS, table
from weft.workbench.report.scales import NONE

RECORD = "nn-gpt2.json"
COMMAND = "python3 -m weft.nn.measure --save results/<device>/" + RECORD
HEAD = ("a training step", "ms", "of unpatched", "peak memory, MiB", "of unpatched")


def figures(results: Path = RESULTS) -> str:
    """Every committed record as Markdown; what to run where there is none."""
    found = [json.loads(f.read_text()) for f in sorted(results.glob(f"*/{RECORD}"))]
    return "\n".join(map(drawn, found)) if found else f"not measured yet: `{COMMAND}`\n"


def drawn(record: dict[str, Any]) -> str:
    """One record: what it was measured on and of, and a row for each way."""
    here, model = record["machine"], record["model"]
    changed = " with uncommitted changes" if here["dirty"] else ""
    head = (
        f"**{here['device']}**, {here['date'][:10]}, commit {str(here['commit'])[:10]}{changed}, "
        f"torch {here['versions']['torch']}, transformers {record['transformers']}: GPT-2 of "
        f"{model['parameters'] / 1e6:.3g} M parameters, {record['batch']} x {record['length']} "
        f"tokens a step, {record['dtype']}; medians.\n"
    )
    own = record["ways"]["unpatched"]
    rows = [
        (
            way,
            f"{data['median_ms']:.4g}",
            _share(data["median_ms"], own["median_ms"]),
            NONE if data["peak_bytes"] is None else f"{data['peak_bytes'] / 2**20:.0f}",
            _share(data["peak_bytes"], own["peak_bytes"]),
        )
        for way, data in record["ways"].items()
    ]
    return f"{head}\n{table(HEAD, rows, ' rrrr')}"


def _share(part: float | None, whole: float | None) -> str:
    return NONE if part is None or whole is None else f"{100 * part / whole:.1f} %"
