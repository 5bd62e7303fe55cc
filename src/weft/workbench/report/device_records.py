"""Records for display: read from files, made safe to show, and grouped by device.

Record files can come from anyone, and :meth:`Record.from_json` checks names, not types. A :class:`Row` holds
finite floats or None, and strings; the modules that render rows do not check types again.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.implementation import BACKENDS
from weft.core.record import FAIL, PASS, UNSUPPORTED, Record, read
from weft.workbench.report.scales import share

COMPOSED = ("eager", "compile")  # speed-ups are against the faster of these two
OTHER = "other"
MAX_ENTRIES = 20_000  # files and folders below a folder of records
HUGE = 1e30  # larger than any real time, rate or size; larger values would break the axes


def load(paths: Iterable[Path]) -> tuple[list[Record], int]:
    """Return all records of files, and of every ``.jsonl`` file in folders, in the order of the paths.

    The second value is the number of torn lines that were skipped. Raises :class:`WeftError` if a path is
    missing, holds no record, or holds something else, or is a folder of more than ``MAX_ENTRIES`` files.
    """
    records: list[Record] = []
    torn = 0
    for path in paths:
        files = _record_files(path) if path.is_dir() else [path]
        if not files:
            raise WeftError(
                "no records in folder",
                expected="at least one .jsonl file",
                got=path,
                hint="write one: weft bench --save FILE",
            )
        for file in files:
            try:
                file_records, file_torn = read(file)
            except (UnicodeDecodeError, OSError) as error:
                raise WeftError(
                    f"{file} could not be read as records",
                    expected="a text file of JSON lines",
                    got=f"{type(error).__name__}: {error}",
                ) from error
            records += file_records
            torn += file_torn
    return records, torn


def _record_files(folder: Path) -> list[Path]:
    """Return the ``.jsonl`` files below a folder, sorted; refuse a folder that is a whole disk."""
    files, entries = [], 0
    for root, folders, names in os.walk(folder):  # follows no links, as ``rglob``
        entries += len(folders) + len(names)
        if entries > MAX_ENTRIES:
            raise WeftError(
                "too many files below a folder",
                expected=f"a folder of records, with at most {MAX_ENTRIES} files and folders",
                got=folder,
                hint="name the record files, or the folder that holds them",
            )
        files += [Path(root, name) for name in names if name.endswith(".jsonl")]
    return sorted(files)


def number(value: object) -> float | None:
    """Return ``value`` as a finite float below ``HUGE``, or None."""
    # bool is a subclass of int, but True is not a time.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:  # JSON allows integers that no float can hold
        return None
    # Not true for NaN either, which compares as False.
    return converted if abs(converted) < HUGE else None


def positive(value: object) -> float | None:
    """Return ``value`` as a finite float above zero, which a logarithmic axis can show, or None."""
    converted = number(value)
    return converted if converted is not None and converted > 1 / HUGE else None


def strings(value: object) -> tuple[str, ...]:
    """Return a string, or the items of any iterable, as a tuple of strings."""
    if isinstance(value, str):
        return (value,)
    return tuple(str(v) for v in value) if isinstance(value, Iterable) else ()


def mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Record that is ready to show. Times are in microseconds; ``efficiency`` is a share of 1.

    ``limit`` is the shortest time that the measured peaks allow (``floor`` in the record). ``speedup`` is
    against the faster of eager and compile at the same case, direction and device. ``doubt`` is why the limit
    is doubtful; it is empty for a good one.
    """

    operator: str
    implementation: str
    backend: str
    case: str
    direction: str
    status: str
    reason: str
    idea: str
    flags: tuple[str, ...]
    cold: float | None
    low: float | None
    high: float | None
    p10: float | None
    p90: float | None
    warm: float | None
    host: float | None
    first: float | None
    limit: float | None
    gbps: float | None
    tflops: float | None
    efficiency: float | None
    nbytes: float | None
    flops: float | None
    rate: str
    tolerance_used: float | None
    findings: tuple[tuple[str, str, str], ...]
    samples: int
    speedup: float | None = None
    doubt: str = ""

    @property
    def share_of_limit(self) -> str:
        """Efficiency as text in percent, with ``~`` before it if the ceilings are doubtful."""
        return ("~" if self.doubt and self.efficiency is not None else "") + share(self.efficiency)

    @property
    def point(self) -> tuple[str, str, str]:
        """Operator, case and direction: rows of one point are compared with each other."""
        return (self.operator, self.case, self.direction)

    @property
    def timed(self) -> bool:
        return self.cold is not None

    @property
    def step(self) -> int | None:
        """Number of a ladder's step (``cuda/03-...`` is 3), else None."""
        _, _, tail = self.implementation.partition("/")
        return int(tail[:2]) if tail[:2].isascii() and tail[:2].isdigit() else None

    @property
    def ours(self) -> bool:
        """True if the kernel is written in Weft, not in a library or by a compiler."""
        return self.backend in ("triton", "cuda", "numba")

    @property
    def suspect(self) -> bool:
        """True if the timing checks reject this time: it is shown, but never as the best."""
        return any(flag.startswith("suspect") for flag in self.flags)

    @property
    def why_untimed(self) -> str:
        """Reason why this row has no time; never empty for a row without one."""
        if self.reason:
            return self.reason
        return "passed, not timed" if self.status == PASS else "no reason was recorded"


def row_of(record: Record) -> Row:
    """Return one record as a row."""
    timing, verdict = record.timing, record.verdict
    low, high = None, None
    if timing is not None and len(timing.interval) == 2:
        low, high = positive(timing.interval[0]), positive(timing.interval[1])
    # An unknown status counts as a failure: it must not look like a pass.
    status = verdict.status if verdict.status in (PASS, FAIL, UNSUPPORTED) else FAIL
    flags = dict.fromkeys(strings(record.flags) + (strings(timing.flags) if timing else ()))
    return Row(
        operator=str(record.operator),
        implementation=str(record.implementation),
        backend=str(record.backend) if record.backend in BACKENDS else OTHER,
        case=str(record.case),
        direction=str(record.direction),
        status=status,
        reason=str(verdict.reason or ""),
        idea=str(record.idea or ""),
        flags=tuple(flags),
        cold=positive(timing.cold) if timing else None,
        low=low,
        high=high,
        p10=positive(timing.p10) if timing else None,
        p90=positive(timing.p90) if timing else None,
        warm=positive(timing.warm) if timing else None,
        host=positive(timing.host) if timing else None,
        first=positive(timing.first) if timing else None,
        limit=positive(record.floor),
        gbps=positive(record.gbps),
        tflops=positive(record.tflops),
        efficiency=positive(record.efficiency),
        nbytes=positive(record.nbytes),
        flops=number(record.flops),
        rate=str(record.rate or ""),
        tolerance_used=number(verdict.tolerance_used),
        findings=tuple((str(f.check), str(f.status), str(f.detail)) for f in verdict.findings),
        samples=len(timing.samples) if timing else 0,
        doubt=str(record.doubt or ""),
    )


def with_speedups(rows: list[Row]) -> list[Row]:
    """Return the rows with their speed-up over the faster of eager and compile."""
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.implementation in COMPOSED and row.cold is not None and row.status == PASS:
            best[row.point] = min(row.cold, best.get(row.point, math.inf))
    return [
        replace(row, speedup=best[row.point] / row.cold)
        if row.cold is not None and row.point in best
        else row
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Measured peak rates of a device: bytes/s of a copy and a read and, by rate name, FLOP/s.

    ``derived`` is True if the records carry no peaks and these were computed from their limits.
    """

    copy: float | None
    read: float | None
    matrix: Mapping[str, float]
    derived: bool


@dataclass(frozen=True, kw_only=True)
class DeviceRecords:
    """All rows of one device.

    ``machines`` are the distinct fingerprints without peaks, the latest last. ``superseded`` counts
    records that a later one of the same implementation, case and direction replaces.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]
    machines: tuple[Mapping[str, Any], ...]
    peaks: Peaks
    superseded: int

    @property
    def timed(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.timed)

    @property
    def latest(self) -> float:
        """When the latest record was made, in seconds."""
        return _date(self.machines[-1])

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.operator for r in self.rows))

    @property
    def points(self) -> dict[tuple[str, str, str], list[Row]]:
        """Rows by operator, case and direction: the fastest first, untimed ones last."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.point, []).append(row)
        # Operators keep the order of the records; within one operator, forward comes first.
        order = {name: i for i, name in enumerate(self.operators)}
        keys = sorted(groups, key=lambda p: (order[p[0]], p[2] != "forward"))
        return {k: sorted(groups[k], key=lambda r: (r.cold is None, r.cold or 0)) for k in keys}

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why shares of the limit are doubtful, each once."""
        return tuple(dict.fromkeys(r.doubt for r in self.rows if r.doubt))

    @property
    def machine(self) -> Mapping[str, Any]:
        """Fingerprint of the latest record."""
        return self.machines[-1]


def by_device(records: Iterable[Record]) -> list[DeviceRecords]:
    """Return the records grouped by device, in the order in which the devices first appear."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        machine = mapping(record.machine)
        key = (str(machine.get("device") or "unknown device"), str(machine.get("kind") or ""))
        groups.setdefault(key, []).append(record)
    return [_device(name, kind, group) for (name, kind), group in groups.items()]


def _date(machine: Mapping[str, Any]) -> float:
    """Return when a record was made, in seconds; -inf if it does not say, so that any other is later."""
    try:
        return datetime.datetime.fromisoformat(str(machine.get("date"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return -math.inf


def _device(name: str, kind: str, records: list[Record]) -> DeviceRecords:
    latest: dict[tuple[str, ...], tuple[float, Record]] = {}
    machines: list[Mapping[str, Any]] = []
    ceilings: Mapping[str, Any] = {}
    for record in records:
        names = (record.operator, record.implementation, record.case, record.direction)
        key = tuple(map(str, names))
        machine = dict(mapping(record.machine))
        # By date, since files come in the order of their names. Of equal dates, the last.
        date = _date(machine)
        if key not in latest or date >= latest[key][0]:
            latest[key] = date, record
        ceilings = mapping(machine.pop("ceilings", None)) or ceilings
        machine.pop("load", None)  # differs at each point
        if machine in machines:  # move it to the end: the latest record's machine is the last
            machines.remove(machine)
        machines.append(machine)
    machines.sort(key=_date)
    rows = with_speedups([row_of(record) for _, record in latest.values()])
    return DeviceRecords(
        name=name,
        kind=kind,
        rows=tuple(rows),
        machines=tuple(machines),
        peaks=_recorded_peaks(ceilings) or _derived_peaks(rows),
        superseded=len(records) - len(latest),
    )


def _recorded_peaks(ceilings: Mapping[str, Any]) -> Peaks | None:
    copy, read_rate = positive(ceilings.get("copy")), positive(ceilings.get("read"))
    if not (copy or read_rate):
        return None
    matrix = {str(k): positive(v) for k, v in mapping(ceilings.get("matrix")).items()}
    known = {k: v for k, v in matrix.items() if v is not None}
    return Peaks(copy=copy, read=read_rate, matrix=known, derived=False)


def _derived_peaks(rows: list[Row]) -> Peaks:
    """Return peaks from limits: bytes / limit if bytes decide the limit, FLOPs / limit otherwise."""
    rates = [(r, r.nbytes / r.limit * 1e6) for r in rows if r.limit and r.nbytes]
    # Rows without a FLOP rate are bound by bytes alone, so their limit gives the bandwidth exactly.
    bandwidth = max((b for r, b in rates if not r.rate), default=None)
    bandwidth = bandwidth or max((b for _, b in rates), default=None)
    matrix: dict[str, float] = {}
    for row, bytes_per_s in rates:
        # Rows whose limit allows clearly less than the bandwidth are bound by FLOPs; 2 % covers rounding.
        compute_bound = bandwidth is not None and bytes_per_s < 0.98 * bandwidth
        if row.rate and compute_bound and row.flops and row.limit:
            matrix[row.rate] = max(matrix.get(row.rate, 0.0), row.flops / row.limit * 1e6)
    return Peaks(copy=bandwidth, read=None, matrix=matrix, derived=True)
