"""Markdown table of all shipped kernels, from the committed output of ``weft inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.workbench.report.markdown import RESULTS, table

ARCH = 90
FILE = Path("inspect") / f"sm_{ARCH}.json"
COMMAND = f"weft inspect --all --backend triton --backend cuda --arch sm_{ARCH} --json > {RESULTS / FILE}"
Data = Mapping[str, Any]
HEAD = ("operator", "kernel", "variants", "registers", "spills", "shared memory", "occupancy")
REST = ("widest load", "tensor cores")
COMPARED = ("registers", "stack", "shared_static", "shared_dynamic", "threads", "counts")


def committed(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the kernels of the committed output; none if the file is missing."""
    file = results / FILE
    return read_json(file)["kernels"] if file.is_file() else []


def differences(now: Sequence[Data], results: Path = RESULTS) -> list[str]:
    """Return the differences between the committed output and the kernels ``now``.

    Kernels are compared by name. Their numbers are compared only if the compiler is the same, since
    another compiler may produce other numbers.
    """
    before, after = ({_key(k): k for k in kernels} for kernels in (committed(results), now))
    lines = [f"{key} is gone" for key in before.keys() - after.keys()]
    lines += [f"{key} is new" for key in after.keys() - before.keys()]
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if old["compiler"] == new["compiler"]:
            # Kernels that were not disassembled have no counts, the last of COMPARED.
            was_counted = new["counts"]["instructions"]
            names = COMPARED if was_counted else COMPARED[:-1]
            lines += [f"{key}: {name}" for name in names if old[name] != new[name]]
    return sorted(lines)


def _key(kernel: Data) -> str:
    names = ("operator", "implementation", "kernel", "label", "target")
    return " ".join(str(kernel[name]) for name in names)


def shipped(results: Path = RESULTS) -> str:
    """Return the table with one row a kernel, over all its variants (dtypes, row sizes, tiles)."""
    kernels = committed(results)
    if not kernels:
        return f"not written yet: `{COMMAND}`\n"
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for kernel in kernels:
        key = (kernel["operator"], kernel["implementation"], kernel["kernel"])
        groups.setdefault(key, []).append(kernel)
    rows = [_row(*key, group) for key, group in groups.items()]
    compilers = sorted({k["compiler"] for k in kernels})
    return table((*HEAD, *REST), rows, align="--rr----") + f"\nCompiled by {' and '.join(compilers)}.\n"


def _row(operator: str, implementation: str, name: str, group: Sequence[Data]) -> list[str]:
    spilled = [k["label"] for k in group if k["stack"]]
    known = [k for k in group if k["shared_dynamic"] is not None]
    shared = [k["shared_static"] + k["shared_dynamic"] for k in known]
    occupancies = [k["occupancy"] for k in group if k["occupancy"]]
    limits = dict.fromkeys(limit for occupancy in occupancies for limit in occupancy["limits"])
    shares = _span([round(100 * occupancy["share"]) for occupancy in occupancies], " %")
    tensor = dict.fromkeys(t.partition(".")[0] for k in group for t in k["counts"]["tensor"])
    return [
        f"{operator} {implementation}",
        f"`{name}`",
        str(len(group)),
        _span([k["registers"] for k in group]),
        f"{len(spilled)} of {len(group)}" if spilled else "none",
        _span([round(n / 1024, 1) for n in shared], " KiB"),
        f"{shares} ({', '.join(limits)})" if occupancies else "unknown",
        _widest(group),
        ", ".join(tensor) or "none",
    ]


def _span(values: Iterable[float], unit: str = "") -> str:
    """Format the smallest and the largest value, or the only one.

    >>> _span([32, 16, 64]), _span([0.0, 0.0], " KiB")
    ('16 to 64', '0 KiB')
    """
    distinct = sorted(set(values))
    if not distinct:
        return "unknown"
    text = f"{distinct[0]:g}" if len(distinct) == 1 else f"{distinct[0]:g} to {distinct[-1]:g}"
    return text + unit


def _widest(group: Sequence[Data]) -> str:
    """Format the widest loads from global memory: bits a thread, or the engine that copies."""
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
