"""Ledger of claims about GPU kernels: each has a sentence, a source, an argument and a test.

A test returns the settings in which it tried the claim and, for each, whether the claim holds there. The
verdict follows: ``true`` if it holds in all settings, ``false`` if in none, ``depends`` otherwise. The
expected verdict is data beside the claim; a test of the project compares both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.json_files import content_errors, read_json, read_text
from weft.core.operator import unknown_name
from weft.machine import specs

THEMES = ("memory", "kernels", "numerics", "transformers", "tools")
TRUE, FALSE, DEPENDS = "true", "false", "depends"
RESULTS = Path(__file__).resolve().parents[4] / "results"  # in a checkout
MEASURED = "nvidia-h200"  # folder of the device that most records are of
MAX_NAMED = 8  # settings in a line of text; the JSON has all


@dataclass(frozen=True)
class Source:
    """Source of a claim. ``url`` is empty where the page's host is not one that Weft links to."""

    author: str
    title: str
    year: int | None = None
    url: str = ""

    def __str__(self) -> str:
        year = f" ({self.year})" if self.year else ""
        return f"{self.author}, {self.title}{year}"


COMMON = Source("common saying", "courses and forums")


@dataclass(frozen=True)
class Evidence:
    """Result of a claim's test: the settings that were tried, with True where the claim holds, and "
    "figures."""

    settings: Mapping[str, bool]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        outcomes = set(self.settings.values())
        return DEPENDS if len(outcomes) == 2 else TRUE if outcomes == {True} else FALSE

    @property
    def range(self) -> str:
        """Settings in which the claim holds, and in which it fails."""
        texts = []
        for word, outcome in (("holds", True), ("fails", False)):
            names = [name for name, holds in self.settings.items() if holds == outcome]
            if len(names) > MAX_NAMED:
                names = [f"{len(names)} settings, such as {names[0]}"]
            texts += [f"{word}: {'; '.join(names)}"] if names else []
        return ". ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim with the function that tests it. ``expected`` is the verdict that the ledger was "
    "reviewed with."""

    id: str
    theme: str
    text: str
    source: Source
    argument: str
    expected: str
    compute: Callable[[], Evidence]

    @property
    def test(self) -> str:
        """Dotted name of the test."""
        return f"{self.compute.__module__}.{self.compute.__name__}"

    def to_json(self, evidence: Evidence | None, reason: str = "") -> dict[str, Any]:
        return {
            "id": self.id,
            "theme": self.theme,
            "claim": self.text,
            "source": str(self.source),
            "url": self.source.url or None,
            "argument": self.argument,
            "verdict": evidence.verdict if evidence else None,
            "expected": self.expected,
            "range": evidence.range if evidence else None,
            "settings": dict(evidence.settings) if evidence else None,
            "figures": dict(evidence.figures) if evidence else None,
            "test": self.test,
            "reason": reason,
        }


_CLAIMS: dict[str, Claim] = {}
Test = Callable[[], Evidence]


def claim(id: str, text: str, source: Source, *, argument: str, expected: str) -> Callable[[Test], Test]:
    """Enter the decorated test into the ledger. ``{h200}`` in the text becomes that GPU's name."""
    if id in _CLAIMS or expected not in (TRUE, FALSE, DEPENDS):
        raise ValueError(f"the claim {id!r} is there already, or expects {expected!r}")

    def enter(test: Test) -> Test:
        _CLAIMS[id] = Claim(
            id=id,
            theme=test.__module__.rpartition(".")[2],
            text=with_names(text),
            source=source,
            argument=with_names(argument),
            expected=expected,
            compute=cache(test),
        )
        return test

    return enter


class _Names(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return specs.one(key.replace("_", "-")).name


def with_names(text: str) -> str:
    """Replace ``{h100_sxm}`` by the name of the GPU with that key."""
    return text.format_map(_Names())


@cache
def all_claims() -> tuple[Claim, ...]:
    """Return every claim, by theme."""
    for theme in THEMES:
        import_module(f"weft.lab.claims.{theme}")
    return tuple(sorted(_CLAIMS.values(), key=lambda c: THEMES.index(c.theme)))


def claim_ids() -> list[str]:
    """Return the IDs of all claims, read from their sources: the modules themselves import torch."""
    files = (Path(__file__).with_name(f"{theme}.py") for theme in THEMES)
    return [id for file in files for id in re.findall(r'^@claim\(\s*"([^"]+)"', file.read_text(), re.M)]


def find(id: str) -> Claim:
    """Return the claim of this ID. Raise :class:`WeftError` with the nearest IDs if there is none."""
    by_id = {c.id: c for c in all_claims()}
    if id not in by_id:
        raise unknown_name("claim", id, list(by_id), listed_by="weft claims")
    return by_id[id]


def record(path: str) -> Any:
    """Return a JSON record below ``results/``. Raise :class:`WeftError` where there is no checkout."""
    file = _committed(path)
    with content_errors(file, "a record"):
        return read_json(file)


@cache
def cold_us(operator: str, case: str, implementation: str, *, direction: str = "forward") -> float:
    """Return the recorded time in us of an implementation, from cold caches, on the measured device."""
    return _timing(operator, case, implementation, direction)["cold"]


@cache
def host_us(operator: str, case: str, implementation: str) -> float:
    """Return the recorded host time of a call in us."""
    return _timing(operator, case, implementation, "forward")["host"]


@cache
def warm_us(operator: str, case: str, implementation: str) -> float:
    """Return the recorded time in us from warm caches."""
    return _timing(operator, case, implementation, "forward")["warm"]


def _timing(operator: str, case: str, implementation: str, direction: str) -> dict[str, float]:
    file = _committed(f"{MEASURED}/{operator}.jsonl")
    times: dict[str, float] = {}
    for line in read_text(file).splitlines():
        row = json.loads(line)
        key = (row["implementation"], row["case"], row["direction"])
        if key == (implementation, case, direction) and (timing := row["detail"].get("timing")):
            times = {name: float(timing[name]) for name in ("cold", "warm", "host")}  # the last one counts
    if not times:
        got = f"no time of {implementation} at {case} {direction}"
        raise WeftError(f"{file.name}", expected="a record", got=got)
    return times


def demo_ratio(name: str) -> float:
    """Return the recorded ratio of a demonstration's two kernels."""
    demos = record(f"{MEASURED}/demos.json")["demos"]
    return float(next(d["ratio"] for d in demos if d["name"] == name))


def plateaus(key: str) -> list[float]:
    """Return the plateaus of a curve of the recorded memory hierarchy, nearest level first."""
    series = record(f"{MEASURED}/hierarchy.json")["series"]
    curve = next(s for s in series if s["key"] == key)
    return [float(p["value"]) for p in curve["plateaus" if "plateaus" in curve else "levels"]]


def _committed(path: str) -> Path:
    file = RESULTS / path
    if not file.is_file():
        hint = "run it in a checkout of Weft: records are not part of an installation"
        raise WeftError(f"the record results/{path}", expected="a file", got="none", hint=hint)
    return file
