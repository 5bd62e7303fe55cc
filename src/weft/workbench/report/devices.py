"""Rows gathered by the device they were measured on, the later record of a pair winning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.record import Record
from weft.workbench.report.rows import Row, against_composed, clean, mapping, positive


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """A device's measured ceilings: bytes/s and, by rate, FLOP/s. ``derived`` where they were
    worked back from the records' floors, because the records carry no ceilings."""

    copy: float | None
    read: float | None
    matrix: Mapping[str, float]
    derived: bool


@dataclass(frozen=True, kw_only=True)
class DeviceRecords:
    """All that was recorded on one device.

    ``machines`` are the distinct fingerprints, ceilings left out, first seen first;
    ``superseded`` counts records that a later one of the same implementation, case and direction
    has replaced.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]
    machines: tuple[Mapping[str, Any], ...]
    roofs: Roofs
    superseded: int

    @property
    def timed(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.timed)

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.operator for r in self.rows))

    @property
    def points(self) -> dict[tuple[str, str, str], list[Row]]:
        """Rows by operator, case and direction: the fastest first, the untimed last."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.point, []).append(row)
        order = {name: i for i, name in enumerate(self.operators)}
        keys = sorted(found, key=lambda p: (order[p[0]], p[2] != "forward"))
        return {k: sorted(found[k], key=lambda r: (r.cold is None, r.cold or 0)) for k in keys}

    @property
    def machine(self) -> Mapping[str, Any]:
        """The fingerprint of the latest record."""
        return self.machines[-1]


def by_device(records: Iterable[Record]) -> list[DeviceRecords]:
    """One :class:`DeviceRecords` for each device named, in the order in which they first appear."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        machine = mapping(record.machine)
        key = (str(machine.get("device") or "unknown device"), str(machine.get("kind") or ""))
        found.setdefault(key, []).append(record)
    return [_gather(name, kind, held) for (name, kind), held in found.items()]


def _gather(name: str, kind: str, records: list[Record]) -> DeviceRecords:
    latest: dict[tuple[str, str, str, str], Record] = {}
    machines: list[Mapping[str, Any]] = []
    ceilings: Mapping[str, Any] = {}
    for record in records:
        key = (record.operator, record.implementation, record.case, record.direction)
        latest[tuple(map(str, key))] = record  # type: ignore[index]
        machine = dict(mapping(record.machine))
        ceilings = mapping(machine.pop("ceilings", None)) or ceilings
        if machine in machines:
            machines.remove(machine)
        machines.append(machine)
    rows = against_composed([clean(r) for r in latest.values()])
    return DeviceRecords(
        name=name,
        kind=kind,
        rows=tuple(rows),
        machines=tuple(machines),
        roofs=_roofs(ceilings, rows),
        superseded=len(records) - len(latest),
    )


def _roofs(ceilings: Mapping[str, Any], rows: list[Row]) -> Roofs:
    matrix = {str(k): positive(v) for k, v in mapping(ceilings.get("matrix")).items()}
    copy, read = positive(ceilings.get("copy")), positive(ceilings.get("read"))
    if copy or read:
        kept = {k: v for k, v in matrix.items() if v is not None}
        return Roofs(copy=copy, read=read, matrix=kept, derived=False)
    return _derived(rows)


def _derived(rows: list[Row]) -> Roofs:
    """Ceilings from floors: bytes / floor where bytes bind, FLOPs / floor where they do not."""
    bounded = [(r, r.nbytes / r.floor * 1e6) for r in rows if r.floor and r.nbytes]
    bandwidth = max((b for r, b in bounded if not r.rate), default=None)
    bandwidth = bandwidth or max((b for _, b in bounded), default=None)
    matrix: dict[str, float] = {}
    for row, reached in bounded:
        binds = bandwidth is not None and reached < 0.98 * bandwidth
        if row.rate and binds and row.flops and row.floor:
            matrix[row.rate] = max(matrix.get(row.rate, 0.0), row.flops / row.floor * 1e6)
    return Roofs(copy=bandwidth, read=None, matrix=matrix, derived=True)
