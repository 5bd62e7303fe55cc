"""Records: a verdict and a timing with the machine's fingerprint, one JSON line each.

Every table, plot, page and comparison is drawn from records; nothing downstream runs a kernel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError

PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found: ``status`` pass or fail, and a line of detail."""

    check: str
    status: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What checking one implementation at one case and direction found.

    ``tolerance_used`` is the largest error as a share of what was allowed (1.0 is the limit);
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
    """What measuring found. Times are in microseconds a call; ``None`` means not measured here.

    ``cold`` is the headline: the median with no useful line in the cache. ``interval`` is the 95 %
    bootstrap interval of that median; ``samples`` are all of them, throttled ones included and
    counted in ``throttled``. ``clocks`` holds what was read beside each round.
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
    throttled: int = 0
    flags: tuple[str, ...] = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Verdict + timing + machine: the unit that everything shown is drawn from.

    ``floor`` (us), ``gbps`` and ``tflops`` come from the operator's cost and the device's measured
    ceilings; ``efficiency`` = floor / cold. ``machine`` is the fingerprint. ``kernels`` are the
    names of what really ran, the longest first, from a profiler in a pass of its own.
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

    def to_json(self) -> dict[str, Any]:
        """The record as plain data, with the keys of the machine-readable contract on top."""
        data = asdict(self)
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
        """The record that :meth:`to_json` wrote; raises :class:`WeftError` on another shape."""
        try:
            rest = {k: v for k, v in data.items() if k in Record.__dataclass_fields__}
            verdict = dict(data["detail"]["verdict"])
            verdict["findings"] = tuple(Finding(**f) for f in verdict["findings"])
            verdict["seeds"] = tuple(verdict["seeds"])
            timing = data["detail"]["timing"]
            if timing is not None:
                lists = ("interval", "samples", "flags")
                timing = Timing(**{**timing, **{k: tuple(timing[k]) for k in lists}})
            rest |= {"verdict": Verdict(**verdict), "timing": timing, "flags": tuple(data["flags"])}
            rest |= {"kernels": tuple(data.get("kernels", ()))}
            return Record(**rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise WeftError(
                "not a Weft record",
                expected="a line that `weft bench --save` or `--json` wrote",
                got=f"{type(error).__name__}: {error}",
            ) from error


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records to a JSON-lines file so that a kill or a full disk costs no earlier record.

    All lines go out in one write to a file opened for appending, then to the disk. A torn last line
    (from a kill in mid-write) is ended first, so that it harms no line after it; a write that
    fails is cut back off.
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
    """All records of a JSON-lines file, and how many torn lines were passed over.

    Raises :class:`WeftError` where the file is missing or holds no record at all.
    """
    if not path.exists():
        raise WeftError("no such records file", got=path, hint="write one: weft bench --save FILE")
    records, torn = [], 0
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            torn += 1
            continue
        records.append(Record.from_json(data))
    if not records:
        raise WeftError("no records in file", got=path, hint="write some: weft bench --save FILE")
    return records, torn
