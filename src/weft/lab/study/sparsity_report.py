"""Report of the sparsity study, from its record alone: tables, sentences, and the page's generated parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.core.text import slug
from weft.lab.study import sparsity_memory as memory
from weft.lab.study.sparsity import BLOCK, CSR, DENSE, MODES, QUICK_DENSITIES, SEMI, SIDES, crossover, fastest
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, digits, percent, time, times

RECORD = "study-sparsity.json"  # its name under results/<device>/
PICTURES = "../pictures"  # as seen from docs/speed/, with one folder for each device
EXAMPLE = (4096, 4096)  # outputs and inputs of the weight in the page's memory table
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
SPARSE_KINDS = (*((BLOCK, side) for side in SIDES), (CSR, 0))
Record = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[list[str]]]


def by(sizes: Sequence[int]) -> str:
    """Return ``4096 x 4096`` of sizes."""
    return " x ".join(map(str, sizes))


def kind_name(kind: str, block: int = 0) -> str:
    """Return the name of a kind of sparsity in tables."""
    return f"blocks of {block}" if block else {CSR: "unstructured (CSR)"}.get(kind, kind)


def title(record: Record, size: Sequence[int], mode: str) -> str:
    m, n, k = size
    return f"{mode}: {m} rows, {n} outputs, {k} inputs, {record['dtype']}"


def modes(record: Record, size: Sequence[int]) -> list[str]:
    """Return the modes that were measured at a size: a stopped study may lack one."""
    measured = {row["mode"] for row in record["rows"] if list(row["size"]) == list(size)}
    return [mode for mode in MODES if mode in measured]


def dense_us(record: Record, size: Sequence[int], mode: str) -> float | None:
    """Return the time of the fastest dense product, or None."""
    rows = fastest(dict(record), size, mode, DENSE)
    return rows[1.0]["us"] if rows else None


def times_table(record: Record, size: Sequence[int], mode: str) -> Table:
    """Return one row for each kind: at each density its time, the speed against dense, the implementation."""
    densities, dense = record["densities"], dense_us(record, size, mode)
    rows = []
    for kind, block in ((DENSE, 0), (SEMI, 0), *SPARSE_KINDS):
        timed = fastest(dict(record), size, mode, kind, block)
        at = [0.5 if kind == SEMI else 1.0] if kind in (DENSE, SEMI) else densities
        cells = [_time_text(timed.get(density), dense) for density in at]
        if kind in (DENSE, SEMI):
            # One time, of its own density; a row of a table has a cell for each density.
            column = densities.index(0.5) if kind == SEMI and 0.5 in densities else 0
            cells = [cells[0] if i == column else "" for i in range(len(densities))]
        rows.append([kind_name(kind, block), *cells])
    return ("weight", *(f"density {density:g}" for density in densities)), rows


def _time_text(row: Mapping[str, Any] | None, dense: float | None) -> str:
    if row is None:
        return NONE
    speed = f" {times(dense / row['us'])}" if dense and row["kind"] != DENSE else ""
    return f"{time(row['us'])}{speed} ({row['impl']})"


def crossing(
    record: Record, size: Sequence[int], mode: str, kind: str, block: int
) -> tuple[str, float | None]:
    """Return how and at which density a kind of weight crosses the dense product, see ``crossover``."""
    dense = dense_us(record, size, mode)
    timed = fastest(dict(record), size, mode, kind, block)
    if dense is None:
        return "unknown", None
    return crossover({density: row["us"] for density, row in timed.items()}, dense)


def crossing_text(how: str, density: float | None) -> str:
    """Return a crossover in words."""
    if density is None:
        return "not timed"
    text = digits(100 * density, 2)
    return {
        "below": f"below {text} %",
        "all": f"at {text} % and below",
        "none": f"not at {text} %",
    }[how]


def crossover_table(record: Record) -> Table:
    """Return one row for each size and mode: the density below which each kind is faster than dense."""
    rows = []
    for size in record["sizes"]:
        for mode in modes(record, size):
            dense = dense_us(record, size, mode)
            semi = fastest(dict(record), size, mode, SEMI).get(0.5)
            speed = times(dense / semi["us"]) if dense and semi else "not timed"
            cells = [crossing_text(*crossing(record, size, mode, *kind)) for kind in SPARSE_KINDS]
            rows.append([by(size), mode, speed, *cells])
    names = [kind_name(*kind) for kind in SPARSE_KINDS]
    return ("rows x outputs x inputs", "mode", "2:4 against dense", *names), rows


def not_timed(record: Record) -> list[str]:
    """Return the reasons why implementations were not timed, with their number."""
    counts: dict[str, int] = {}
    for row in record["rows"]:
        if row["reason"]:
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return [f"not timed ({count}): {reason}" for reason, count in counts.items()]


def memory_table(n: int, k: int, dtype: str, densities: Sequence[float] = QUICK_DENSITIES) -> Table:
    """Return the bytes of a weight (N, K) by kind and density, and the share of the dense weight."""
    item = ITEMSIZE[dtype]
    dense = memory.dense(n, k, item)
    entries = [("dense", 1.0, dense), ("2:4", 0.5, memory.semi_structured(n, k, item))]
    for block in SIDES:
        if not (n % block or k % block):
            name = kind_name(BLOCK, block)
            entries += [(name, d, memory.in_blocks(n, k, item, block, d)) for d in densities]
    entries += [(kind_name(CSR), d, memory.unstructured(n, k, item, d)) for d in densities]
    rows = []
    for name, density, size in entries:
        shares = [percent(total / dense.inference) for total in (size.inference, size.training)]
        counts = [f"{count:,}" for count in (size.values, size.metadata, size.transposed)]
        rows.append([name, f"{density:g}", *counts, *shares])
    head = ("weight", "density", "values", "metadata", "for the transposed product")
    return (*head, "inference, of dense", "training, of dense"), rows


def memory_markdown() -> str:
    """Return the memory table of the page's example."""
    head, rows = memory_table(*EXAMPLE, "bf16")
    return table(head, rows, "  rrrrr")


def sentences(record: Record) -> list[str]:
    """Answer which sparsity pays, for each size and mode: a sentence each."""
    lines = []
    for size in record["sizes"]:
        for mode in modes(record, size):
            dense = dense_us(record, size, mode)
            if dense is None:
                continue
            semi = fastest(dict(record), size, mode, SEMI).get(0.5)
            texts = [f"2:4 is {times(dense / semi['us'])} as fast as dense"] if semi else []
            pays = [(kind, crossing(record, size, mode, *kind)) for kind in SPARSE_KINDS]
            texts += [
                f"{kind_name(*kind)} {'pays' if kind[0] == CSR else 'pay'} {crossing_text(*crossed)}"
                for kind, crossed in pays
                if crossed[0] in ("below", "all")
            ]
            never = [kind_name(*kind) for kind, crossed in pays if crossed[0] == "none"]
            texts += [f"no gain at any density: {', '.join(never)}"] if never else []
            lines.append(f"{mode.capitalize()} at {by(size)} (dense: {time(dense)}): {'; '.join(texts)}.")
    return lines


def markdown(results: Path = RESULTS) -> str:
    """Return every committed study as Markdown, or the sentence that there is none."""
    files = sorted(results.glob(f"*/{RECORD}"))
    if not files:
        return "Not measured yet on a GPU: `weft study sparsity`\n"
    return "\n".join(block for path in files for block in _study_blocks(read_json(path)))


def _study_blocks(record: Record) -> Iterator[str]:
    fingerprint = record["machine"]
    changed = " with uncommitted changes" if fingerprint.get("dirty") else ""
    versions = fingerprint["versions"]
    name = fingerprint["device"]
    yield f"### {name}\n"
    yield (
        f"**{name}**, {fingerprint['date'][:10]}, commit {str(fingerprint['commit'])[:10]}{changed}, weft "
        f"{versions['weft']}, torch {versions['torch']}, {record['dtype']}.\n"
    )
    yield "".join(f"- {line}\n" for line in sentences(record))
    head, rows = crossover_table(record)
    yield table(head, rows, "  r")
    folder = f"{PICTURES}/{slug(name)}"
    yield (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" '
        f'srcset="{folder}/study-sparsity-dark.svg">\n'
        f'  <img alt="Time against dense by density" src="{folder}/study-sparsity-light.svg">\n</picture>\n'
    )
    for size in record["sizes"]:
        for mode in modes(record, size):
            yield f"{title(record, size, mode).capitalize()}:\n"
            head, rows = times_table(record, size, mode)
            yield table(head, rows, " " + "r" * (len(head) - 1))
