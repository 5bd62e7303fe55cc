"""``weft report``: one self-contained HTML page from records."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft.core.errors import WeftError

EPILOG = "Example: weft report a.jsonl results/ -o page.html"


def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records files (JSON lines), or folders of them.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write; - for standard output.")
    ] = Path("weft-report.html"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "Weft report",
    as_json: Annotated[
        bool, typer.Option("--json", help="Say what was written as JSON on standard output.")
    ] = False,
) -> None:
    """Draw one self-contained HTML page from records: roofline, bars, ladders, verdicts, tables.

    The page fetches nothing and can be mailed or opened from disk. Nothing is run to draw it.
    """
    from weft.workbench.report import load, page

    loaded, torn = load(records)
    html = page(loaded, torn=torn, title=title)
    if torn:
        lines = "line was" if torn == 1 else "lines were"
        print(f"{torn} torn {lines} passed over; the page says so", file=sys.stderr)
    if str(output) == "-":
        if as_json:
            raise WeftError(
                "one of the two can have standard output",
                expected="--json with a file to write to, or --output - alone",
                got="--json --output -",
            )
        sys.stdout.write(html)
        return
    _write(output, html)
    devices = len({str(r.machine.get("device")) for r in loaded if hasattr(r.machine, "get")})
    if as_json:
        told = {"page": str(output), "records": len(loaded), "devices": devices, "torn": torn}
        print(json.dumps(told))
    else:
        print(output)
        print(f"{len(loaded)} records drawn", file=sys.stderr)


def _write(output: Path, html: str) -> None:
    """The whole page or none of it: an earlier page outlives a full disk."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(html)
            os.chmod(name, 0o644)
            os.replace(name, output)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise WeftError(
            f"the page could not be written to {output}",
            got=error.strerror or str(error),
            hint="name another place: --output FILE",
        ) from error
