"""Tables of decoded kernel names as Markdown: those of the tests' fixture and of committed records."""

from __future__ import annotations

import json
from pathlib import Path

from weft.workbench.kernels.fields import Kernel
from weft.workbench.kernels.names import decode
from weft.workbench.report.markdown import RESULTS, table

FIXTURE = Path("tests/data/kernel_names.jsonl")
NOT_YET = "not measured yet: `weft bench --save results/<device>/<what>.jsonl` on a GPU names them"
LONGEST = 72


def fixture(file: Path = FIXTURE) -> str:
    """Return a table of every name of the fixture, sorted by library; long names are shortened."""
    lines = file.read_text().splitlines()
    kernels = sorted((decode(json.loads(line)["name"]) for line in lines), key=lambda k: k.library)
    return _table(kernels)


def recorded(folder: Path = RESULTS) -> str:
    """Return a table of the kernels in the committed records of each device."""
    parts = []
    for device in sorted(folder.glob("*")):
        if names := _names(device):
            parts += [f"`{device.name}`:", "", _table([decode(n) for n in sorted(names)]), ""]
    return "\n".join(parts).rstrip() or NOT_YET


def _names(folder: Path) -> set[str]:
    """Return the names in a device's records: plain ones, and those of profiles."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            kernels = json.loads(line).get("kernels", ())
            names.update(k["name"] if isinstance(k, dict) else k for k in kernels)
    return names


def _table(kernels: list[Kernel]) -> str:
    rows = [
        [k.library, f"`{_cut(k)}`", k.summary() or "-", ", ".join(f"`{u}`" for u in k.unread) or "-"]
        for k in kernels
    ]
    return table(["library", "name", "what it says", "unread"], rows)


def _cut(kernel: Kernel) -> str:
    """Return the name if it is short, else its short form, cut to the width of a cell."""
    name = kernel.name if len(kernel.name) <= LONGEST else kernel.short
    return name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
