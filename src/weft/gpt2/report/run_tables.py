"""Tables of training runs for README and docs, from committed records.

    train-NAME.json                   any run
    train-shakespeare-OPS-SEED.json   one text with several seeds, by Weft's operators and by torch's
    train-SIZE-bBATCH-OPS.json        speed: SIZE 124M to 1.5B, OPS weft, torch or eager
    train-scale-KIND-GPUS.json        KIND ddp or fsdp, each GPU with the work of train-scale-one
    train-same-KIND-GPUS.json         the batch of train-same-one, split; train-same-parts is one GPU with
                                      more micro-batches, whose difference is rounding alone
    train-profile-NAME.json           a run with --profile

Each is the output of ``weft train --json``. gpt2-switches.json is that of tools/gpt2_switches.py. A table
without records is empty.
``python -m weft.gpt2.report.run_tables`` plots the curves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.gpt2.report import step_profile
from weft.workbench.report.markdown import RESULTS, dates_and_commits, table
from weft.workbench.report.scales import NONE

RUN_HEAD = ("run", "ops", "steps", "tokens a step", "first loss", "last", "validation", "took",
            "tokens/s", "MFU", "peak memory")  # fmt: skip
SAMPLE_LINES = 16
# First words of the names of runs that have a table of their own.
OTHER_TABLES = ("shakespeare", "scale", "same", "profile", "124M", "350M", "774M", "1.5B", "finetune")
SEEDED = re.compile(r"shakespeare-(weft|torch|eager)-(\d+)")
SPEED = re.compile(r"(124M|350M|774M|1\.5B)-b(\d+)-(.+)")
SCALED = re.compile(r"(scale|same)-(ddp|fsdp)-(\d+)")
PROFILED = re.compile(r"profile-(.+)")
SIZES = ("124M", "350M", "774M", "1.5B")
SEEDS_PLOT = Path("docs/pictures/train-shakespeare.svg")
Record = dict[str, Any]
Matches = list[tuple[re.Match[str], Record]]


def records(results: Path = RESULTS) -> list[tuple[str, Record]]:
    """Return every committed run with its name: ``train-tiny.json`` is tiny."""
    files = sorted(results.glob("*/train-*.json"))
    return [(f.stem.removeprefix("train-"), read_json(f)) for f in files]


def _matching(pattern: re.Pattern[str], results: Path) -> Matches:
    matches = [(pattern.fullmatch(name), record) for name, record in records(results)]
    return [(match, record) for match, record in matches if match]


def machines(runs: Iterable[Record]) -> str:
    """Return the devices of runs with dates, commits and torch's versions, as Markdown."""
    by_device: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in runs:
        here = record["machine"]
        by_device.setdefault((here["device"], here["versions"]["torch"]), []).append(here)
    return "; ".join(
        f"**{device}**, {dates_and_commits(fingerprints)}, torch {torch}"
        for (device, torch), fingerprints in by_device.items()
    )


# --- runs by themselves


def run_table(results: Path = RESULTS) -> str:
    """Return committed runs as a table for each machine, without those that have a table of their own."""
    by_machine: dict[str, list[tuple[str, ...]]] = {}
    for name, record in records(results):
        if name.partition("-")[0] not in OTHER_TABLES:
            by_machine.setdefault(machines([record]), []).append(_run_row(name, record))
    align = " " + "l" + "r" * (len(RUN_HEAD) - 2)
    return "\n\n".join(f"{m}\n\n{table(RUN_HEAD, rows, align)}" for m, rows in by_machine.items())


def _run_row(name: str, record: Record) -> tuple[str, ...]:
    train = record["train"]
    return (
        f"{name}, {record['parameters'] / 1e6:.3g} M",
        record["model"]["ops"] + (", compiled" if train.get("compile") else ""),
        str(record["steps"]),
        f"{train['batch']} x {train['length']}",
        f"{record['first_loss']:.3f}",
        f"{record['loss']:.3f}",
        NONE if record["validation"] is None else f"{record['validation']:.3f}",
        _duration(record["seconds"]),
        *_speed_cells(record),
    )


def tiny_run(results: Path = RESULTS) -> str:
    """Describe the default run for README: its time, its first and last loss, and its sample."""
    tiny = [record for name, record in records(results) if name == "tiny"]
    if not tiny:
        return "Not run yet: `weft train`.\n"
    record = tiny[-1]
    sample = "\n".join(record["sample"].splitlines()[:SAMPLE_LINES])
    return (
        f"{machines([record])}: {record['parameters'] / 1e6:.2f} M parameters, {record['steps']} steps in "
        f"{_duration(record['seconds'])}, loss from {record['first_loss']:.2f} to {record['loss']:.2f} "
        f"nats a byte, {record['validation']:.2f} on unseen text. It writes:\n\n"
        f"```\n{sample}\n```\n"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _speed_cells(record: Record) -> tuple[str, str, str]:
    speed, mfu, memory = (record[k] for k in ("tokens_a_second", "mfu", "memory_bytes"))
    return (
        NONE if speed is None else f"{speed:,.0f}",
        NONE if mfu is None else f"{100 * mfu:.1f} %",
        NONE if memory is None else f"{memory / 2**30:.1f} GiB",
    )


# --- comparisons of runs


def seeds_table(results: Path = RESULTS) -> str:
    """Return final losses by seed and operators, their differences, and a sample."""
    matches = _matching(SEEDED, results)
    if not matches:
        return ""
    by_ops: dict[str, dict[int, Record]] = {}
    for match, record in matches:
        by_ops.setdefault(match[1], {})[int(match[2])] = record
    seeds = sorted({seed for by_seed in by_ops.values() for seed in by_seed})
    head = ("", *(f"seed {seed}" for seed in seeds), "mean", "largest less least")
    rows = []
    for label, key in (("training", "loss"), ("validation", "validation")):
        for ops, by_seed in sorted(by_ops.items(), reverse=True):
            values = [by_seed[s][key] if s in by_seed else None for s in seeds]
            rows.append((f"{label}, {ops}", *map(_loss, values), *_mean_and_spread(values)))
        if {"weft", "torch"} <= by_ops.keys():
            differences = [
                by_ops["weft"][s][key] - by_ops["torch"][s][key] if s in by_ops["torch"] else None
                for s in seeds
                if s in by_ops["weft"]
            ]
            # Only if every seed was run with both: a mean over other seeds would compare other runs.
            if len(differences) == len(seeds):
                rows.append((f"{label}, weft less torch", *map(_signed, differences), _mean(differences), ""))
    last = matches[-1][1]
    train = last["train"]
    caption = (
        f"{machines(record for _, record in matches)}. {last['parameters'] / 1e6:.2f} M parameters, "
        f"{last['steps']} steps of {train['batch']} x {train['length']} tokens, {train['dtype']}; "
        "nats a token.\n\n"
    )
    with_sample = next((r for m, r in matches if m[1] == "weft" and r["sample"]), None)
    sample = ""
    if with_sample is not None:
        lines = "\n".join(with_sample["sample"].splitlines()[:SAMPLE_LINES])
        sample = f"\nSample of the first run with Weft's operators:\n\n```\n{lines}\n```\n"
    return caption + table(head, rows, " " + "r" * (len(head) - 1)) + sample


def _loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.4f}"


def _mean(values: Iterable[float | None]) -> str:
    known = [v for v in values if v is not None]
    return _signed(sum(known) / len(known)) if known else NONE


def _mean_and_spread(values: Iterable[float | None]) -> tuple[str, str]:
    known = [v for v in values if v is not None]
    if not known:
        return NONE, NONE
    return _loss(sum(known) / len(known)), _loss(max(known) - min(known))


def speed_table(results: Path = RESULTS) -> str:
    """Return tokens per second, MFU and memory by size, batch and operators; largest batches first."""
    matches = sorted(_matching(SPEED, results), key=lambda p: (SIZES.index(p[0][1]), -int(p[0][2]), p[0][3]))
    if not matches:
        return ""
    head = ("size", "tokens a step", "ops", "tokens/s", "MFU", "peak memory")
    rows = []
    for match, record in matches:
        train = record["train"]
        ops = record["model"]["ops"] + (", compiled" if train["compile"] else "")
        split = "" if train["accumulate"] == 1 else f" in {train['accumulate']} micro-batches"
        rows.append((match[1], f"{train['batch']} x {train['length']}{split}", ops, *_speed_cells(record)))
    # Rows come from several runs; the caption gives the range of their dates and commits.
    caption = machines(record for _, record in matches)
    dtypes = ", ".join(dict.fromkeys(record["train"]["dtype"] for _, record in matches))
    return f"{caption}. {dtypes}.\n\n{table(head, rows, '   rrr')}"


def finetune_table(results: Path = RESULTS) -> str:
    """Return runs that continue one model with dense and with sparse MLPs: losses, speed and memory."""
    matches = _matching(re.compile("finetune-(dense|sparse)"), results)
    if not matches:
        return ""
    head = ("MLPs", "steps", "first loss", "last loss", "validation", "tokens/s", "MFU", "peak memory")
    rows = []
    for match, record in matches:
        losses = [_loss(record[k]) for k in ("first_loss", "loss", "validation")]
        rows.append((match[1], str(record["steps"]), *losses, *_speed_cells(record)))
    return f"{machines(record for _, record in matches)}\n\n{table(head, rows, ' rrrrrrr')}"


def scaling_tables(results: Path = RESULTS) -> str:
    """Return tokens per second of each GPU next to one GPU's, and losses next to one GPU's.

    A table is left out if its run on one GPU is missing.
    """
    by_name, matches = dict(records(results)), _matching(SCALED, results)
    speed_rows: list[tuple[str, ...]] = []
    loss_rows: list[tuple[str, ...]] = []
    for match, record in matches:
        kind, gpus = f"{match[2]}, {match[3]} GPUs", int(match[3])
        baseline = by_name.get(f"{match[1]}-one")
        if baseline is None:
            continue
        if match[1] == "scale":
            per_gpu = record["tokens_a_second"] / gpus
            share = f"{100 * per_gpu / baseline['tokens_a_second']:.1f} %"
            speed_rows.append((kind, f"{per_gpu:,.0f}", share, _speed_cells(record)[2]))
        else:
            loss_rows.append((kind, *_differences(record, baseline), *_final_losses(record)))
    tables = []
    if speed_rows:
        baseline = by_name["scale-one"]
        first = ("1 GPU", f"{baseline['tokens_a_second']:,.0f}", "100 %", _speed_cells(baseline)[2])
        head = ("", "tokens/s a GPU", "of one GPU's", "peak memory")
        tables.append(table(head, [first, *speed_rows], " rrr"))
    if loss_rows:
        baseline, split = by_name["same-one"], by_name.get("same-parts")
        rows: list[tuple[str, ...]] = [("1 GPU", NONE, NONE, *_final_losses(baseline))]
        if split is not None:
            differences = _differences(split, baseline)
            rows.append(("1 GPU, more micro-batches", *differences, *_final_losses(split)))
        names = ("", "largest difference", "mean difference", "last loss", "validation")
        tables.append(table(names, [*rows, *loss_rows], " rrrr"))
    caption = machines(record for _, record in matches)
    return f"{caption}.\n\n" + "\n".join(tables) if tables else ""


def _final_losses(record: Record) -> tuple[str, str]:
    return _loss(record["loss"]), _loss(record["validation"])


def _differences(record: Record, other: Record) -> tuple[str, str]:
    """Return the largest and the mean difference of two runs' loss curves."""
    other_curve = dict(other["curve"])
    differences = [abs(y - other_curve[x]) for x, y in record["curve"] if x in other_curve]
    if not differences:
        return NONE, NONE
    return _loss(max(differences)), _loss(sum(differences) / len(differences))


def profile_tables(results: Path = RESULTS) -> str:
    """Return the step profile of each run with one."""
    tables = []
    for match, record in _matching(PROFILED, results):
        profile, train = record["profile"], record["train"]
        step, busy, gaps = (f"{profile[k] / 1000:.2f} ms" for k in ("step_us", "busy_us", "gaps_us"))
        rows = table(step_profile.HEAD, step_profile.table_rows(profile), " rrrrr")
        tables.append(
            f"**{match[1]}**: {machines([record])}. {record['parameters'] / 1e6:.0f} M parameters, "
            f"{train['batch']} x {train['length']} tokens, {train['dtype']}, ops "
            f"{record['model']['ops']}. A step takes {step}, its kernels {busy}; the gaps between "
            f"kernels, under the profiler, {gaps}.\n\n{rows}"
        )
    return "\n".join(tables)


def plot_seeds(results: Path = RESULTS, path: Path = SEEDS_PLOT) -> Path | None:
    """Plot the losses of the seeds, Weft's and torch's; None if there are no records."""
    from weft.workbench.report.svg_curves import Curve, render_curves

    curves, final = [], []
    for match, record in sorted(_matching(SEEDED, results), key=lambda p: p[0][0], reverse=True):
        ops, seed = match[1], match[2]
        xs, ys = ([point[k] for point in record["validations"]] for k in (0, 1))
        curves.append(Curve(f"validation, {ops}, seed {seed}", xs, ys))
        if seed == "0":
            xs, ys = ([point[k] for point in record["curve"]] for k in (0, 1))
            curves.append(Curve(f"training, {ops}, seed {seed}", xs, ys))
        final.append(record["validation"])
    if not curves:
        return None
    caption = f"Validation ends between {min(final):.3f} and {max(final):.3f} nats a token."
    title = "tinyshakespeare, by Weft's operators and by torch's"
    render_curves(path, curves, title=title, x="step", y="loss (nats a token)", caption=caption)
    return path


def switch_table(record: dict[str, Any]) -> str:
    """Return a Markdown table of a record of switches: milliseconds of a step, and what a switch adds."""
    here = record["machine"]
    where = f"{here['device']}, commit {here['commit']}, {here['date'][:10]}"
    size = f"{record['preset']}, {record['batch']} x {record['length']} tokens, forward and backward"
    body = []
    for row in record["rows"]:
        default = record["chosen"][row["operator"]] or "dispatch"
        cells = [row["operator"], default, row["implementation"]]
        if "reason" in row:
            body.append([*cells, NONE, row["reason"], NONE])
            continue
        base, switched = row["base_ms"], row["switched_ms"]
        body.append([*cells, f"{base:.2f} ms", f"{switched:.2f} ms", f"{100 * (switched / base - 1):+.1f} %"])
    head = ("operator", "by default", "switched to", "default", "switched", "added")
    return f"{where}; {size}.\n\n{table(head, body, '   rrr')}"


def switch_tables() -> str:
    """Return the table of each device's gpt2-switches.json."""
    files = sorted(RESULTS.glob("*/gpt2-switches.json"))
    return "\n".join(switch_table(dict(read_json(path))) for path in files)


if __name__ == "__main__":
    print(plot_seeds() or f"no shakespeare record under {RESULTS}")
