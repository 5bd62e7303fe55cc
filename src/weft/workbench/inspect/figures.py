"""The table of every shipped kernel, as Markdown, from the committed answer of ``weft inspect``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.workbench.figures import RESULTS, table

ARCH = 90
FILE = Path("inspect") / f"sm_{ARCH}.json"
COMMAND = (
    f"weft inspect --all --backend triton --backend cuda --arch sm_{ARCH} --json > {RESULTS / FILE}"
)
Data = Mapping[str, Any]
HEAD = ("operator", "kernel", "specimens", "registers", "spills", "shared memory", "occupancy")
REST = ("widest load", "tensor cores")
COMPARED = ("registers", "stack", "shared_static", "shared_dynamic", "threads", "counts")


def committed(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The kernels of the committed answer; none where it is not there."""
    file = results / FILE
    return json.loads(file.read_text())["kernels"] if file.is_file() else []


def differences(now: Sequence[Data], results: Path = RESULTS) -> list[str]:
    """What the committed answer tells otherwise: kernels by name, and numbers where the compiler is
    the same one. Another compiler may rightly tell other numbers."""
    before, after = ({_key(k): k for k in side} for side in (committed(results), now))
    found = [f"{key} is gone" for key in before.keys() - after.keys()]
    found += [f"{key} is new" for key in after.keys() - before.keys()]
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if old["compiler"] == new["compiler"]:
            names = COMPARED if new["counts"]["instructions"] else COMPARED[:-1]  # not counted now
            found += [f"{key}: {name}" for name in names if old[name] != new[name]]
    return sorted(found)


def _key(kernel: Data) -> str:
    names = ("operator", "implementation", "kernel", "label", "target")
    return " ".join(str(kernel[name]) for name in names)


def shipped(results: Path = RESULTS) -> str:
    """One line a kernel, over all that it is compiled for (dtypes, sizes of rows, tiles)."""
    kernels = committed(results)
    if not kernels:
        return f"not written yet: `{COMMAND}`\n"
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for kernel in kernels:
        key = (kernel["operator"], kernel["implementation"], kernel["kernel"])
        groups.setdefault(key, []).append(kernel)
    rows = [_row(*key, group) for key, group in groups.items()]
    by = sorted({k["compiler"] for k in kernels})
    return table((*HEAD, *REST), rows, align="--rr----") + f"\nCompiled by {' and '.join(by)}.\n"


def _row(operator: str, implementation: str, name: str, group: Sequence[Data]) -> list[str]:
    spilled = [k["label"] for k in group if k["stack"]]
    shared = [k["shared_static"] + k["shared_dynamic"] for k in group if _known(k)]
    full = [k["occupancy"] for k in group if k["occupancy"]]
    limits = dict.fromkeys(limit for one in full for limit in one["limits"])
    filled = _span([round(100 * one["share"]) for one in full], " %")
    tensor = dict.fromkeys(t.partition(".")[0] for k in group for t in k["counts"]["tensor"])
    return [
        f"{operator} {implementation}",
        f"`{name}`",
        str(len(group)),
        _span([k["registers"] for k in group]),
        f"{len(spilled)} of {len(group)}" if spilled else "none",
        _span([round(n / 1024, 1) for n in shared], " KiB"),
        f"{filled} ({', '.join(limits)})" if full else "unknown",
        _widest(group),
        ", ".join(tensor) or "none",
    ]


def _known(kernel: Data) -> bool:
    return kernel["shared_dynamic"] is not None


def _span(values: Iterable[float], unit: str = "") -> str:
    """The least and the most, or the one that there is.

    >>> _span([32, 16, 64]), _span([0.0, 0.0], " KiB")
    ('16 to 64', '0 KiB')
    """
    found = sorted(set(values))
    if not found:
        return "unknown"
    told = f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"
    return told + unit


def _widest(group: Sequence[Data]) -> str:
    """How the widest loads from global memory go: bits a thread, or an engine's copies."""
    engines: dict[str, None] = {}
    bits: list[int] = []
    for kernel in group:
        counts = kernel["counts"]
        if "TMA loads" in counts["bulk"]:
            engines["TMA"] = None
        elif "bulk copies" in counts["bulk"]:
            engines["bulk copy"] = None
        else:
            kinds = ("global loads", "generic loads", "async copies")
            widths = (int(w) for k in kinds for w in counts["memory"].get(k, {}))
            bits.append(max(widths, default=0))
    return " or ".join([*engines, *([_span(bits, " bits")] if bits else [])])
