"""``weft report``: write one self-contained HTML page from records."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import ending
from weft.cli import output as terminal
from weft.cli.options import Json
from weft.core.errors import WeftError

EPILOG = """Examples:
  weft report records.jsonl
  weft report a.jsonl results/ -o page.html --title "Before and after"
  weft report records.jsonl -o - > page.html

The quantities on the page: weft help time"""


def report(
    records: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Record files (JSON Lines), or folders of them")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Page to write; - for stdout")
    ] = Path("weft-report.html"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the page")] = "Weft report",
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page from records: roofline, bars, ladders, verdicts, tables.

    The page loads nothing from the network, so it can be mailed or opened from disk. No kernel runs.
    """
    from weft.workbench.report import load, page

    loaded, torn = load(records)
    html = page(loaded, torn=torn, title=title)
    if torn:
        lines = "line was" if torn == 1 else "lines were"
        terminal.log(f"{torn} torn {lines} skipped; the page shows their number")
    if str(output) == "-":
        if as_json:
            raise WeftError(
                "only one output can go to stdout",
                expected="--json with a file as --output, or --output - alone",
                got="--json --output -",
            )
        sys.stdout.write(html)
        return
    _write(output, html)
    devices = len({str(r.machine.get("device")) for r in loaded if hasattr(r.machine, "get")})
    if as_json:
        print(json.dumps({"page": str(output), "records": len(loaded), "devices": devices, "torn": torn}))
    else:
        counts = f"{ending.count_text(len(loaded), 'record')} of {ending.count_text(devices, 'device')}"
        ending.print_verdict(f"written: {output} ({counts})")


def _write(output: Path, html: str) -> None:
    """Write the whole page or nothing: a full disk leaves the earlier page as it was."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(html)
            os.chmod(name, 0o644)  # mkstemp makes a file that only its owner can read
            os.replace(name, output)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise WeftError(
            f"the page could not be written to {output}",
            got=error.strerror or str(error),
            hint="choose another file: --output FILE",
        ) from error
