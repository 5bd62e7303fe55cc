"""The sparsity study of ``weft study``: its options, its measurement, its tables and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.cli import ending, output, progress
from weft.cli.busy import warn_if_busy

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ("sizes", "densities", "dtype")
FILE = "sparsity.json"
PARTIAL = "rows"  # a stopped study is saved if it has this field
NEEDS_MATPLOTLIB = False
DTYPES = ("fp32", "bf16", "fp16")


def format_number() -> int:
    """Return the format of the records that this version reads."""
    from weft.lab.study.sparsity import FORMAT

    return FORMAT


def measure(device: str | None, options: Mapping[str, str | None], quick: bool) -> dict[str, Any]:
    """Run the study; ``options`` are the texts of ``OPTIONS``. Raises :class:`WeftError` for bad ones."""
    from weft.core import WeftError
    from weft.lab.study import sparsity
    from weft.machine import known_kind

    kind = known_kind(device)
    defaults = (sparsity.QUICK_SIZES if quick else sparsity.SIZES)[kind]
    sizes = defaults if options["sizes"] is None else tuple(_size(t) for t in options["sizes"].split(","))
    text = options["densities"]
    default = sparsity.QUICK_DENSITIES if quick else sparsity.DENSITIES
    densities = default if text is None else tuple(_density(t) for t in text.split(","))
    dtype = options["dtype"] or ("bf16" if kind == "cuda" else "fp32")
    if dtype not in DTYPES:
        raise WeftError("--dtype", expected=" or ".join(DTYPES), got=dtype)
    warn_if_busy(kind)
    if kind == "cpu":
        output.log("note: no GPU: small sizes on the CPU, where only PyTorch's own calls and eager run")
    with progress.Progress(every_line=True) as status:
        seconds = sparsity.expected_seconds(kind, len(sizes), quick)
        status.announce(seconds, ending.count_text(len(sizes), "size"))
        return sparsity.run(kind, sizes, sorted(set(densities)), dtype, quick=quick, log=status)


def _size(text: str) -> tuple[int, int, int]:
    from weft.core import WeftError

    parts = text.strip().split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise WeftError("--sizes", expected="rows x outputs x inputs, such as 16x4096x4096", got=text)
    m, n, k = (int(p) for p in parts)
    if n % 16 or k % 16:
        expected = "outputs and inputs in multiples of 16, which 2:4 and the smallest blocks need"
        raise WeftError("--sizes", expected=expected, got=text)
    return m, n, k


def _density(text: str) -> float:
    from weft.core import WeftError

    try:
        density = float(text)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise WeftError("--densities", expected="shares above 0 and at most 1, such as 0.5,0.1", got=text)
    return density


def plot_all(record: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the picture into a folder, light and dark."""
    from weft.lab.study.sparsity_svg import plot_all

    return plot_all(record, out)


def show(record: dict[str, Any]) -> None:
    """Print a table for each size and mode, the crossovers, the memory and the faults."""
    from dataclasses import replace

    from weft.core.table import plain_table
    from weft.lab.study import sparsity_report as report

    for size in record["sizes"]:
        for mode in report.modes(record, size):
            columns, rows = report.times_table(record, size, mode)
            table = plain_table(columns, rows, numeric=columns[1:])
            output.show_table(replace(table, title=report.title(record, size, mode)))
            print()
    columns, rows = report.crossover_table(record)
    output.show_table(replace(plain_table(columns, rows, fold=14), title="faster than dense"))
    print()
    _, n, k = record["sizes"][0]
    columns, rows = report.memory_table(n, k, record["dtype"])
    title = f"memory of a weight {n} x {k}, {record['dtype']}"
    output.show_table(replace(plain_table(columns, rows, numeric=columns[2:]), title=title))
    output.show_notes(report.not_timed(record), style="")
    output.show_notes([f"wrong: {line}" for line in record["wrong"]], style="red")


def verdict(record: Mapping[str, Any], ending_text: str, stopped: bool) -> str:
    """Return the last line: the faults, the number of products, and ``ending_text``: time and files."""
    timed = sum(row["us"] is not None for row in record["rows"])
    text = f"{ending.count_text(timed, 'product')} timed on {record['device']} {ending_text}"
    if record["wrong"]:
        return f"wrong: {ending.count_text(len(record['wrong']), 'fault')} in {text}"
    if stopped:
        return f"stopped: {text}"
    return f"good: {text}"
