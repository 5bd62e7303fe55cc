"""The page: one self-contained HTML file from records, with no network and nothing trusted.

Everything a record says is escaped by the templates; a content security policy lets only the
page's own script run and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from weft.core.implementation import BACKENDS
from weft.core.record import FAIL, PASS, UNSUPPORTED, Record
from weft.workbench.report import scales, svg
from weft.workbench.report.bandwidth import bandwidth_roof
from weft.workbench.report.charts import bars, closeness
from weft.workbench.report.devices import DeviceRecords, by_device
from weft.workbench.report.ladders import Ladder, ladders
from weft.workbench.report.roofline import roofline
from weft.workbench.report.rows import OTHER, Row, mapping

BACKEND_SAYS = {
    "eager": "composed by hand from torch calls",
    "torch": "the library's own fused call",
    "compile": "eager through torch.compile",
    "triton": "a Triton kernel",
    "cuda": "CUDA C++ through NVRTC",
    "numba": "numba.cuda, or njit on a CPU",
    OTHER: "a backend this page does not know",
}
# The versions that a figure hangs on; the fingerprint at the foot has all of them.
NAMED = ("weft", "python", "torch", "triton", "numba", "cuda")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One reason, and everything that it holds for."""

    reason: str
    rows: tuple[Row, ...]

    @property
    def who(self) -> list[str]:
        return list(dict.fromkeys(f"{r.operator} {r.implementation}" for r in self.rows))


def page(records: Iterable[Record], *, torn: int = 0, title: str = "Weft report") -> str:
    """The report as HTML. ``torn`` is how many lines of the files could not be read."""
    devices = by_device(records)
    rows = [r for d in devices for r in d.rows]
    used = {r.backend for r in rows}
    script = Markup(_source("page.js"))
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=title,
            torn=torn,
            devices=[_device(d, i) for i, d in enumerate(devices)],
            counts={s: sum(r.status == s for r in rows) for s in (PASS, FAIL, UNSUPPORTED)},
            legend=[(b, BACKEND_SAYS[b], svg.swatch(b)) for b in (*BACKENDS, OTHER) if b in used],
            style=Markup(_source("page.css")),
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            many=len(devices) > 1,
        )
    )


def _device(device: DeviceRecords, index: int) -> dict[str, Any]:
    refused = [r for r in device.rows if r.status == UNSUPPORTED]
    untimed = [r for r in device.rows if r.status == PASS and not r.timed]
    return {
        "id": f"device-{index + 1}",
        "data": device,
        "facts": _facts(device),
        "ceilings": _ceilings(device),
        "closeness": closeness(device),
        "plots": [p for p in (bandwidth_roof(device), roofline(device)) if p],
        "bars": _by_operator(bars(device)),
        "ladders": _folded(ladders(device)),
        "failed": [r for r in device.rows if r.status == FAIL],
        "unsupported": _refusals(refused),
        "untimed": _refusals(untimed),
        "tally": _tally(device),
        "machines": [flatten(m) for m in device.machines],
    }


def _facts(device: DeviceRecords) -> list[tuple[str, str]]:
    """What a reader must know to judge a figure: the date, the commit, the driver, the versions."""
    machine = device.machine
    commit = str(machine.get("commit") or "")[:12]
    if commit and machine.get("dirty"):
        commit += " (with uncommitted changes)"
    versions = mapping(machine.get("versions"))
    date = str(machine.get("date") or "")[:16].replace("T", " ")
    facts = [("date", date), ("commit", commit)]
    facts += [(k, str(machine.get(k) or "")) for k in ("arch", "driver", "os")]
    facts += [(k, str(versions.get(k) or "")) for k in NAMED]
    return [(k, v) for k, v in facts if v]


def _ceilings(device: DeviceRecords) -> list[tuple[str, str]]:
    """What the device was measured to reach; nothing where the records do not say."""
    roofs, facts = device.roofs, []
    if not roofs.derived:
        facts.append(("copy", scales.unit(roofs.copy, "B/s")))
        facts.append(("read", scales.unit(roofs.read, "B/s")))
        for rate, value in roofs.matrix.items():
            facts.append((rate, scales.unit(value, "FLOP/s")))
    return [(k, v) for k, v in facts if v != scales.NONE]


def flatten(machine: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """A fingerprint as rows of dotted name and value, nested mappings opened."""
    found: list[tuple[str, str]] = []
    for key, value in machine.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found += flatten(value, f"{name}.")
        else:
            told = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((name, scales.NONE if value is None else told))
    return found


def _by_operator(charts: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for chart in charts:
        found.setdefault(chart.operator, []).append(chart)
    return found


def _folded(found: list[Ladder]) -> list[tuple[Ladder, list[Ladder]]]:
    """Each ladder at its largest case, with the same ladder's other cases behind it."""
    groups: dict[tuple[str, str], list[Ladder]] = {}
    for ladder in found:
        groups.setdefault((ladder.operator, ladder.backend), []).append(ladder)
    return [(group[0], group[1:]) for group in groups.values()]


def _refusals(rows: list[Row]) -> list[Refusal]:
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        reasons.setdefault(row.why, []).append(row)
    return [Refusal(reason=k, rows=tuple(v)) for k, v in reasons.items()]


def _tally(device: DeviceRecords) -> list[dict[str, Any]]:
    """Verdicts counted by operator and implementation, with the most of a tolerance used."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in device.rows:
        groups.setdefault((row.operator, row.implementation), []).append(row)
    return [
        {
            "operator": operator,
            "implementation": name,
            "backend": rows[0].backend,
            **{s: sum(r.status == s for r in rows) for s in (PASS, FAIL, UNSUPPORTED)},
            "used": max(filter(None, (r.tolerance_used for r in rows)), default=None),
        }
        for (operator, name), rows in groups.items()
    ]


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weft.workbench.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "time": scales.time,
        "share": scales.share,
        "percent": scales.percent,
        "times": scales.times,
        "unit": scales.unit,
        "digits": lambda v: scales.NONE if v is None else scales.digits(v),
        "swatch": svg.swatch,
        "unbroken": scales.unbroken,
    }
    return environment


def _source(name: str) -> str:
    """A file of the templates folder as it stands."""
    environment = _templates()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
