"""Source, PTX and SASS of one kernel, and which line of one came of which line of another."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import weft
from weft.workbench.inspect.gather import listing
from weft.workbench.inspect.kernel import Kernel
from weft.workbench.inspect.ptx import body
from weft.workbench.inspect.sass import Instruction, Place

AROUND = 3  # lines of a source file shown before and after those that became code
PACKAGE = Path(weft.__file__).resolve().parent
LIBRARIES = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Line:
    """One line of source or PTX, and how many instructions came of it."""

    number: int
    text: str
    instructions: int


@dataclass(frozen=True)
class SourceFile:
    """What is shown of a file: the lines around those that became code, in runs."""

    path: Path
    runs: tuple[tuple[Line, ...], ...]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Side:
    """A kernel's three texts. An instruction's ``places`` name files as ``files`` does."""

    kernel: Kernel
    files: tuple[SourceFile, ...]
    ptx: tuple[Line, ...]
    sass: tuple[Instruction, ...]

    def file(self, place: Place) -> int | None:
        """The number of a place's file; None where it cannot be read here."""
        path = _found(place.file, self.kernel.program.file)
        return next((i for i, f in enumerate(self.files) if f.path == path), None)

    def shown_at(self, instruction: Instruction) -> Place | None:
        """The place to show it under: the innermost in the kernel's own file, if any."""
        own = [p for p in instruction.places if self.file(p) == 0]
        known = own or [p for p in instruction.places if self.file(p) is not None]
        return known[0] if known else None


def side_by_side(kernel: Kernel) -> Side:
    """A kernel's source, PTX and SASS; the kernel's own file first."""
    code = listing(kernel)
    own = kernel.program.file
    by_file: dict[Path, Counter[int]] = {own: Counter()}
    for instruction in code:
        # A line that is met twice on the way in, as recursion or a macro has it, counts once.
        for place in dict.fromkeys(instruction.places):
            path = _found(place.file, own)
            if path is not None:
                by_file.setdefault(path, Counter())[place.line] += 1
    files = tuple(SourceFile(p, tuple(_runs(p, lines))) for p, lines in by_file.items() if lines)
    ptx = Counter(i.ptx for i in code if i.ptx is not None)
    return Side(kernel, files, tuple(_ptx(kernel, ptx)), code)


@cache
def _found(file: str, own: Path) -> Path | None:
    """A file as the compiler named it, here; None where it is nowhere to be read.

    Triton's cache may hold what another checkout compiled: the same code by another path, which is
    looked for here by the part below ``weft/``, or below the folder of libraries.
    """
    path = Path(file)
    if path.name == own.name:
        return own
    if path.is_file():
        return path
    parts = path.parts
    homes = {PACKAGE.name: PACKAGE, "site-packages": LIBRARIES}
    for name, home in homes.items():
        if name in parts:
            below = parts[len(parts) - parts[::-1].index(name) :]
            here = home.joinpath(*below)
            return here if here.is_file() else None
    return None


@cache
def _text(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(errors="replace").splitlines())
    except OSError:
        return ()


def source_line(path: Path, number: int) -> str:
    """One line of a file, numbered from 1; empty past its end."""
    lines = _text(path)
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _runs(path: Path, used: Counter[int]) -> Iterator[tuple[Line, ...]]:
    """Runs of lines around those used, no two of which overlap or touch."""
    run: list[Line] = []
    for number, text in enumerate(_text(path), 1):
        if any(n in used for n in range(number - AROUND, number + AROUND + 1)):
            run.append(Line(number, text, used[number]))
        elif run:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)


def _ptx(kernel: Kernel, used: Counter[int]) -> Iterator[Line]:
    """The kernel's own PTX, and besides what its instructions came of (functions called)."""
    lines = kernel.program.ptx.splitlines()
    own = body(lines, kernel.code.name)
    for number, text in enumerate(lines, 1):
        if number in own or number in used:
            yield Line(number, text, used[number])
