"""Text of inspected kernels for a terminal: tables of facts, and source lines with their SASS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.core.table import Column, Number, Table
from weft.workbench.explain.inspect import facts
from weft.workbench.explain.inspect import ptx as reading
from weft.workbench.explain.inspect.kernel import Kernel
from weft.workbench.explain.inspect.listing import Listing, source_line

FOLD = 16  # characters to which facts are folded at least
PTX_COLUMNS = 64  # of a line of PTX, before the kind of its statement
MAX_COLUMNS = 3  # kernels with a column of facts each; more kernels have a row each


def summary(kernels: Sequence[Kernel]) -> Table:
    """Return a table with a column a kernel for few kernels, else with a row a kernel."""
    return _columns(kernels) if len(kernels) <= MAX_COLUMNS else _rows(kernels)


def _columns(kernels: Sequence[Kernel]) -> Table:
    labels = [k.program.label for k in kernels]
    names = [f"{k.name}\n{t}" if t != k.name else t for k, t in zip(kernels, labels, strict=True)]
    columns = [facts.facts(k) for k in kernels]
    return Table(
        [Column("", style="dim"), *(Column(name, fold=FOLD) for name in names)],
        [(fact, *(column[fact] for column in columns)) for fact in columns[0]],
    )


def _rows(kernels: Sequence[Kernel]) -> Table:
    columns = (
        Column("kernel", fold=FOLD),
        Column("reg.", numeric=True),
        Column("spills"),
        Column("occup.", numeric=True, unit="%"),
        Column("loads", 1),
        Column("stores", 1),
        Column("shared", 2, numeric=True, unit="B"),
        Column("block", 3, numeric=True),
        Column("limit", 4),
        Column("tensor", 5, fold=FOLD),
    )
    return Table(columns, [(_short(k), *_row(k)) for k in kernels])


def _short(kernel: Kernel) -> str:
    label = kernel.program.label
    return label if label.startswith(kernel.name) else f"{kernel.name} {label}"


def _row(kernel: Kernel) -> list[str]:
    occupied, counts, spilled = kernel.occupancy, kernel.counts, kernel.spills
    dynamic = kernel.dynamic
    spills = "?" if spilled is None else f"{sum(spilled)} B" if any(spilled) else "none"
    kinds = dict.fromkeys(name.partition(".")[0] for name in counts.tensor)
    share = 100 * occupied.share if occupied else None
    shared = None if dynamic is None else kernel.code.shared + dynamic
    return [
        Number(str(kernel.code.registers), kernel.code.registers),
        spills,
        Number("?" if share is None else f"{share:.0f} %", share),
        _widest(kernel, "loads"),
        _widest(kernel, "stores"),
        Number("?" if shared is None else facts.size(shared), shared),
        Number(str(kernel.threads or "?"), kernel.threads),
        ",".join(n.removesuffix(" memory") for n in occupied.limits) if occupied else "?",
        ", ".join(kinds) or "none",
    ]


def _widest(kernel: Kernel, access: str) -> str:
    """Format the widest loads or stores of global memory: bits, or the engine that copies."""
    names = [f"TMA {access}"] + ([] if access == "stores" else ["bulk copies"])
    engines = [name for name in names if name in kernel.counts.bulk]
    kinds = [f"global {access}", f"generic {access}"] + ([] if access == "stores" else ["async copies"])
    widest = max(kernel.counts.widest(kind) for kind in kinds)
    engine = [engines[0].partition(" ")[0]] if engines else []
    return " + ".join(engine + ([f"{widest} bit"] if widest else [])) or "none"


def comparison(left: Sequence[Kernel], right: Sequence[Kernel]) -> Table:
    """Return the facts of two implementations side by side; differing rows are bold with a star."""
    rows = facts.compare(left, right)
    names = (k.implementation for k in (*left, *right))
    return Table(
        [Column(""), Column("fact"), *(Column(name, fold=FOLD) for name in names)],
        [("*" if row.differs else "", row.fact, *row.left, *row.right) for row in rows],
        styles=["bold" if row.differs else "dim" for row in rows],
    )


def sass(listing: Listing) -> Iterator[str]:
    """Yield SASS in the order of its addresses, under the source lines that it came from."""
    current = None
    for instruction in listing.sass:
        location = listing.shown_location(instruction)
        if location != current and location is not None:
            number = listing.file_number(location)
            assert number is not None
            file = listing.files[number]
            line = source_line(file.path, location.line).strip()
            yield f"{file.name}:{location.line}  {line}"
            current = location
        if instruction.label:
            yield f"  {instruction.label}:"
        code = f"{instruction.predicate:>5} {instruction.opcode:<26} {instruction.operands}"
        yield f"    {instruction.offset:04x}  {code}".rstrip()


def ptx(listing: Listing) -> Iterator[str]:
    """Yield the kernel's PTX, with the number of instructions that came from each line."""
    for line in listing.ptx:
        yield f"{_gutter(line.instructions)} {line.number:5d}  {line.text.rstrip()}"


def ptx_explained(listing: Listing) -> Iterator[str]:
    """Yield the kernel's PTX with the kind of each statement behind its line."""
    lines = [line.text for line in listing.ptx]
    for shown, begun in zip(ptx(listing), reading.statements(lines), strict=True):
        kinds = " + ".join(f"{s.kind.name}{f', {s.bits} bits' if s.bits else ''}" for s in begun)
        yield f"{shown.expandtabs(4):<{PTX_COLUMNS}}  // {kinds}" if kinds else shown


def ptx_kinds(counts: Sequence[reading.KindCount]) -> Table:
    """Return the kinds of a kernel's PTX: their numbers, what they do, and what to look for."""
    columns = (
        Column("kind", fold=FOLD),
        Column("lines", numeric=True),
        Column("of them", fold=FOLD),
        Column("what it does", fold=FOLD),
        Column("what to look for", 1, fold=FOLD),
    )
    rows = []
    for row in counts:
        details = [facts.widths({str(bits): n for bits, n in row.widths.items()})] if row.widths else []
        details += [f"{row.predicated} with a predicate"] if row.predicated else []
        cells = (", ".join(details), row.kind.does, row.kind.look_for or reading.NOTHING)
        rows.append((row.kind.name, Number(str(row.count), row.count), *cells))
    return Table(columns, rows)


def source(listing: Listing) -> Iterator[str]:
    """Yield the source lines that became code, with the number of instructions that came from each."""
    for file in listing.files:
        yield f"{file.path}"
        for number, run in enumerate(file.runs):
            if number:
                yield "     ..."
            for line in run:
                yield f"{_gutter(line.instructions)} {line.number:5d}  {line.text}"


def _gutter(count: int) -> str:
    return f"{count:4d}" if count else "    "
