"""Records of training runs, and what README and docs draw from them.

    weft train --json --out RUN > results/<device>/train-NAME.json

A record has the machine, the plan, the outcome, the sample, and the curve's own points.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.workbench.figures import RESULTS, table
from weft.workbench.report.scales import NONE

if TYPE_CHECKING:
    from weft.gpt2.launch import Trained

HEAD = ("run", "ops", "steps", "tokens a step", "first loss", "last", "validation", "took",
        "tokens/s", "MFU", "peak memory")  # fmt: skip
SHOWN = 16  # lines of a sample
# The first words of runs that are told elsewhere: train-shakespeare-weft-0.json, and so on.
BESIDE = ("shakespeare", "scale", "same", "profile", "124M", "350M", "774M", "1.5B")


def record(found: Trained) -> dict[str, Any]:
    """A run as plain data: what ``weft train --json`` prints."""
    from weft import machine
    from weft.gpt2 import curves, folder

    plan = folder.read(found.folder)
    trained, validated = curves.losses(found.folder)
    xs, ys = curves.averaged(trained)
    return {
        "machine": machine.fingerprint(),
        "model": plan["model"],
        "train": plan["train"],
        "tokeniser": plan["tokeniser"],
        **found.outcome.to_json(),
        "first_loss": trained[0][1] if trained else None,
        "curve": [[x, round(y, 4)] for x, y in zip(xs, ys, strict=True)],
        "validations": [list(point) for point in validated],
        "out": str(found.folder),
        "sample": found.sample,
        **({} if found.profile is None else {"profile": found.profile}),
    }


def runs(results: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """Every committed run with its name: of ``train-tiny.json``, tiny."""
    files = sorted(results.glob("*/train-*.json"))
    return [(f.stem.removeprefix("train-"), json.loads(f.read_text())) for f in files]


def figures(results: Path = RESULTS) -> str:
    """Committed runs as rows of Markdown, machine by machine, but for those that
    ``weft.gpt2.comparisons`` sets beside each other."""
    by_machine: dict[str, list[tuple[str, ...]]] = {}
    for name, one in runs(results):
        if name.partition("-")[0] in BESIDE:
            continue
        by_machine.setdefault(machine(one), []).append(_row(name, one))
    align = " " + "l" + "r" * (len(HEAD) - 2)
    return "\n\n".join(f"{m}\n\n{table(HEAD, rows, align)}" for m, rows in by_machine.items())


def tiny(results: Path = RESULTS) -> str:
    """The run out of the box, for a reader: how long, from which loss to which, and its sample."""
    found = [one for name, one in runs(results) if name == "tiny"]
    if not found:
        return "Not run yet: `weft train`.\n"
    one = found[-1]
    lines = one["sample"].splitlines()
    sample = "\n".join(lines[:SHOWN])
    return (
        f"{machine(one)}: {one['parameters'] / 1e6:.2f} M parameters, {one['steps']} steps in "
        f"{_took(one['seconds'])}, loss from {one['first_loss']:.2f} to {one['loss']:.2f} nats a "
        f"byte, {one['validation']:.2f} on text it never saw. It writes:\n\n"
        f"```\n{sample}\n```\n"
    )


def machine(one: dict[str, Any]) -> str:
    """Device, date, commit and torch's version of a run."""
    here = one["machine"]
    changed = " with uncommitted changes" if here["dirty"] else ""
    return (
        f"**{here['device']}**, {here['date'][:10]}, commit {str(here['commit'])[:10]}{changed}, "
        f"torch {here['versions']['torch']}"
    )


def _row(name: str, one: dict[str, Any]) -> tuple[str, ...]:
    train = one["train"]
    memory, mfu, held = one["memory_bytes"], one["mfu"], one["validation"]
    return (
        f"{name}, {one['parameters'] / 1e6:.3g} M",
        one["model"]["ops"] + (", compiled" if train.get("compile") else ""),
        str(one["steps"]),
        f"{train['batch']} x {train['length']}",
        f"{one['first_loss']:.3f}",
        f"{one['loss']:.3f}",
        NONE if held is None else f"{held:.3f}",
        _took(one["seconds"]),
        NONE if one["tokens_a_second"] is None else f"{one['tokens_a_second']:,.0f}",
        NONE if mfu is None else f"{100 * mfu:.1f} %",
        NONE if memory is None else f"{memory / 2**30:.1f} GiB",
    )


def _took(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
