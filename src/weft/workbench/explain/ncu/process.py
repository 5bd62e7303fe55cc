"""Run of ncu over the target: its command, its limits, and its result."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core import Cost, Log, WeftError
from weft.workbench.explain.ncu import find
from weft.workbench.explain.ncu.counters import metric_names
from weft.workbench.explain.ncu.output import ParsedOutput, parse
from weft.workbench.sandbox import process_tree
from weft.workbench.sanitizer import subprocess_target
from weft.workbench.sanitizer.subprocess_target import EventState, RunFiles

TIMEOUT = 600.0  # seconds, all runs together; each pass replays the kernel and restores its memory
MAX_MEMORY = 48 << 30  # bytes of host memory of all processes; ncu keeps a copy of what kernels write
MAX_OUTPUT = 64 << 20  # bytes
MAX_RUNS = 6  # each run may end with metric names that this version of the tool does not know
HINT = "a smaller case has fewer bytes to restore between the tool's passes"


@dataclass
class TargetState(EventState):
    """State of the target, from the events that it has written so far."""

    pid: int = 0
    last: str = ""
    backend: str = ""
    cost: Cost | None = None
    why: dict[str, str] = field(default_factory=dict)

    def update(self, event: dict[str, Any]) -> None:
        self.last = event["event"]
        if self.last == "started":
            self.pid = event["pid"]
        elif self.last == "subject":
            self.backend, self.cost = event["backend"], Cost(**event["cost"])
        elif "why" in event:
            self.why[self.last] = event["why"]

    @property
    def finished(self) -> bool:
        return self.last == "finished"


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
            output, state = parse(run.text()), TargetState.read(run.files.report)
            # The tool names a metric with or without its suffix.
            # With unknown metrics the tool counts nothing, so the run is repeated without them.
            rejected = {m for m in metrics for u in output.unknown if m == u or m.startswith(u + ".")}
            if not rejected or output.rows:
                return run.result(output, state)
        unknown |= rejected
        log(f"ncu does not know {', '.join(sorted(rejected))}; running again without")
    raise WeftError(
        f"{find.TOOL} does not know the counters that Weft requests",
        got=", ".join(sorted(unknown)),
        hint=f"install another version: {find.GET}",
    )


class NcuProcess:
    """Process of the tool with its files, its progress and its limits."""

    def __init__(self, program: Path, job: dict[str, Any], folder: Path, metrics: Sequence[str]) -> None:
        self.files = RunFiles(folder)
        self.is_external, self.stop_reason = bool(job["sources"]), ""
        command = [str(program), *options(self.files.log, metrics)]
        self.process = self.files.start(command, "weft.workbench.explain.ncu.target", job, environment())

    def text(self) -> str:
        """Return the tool's log, and the output of the tool and the target."""
        files = (f for f in (self.files.log, self.files.output) if f.exists())
        return "\n".join(f.read_text(errors="replace") for f in files)

    def wait(self, deadline: float, log: Log) -> None:
        """Wait until the run ends; beyond a limit kill it and all that it started."""
        last_line = ""
        try:
            while self.process.poll() is None and not self.stop_reason:
                state = TargetState.read(self.files.report)
                line = f"ncu: {_STEPS.get(state.last, 'starting')}"
                if line != last_line:
                    log(line)
                    last_line = line
                self.stop_reason = self._exceeded_limit(deadline)
                time.sleep(0.1)
        finally:
            self._kill_all()

    def _exceeded_limit(self, deadline: float) -> str:
        """Return the reason to stop the run; empty while it may continue."""
        if time.monotonic() > deadline:
            return f"it was not done within {TIMEOUT:.0f} s"
        if self.files.output.stat().st_size > MAX_OUTPUT:
            return f"it printed more than {MAX_OUTPUT >> 20} MiB"
        if self.files.log.exists() and _cannot_count(self.files.log.read_text(errors="replace")):
            return "the tool cannot count"
        # Only external code is limited; Weft's own implementations may need large cases.
        used = self.is_external and process_tree.resident_bytes(self._processes())
        return f"it took more than {MAX_MEMORY >> 30} GiB of memory" if used > MAX_MEMORY else ""

    def _processes(self) -> list[int]:
        """Return the ids of the tool and all that it has started."""
        return [self.process.pid, *process_tree.members(self.process.pid, self.process.pid)]

    def _kill_all(self) -> None:
        """Kill every process that the run started, and wait for the tool."""
        pids = [p for p in self._processes() if p != os.getpid()]
        target = TargetState.read(self.files.report).pid
        # The target may have left the process tree. Its command line has the path of this run's job, so a
        # process that has taken over its id is not killed. OSError: no process has the id now.
        with suppress(OSError):
            if str(self.files.job).encode() in Path(f"/proc/{target}/cmdline").read_bytes():
                pids.append(target)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, output: ParsedOutput, state: TargetState) -> CompletedRun:
        """Return the completed run; raises :class:`WeftError` with the first problem."""
        text = self.text()
        # Rows prove that the tool can count here, whatever else the candidate or the tool has printed.
        problem = None if output.rows else find.explain_problem(_complaints(text))
        if problem is not None:
            raise problem
        # After the known problems: one of them also stops the run, and its own error has a better hint.
        if self.stop_reason:
            step = _STEPS.get(state.last, "starting")
            raise WeftError(f"the profile was stopped: {self.stop_reason} ({step})", hint=HINT)
        # The end of the output has the reason; 300 characters fit in an error line.
        tail = " ".join(text.split())[-300:] or "it printed nothing"
        if not state.pid:
            raise WeftError(f"{find.TOOL} could not start Python here", got=tail)
        for event, message in _REFUSALS.items():
            if event in state.why:
                raise WeftError(f"{message}: {state.why[event]}")
        if not state.finished or state.cost is None:
            raise WeftError(
                f"the process ended before the call was over (exit code {self.process.returncode})",
                got=tail,
            )
        if not output.rows:
            raise WeftError(
                "no kernel was counted",
                got="; ".join(output.troubles) or "the call launched none",
                hint="a view, as the backward of a sum is, needs no kernel",
            )
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
_REFUSALS = {
    "refused": "not supported",
    "unusable": "it cannot be read",
    "raised": "the call raised under the profiler",
}
