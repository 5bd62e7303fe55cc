"""What docs/extension.md shows of a committed run of an extension's ``build_all.py``."""

from __future__ import annotations

import json
from pathlib import Path

from weft.workbench.figures import RESULTS, table

MEASURE = "`python build_all.py --json > extension.json`, committed under `results/<device>/`"


def built(folder: Path = RESULTS) -> str:
    """Seconds a way from nothing, and whether all gave the same bits, one table a device."""
    told = [_one(file) for file in sorted(folder.glob("*/extension.json"))]
    return "\n\n".join(told) or f"Not measured yet: {MEASURE}."


def _one(file: Path) -> str:
    said = json.loads(file.read_text())
    rows, where = [], ""
    for way, one in said["ways"].items():
        took = f"{one['seconds']:.1f} s" if "seconds" in one else "-"
        where = f"{one['device']}, PyTorch {one['torch']}" if "device" in one else where
        rows.append([f"`{way}`", took, _bits(one)])
    here = said["machine"]
    named = f"{where or 'No GPU'}, nvcc {here['nvcc']}, {here['cores']} cores, {here['date'][:10]}"
    good = "All are right, with the same bits." if said["good"] else "**Not all agree.**"
    heads = ["way", "build, from nothing", "bits of relu, add, matmul"]
    return f"{named}:\n\n{table(heads, rows)}\n\n{good}"


def _bits(one: dict[str, object]) -> str:
    answers = one.get("answers")
    if isinstance(answers, dict):
        return " ".join(f"`{bits[:6]}`" for bits in answers.values())
    return str(one.get("reason", "not called"))
