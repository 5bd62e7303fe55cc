"""Listing of one kernel: source, PTX and SASS, with the lines that came from one another."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import weft
from weft.workbench.explain.inspect.compile import instructions
from weft.workbench.explain.inspect.kernel import Kernel, ptx_lines_of
from weft.workbench.explain.inspect.sass import Instruction, SourceLocation

CONTEXT_LINES = 3  # lines of a source file shown before and after those that became code
PACKAGE = Path(weft.__file__).resolve().parent
LIBRARIES = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Line:
    """Line of source or PTX, and the number of instructions that came from it."""

    number: int
    text: str
    instructions: int


@dataclass(frozen=True)
class SourceFile:
    """Shown part of a file: the lines around those that became code, in runs of neighbours."""

    path: Path
    runs: tuple[tuple[Line, ...], ...]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Listing:
    """Source files, PTX and SASS of a kernel; ``locations`` of instructions refer to ``files``."""

    kernel: Kernel
    files: tuple[SourceFile, ...]
    ptx: tuple[Line, ...]
    sass: tuple[Instruction, ...]

    def file_number(self, location: SourceLocation) -> int | None:
        """Return the index of a location's file; None if the file cannot be read here."""
        path = _local_path(location.file, self.kernel.program.file)
        return next((i for i, f in enumerate(self.files) if f.path == path), None)

    def shown_location(self, instruction: Instruction) -> SourceLocation | None:
        """Return the location to list an instruction under, preferably in the kernel's own file."""
        own = [p for p in instruction.locations if self.file_number(p) == 0]
        readable = own or [p for p in instruction.locations if self.file_number(p) is not None]
        return readable[0] if readable else None


def make_listing(kernel: Kernel) -> Listing:
    """Return a kernel's listing, with the kernel's own source file first."""
    code = instructions(kernel)
    own = kernel.program.file
    by_file: dict[Path, Counter[int]] = {own: Counter()}
    for instruction in code:
        # A line that occurs twice in a chain of inlined calls (recursion, macros) counts once.
        for location in dict.fromkeys(instruction.locations):
            path = _local_path(location.file, own)
            if path is not None:
                by_file.setdefault(path, Counter())[location.line] += 1
    # The own file stays first; it is left out if no instruction came from it.
    files = tuple(SourceFile(p, tuple(_runs(p, lines))) for p, lines in by_file.items() if lines)
    ptx = Counter(i.ptx for i in code if i.ptx is not None)
    return Listing(kernel, files, tuple(_ptx_lines(kernel, ptx)), code)


@cache
def _local_path(file: str, own: Path) -> Path | None:
    """Return the local path of a file that a compiler named; None if it cannot be read here.

    Triton's cache may contain a kernel that another checkout compiled: the same code under another path.
    The file is then searched by the part of its path below ``weft/`` or below ``site-packages``.
    """
    path = Path(file)
    if path.name == own.name:
        return own
    if path.is_file():
        return path
    parts = path.parts
    roots = {PACKAGE.name: PACKAGE, "site-packages": LIBRARIES}
    for name, root in roots.items():
        if name in parts:
            # Search from the end: a checkout may itself lie in a folder called weft.
            below = parts[len(parts) - parts[::-1].index(name) :]
            local = root.joinpath(*below)
            return local if local.is_file() else None
    return None


@cache
def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(errors="replace").splitlines())
    except OSError:
        return ()


def source_line(path: Path, number: int) -> str:
    """Return one line of a file, numbered from 1; empty past its end."""
    lines = _lines(path)
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _runs(path: Path, used: Counter[int]) -> Iterator[tuple[Line, ...]]:
    """Yield runs of lines around those used; no two runs overlap or touch."""
    run: list[Line] = []
    for number, text in enumerate(_lines(path), 1):
        if any(n in used for n in range(number - CONTEXT_LINES, number + CONTEXT_LINES + 1)):
            run.append(Line(number, text, used[number]))
        elif run:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)


def _ptx_lines(kernel: Kernel, used: Counter[int]) -> Iterator[Line]:
    """Yield the kernel's own PTX, and the lines of called functions that its instructions came from."""
    lines = kernel.program.ptx.splitlines()
    own = ptx_lines_of(lines, kernel.code.name)
    for number, text in enumerate(lines, 1):
        if number in own or number in used:
            yield Line(number, text, used[number])
