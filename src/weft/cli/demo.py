"""``weft demo``: small pairs of a bad and a good kernel, and the counter that tells them apart."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = "What each of them shows, with figures: docs/demos.md"
ALL = "all"


def demo(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or 'all'; left out: list them.")
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List them, run none.")] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Print both files whole: kernels and their launch.")
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_90", help="Target of the static evidence; default: this GPU's."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the sweep of wave-quantization as this SVG.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write what was found, and the machine, as JSON.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option("--from", help="Show what --save wrote; run nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a bad and a good kernel that compute the same: their times, the ratio, and the cause.

    With no GPU: the kernels and what their code and addresses tell.

    Exit 0: shown, or not timed here for the reason told; 1: not so, or an answer was wrong.

    Example: weft demo coalescing
    """
    from weft.workbench import demos

    if (name is None and read is None) or as_list:
        _list(as_json)
        return
    chosen = demos.DEMOS if name in (None, ALL) else (demos.demo(str(name)).name,)
    _validate(chosen, arch, picture, save, read)
    said = _kept(read, chosen) if read is not None else _run(chosen, arch)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(said, indent=1) + "\n")
    if picture is not None:
        _draw(said["demos"], picture)
    if as_json:
        print(json.dumps(said))
    else:
        for shown in said["demos"]:
            _show(shown, whole=source, code=len(chosen) == 1)
    if any(shown["status"] in ("not shown", "wrong") for shown in said["demos"]):
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from weft.workbench import demos

    found = demos.all_demos()
    if as_json:
        print(json.dumps([{"name": d.name, "sentence": d.sentence} for d in found]))
        return
    width = max(len(d.name) for d in found)
    for d in found:
        print(f"{d.name:{width}}  {d.sentence}")


def _validate(
    chosen: Sequence[str],
    arch: str | None,
    picture: Path | None,
    save: Path | None,
    read: Path | None,
) -> None:
    """What would come to nothing is refused before anything runs."""
    import re

    from weft.core.errors import WeftError
    from weft.machine.query import known_kind
    from weft.workbench import demos

    if arch is not None and not re.fullmatch(r"sm_\d{2,3}", arch):
        raise WeftError("--arch", expected="a target such as sm_90", got=arch)
    if picture is not None and not any(demos.demo(n).sweep for n in chosen):
        raise WeftError("--picture", expected="wave-quantization, which has one", got=chosen[0])
    if picture is not None and picture.suffix != ".svg":
        raise WeftError("--picture", expected="a name that ends in .svg", got=picture)
    if save is not None and read is not None:
        raise WeftError("--save", expected="a run", got="--from, which runs nothing")
    if save is not None and save.is_dir():
        raise WeftError("--save", expected="a file", got=f"the folder {save}")
    if read is None and (save is not None or picture is not None):
        known_kind("cuda")  # with nothing timed there is nothing to keep or draw


def _kept(read: Path, chosen: Sequence[str]) -> dict[str, Any]:
    from weft.core.errors import WeftError
    from weft.workbench.demos import page

    said = page.load(read)
    found = [d for d in said["demos"] if d["name"] in chosen]
    if not found:
        raise WeftError(f"{read}", expected=f"the demo {chosen[0]} in it", got="others")
    return {**said, "demos": found}


def _run(chosen: Sequence[str], arch: str | None) -> dict[str, Any]:
    from weft import backends, machine  # backends decides what is interpreted, so before torch
    from weft.workbench import demos
    from weft.workbench.demos import running

    assert backends
    found = [running.run(demos.demo(n), _say, arch=arch) for n in chosen]
    return {"machine": machine.fingerprint(), "demos": found}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _draw(demos: Sequence[Mapping[str, Any]], path: Path) -> None:
    from weft.core.errors import WeftError
    from weft.workbench.demos import page

    found = next((s for s in map(page.sweep, demos) if s is not None), None)
    if found is None:
        raise WeftError("--picture", expected="a sweep that was measured", got="none")
    page.picture(found, path)
    _say(f"drawn: {path}")


def _show(shown: Mapping[str, Any], *, whole: bool, code: bool) -> None:
    """What it shows, the kernels, both times, the cause, and what to see."""
    from weft.workbench import demos, table
    from weft.workbench.demos import page

    out = table.console()
    out.print(f"{shown['name']}: {shown['sentence']}", style="bold", markup=False)
    if whole:
        for file in demos.demo(shown["name"]).files:
            print(f"\n--- {file.name}\n{file.read_text().rstrip()}")
    elif code:
        print(f"\n{shown['code']}")
    print()
    out.print(_table(shown))
    print()
    print(page.verdict(shown))
    if "ratio" in shown:
        allowed = shown["tolerance"]
        within = f"within {allowed:g} of float64" if allowed else "to the bit"
        print(f"both answers are right, {within}; times are {shown['clock']}")
    for side, taken in shown.get("times", {}).items():
        if taken["flags"]:
            print(f"{side}: {', '.join(taken['flags'])}")
    for word, about in (("no_evidence", "no static evidence"), ("not_counted", "not counted")):
        if word in shown:
            print(f"{about}: {shown[word]}")
    if code and shown.get("hint"):
        print(f"hint: {shown['hint']}")
    print(f"why: {shown['because']}")
    print(f"see: {shown['see']}\n")


def _table(shown: Mapping[str, Any]) -> Any:
    """Both ways side by side: how, time, and each piece of evidence."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from weft.workbench.demos.page import figure
    from weft.workbench.table import duration

    ways, taken = shown["ways"], shown.get("times")
    rows = [[word, *(ways[s][word] for s in ways), ""] for word in ("kernel", "how")]
    if taken:
        clock = shown["clock"].partition(":")[0]
        rows.append(["time", *(_time(duration, taken[s]) for s in ways), clock])
    for fact in shown["evidence"]:
        by = f"{fact['source']}, {shown['arch']}" if fact["source"] == "SASS" else fact["source"]
        rows.append([fact["label"], figure(fact["bad"]), figure(fact["good"]), by])
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "bad", "good", "by"):
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def _time(duration: Any, taken: Mapping[str, Any]) -> str:
    low, high = taken["interval"]
    warm = f", warm {duration(taken['warm_us'])}" if taken["warm_us"] is not None else ""
    return f"{duration(taken['us'])} ({duration(low)} to {duration(high)}){warm}"
