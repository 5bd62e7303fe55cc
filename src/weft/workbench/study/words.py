"""A study in words: its tables, the sentences of what was found, and its block of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.workbench.figures import RESULTS, slug, table
from weft.workbench.report.scales import NONE, percent, share, time, unit
from weft.workbench.study.drawn import NAMES, PHASES, file_name
from weft.workbench.study.profiled import KINDS

RECORD = "study-mlp.json"  # its name under results/<device>/
PICTURES = "pictures"  # where the docs keep them, a folder a device
Study = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[list[str]]]


def scaling(study: Study) -> Table:
    """One row a fit: what grows, the fit with its interval, the roofline's own, and the points."""
    rows = []
    for sweep, phases in study["fits"].items():
        for phase, fitted in phases.items():
            of = f"{fitted['points']}" + ("" if fitted["cold"] else ", some in the cache")
            rows.append([sweep, PHASES[phase], *_fit(sweep, fitted), of])
    return ("over", "of", "fit", "95 % interval", "the roofline's", "points"), rows


def _fit(sweep: str, fitted: Mapping[str, Any]) -> list[str]:
    model = fitted["model"]
    if sweep in ("steps", "layers"):
        low, high = fitted["each_interval"]
        each = f"{_signed(fitted['fixed'])} + {time(fitted['each'])} each"
        return [each, f"{_signed(low)} to {_signed(high)} each", f"{time(model['each'])} each"]
    if sweep == "width":
        low, high = fitted["interval"]
        return [
            f"width^{fitted['slope']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"width^{model['slope']:.2f}",
        ]
    bent = f"batch^{fitted['below']:.2f}, then ^{fitted['above']:.2f}"
    theirs = f"batch^{model['below']:.2f}, then ^{model['above']:.2f}"
    low, high = fitted["interval"]
    return [bent, f"the turn at {low:.0f} to {high:.0f}", theirs]


def _signed(us: float) -> str:
    return time(us) if us >= 0 else f"-{time(-us)}"


def turning(study: Study) -> Table:
    """One row a phase: the batch that turns it from memory- to compute-bound."""
    rows = []
    for phase, turned in study["turn"].items():
        low, high = turned["interval"]
        seen = f"{turned['measured']:.0f} ({low:.0f} to {high:.0f})" if turned["measured"] else NONE
        rows.append([PHASES[phase], _number(turned["predicted"]), seen])
    return ("of", "turns at batch, predicted", "measured (95 %)"), rows


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}"


def reached(study: Study) -> Table:
    """One row a phase and batch: its time, what it reaches of each ceiling, and of the floor."""
    rows = []
    for row in study["points"]["batch"]:
        us = row["us"]
        flags = ", ".join(row["flags"]) or ""
        figures = [share(row["memory_us"] / us), share(row["compute_us"] / us)]
        rows.append(
            [
                PHASES[row["phase"]],
                f"{row['batch']}",
                time(us),
                unit(row["flops"] / us * 1e6, "FLOP/s"),
                *figures,
                share(row["floor_us"] / us),
                flags,
            ]
        )
    head = ("of", "batch", "time", "rate", "of bandwidth", "of the rate", "of the limit", "")
    return head, rows


def shares(study: Study) -> Table:
    """One row a batch: where a training step's time goes."""
    rows = []
    for seen in study["profile"]:
        parts = [percent(seen["shares"][kind]) for kind in KINDS]
        rows.append([f"{seen['batch']}", *parts, time(seen["us"])])
    return ("batch", *KINDS, "operators' time"), rows


def by_layer(study: Study) -> Table:
    """One row a layer at the base's batch: what ran in it; none where the profile has no layers."""
    base = next(p for p in study["profile"] if p["batch"] == study["base"]["batch"])
    whats = list(base["layers"][0]) if base["layers"] else []
    rows = [[f"{i}", *(time(layer[w]) for w in whats)] for i, layer in enumerate(base["layers"])]
    return ("layer", *whats), rows


def sentences(study: Study) -> list[str]:
    """What was found, in two or three sentences and one for each doubt."""
    base, step = study["base"], study["fits"]["layers"]["step"]
    sizes = f"batch {base['batch']}, {base['depth']} layers of {base['width']}"
    whole = study["fits"]["steps"]["step"]
    found = [
        f"A training step at {sizes}, {base['dtype']} takes {time(whole['each'])}; each layer adds "
        f"{time(step['each'])} to it (the roofline: {time(step['model']['each'])})."
    ]
    found += [_turned(study, phase) for phase in study["turn"]]
    first, last = study["profile"][0], study["profile"][-1]
    found.append(
        f"At batch {first['batch']} the optimizer takes {percent(first['shares']['optimizer'])} of "
        f"a step's operators and products {percent(first['shares']['matmul'])}; at batch "
        f"{last['batch']} {percent(last['shares']['optimizer'])} and "
        f"{percent(last['shares']['matmul'])}."
    )
    return [*found, *doubts(study)]


def _turned(study: Study, phase: str) -> str:
    turned = study["turn"][phase]
    guess = "that it never does" if turned["predicted"] is None else f"{turned['predicted']}"
    if turned["measured"] is None:
        batches = study["sizes"]["batches"]
        return (
            f"Of a {PHASES[phase]} no turn was seen between batch {batches[0]} and {batches[-1]}; "
            f"the ceilings say: {guess}."
        )
    return (
        f"A {PHASES[phase]} turns from memory- to compute-bound at a batch of "
        f"{turned['measured']:.0f}; the ceilings say: {guess}."
    )


def doubts(study: Study) -> list[str]:
    """Why the figures may be off: doubtful ceilings, noise, sizes that show no memory's bound."""
    found = [f"Doubt: {study['doubt']}."] if study["doubt"] else []
    rows = {json.dumps(r, sort_keys=True): r for some in study["points"].values() for r in some}
    noisy = sum("noisy" in r["flags"] for r in rows.values())
    if noisy:
        found.append(f"Noisy: {noisy} of {len(rows)} points; other work may share the machine.")
    if not any(r["cold"] for r in study["points"]["batch"]):
        found.append("All weights fit in the cache here, so memory's bandwidth bounds nothing.")
    return found


def figures(results: Path = RESULTS) -> str:
    """Every committed study as Markdown with its pictures; what to run where there is none."""
    found = [json.loads(f.read_text()) for f in sorted(results.glob(f"*/{RECORD}"))]
    kinds = {study["device"] for study in found}
    parts = [part for study in found for part in _shown(study)]
    for kind, name in (("cuda", "An NVIDIA GPU"), ("cpu", "A CPU")):
        if kind not in kinds:
            parts.append(f"{name}: not measured yet: `weft study mlp --device {kind}`\n")
    return "\n".join(parts)


def _shown(study: Study) -> Iterator[str]:
    here, name = study["machine"], study["machine"]["device"]
    changed = " with uncommitted changes" if here.get("dirty") else ""
    versions = f"weft {here['versions']['weft']}, torch {here['versions']['torch']}"
    commit = f"commit {str(here['commit'])[:10]}{changed}"
    ceilings = study["ceilings"]
    rate = unit(ceilings["matrix"][study["sizes"]["dtype"]], "FLOP/s")
    yield f"## {name}\n"
    yield (
        f"**{name}**, {here['date'][:10]}, {commit}, {versions}; measured ceilings: copy "
        f"{unit(ceilings['copy'], 'B/s')}, read {unit(ceilings['read'], 'B/s')}, "
        f"{study['sizes']['dtype']} products {rate}.\n"
    )
    yield " ".join(sentences(study)) + "\n"
    for made, align in ((turning, " rr"), (scaling, "  rrr "), (reached, " rrrrrr "), (shares, "")):
        head, rows = made(study)
        yield table(head, rows, align or "r" * len(head))
    for picture in NAMES:
        yield f"![time over {picture}]({PICTURES}/{slug(name)}/{file_name(picture)})\n"
    head, rows = by_layer(study)
    if rows:
        yield f"By layer, at batch {study['base']['batch']}:\n"
        yield table(head, rows, "r" * len(head))
