"""A comparison in words: a sentence, the table for a pull request, and where the noise is from.

What changed stands first and open, what stayed is folded away, and every ``ambiguous`` says why.
Names come from records, which may be a stranger's, so that nothing of them is taken for Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core import Record
from weft.workbench import compare as rules
from weft.workbench.compare import AMBIGUOUS, FASTER, SAME, SLOWER, Comparison
from weft.workbench.compare_commits import commits, differences
from weft.workbench.compare_side import ENOUGH
from weft.workbench.noise import NOISE, Noise, identity, path_for
from weft.workbench.table import duration

COLUMNS = ("operator", "implementation", "case", "direction", "A", "B", "B / A", "noise", "verdict")
FROM = {
    "default": "the default of its kind of device",
    "measured": "measured on this machine",
    "threshold": "the threshold",
    "drift": "drift within a run",
    "runs": "how far runs of one commit lie apart",
}
AGAIN = (
    "To decide what is ambiguous, measure both commits again on a quiet machine and append to the "
    f"same records, in turns: {ENOUGH} or more runs a side are pooled into a narrower interval. "
    "Or raise the threshold, where so small a difference does not matter."
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """All that is told of a comparison. ``stops`` is what the gate stops at, and ``by_hand`` the
    noise file that was given rather than found."""

    a: Sequence[Record]
    b: Sequence[Record]
    found: Sequence[Comparison]
    stops: Sequence[Comparison]
    noises: rules.Noises
    threshold: float | None
    fail_on: str
    by_hand: str = ""

    def to_json(self) -> dict[str, Any]:
        """The comparison as one JSON object."""
        return {
            "counts": rules.counts(self.found),
            "differences": differences(self.a, self.b),
            "comparisons": [c.to_json() for c in self.found],
            "commits": {
                name: [c.to_json() for c in commits(records)]
                for name, records in (("a", self.a), ("b", self.b))
            },
            "machine": machine(self),
            "noise": noise(self),
            "threshold": self.threshold,
            "fail_on": self.fail_on,
            "failed": bool(self.stops),
        }


def machine(told: Compared) -> str:
    """The machine, or machines, in words."""
    return rules.names({rules.machine_of(r) for r in (*told.a, *told.b)})


def noise(told: Compared) -> list[dict[str, Any]]:
    """Which noise stood for each machine: ``origin`` "measured" or "default", its share, and where
    and when it was measured."""
    machines = {identity(r.machine): r.machine for r in (*told.a, *told.b)}
    return [_origin(told, here, told.noises.get(key)) for key, here in machines.items()]


def _origin(told: Compared, here: Mapping[str, Any], measured: Noise | None) -> dict[str, Any]:
    empty = dict.fromkeys(("date", "commit", "runs", "path"))
    if measured is None:
        share = NOISE.get(str(here.get("kind")), max(NOISE.values()))
        return {"machine": here.get("device"), "origin": "default", "share": share, **empty}
    return {
        "machine": here.get("device"),
        "origin": "measured",
        "share": measured.usual,
        "date": measured.machine.get("date"),
        "commit": measured.machine.get("commit"),
        "runs": measured.runs,
        "path": told.by_hand or path_for(here).name,
    }


def noise_lines(told: Compared) -> list[str]:
    """A sentence for each machine on which noise was used."""
    lines = []
    for one in noise(told):
        if one["origin"] == "measured":
            when = f"{one['runs']} runs, {str(one['date'])[:10]}, commit {str(one['commit'])[:12]}"
            lines.append(f"A/A noise of {one['machine']}: {one['share']:.1%}, measured ({when})")
        elif told.threshold is None:
            hint = "not measured here: weft compare --measure-noise"
            lines.append(f"noise of {one['machine']}: {one['share']:.1%}, the default ({hint})")
    if told.threshold is not None:
        lines.append(f"threshold: {told.threshold:.1%}")
    return lines


def sides(told: Compared) -> list[tuple[str, str, str, str]]:
    """For A and B: the commits, the dates, and the number of records."""
    rows = []
    for name, records in (("A", told.a), ("B", told.b)):
        here = commits(records)
        days = list(
            dict.fromkeys(d[:16].replace("T", " ") for c in here for d in (c.first, c.last))
        )
        when = f"{min(days)} to {max(days)}" if len(days) > 1 else days[0]
        rows.append((name, ", ".join(c.short for c in here), when, str(len(records))))
    return rows


def sentence(told: Compared) -> str:
    """What a reader of a pull request wants to know first."""
    count = rules.counts(told.found)
    compared = sum(count[w] for w in (FASTER, SLOWER, SAME, AMBIGUOUS))
    parts = [f"{count[w]} {w}" for w in (SLOWER, "broken", FASTER, AMBIGUOUS, SAME) if count[w]]
    said = f"{', '.join(parts) or 'nothing to compare'} of {compared} compared"
    worst = max((c for c in told.found if c.verdict == SLOWER), key=_ratio, default=None)
    if worst is not None:
        where = f"{worst.operator} {worst.implementation}, {worst.case}, {worst.direction}"
        said += f"; the slowest now takes {_ratio(worst):.2f} times as long ({where})"
    return said + "."


def _ratio(c: Comparison) -> float:
    return c.ratio or 0.0


def cells(c: Comparison) -> list[str]:
    """One comparison as the table's row."""
    point = [c.operator, c.implementation, c.case, c.direction]
    if c.verdict is None or c.ratio is None or c.interval is None or c.noise is None:
        said = f"broken: {c.reason}" if c.broken else c.reason
        return [*point, duration(c.a), duration(c.b), "", "", said]
    low, high = c.interval
    ratio = f"{c.ratio:.3f} ({low:.3f} to {high:.3f})"
    said = f"{c.verdict}: {c.reason}" if c.reason else c.verdict
    return [*point, duration(c.a), duration(c.b), ratio, f"{c.noise:.1%} {c.noise_from}", said]


def in_order(found: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """What changed or may have, the worst first, and what did not."""

    def rank(c: Comparison) -> tuple[int, float]:
        place = {SLOWER: 0, None: 1 if c.broken else 4, FASTER: 2, AMBIGUOUS: 3}[c.verdict]
        return place, -_ratio(c) if c.verdict != FASTER else _ratio(c)

    changed = [c for c in found if c.verdict in (SLOWER, FASTER, AMBIGUOUS) or c.broken]
    return sorted(changed, key=rank), [c for c in found if c not in changed]


def _plain(text: str) -> str:
    """Text in which Markdown, HTML and a mention mean nothing."""
    for sign, stands in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "&#64;")):
        text = text.replace(sign, stands)
    for sign in "\\|`*_[]":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "| " + " | ".join("---" for _ in columns) + " |"
    lines = ["| " + " | ".join(map(_plain, row)) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown(told: Compared) -> str:
    """The whole for a pull request: heading, sentence, sides, what changed, the rest folded."""
    changed, rest = in_order(told.found)
    verdict = "stopped" if told.stops else "passed"
    parts = [
        f"### Speed, {verdict}: {_plain(machine(told))}",
        _plain(sentence(told)),
        _table(("side", "commit", "measured", "records"), sides(told)),
        f"Versions: {_plain(_versions(told.b))}.",
    ]
    parts += [f"Differs: {_plain(note)}." for note in differences(told.a, told.b)]
    if changed:
        parts.append(_table(COLUMNS, [cells(c) for c in changed]))
    if any(c.verdict == AMBIGUOUS for c in changed):
        parts.append(AGAIN)
    if rest:
        same = sum(c.verdict == SAME for c in rest)
        more = f", {len(rest) - same} not compared" if len(rest) > same else ""
        head = f"<details><summary>{same} unchanged{more}</summary>"
        parts += [head, _table(COLUMNS, [cells(c) for c in rest]), "</details>"]
    used = {c.noise_from for c in told.found if c.noise_from}
    parts += [f"{_plain(line)}." for line in noise_lines(told)]
    if used:
        meant = "; ".join(f"{word} is {FROM[word]}" for word in FROM if word in used)
        parts.append(f"Time is the cold median. Noise: {meant}.")
    return "\n\n".join(parts)


def _versions(records: Sequence[Record]) -> str:
    here = records[-1].machine
    found = {"driver": here.get("driver"), **(here.get("versions") or {})}
    return ", ".join(f"{k} {v}" for k, v in found.items() if v) or "unknown"
