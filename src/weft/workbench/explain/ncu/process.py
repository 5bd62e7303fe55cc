"""Run of ncu over the target: its command, its limits, and its result."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core import Cost, Log, WeftError
from weft.workbench.explain.ncu import find
from weft.workbench.explain.ncu.counters import metric_names
from weft.workbench.explain.ncu.output import ParsedOutput, parse
from weft.workbench.explain.tool_process import ToolProcess
from weft.workbench.sanitizer import subprocess_target
from weft.workbench.sanitizer.subprocess_target import RunFiles

TIMEOUT = 600.0  # seconds, all runs together; each pass replays the kernel and restores its memory
MAX_RUNS = 6  # each run may end with metric names that this version of the tool does not know
HINT = "a smaller case has fewer bytes to restore between the tool's passes"


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """Run that ended normally: the tool's rows, and the subject's backend and cost."""

    output: ParsedOutput
    backend: str
    cost: Cost


def options(log: Path, metrics: Sequence[str]) -> list[str]:
    """Return the tool's options; each exists since 2022.

    Clocks are not locked, as in the timing records. ``--cache-control all`` flushes every cache before each
    pass of each kernel: with ``none`` only the first pass would be cold, and counters of different passes
    would describe different calls. Kernels are replayed, not the whole program, which would compile and
    generate inputs again in each pass.
    """
    return [
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *("--config-file", "off", "--target-processes", "application-only"),
        *("--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel"),
        *("--profile-from-start", "off", "--metrics", ",".join(metrics)),
    ]


def environment() -> dict[str, str]:
    """Return the user's environment with Weft on the path, C number formats, and no files in the home."""
    return subprocess_target.environment(LC_ALL="C", NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT="1")


def count(program: Path, job: dict[str, Any], arch: str, log: Log) -> CompletedRun:
    """Run the tool until it knows every requested metric, and return that run.

    Raises :class:`WeftError` if it cannot count or the call fails. All processes are ended.
    """
    unknown: set[str] = set()
    deadline = time.monotonic() + TIMEOUT
    for _ in range(MAX_RUNS):
        metrics = metric_names(arch, unknown)
        with tempfile.TemporaryDirectory(prefix="weft-ncu-") as folder:
            run = NcuProcess(program, job, Path(folder), metrics)
            run.wait(deadline, log)
            output = parse(run.text())
            # The tool names a metric with or without its suffix.
            # With unknown metrics the tool counts nothing, so the run is repeated without them.
            rejected = {m for m in metrics for u in output.unknown if m == u or m.startswith(u + ".")}
            if not rejected or output.rows:
                return run.result(output)
        unknown |= rejected
        log(f"ncu does not know {', '.join(sorted(rejected))}; running again without")
    raise WeftError(
        f"{find.TOOL} does not know the counters that Weft requests",
        got=", ".join(sorted(unknown)),
        hint=f"install another version: {find.GET}",
    )


class NcuProcess(ToolProcess):
    """Process of ncu; it stops early if the tool cannot count."""

    def __init__(self, program: Path, job: dict[str, Any], folder: Path, metrics: Sequence[str]) -> None:
        files = RunFiles(folder)
        super().__init__(
            [str(program), *options(files.log, metrics)],
            title=find.TOOL,
            module="weft.workbench.explain.ncu.target",
            job=job,
            files=files,
            environment=environment(),
            steps=_STEPS,
            timeout=TIMEOUT,
            hint=HINT,
        )

    def cannot_go_on(self) -> str:
        """Return a reason once the tool's log has an error after which it counts nothing."""
        log = self.files.log
        stopped = log.exists() and _cannot_count(log.read_text(errors="replace"))
        return "the tool cannot count" if stopped else ""

    def known_problem(self) -> WeftError | None:
        """Return the first known problem that the tool complains about."""
        return find.explain_problem(_complaints(self.text()))

    def result(self, output: ParsedOutput) -> CompletedRun:
        """Return the completed run; raises :class:`WeftError` with the first problem."""
        # Rows prove that the tool can count here, whatever else the candidate or the tool has printed.
        state = self.final_state(succeeded=bool(output.rows))
        if not output.rows:
            raise WeftError(
                "no kernel was counted",
                got="; ".join(output.troubles) or "the call launched none",
                hint="a view, as the backward of a sum is, needs no kernel",
            )
        assert state.cost is not None  # a final state has one
        return CompletedRun(output=output, backend=state.backend, cost=state.cost)


def _cannot_count(log: str) -> bool:
    """Return True if the log has an error after which the tool counts nothing."""
    complaints = _complaints(log)
    return bool(parse(complaints).unknown) or find.explain_problem(complaints) is not None


def _complaints(text: str) -> str:
    """Return the text without progress and warnings; if the tool does not start, its lines have no mark."""
    lines = text.splitlines()
    return "\n".join(x for x in lines if not x.lstrip().startswith(("==PROF==", "==WARNING==")))


_STEPS = {
    "": "starting, importing",
    "started": "importing",
    "subject": "generating inputs",
    "warming": "compiling and warming up",
    "counting": "counting, pass by pass",
    "counted": "writing",
    "finished": "writing",
}
