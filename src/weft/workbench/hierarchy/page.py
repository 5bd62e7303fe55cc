"""The page's block on the hierarchy, drawn from committed records; nothing is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.workbench.figures import RESULTS, table
from weft.workbench.hierarchy.show import READINGS, off, quantity, size

PICTURE = "hierarchy.svg"
COMMAND = (
    "weft device --measure --hierarchy --save results/<device>/hierarchy.json "
    f"--picture results/<device>/{PICTURE}"
)


def measured(folder: Path = RESULTS) -> str:
    """Each committed ``hierarchy.json``, one heading a device; or the command that makes one."""
    parts = [
        "\n".join(_device(json.loads(file.read_text()), file))
        for file in sorted(folder.glob("*/hierarchy.json"))
    ]
    return "\n".join(parts) if parts else f"not measured yet: `{COMMAND}`\n"


def _device(said: Mapping[str, Any], file: Path) -> Iterator[str]:
    here = said["machine"]
    changed = " with uncommitted changes" if here.get("dirty") else ""
    commit = str(here.get("commit") or "unknown")[:10]
    yield f"### {here['device']}\n"
    yield f"{here['date'][:10]}, commit {commit}{changed}, in {said['seconds']:.0f} s.\n"
    yield table(("level", "by", "known", *READINGS, "within 10 %"), _held(said), "  rrr")
    yield from _store(said)
    yield table(("curve", "plateau", "from", "to"), _flat(said), " rrr")
    yield table(("what", "measured", "expected", "off"), _figures(said), " rrr")
    if (file.parent / PICTURE).exists():
        yield f"![Latency by working set](../{(file.parent / PICTURE).as_posix()})\n"


def _held(said: Mapping[str, Any]) -> Iterator[list[str]]:
    for one in said["series"]:
        for found in one["held"]:
            head = [found["level"], f"{one['kind']}, {one['label']}", size(found["known"])]
            if "leaves" not in found:
                yield [*head, "no break", "", "no"]
                continue
            told = [f"{size(found[r])} ({off(found[f'{r}_off'])})" for r in READINGS]
            yield [*head, *told, " and ".join(found["within"]) or "**neither**"]


def _store(said: Mapping[str, Any]) -> Iterator[str]:
    """L1 against the part of its store that shared memory may take: neither gets all of it."""
    most = said["known"].get("shared")
    for found in said["series"][0]["held"]:
        if most and found["level"] == "L1" and "leaves" in found:
            yield (
                f"L1 and shared memory divide one store of {size(found['known'])}, of which shared "
                f"memory gets {size(most)} at most, and L1, by where its plateau is left, "
                f"{size(found['leaves'])}: {off(found['leaves'] / most - 1)} against shared "
                "memory's.\n"
            )


def _flat(said: Mapping[str, Any]) -> Iterator[list[str]]:
    for one in said["series"]:
        for flat in one["plateaus"]:
            ns = f" ({flat['ns']:.3g} ns)" if "ns" in flat else ""
            told = quantity(flat["value"], one["unit"]) + ns
            yield [f"{one['kind']}, {one['label']}", told, size(flat["first"]), size(flat["last"])]


def _figures(said: Mapping[str, Any]) -> Iterator[list[str]]:
    for one in said["figures"]:
        told = [one["label"], quantity(one["value"], one["unit"])]
        expected = quantity(one["expected"], one["unit"]) if "expected" in one else ""
        yield [*told, expected, off(one["off"]) if "off" in one else ""]
