"""The page: one self-contained HTML file from records, which needs no network.

Records are not trusted: the templates escape all of their text, and a content security policy allows only the
page's own script and no requests.
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
from weft.workbench.report.charts import Bars, bars, closeness
from weft.workbench.report.device_records import OTHER, DeviceRecords, Row, by_device, mapping
from weft.workbench.report.ladders import Ladder, ladders
from weft.workbench.report.roofline import bandwidth_plot, roofline

BACKEND_TITLES = {
    "eager": "plain PyTorch calls",
    "torch": "PyTorch's own fused operator",
    "compile": "the eager implementation through torch.compile",
    "triton": "a Triton kernel",
    "cuda": "CUDA C++ through NVRTC",
    "numba": "numba.cuda, or njit on a CPU",
    OTHER: "a backend unknown to this page",
}
# Versions that affect times; the fingerprint at the end of the page has all of them.
SHOWN_VERSIONS = ("weft", "python", "torch", "triton", "numba", "cuda")


@dataclass(frozen=True, kw_only=True)
class SharedReason:
    """Reason for a missing time, with all rows that it applies to."""

    reason: str
    rows: tuple[Row, ...]

    @property
    def names(self) -> list[str]:
        """Operators and implementations of the rows, each once."""
        return list(dict.fromkeys(f"{r.operator} {r.implementation}" for r in self.rows))


def page(records: Iterable[Record], *, torn: int = 0, title: str = "Weft report") -> str:
    """Return the report as HTML. ``torn`` is the number of lines of the files that could not be read."""
    devices = by_device(records)
    rows = [r for d in devices for r in d.rows]
    backends = {r.backend for r in rows}
    script = Markup(template_source("page.js"))
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            title=title,
            torn=torn,
            devices=[_device(d, i) for i, d in enumerate(devices)],
            counts={s: sum(r.status == s for r in rows) for s in (PASS, FAIL, UNSUPPORTED)},
            # The legend has the fixed order of all backends, but only those in the records.
            legend=[(b, BACKEND_TITLES[b], svg.swatch(b)) for b in (*BACKENDS, OTHER) if b in backends],
            style=Markup(template_source("page.css")),
            script=script,
            # The content security policy names this hash, so a script injected by a record cannot run.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _device(device: DeviceRecords, index: int) -> dict[str, Any]:
    unsupported = [r for r in device.rows if r.status == UNSUPPORTED]
    untimed = [r for r in device.rows if r.status == PASS and not r.timed]
    return {
        "id": f"device-{index + 1}",
        "data": device,
        "facts": _facts(device),
        "peaks": _peaks(device),
        "closeness": closeness(device),
        "plots": [p for p in (bandwidth_plot(device), roofline(device)) if p],
        "bars": _by_operator(bars(device)),
        "ladders": _by_backend(ladders(device)),
        "failed": [r for r in device.rows if r.status == FAIL],
        "unsupported": _by_reason(unsupported),
        "untimed": _by_reason(untimed),
        "tally": _tally(device),
        "machines": [flatten(m) for m in device.machines],
    }


def _facts(device: DeviceRecords) -> list[tuple[str, str]]:
    """Return what a reader needs to judge a time: date, commit, driver, versions."""
    machine = device.machine
    commit = str(machine.get("commit") or "")[:12]
    if commit and machine.get("dirty"):
        commit += " (with uncommitted changes)"
    versions = mapping(machine.get("versions"))
    date = str(machine.get("date") or "")[:16].replace("T", " ")
    facts = [("date", date), ("commit", commit)]
    facts += [(k, str(machine.get(k) or "")) for k in ("arch", "driver", "os")]
    facts += [(k, str(versions.get(k) or "")) for k in SHOWN_VERSIONS]
    return [(k, v) for k, v in facts if v]


def _peaks(device: DeviceRecords) -> list[tuple[str, str]]:
    """Return the measured peaks of the device; an empty list if the records have none."""
    peaks, facts = device.peaks, []
    if not peaks.derived:
        facts.append(("copy", scales.unit(peaks.copy, "B/s")))
        facts.append(("read", scales.unit(peaks.read, "B/s")))
        for rate, value in peaks.matrix.items():
            facts.append((rate, scales.unit(value, "FLOP/s")))
    return [(k, v) for k, v in facts if v != scales.NONE]


def flatten(machine: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return a fingerprint as pairs of dotted name and value."""
    pairs: list[tuple[str, str]] = []
    for key, value in machine.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            pairs.append((name, scales.NONE if value is None else text))
    return pairs


def _by_operator(charts: list[Bars]) -> dict[str, list[Bars]]:
    groups: dict[str, list[Bars]] = {}
    for chart in charts:
        groups.setdefault(chart.operator, []).append(chart)
    return groups


def _by_backend(sorted_ladders: list[Ladder]) -> list[tuple[Ladder, list[Ladder]]]:
    """Return each operator's ladder in each backend: the one at its largest case, and the other cases."""
    # `ladders` sorts the largest case first; the page folds the others.
    groups: dict[tuple[str, str], list[Ladder]] = {}
    for ladder in sorted_ladders:
        groups.setdefault((ladder.operator, ladder.backend), []).append(ladder)
    return [(group[0], group[1:]) for group in groups.values()]


def _by_reason(rows: list[Row]) -> list[SharedReason]:
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        reasons.setdefault(row.why_untimed, []).append(row)
    return [SharedReason(reason=k, rows=tuple(v)) for k, v in reasons.items()]


def _tally(device: DeviceRecords) -> list[dict[str, Any]]:
    """Count the verdicts by operator and implementation, with the largest share of the tolerance used."""
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
def templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weft.workbench.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,  # a misspelled name is an error, not an empty string
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


def template_source(name: str) -> str:
    """Return the text of a file of the templates folder, not rendered."""
    environment = templates()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
