"""What kernels' names say, as Markdown: the fixture's names, and those of committed records."""

from __future__ import annotations

import json
from pathlib import Path

from weft.workbench.figures import RESULTS, table
from weft.workbench.kernel_names import decode
from weft.workbench.kernel_words import Kernel

FIXTURE = Path("tests/data/kernel_names.jsonl")
NOT_YET = "not measured yet: `weft bench --save results/<device>/<what>.jsonl` on a GPU names them"
LONGEST = 72


def fixture(file: Path = FIXTURE) -> str:
    """Every name of the fixture, read: library by library, the longest names cut."""
    lines = file.read_text().splitlines()
    kernels = sorted((decode(json.loads(line)["name"]) for line in lines), key=lambda k: k.library)
    return _table(kernels)


def recorded(folder: Path = RESULTS) -> str:
    """The kernels that committed records name, device by device, and what their names say."""
    parts = []
    for place in sorted(folder.glob("*")):
        if names := _names(place):
            parts += [f"`{place.name}`:", "", _table([decode(n) for n in sorted(names)]), ""]
    return "\n".join(parts).rstrip() or NOT_YET


def _names(folder: Path) -> set[str]:
    """Names in a device's records: plain ones, and a profile's, which says more of each."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            told = json.loads(line).get("kernels", ())
            found.update(k["name"] if isinstance(k, dict) else k for k in told)
    return found


def _table(kernels: list[Kernel]) -> str:
    rows = [
        [k.library, f"`{_cut(k)}`", k.says() or "-", ", ".join(f"`{u}`" for u in k.unread) or "-"]
        for k in kernels
    ]
    return table(["library", "name", "what it says", "unread"], rows)


def _cut(kernel: Kernel) -> str:
    """The name as it is where it is short; else without its types, and no longer than a cell."""
    name = kernel.name if len(kernel.name) <= LONGEST else kernel.short
    return name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
