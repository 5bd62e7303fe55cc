"""One demonstration from its evidence to its ratio, as plain data that is shown or kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from weft import machine
from weft.core.errors import WeftError
from weft.workbench.demos.demo import BAD, GOOD, SIDES, Demo, Say, Taken

ARCH = "sm_90"  # what evidence is compiled for where there is no GPU
SHOWN, NOT_SHOWN, WRONG, NOT_TIMED = "shown", "not shown", "wrong", "not timed"


def default_arch() -> str:
    """This GPU's target; ``ARCH`` where there is none."""
    return machine.query("cuda").arch if machine.has_gpu() else ARCH


def run(demo: Demo, say: Say, *, arch: str | None = None) -> dict[str, Any]:
    """Show a demonstration: its static evidence, and on a GPU both answers, times and the counter.

    ``status`` is ``shown`` where the bad way took at least ``at_least`` times as long, ``not
    shown`` where not, ``wrong`` where an answer was, ``not timed`` with its ``reason`` where that
    cannot be done here. ``arch`` is the target that evidence is compiled for.
    """
    found = _described(demo) | _static(demo, arch or default_arch())
    if not machine.has_gpu():
        return found | _not_timed(f"timing needs a GPU: {machine.gpu_reason()}")
    from weft.workbench.demos.taking import both

    say(f"{demo.name}: compiling, looking at both answers")
    try:
        found |= weighed(demo, both(demo, say))
        if demo.sweep is not None:
            found["sweep"] = asdict(demo.sweep(say))
    except WeftError as error:
        return found | _not_timed(str(error))
    except Exception as error:  # noqa: BLE001 - a fault on the GPU; the other demos' figures are kept
        return found | {"status": WRONG, "reason": f"{type(error).__name__}: {error}"}
    if demo.counter is not None:
        from weft.workbench.demos.counting import counted

        say(f"{demo.name}: counting")
        try:
            found["evidence"].append(counted(demo).to_json())
        except WeftError as error:
            found["not_counted"] = str(error).partition("; hint: ")[0]
            found["hint"] = error.hint
    return found


def _described(demo: Demo) -> dict[str, Any]:
    words = ("name", "sentence", "expected", "because", "at_least", "see", "clock", "tolerance")
    ways = {s: {"kernel": demo.way(s).kernel, "how": demo.way(s).how} for s in SIDES}
    return {word: getattr(demo, word) for word in words} | {"ways": ways, "code": demo.code}


def _static(demo: Demo, arch: str) -> dict[str, Any]:
    try:
        return {"arch": arch, "evidence": [fact.to_json() for fact in demo.facts(arch)]}
    except WeftError as error:  # no compiler, no disassembler, a target of which nothing is known
        return {"arch": arch, "evidence": [], "no_evidence": str(error)}


def _not_timed(reason: str) -> dict[str, Any]:
    return {"status": NOT_TIMED, "reason": reason}


def weighed(demo: Demo, taken: Mapping[str, Taken]) -> dict[str, Any]:
    """Times, their ratio with its interval, and what that comes to.

    The ratio's interval runs from the least that both medians' intervals allow to the most.
    """
    wrong = next((t.wrong for t in taken.values() if t.wrong), "")
    if wrong:
        return {"status": WRONG, "reason": wrong}
    from weft.workbench.statistics import summarise

    found = {side: summarise(taken[side].samples) for side in SIDES}
    times = {
        side: {
            "us": found[side].median,
            "interval": list(found[side].interval),
            "warm_us": taken[side].warm,
            "samples": list(taken[side].samples),
            "flags": list(taken[side].flags),
        }
        for side in SIDES
    }
    ratio = found[BAD].median / found[GOOD].median
    doubts = [flag for side in SIDES for flag in taken[side].flags if flag.startswith("suspect")]
    less = [f"under {demo.at_least:g} times as long"] if ratio < demo.at_least else []
    low = found[BAD].interval[0] / found[GOOD].interval[1]
    high = found[BAD].interval[1] / found[GOOD].interval[0]
    return {
        "status": NOT_SHOWN if less or doubts else SHOWN,
        "reason": "; ".join([*less, *doubts]),
        "times": times,
        "ratio": ratio,
        "ratio_interval": [low, high],
    }
