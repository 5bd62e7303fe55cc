"""Reader of an SQLite export of Nsight Systems: device work, API calls and NVTX ranges. Times are in ns.

The tables are those of the schema that NVIDIA documents for ``nsys export --type sqlite``. nsys creates a
table when its first row comes, so each of them may be absent; a table that is there must have the columns
that are read here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.core import WeftError
from weft.core.json_files import regular_size

HEADER = b"SQLite format 3\0"
HINT = "write one by: nsys export --type sqlite --output FILE.sqlite REPORT.nsys-rep"
KERNEL, COPY, FILL = "kernel", "copy", "fill"

KERNELS, COPIES, FILLS = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS, RANGES, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # whole CUDA graphs, where their kernels are not traced
TABLES = (KERNELS, COPIES, FILLS, CALLS, RANGES)

_WORK = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_LAUNCH = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
PUSH_POP, START_END = 59, 60  # event types of NVTX_EVENTS that are ranges
_PROCESS_SHIFT = 24  # a global thread id is the process's global id, then 24 bits of the thread's

# CUpti_ActivityMemcpyKind and CUpti_ActivityMemoryKind of CUPTI's documentation.
COPY_KINDS = {
    1: "host to device",
    2: "device to host",
    3: "host to array",
    4: "array to host",
    5: "array to array",
    6: "array to device",
    7: "device to array",
    8: "device to device",
    9: "host to host",
    10: "peer to peer",
}
MEMORY_KINDS = {1: "pageable", 2: "pinned", 3: "device", 4: "array", 5: "managed"}


class Work(NamedTuple):
    """Kernel, copy or fill on a device. ``grid`` and ``block`` are a kernel's, ``nbytes`` a copy's or fill's.

    ``source`` and ``target`` are the kinds of a copy's memory, such as ``pinned``; "" if unknown.
    """

    start: int
    end: int
    kind: str
    name: str
    device: int
    stream: int
    process: int
    correlation: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int | None = None
    shared: int | None = None
    nbytes: int = 0
    source: str = ""
    target: str = ""


class ApiCall(NamedTuple):
    """Call of CUDA's runtime or driver on the host."""

    start: int
    end: int
    name: str
    process: int
    thread: int
    correlation: int


class Range(NamedTuple):
    """NVTX range. ``thread`` is None if it began and ended independently of a thread's other ranges."""

    start: int
    end: int
    name: str
    process: int
    thread: int | None


@dataclass(frozen=True, kw_only=True)
class Export:
    """Content of an export, each list sorted by start.

    ``n_graphs`` are launches of CUDA graphs whose kernels were not traced one by one.
    """

    work: tuple[Work, ...]
    calls: tuple[ApiCall, ...]
    ranges: tuple[Range, ...]
    n_graphs: int = 0

    @property
    def kernels(self) -> list[Work]:
        return [w for w in self.work if w.kind == KERNEL]


def load(file: Path) -> Export:
    """Read an export.

    Raises :class:`WeftError` for a file that is no SQLite database, has none of the tables, or has one
    without a column that is needed or with a value of another type.
    """
    try:
        regular_size(file)
        with file.open("rb") as opened:
            header = opened.read(len(HEADER))
    except (OSError, ValueError) as error:
        raise WeftError(f"{file} cannot be read", expected="a file", got=error) from error
    if header != HEADER:
        kind = "an empty file" if not header else "a file of another format"
        raise WeftError(f"{file} is not an SQLite export of nsys", got=kind, hint=HINT)
    try:
        # Read-only: a file that is evidence must not change, and no journal appears beside it.
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _Reader(file, database).read()
    except sqlite3.Error as error:
        raise WeftError(f"{file} is damaged", expected="an SQLite export of nsys", got=error) from error


class _Reader:
    """Reads the tables of one database."""

    def __init__(self, file: Path, database: sqlite3.Connection) -> None:
        self.file, self.database = file, database
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.tables = {str(name) for (name,) in names}
        self.strings: dict[int, str] = {}

    def read(self) -> Export:
        if not self.tables & set(TABLES):
            got = ", ".join(sorted(self.tables)[:4]) or "no table"
            expected = f"one of {KERNELS}, {CALLS}, {RANGES}"
            raise WeftError(f"{self.file} has no trace of a GPU", expected=expected, got=got, hint=HINT)
        if STRINGS in self.tables:
            self.strings = {i: str(v) for i, v in self._rows(STRINGS, ("id", "value"), text=("value",))}
        elif self.tables & {KERNELS, CALLS}:
            got = f"{', '.join(sorted(self.tables & set(TABLES)))} without it"
            raise WeftError(f"{self.file} is incomplete", expected=f"the table {STRINGS}", got=got)
        work = [*self._kernels(), *self._copies(), *self._fills()]
        calls = [*self._calls()]
        timed: list[Work | ApiCall] = [*work, *calls]
        for row in timed:
            if row.end < row.start:
                got = f"{row.name} from {row.start} to {row.end}"
                raise WeftError(f"{self.file} is damaged", expected="ends after their starts", got=got)
        latest = max((row.end for row in timed), default=0)
        return Export(
            work=tuple(sorted(work)),
            calls=tuple(sorted(calls)),
            ranges=tuple(sorted(self._ranges(latest), key=lambda r: (r.start, -r.end))),
            n_graphs=len(list(self._rows(GRAPHS, ("start",)))),
        )

    def _kernels(self) -> Iterator[Work]:
        columns = self._columns(KERNELS)
        name = "demangledName" if "demangledName" in columns else "shortName"
        for row in self._rows(KERNELS, (*_WORK, name), (*_LAUNCH, "registersPerThread", *_SHARED)):
            start, end, device, stream, correlation, process, name_id, *launch = row
            *sizes, registers, static, dynamic = launch
            shape = () if None in sizes else tuple(sizes)
            yield Work(
                *(start, end, KERNEL, self._string(name_id), device, stream),
                *(process >> _PROCESS_SHIFT, correlation),
                grid=shape[:3],
                block=shape[3:],
                registers=registers,
                shared=None if None in (static, dynamic) else static + dynamic,
            )

    def _copies(self) -> Iterator[Work]:
        for row in self._rows(COPIES, (*_WORK, "bytes", "copyKind"), ("srcKind", "dstKind")):
            start, end, device, stream, correlation, process, nbytes, kind, source, target = row
            yield Work(
                *(start, end, COPY, COPY_KINDS.get(kind, f"copy of kind {kind}"), device, stream),
                *(process >> _PROCESS_SHIFT, correlation),
                nbytes=nbytes,
                source=MEMORY_KINDS.get(source, ""),
                target=MEMORY_KINDS.get(target, ""),
            )

    def _fills(self) -> Iterator[Work]:
        for row in self._rows(FILLS, (*_WORK, "bytes")):
            start, end, device, stream, correlation, process, nbytes = row
            where = (device, stream, process >> _PROCESS_SHIFT, correlation)
            yield Work(start, end, FILL, "fill", *where, nbytes=nbytes)

    def _calls(self) -> Iterator[ApiCall]:
        for row in self._rows(CALLS, ("start", "end", "nameId", "globalTid", "correlationId")):
            start, end, name, thread, correlation = row
            yield ApiCall(start, end, self._string(name), thread >> _PROCESS_SHIFT, thread, correlation)

    def _ranges(self, latest: int) -> Iterator[Range]:
        needed, texts = ("start", "eventType", "globalTid"), ("end", "text", "textId")
        # Other events, such as the names of domains, have no times and no thread.
        only = f"WHERE [eventType] IN ({PUSH_POP}, {START_END})"
        for row in self._rows(RANGES, needed, texts, text=("text",), only=only):
            start, kind, thread, end, text, text_id = row
            name = text if text is not None else self.strings.get(text_id, "(no name)")
            # A range without an end was open when the trace stopped.
            end = end if end is not None and end >= start else max(latest, start)
            owner = thread if kind == PUSH_POP else None
            yield Range(start, end, str(name), thread >> _PROCESS_SHIFT, owner)

    def _string(self, number: int) -> str:
        # A kernel whose name the export lacks still has its time: the number tells such kernels apart.
        return self.strings.get(number, f"(name {number})")

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self.database.execute(f"PRAGMA table_info([{table}])")}

    def _rows(
        self,
        table: str,
        needed: Sequence[str],
        optional: Sequence[str] = (),
        *,
        text: Sequence[str] = (),
        only: str = "",
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table: the needed columns, then the optional ones, None where absent."""
        if table not in self.tables:
            return
        columns = self._columns(table)
        if missing := [name for name in needed if name not in columns]:
            got = f"without {', '.join(missing)}"
            expected = f"{table} with {', '.join(needed)}"
            raise WeftError(f"{self.file} has another schema", expected=expected, got=got, hint=HINT)
        # Brackets: SQLite reads an unknown name in double quotes as a text, and `end` is a keyword.
        names = ", ".join(f"[{name}]" if name in columns else "NULL" for name in (*needed, *optional))
        kinds: Mapping[str, type] = {name: str if name in text else int for name in (*needed, *optional)}
        for row in self.database.execute(f"SELECT {names} FROM [{table}] {only}"):
            for (name, kind), value in zip(kinds.items(), row, strict=True):
                if not isinstance(value, kind) and not (value is None and name in optional):
                    expected = f"{'text' if kind is str else 'integers'} in {table}.{name}"
                    raise WeftError(f"{self.file} is damaged", expected=expected, got=repr(value))
            yield row
