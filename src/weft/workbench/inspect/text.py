"""Kernels taken apart, for a terminal: tables of facts, and source lines with their SASS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from weft.workbench.inspect import facts as told
from weft.workbench.inspect.kernel import Kernel
from weft.workbench.inspect.side import Side, source_line

FEW = 3  # kernels that get a list of facts each; more get a line each


def summary(kernels: Sequence[Kernel]) -> Table:
    """Facts down and kernels across where there are few, else a line a kernel."""
    return _facts(kernels) if len(kernels) <= FEW else _lines(kernels)


def _facts(kernels: Sequence[Kernel]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for kernel in kernels:
        label = kernel.program.label
        table.add_column(escape(f"{kernel.name}\n{label}" if label != kernel.name else kernel.name))
    lists = [told.facts(k) for k in kernels]
    for name in lists[0]:
        table.add_row(name, *(escape(facts[name]) for facts in lists))
    return table


COLUMNS = ("reg.", "spills", "shared", "block", "occup.", "limit", "loads", "stores", "tensor")


def _lines(kernels: Sequence[Kernel]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("kernel", no_wrap=True)
    for name in COLUMNS:
        right = name in ("reg.", "shared", "block", "occup.")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "tensor")
    for kernel in kernels:
        table.add_row(escape(_short(kernel)), *map(escape, _row(kernel)))
    return table


def _short(kernel: Kernel) -> str:
    label = kernel.program.label
    return label if label.startswith(kernel.name) else f"{kernel.name} {label}"


def _row(kernel: Kernel) -> list[str]:
    full, counts, spilled = kernel.occupancy, kernel.counts, kernel.spills
    dynamic = kernel.dynamic
    moved = "?" if spilled is None else f"{sum(spilled)} B" if any(spilled) else "none"
    kinds = dict.fromkeys(name.partition(".")[0] for name in counts.tensor)
    return [
        str(kernel.code.registers),
        moved,
        "?" if dynamic is None else told.size(kernel.code.shared + dynamic),
        str(kernel.threads or "?"),
        f"{full.share:.0%}" if full else "?",
        ",".join(n.removesuffix(" memory") for n in full.limits) if full else "?",
        _widest(kernel, "loads"),
        _widest(kernel, "stores"),
        ", ".join(kinds) or "none",
    ]


def _widest(kernel: Kernel, way: str) -> str:
    """The widest access to global memory, in bits, or by which engine it goes."""
    names = [f"TMA {way}"] + ([] if way == "stores" else ["bulk copies"])
    engine = [name for name in names if name in kernel.counts.bulk]
    kinds = [f"global {way}", f"generic {way}"] + ([] if way == "stores" else ["async copies"])
    widest = max(kernel.counts.widest(kind) for kind in kinds)
    found = [engine[0].partition(" ")[0]] if engine else []
    return " + ".join(found + ([f"{widest} bit"] if widest else [])) or "none"


def comparison(left: Sequence[Kernel], right: Sequence[Kernel]) -> Table:
    """Facts of two implementations side by side; a star and bold where they differ."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("fact", no_wrap=True)
    for kernel in (*left, *right):
        table.add_column(escape(kernel.implementation))
    for row in told.compare(left, right):
        cells = (*row.left, *row.right)
        style = "bold" if row.differs else "dim"
        table.add_row("*" if row.differs else "", row.fact, *map(escape, cells), style=style)
    return table


def sass(side: Side) -> Iterator[str]:
    """SASS in the order of its addresses, under the source line that it came of."""
    before = None
    for one in side.sass:
        place = side.shown_at(one)
        if place != before and place is not None:
            number = side.file(place)
            assert number is not None
            file = side.files[number]
            line = source_line(file.path, place.line).strip()
            yield f"{file.name}:{place.line}  {line}"
            before = place
        if one.label:
            yield f"  {one.label}:"
        yield f"    {one.offset:04x}  {one.predicate:>5} {one.opcode:<26} {one.operands}".rstrip()


def ptx(side: Side) -> Iterator[str]:
    """The kernel's PTX, with the count of instructions that came of each line."""
    for line in side.ptx:
        yield f"{_gutter(line.instructions)} {line.number:5d}  {line.text.rstrip()}"


def source(side: Side) -> Iterator[str]:
    """The source lines that became code, with the count of instructions that came of each."""
    for file in side.files:
        yield f"{file.path}"
        for number, run in enumerate(file.runs):
            if number:
                yield "     ..."
            for line in run:
                yield f"{_gutter(line.instructions)} {line.number:5d}  {line.text}"


def _gutter(count: int) -> str:
    return f"{count:4d}" if count else "    "
