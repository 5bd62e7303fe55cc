"""A demonstration's counter, read by Nsight Compute from one launch of each way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from weft.core.errors import WeftError
from weft.workbench.demos.demo import COUNTED, SIDES, Counter, Demo, Fact
from weft.workbench.ncu import find, running
from weft.workbench.ncu.output import parse

TIMEOUT = 300.0  # seconds; importing torch under the tool takes most of what is usual, some 20


def counted(demo: Demo) -> Fact:
    """The counter's figure for both ways.

    Raises :class:`WeftError` where the tool is missing, may not count here, or did not.
    """
    assert demo.counter is not None
    program = find.needed()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        log = Path(folder, "log.txt")
        command = [str(program), *running.options(log, demo.counter.metrics)]
        command += [sys.executable, "-m", "weft.workbench.demos.target", demo.name]
        printed = _run(command)
        said = log.read_text(errors="replace") if log.exists() else ""
    return read(demo.counter, f"{said}\n{printed}")


def _run(command: list[str]) -> str:
    """What the tool and the target printed; whatever they started is ended with them."""
    process = subprocess.Popen(
        command,
        env=running.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired as error:
        raise WeftError(f"{find.TOOL} was not done within {TIMEOUT:.0f} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(counter: Counter, text: str) -> Fact:
    """The figure of both ways out of what the tool printed: the bad way's row comes first."""
    rows = parse(text).rows
    missing = {m for row in rows for m in counter.metrics if m not in row.values}
    if len(rows) != len(SIDES) or missing:
        end = " ".join(text.split())[-300:] or "it printed nothing"
        raise find.trouble(text) or WeftError(
            f"{find.TOOL} did not count both kernels",
            expected=f"{len(SIDES)} rows with {', '.join(counter.metrics)}",
            got=end,
        )
    bad, good = (counter.of(row.values) for row in rows)
    return Fact(label=counter.label, bad=bad, good=good, source=COUNTED)
