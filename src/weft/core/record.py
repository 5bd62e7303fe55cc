"""Records: a verdict and a timing with the machine's fingerprint, as one JSON line.

Every table, plot, page and comparison is generated from records. Nothing that reads a record runs a kernel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from weft.core.errors import WeftError
from weft.core.json_files import loads, read_text
from weft.core.text import printable_tree

PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"
MAX_RECORDS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one rule of the check: ``status`` is pass or fail, ``detail`` a line of text."""

    check: str
    status: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of checking one implementation at one case and direction.

    ``tolerance_used`` is the largest error as a share of what was allowed (1.0 is the limit).
    ``error`` and ``baseline_error`` are RMS errors relative to the RMS of the reference.
    """

    operator: str
    implementation: str
    case: str
    direction: str
    status: str
    reason: str = ""
    tolerance_used: float | None = None
    error: float | None = None
    baseline_error: float | None = None
    seeds: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Result of timing. Times are in microseconds for one call; ``None`` means not measured.

    ``cold`` is the headline: the median time with no useful line in the cache. ``interval`` is the 95 %
    bootstrap interval of that median. ``samples`` holds every sample; ``throttled`` counts those that were
    taken while the clock was held down. ``repeated`` holds the second samples of the rounds, of a judged
    candidate's reference. ``clocks`` holds the clocks that were read in each round.
    """

    cold: float
    warm: float | None
    host: float | None
    first: float | None
    interval: tuple[float, float]
    p10: float
    p90: float
    minimum: float
    samples: tuple[float, ...]
    calls_per_sample: int
    repeated: tuple[float, ...] = ()
    throttled: int = 0
    flags: tuple[str, ...] = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Verdict, timing and machine: the unit from which everything shown is generated.

    ``floor`` (us), ``gbps`` and ``tflops`` come from the operator's cost and the device's measured
    ceilings; ``efficiency`` = floor / cold. ``doubt`` says why these ceilings may be too low, and with them
    floor and efficiency wrong; it is empty for good ones. ``machine`` is the fingerprint with ``load``, the
    use of the machine by other processes. ``kernels`` are the names of the kernels that a profiler saw in a
    separate pass, the longest first.
    """

    operator: str
    implementation: str
    backend: str
    case: str
    direction: str
    verdict: Verdict
    timing: Timing | None
    nbytes: int
    flops: float
    rate: str | None
    floor: float | None
    gbps: float | None
    tflops: float | None
    efficiency: float | None
    flags: tuple[str, ...]
    machine: Mapping[str, Any]
    idea: str = ""
    kernels: tuple[str, ...] = ()
    doubt: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data, with the keys of the JSON contract at the top level."""
        # The JSON keys are a contract with other programs: fields are added, never renamed.
        data = asdict(self)
        # Everything of verdict and timing stays under "detail", so that from_json restores the record.
        timing = data.pop("timing")
        verdict = data["verdict"]
        data["detail"] = {"verdict": verdict, "timing": timing}
        data["verdict"] = verdict["status"]
        data["reason"] = verdict["reason"]
        kinds = ("cold", "warm", "host", "first")
        data["time_us"] = {k: timing[k] if timing else None for k in kinds}
        data["interval"] = list(timing["interval"]) if timing else None
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Record:
        """Return the record that :meth:`to_json` wrote. Raise :class:`WeftError` on other data."""
        try:
            # Unknown keys are ignored: a newer version may have written the record.
            rest = {k: v for k, v in data.items() if k in Record.__dataclass_fields__}
            verdict = dict(data["detail"]["verdict"])
            verdict["findings"] = tuple(Finding(**f) for f in verdict["findings"])
            verdict["seeds"] = tuple(verdict["seeds"])
            timing = data["detail"]["timing"]
            if timing is not None:
                lists = ("interval", "samples", "flags")
                repeated = tuple(timing.get("repeated", ()))  # older records have none
                timing = Timing(**{**timing, **{k: tuple(timing[k]) for k in lists}, "repeated": repeated})
            rest |= {"verdict": Verdict(**verdict), "timing": timing, "flags": tuple(data["flags"])}
            rest |= {"kernels": tuple(data.get("kernels", ()))}
            record = Record(**rest)
            for part in (record, record.verdict, *record.verdict.findings, *([timing] if timing else [])):
                _check_types(part)
            return record
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise WeftError(
                "not a Weft record",
                expected="a line that `weft bench --save` or `--json` wrote",
                got=f"{type(error).__name__}: {error}",
            ) from error


def _check_types(part: Any) -> None:
    """Raise TypeError for a field whose value is not of its declared type.

    A record is data from a file: a time that is text would fail far from here, in a table or a comparison.
    """
    for name, hint in _hints(type(part)).items():  # type: ignore[arg-type]
        if not _matches(getattr(part, name), hint):
            raise TypeError(f"{name} is {getattr(part, name)!r:.60}")


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _matches(value: Any, hint: Any) -> bool:
    """Return True if ``value`` is of the type ``hint``: a class, a union, a tuple or a mapping."""
    origin, arguments = get_origin(hint), get_args(hint)
    # A whole number in JSON is read as an int. A bool is an int in Python as well, but no time.
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is UnionType:
        return any(_matches(value, a) for a in arguments)
    if origin is tuple:
        items = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return len(items) == len(value) and all(map(_matches, value, items))
    if origin is not None:
        return isinstance(value, origin)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records to a JSON-lines file. A kill or a full disk loses no earlier record.

    All lines are written by one call to a file opened for appending, and flushed to the disk. A torn last
    line (from a kill in the middle of a write) is terminated first, so that it damages no line after it. A
    write that fails is truncated away.
    """
    lines = "".join(json.dumps(r.to_json(), separators=(",", ":")) + "\n" for r in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines
        data = lines.encode()
        try:
            written = os.write(descriptor, data)
            if written != len(data):
                # 28 is ENOSPC: a short write to a file means a full disk.
                raise OSError(28, "only part of the records could be written")
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise WeftError(
                f"records could not be saved to {path}",
                got=error.strerror or str(error),
                hint="the earlier records are untouched; free some space or --save elsewhere",
            ) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[list[Record], int]:
    """Return all records of a JSON-lines file, and the number of torn lines that were skipped.

    Strings are made printable: a record may come from somebody else, and its texts reach terminals and pages.
    Raises :class:`WeftError` if the file is missing or holds no record.
    """
    if not path.exists():
        raise WeftError("no such records file", got=path, hint="write one: weft bench --save FILE")
    try:
        lines = read_text(path, limit=MAX_RECORDS_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise WeftError("records cannot be read", got=f"{path}: {error}") from error
    records, torn = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            data = printable_tree(loads(line))
        except ValueError:
            torn += 1
            continue
        records.append(Record.from_json(data))
    if not records:
        raise WeftError("no records in file", got=path, hint="write some: weft bench --save FILE")
    return records, torn
