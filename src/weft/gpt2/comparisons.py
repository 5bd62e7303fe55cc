"""Runs beside runs, from committed records, for README and docs; what has no record is left out.

    train-shakespeare-OPS-SEED.json   one text, several seeds, by weft's operators and by torch's
    train-SIZE-bBATCH-WAY.json        speed: SIZE 124M to 1.5B, WAY weft, torch or eager
    train-scale-KIND-GPUS.json        KIND ddp or fsdp, each GPU with the work of train-scale-one
    train-same-KIND-GPUS.json         the whole batch of train-same-one, cut; train-same-parts is
                                      one GPU that cuts it into more parts: rounding alone
    train-profile-NAME.json           a run with --profile

Each is what ``weft train --json`` prints. ``python -m weft.gpt2.comparisons`` draws the curves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.gpt2 import shares
from weft.gpt2.figures import RESULTS, SHOWN, machine, runs
from weft.workbench.figures import table
from weft.workbench.report.scales import NONE

SEEDED = re.compile(r"shakespeare-(weft|torch|eager)-(\d+)")
SPEED = re.compile(r"(124M|350M|774M|1\.5B)-b(\d+)-(.+)")
SCALED = re.compile(r"(scale|same)-(ddp|fsdp)-(\d+)")
PROFILED = re.compile(r"profile-(.+)")
PICTURE = Path("docs/pictures/train-shakespeare.svg")
Record = dict[str, Any]
Found = list[tuple[re.Match[str], Record]]


def _matching(pattern: re.Pattern[str], results: Path) -> Found:
    found = [(pattern.fullmatch(name), one) for name, one in runs(results)]
    return [(match, one) for match, one in found if match]


def _captions(found: Iterable[Record]) -> str:
    return "; ".join(dict.fromkeys(machine(one) for one in found))


def shakespeare(results: Path = RESULTS) -> str:
    """Final losses by seed and by whose operators, what tells them apart, and a sample."""
    found = _matching(SEEDED, results)
    if not found:
        return ""
    held: dict[str, dict[int, Record]] = {}
    for match, one in found:
        held.setdefault(match[1], {})[int(match[2])] = one
    seeds = sorted({seed for by_seed in held.values() for seed in by_seed})
    head = ("", *(f"seed {seed}" for seed in seeds), "mean", "largest less least")
    rows = []
    for what, name in (("training", "loss"), ("validation", "validation")):
        for ops, by_seed in sorted(held.items(), reverse=True):
            values = [by_seed[s][name] if s in by_seed else None for s in seeds]
            rows.append((f"{what}, {ops}", *map(_loss, values), *_spread(values)))
        if {"weft", "torch"} <= held.keys():
            pairs = [
                held["weft"][s][name] - held["torch"][s][name] if s in held["torch"] else None
                for s in seeds
                if s in held["weft"]
            ]
            if len(pairs) == len(seeds):
                rows.append((f"{what}, weft less torch", *map(_signed, pairs), *_mean(pairs), ""))
    one = found[-1][1]
    shown = next((o for m, o in found if m[1] == "weft" and o["sample"]), None)
    sample = "" if shown is None else "\n".join(shown["sample"].splitlines()[:SHOWN])
    train = one["train"]
    told = (
        f"{_captions(o for _, o in found)}. {one['parameters'] / 1e6:.2f} M parameters, "
        f"{one['steps']} steps of {train['batch']} x {train['length']} tokens, {train['dtype']}; "
        "nats a token.\n\n"
    )
    wrote = f"\nBy the first of Weft's:\n\n```\n{sample}\n```\n" if sample else ""
    return told + table(head, rows, " " + "r" * (len(head) - 1)) + wrote


def _loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.4f}"


def _mean(values: Iterable[float | None]) -> tuple[str]:
    there = [v for v in values if v is not None]
    return (_signed(sum(there) / len(there)) if there else NONE,)


def _spread(values: Iterable[float | None]) -> tuple[str, str]:
    there = [v for v in values if v is not None]
    if not there:
        return NONE, NONE
    return _loss(sum(there) / len(there)), _loss(max(there) - min(there))


def speeds(results: Path = RESULTS) -> str:
    """Tokens a second, MFU and memory of each size, batch and way; the largest batches first."""
    order = ("124M", "350M", "774M", "1.5B")
    found = sorted(
        _matching(SPEED, results), key=lambda p: (order.index(p[0][1]), -int(p[0][2]), p[0][3])
    )
    if not found:
        return ""
    head = ("size", "tokens a step", "ops", "tokens/s", "MFU", "peak memory")
    rows = []
    for match, one in found:
        train = one["train"]
        how = one["model"]["ops"] + (", compiled" if train["compile"] else "")
        parts = "" if train["accumulate"] == 1 else f" in {train['accumulate']} parts"
        size = f"{train['batch']} x {train['length']}{parts}"
        rows.append((match[1], size, how, *_speed(one)))
    caption = _captions(one for _, one in found)
    dtypes = ", ".join(dict.fromkeys(one["train"]["dtype"] for _, one in found))
    return f"{caption}. {dtypes}.\n\n{table(head, rows, '   rrr')}"


def _speed(one: Record) -> tuple[str, str, str]:
    speed, mfu, memory = (one[k] for k in ("tokens_a_second", "mfu", "memory_bytes"))
    return (
        NONE if speed is None else f"{speed:,.0f}",
        NONE if mfu is None else f"{100 * mfu:.1f} %",
        NONE if memory is None else f"{memory / 2**30:.1f} GiB",
    )


def scaling(results: Path = RESULTS) -> str:
    """Tokens a second of each GPU beside one alone; and losses beside one GPU's, batch for batch.

    A table is left out where the run on one GPU that it is held against is missing.
    """
    by_name, found = dict(runs(results)), _matching(SCALED, results)
    one: list[tuple[str, ...]] = []
    parts: list[tuple[str, ...]] = []
    for match, run in found:
        kind, count = f"{match[2]}, {match[3]} GPUs", int(match[3])
        alone = by_name.get(f"{match[1]}-one")
        if alone is None:
            continue
        if match[1] == "scale":
            each = run["tokens_a_second"] / count
            share = f"{100 * each / alone['tokens_a_second']:.1f} %"
            one.append((kind, f"{each:,.0f}", share, _speed(run)[2]))
        else:
            parts.append((kind, *_apart(run, alone), *_ends(run)))
    told = []
    if one:
        alone = by_name["scale-one"]
        first = ("1 GPU", f"{alone['tokens_a_second']:,.0f}", "100 %", _speed(alone)[2])
        head = ("", "tokens/s a GPU", "of one GPU's", "peak memory")
        told.append(table(head, [first, *one], " rrr"))
    if parts:
        alone, more = by_name["same-one"], by_name.get("same-parts")
        rows: list[tuple[str, ...]] = [("1 GPU", NONE, NONE, *_ends(alone))]
        if more is not None:
            rows.append(("1 GPU, in more parts", *_apart(more, alone), *_ends(more)))
        names = ("", "apart at most", "on average", "last loss", "validation")
        told.append(table(names, [*rows, *parts], " rrrr"))
    caption = _captions(run for _, run in found)
    return f"{caption}.\n\n" + "\n".join(told) if told else ""


def _ends(one: Record) -> tuple[str, str]:
    return _loss(one["loss"]), _loss(one["validation"])


def _apart(one: Record, other: Record) -> tuple[str, str]:
    """How far two runs' losses are apart, at most and on average over their curves."""
    theirs = dict(other["curve"])
    found = [abs(y - theirs[x]) for x, y in one["curve"] if x in theirs]
    return (_loss(max(found)), _loss(sum(found) / len(found))) if found else (NONE, NONE)


def profiles(results: Path = RESULTS) -> str:
    """Where the time of a step goes, run by run."""
    found = []
    for match, one in _matching(PROFILED, results):
        told, train = one["profile"], one["train"]
        step, busy, gaps = (f"{told[k] / 1000:.2f} ms" for k in ("step_us", "busy_us", "gaps_us"))
        rows = table(shares.HEAD, shares.cells(told), " rrrrr")
        found.append(
            f"**{match[1]}**: {machine(one)}. {one['parameters'] / 1e6:.0f} M parameters, "
            f"{train['batch']} x {train['length']} tokens, {train['dtype']}, ops "
            f"{one['model']['ops']}. A step takes {step}, of which kernels {busy}; between "
            f"kernels, under the profiler, {gaps}.\n\n{rows}"
        )
    return "\n".join(found)


def picture(results: Path = RESULTS, path: Path = PICTURE) -> Path | None:
    """Draw the seeds' losses, Weft's and torch's; None where there are none."""
    from weft.workbench.pictures import Curve, draw

    curves, last = [], []
    for match, one in sorted(_matching(SEEDED, results), key=lambda p: p[0][0], reverse=True):
        ops, seed = match[1], match[2]
        xs, ys = ([point[k] for point in one["validations"]] for k in (0, 1))
        curves.append(Curve(f"validation, {ops}, seed {seed}", xs, ys))
        if seed == "0":
            xs, ys = ([point[k] for point in one["curve"]] for k in (0, 1))
            curves.append(Curve(f"training, {ops}, seed {seed}", xs, ys))
        last.append(one["validation"])
    if not curves:
        return None
    says = f"Validation ends between {min(last):.3f} and {max(last):.3f} nats a token."
    title = "tinyshakespeare, by Weft's operators and by torch's"
    draw(path, curves, title=title, x="step", y="loss (nats a token)", says=says)
    return path


if __name__ == "__main__":
    print(picture() or f"no shakespeare record under {RESULTS}")
