"""``weft demo``: run pairs of a bad and a good kernel, with the evidence for the difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Json, select_device
from weft.core.errors import WeftError
from weft.core.json_files import content_errors

if TYPE_CHECKING:
    from weft.core.table import Table

EPILOG = """Examples:
  weft demo
  weft demo coalescing --source
  weft demo all --save demos.json

All demos, with measured times: weft help demos"""
ALL = "all"


def demo(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Demo to run, or all [default: list the demos]")
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the demos; run none")] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Print both source files: kernels and launch code")
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_NN", help="Architecture of the compiled code to show [default: this GPU's]"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda:N", callback=select_device, help="GPU to run on [default: the first]"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the sweep of wave-quantization as an SVG file")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results and the machine as JSON")
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show a file that --save wrote; run nothing"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a bad and a good kernel that compute the same: times, ratio and the cause.

    Without a GPU: the kernels, and the evidence in their machine code and addresses.

    Exit 0: demo shown (timing may be skipped without a GPU); 1: unexpected timing or wrong result;
    2: invalid arguments.
    """
    from weft.lab import demos

    if (name is None and read is None) or as_list:
        _list(as_json)
        return
    watch = ending.Stopwatch()
    names = demos.DEMOS if name in (None, ALL) else (demos.demo(str(name)).name,)
    if device is not None and device != "cuda":
        raise WeftError("--device", expected="cuda:N, a GPU; without one nothing is timed", got=device)
    _validate(names, arch, picture, save, read)
    report = _read(read, names) if read is not None else _run(names, arch)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(report, indent=1) + "\n")
    with nullcontext() if read is None else content_errors(read, "what weft demo --save wrote"):
        if picture is not None:
            _draw(report["demos"], picture)
        if as_json:
            print(json.dumps(report))
        else:
            for result in report["demos"]:
                _show(result, whole_files=source, with_code=len(names) == 1)
        bad = [r["name"] for r in report["demos"] if r["status"] in ("not shown", "wrong")]
    timed = sum("ratio" in r for r in report["demos"])
    line = f"{'wrong or not as expected: ' + ', '.join(bad) if bad else 'shown'}: "
    line += f"{ending.count_text(len(report['demos']), 'demo')}, {timed} timed ({watch})"
    ending.print_verdict(line, to_stderr=as_json)
    if bad:
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from weft.lab import demos

    entries = demos.all_demos()
    if as_json:
        print(json.dumps([{"name": d.name, "sentence": d.sentence} for d in entries]))
        return
    width = max(len(d.name) for d in entries)
    for d in entries:
        output.show_notes([f"{d.name:{width}}  {d.sentence}"], indent=" " * (width + 2), style="")
    ending.print_verdict(f"{ending.count_text(len(entries), 'demo')}; run one with weft demo NAME")


def _validate(
    names: Sequence[str],
    arch: str | None,
    picture: Path | None,
    save: Path | None,
    read: Path | None,
) -> None:
    """Raise :class:`WeftError`, before anything runs, for options that cannot have a result."""
    import re

    from weft.lab import demos
    from weft.machine.query import known_kind

    if arch is not None and not re.fullmatch(r"sm_\d{2,3}", arch):
        raise WeftError("--arch", expected="a target such as sm_90", got=arch)
    if picture is not None and not any(demos.demo(n).sweep for n in names):
        raise WeftError("--picture", expected="wave-quantization, which has one", got=names[0])
    if picture is not None and picture.suffix != ".svg":
        raise WeftError("--picture", expected="a name that ends in .svg", got=picture)
    if save is not None and read is not None:
        raise WeftError("--save", expected="a run", got="--from, which runs nothing")
    if save is not None and save.is_dir():
        raise WeftError("--save", expected="a file", got=f"the folder {save}")
    if read is None and (save is not None or picture is not None):
        known_kind("cuda")  # without a GPU nothing is timed, so there is nothing to save or draw


def _read(file: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the results of these demos; raise :class:`WeftError` if the file has none of them."""
    from weft.lab.demos.report import load

    report = load(file)
    with content_errors(file, "what weft demo --save wrote"):
        results = [d for d in report["demos"] if d["name"] in names]
    if not results:
        raise WeftError(f"{file}", expected=f"results of the demo {names[0]}", got="others")
    return {**report, "demos": results}


def _run(names: Sequence[str], arch: str | None) -> dict[str, Any]:
    # Weft's backends decide whether Triton interprets kernels, so they are imported before torch.
    from weft import backends, machine
    from weft.lab import demos
    from weft.lab.demos import run

    assert backends
    results = []
    with progress.Progress(total=len(names), every_line=len(names) == 1) as status:
        for name in names:
            status(name)
            results.append(run.run(demos.demo(name), status.describe, arch=arch))
            status.advance()
    return {"machine": machine.fingerprint(), "demos": results}


def _draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    from weft.lab.demos import report

    sweep = next((s for s in map(report.sweep, results) if s is not None), None)
    if sweep is None:
        raise WeftError("--picture", expected="a sweep that was measured", got="none")
    report.plot(sweep, path)
    output.log(f"picture: {path}")


def _show(result: Mapping[str, Any], *, whole_files: bool, with_code: bool) -> None:
    """Print a demo's sentence, kernels, times, evidence, cause and what to look for."""
    from weft.lab import demos
    from weft.lab.demos import report

    output.show_notes([f"{result['name']}: {result['sentence']}"], style="bold")
    if whole_files:
        for file in demos.demo(result["name"]).files:
            print(f"\n--- {file.name}\n{file.read_text().rstrip()}")
    elif with_code:
        print(f"\n{result['code']}")
    print()
    output.show_table(_table(result))
    print()
    if picture := report.traffic(result):
        print(f"{picture}\n")
    lines = [report.verdict(result)]
    if "ratio" in result:
        tolerance = result["tolerance"]
        exactness = f"within {tolerance:g} of float64" if tolerance else "bit for bit"
        lines.append(f"both results are correct, {exactness}; times are {result['clock']}")
    for side, timing in result.get("times", {}).items():
        if timing["flags"]:
            lines.append(f"{side}: {', '.join(timing['flags'])}")
    for key, label in (("no_evidence", "no static evidence"), ("not_counted", "not counted")):
        if key in result:
            lines.append(f"{label}: {result[key]}")
    if with_code and result.get("hint"):
        lines.append(f"hint: {result['hint']}")
    lines += [f"why: {result['because']}", f"see: {result['see']}"]
    output.show_notes(lines, style="")
    print()


def _table(result: Mapping[str, Any]) -> Table:
    """Return a table of both kernels side by side: what differs, time, and each piece of evidence."""
    from weft.core.table import plain_table
    from weft.lab.demos.report import number

    sides, times = result["ways"], result.get("times")
    rows = [[key, *(side[key] for side in sides.values()), ""] for key in ("kernel", "how")]
    if times:
        rows.append(["time", *(_time(times[name]) for name in sides), result["clock"].partition(":")[0]])
    for fact in result["evidence"]:
        by = f"{fact['source']}, {result['arch']}" if fact["source"] == "SASS" else fact["source"]
        rows.append([fact["label"], number(fact["bad"]), number(fact["good"]), by])
    return plain_table(("", "bad", "good", "by"), rows, priorities={"by": 1}, fold=12)


def _time(timing: Mapping[str, Any]) -> str:
    from weft.workbench.report.table import duration

    low, high = timing["interval"]
    warm = f", warm {duration(timing['warm_us'])}" if timing["warm_us"] is not None else ""
    return f"{duration(timing['us'])} ({duration(low)} to {duration(high)}){warm}"
