"""One run of ncu over the target: its command, its time limit, and what it came to."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core import Cost, WeftError
from weft.workbench import cell_processes, target
from weft.workbench.ncu import find
from weft.workbench.ncu.counters import asked
from weft.workbench.ncu.output import Printed, parse
from weft.workbench.target import Place, heard

TIMEOUT = 600.0  # seconds, all runs together; each pass replays the kernel and restores its memory
MEMORY = 48 << 30  # bytes of host memory of all processes; ncu keeps a copy of what kernels write
PRINTED = 64 << 20  # bytes of output
TRIES = 6  # each may find that the tool does not know one of the names
HINT = "a smaller case has fewer bytes to restore between the tool's passes"

Progress = Callable[[str], None]


@dataclass
class Told:
    """What the target wrote in its report as it went."""

    pid: int = 0
    last: str = ""
    backend: str = ""
    cost: Cost | None = None
    why: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Told:
        told = Told()
        for line in heard(path):
            told._take(line)
        return told

    def _take(self, line: dict[str, Any]) -> None:
        self.last = line["event"]
        if self.last == "started":
            self.pid = line["pid"]
        elif self.last == "subject":
            self.backend, self.cost = line["backend"], Cost(**line["cost"])
        elif "why" in line:
            self.why[self.last] = line["why"]

    @property
    def finished(self) -> bool:
        return self.last == "finished"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A run that came to its end: the tool's rows, and what the target told."""

    printed: Printed
    backend: str
    cost: Cost


def options(log: Path, metrics: Sequence[str]) -> list[str]:
    """The tool's options, each of which it has had since 2022.

    Clocks are left as they are, as the records' are. ``--cache-control all`` flushes every cache
    before each pass of each kernel: with ``none`` only the first pass would be cold, and counters
    of different passes would be of different calls. Kernels are replayed, not the whole program,
    which would compile and draw inputs anew for each pass.
    """
    return [
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *("--config-file", "off", "--target-processes", "application-only"),
        *("--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel"),
        *("--profile-from-start", "off", "--metrics", ",".join(metrics)),
    ]


def environment() -> dict[str, str]:
    """The user's, with Weft to be found, numbers printed as in C, and no files left at home."""
    said = {"LC_ALL": "C", "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"}
    return target.environment(**said)


def count(program: Path, job: dict[str, Any], arch: str, progress: Progress) -> Counted:
    """Run the tool until it knows all that it is asked; raises :class:`WeftError` where it cannot
    count, or where the call cannot be made. Nothing that was started is left."""
    unknown: set[str] = set()
    deadline = time.monotonic() + TIMEOUT
    for _ in range(TRIES):
        metrics = asked(arch, unknown)
        with tempfile.TemporaryDirectory(prefix="weft-ncu-") as folder:
            run = Run(program, job, Path(folder), metrics)
            run.wait(deadline, progress)
            printed, told = parse(run.text()), Told.read(run.place.report)
            found = {m for m in metrics for u in printed.unknown if m == u or m.startswith(u + ".")}
            if not (found and not printed.rows):
                return run.result(printed, told)
        unknown |= found
        progress(f"ncu does not know {', '.join(sorted(found))}; once more without")
    raise WeftError(
        f"{find.TOOL} does not know the counters that Weft asks for",
        got=", ".join(sorted(unknown)),
        hint=f"install another version: {find.GET}",
    )


class Run:
    """The tool's process, its folder, and what is told of it while it runs."""

    def __init__(
        self, program: Path, job: dict[str, Any], folder: Path, metrics: Sequence[str]
    ) -> None:
        self.place = place = Place(folder)
        self.strange, self.stopped = bool(job["sources"]), ""
        command = [str(program), *options(place.log, metrics)]
        self.process = place.start(command, "weft.workbench.ncu.target", job, environment())

    def text(self) -> str:
        """What the tool logged, and what it and the target printed."""
        files = (f for f in (self.place.log, self.place.output) if f.exists())
        return "\n".join(f.read_text(errors="replace") for f in files)

    def wait(self, deadline: float, progress: Progress) -> None:
        """Until it has ended, or has been killed with all it started."""
        shown = ""
        try:
            while self.process.poll() is None and not self.stopped:
                told = Told.read(self.place.report)
                line = f"ncu: {_STEPS.get(told.last, 'starting')}"
                if line != shown:
                    progress(line)
                    shown = line
                self.stopped = self._over(deadline)
                time.sleep(0.1)
        finally:
            self._end()

    def _over(self, deadline: float) -> str:
        """Why it must be stopped; empty while it may go on."""
        if time.monotonic() > deadline:
            return f"it was not done within {TIMEOUT:.0f} s"
        if self.place.output.stat().st_size > PRINTED:
            return f"it printed more than {PRINTED >> 20} MiB"
        if self.place.log.exists() and _hopeless(self.place.log.read_text(errors="replace")):
            return "the tool cannot count"
        held = self.strange and cell_processes.resident(self._family())
        return f"it took more than {MEMORY >> 30} GiB of memory" if held > MEMORY else ""

    def _family(self) -> list[int]:
        """The tool and all that it has started."""
        return [self.process.pid, *cell_processes.members(self.process.pid, self.process.pid)]

    def _end(self) -> None:
        """Kill what is left of what was started, and wait for the tool."""
        left = [p for p in self._family() if p != os.getpid()]
        target = Told.read(self.place.report).pid
        with suppress(OSError):  # another has its number by now, or it ended
            if str(self.place.job).encode() in Path(f"/proc/{target}/cmdline").read_bytes():
                left.append(target)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, printed: Printed, told: Told) -> Counted:
        """What was counted; raises :class:`WeftError` with the first thing that went wrong."""
        text = self.text()
        known = None if printed.rows else find.trouble(_complaints(text))
        if known is not None:
            raise known
        if self.stopped:
            step = _STEPS.get(told.last, "starting")
            raise WeftError(f"the profile was stopped: {self.stopped} ({step})", hint=HINT)
        end = " ".join(text.split())[-300:] or "it printed nothing"
        if not told.pid:
            raise WeftError(f"{find.TOOL} could not start Python here", got=end)
        for event, what in _REFUSALS.items():
            if event in told.why:
                raise WeftError(f"{what}: {told.why[event]}")
        if not told.finished or told.cost is None:
            raise WeftError(
                f"the process ended before the call was over (exit code {self.process.returncode})",
                got=end,
            )
        if not printed.rows:
            raise WeftError(
                "no kernel was counted",
                got="; ".join(printed.troubles) or "the call launched none",
                hint="a view, as the backward of a sum is, needs no kernel",
            )
        return Counted(printed=printed, backend=told.backend, cost=told.cost)


def _hopeless(log: str) -> bool:
    """Whether the tool has said what lets it count nothing: the target need not go on."""
    complaints = _complaints(log)
    return bool(parse(complaints).unknown) or find.trouble(complaints) is not None


def _complaints(text: str) -> str:
    """Without what the tool says by the way; where it does not start, its lines have no mark."""
    lines = text.splitlines()
    return "\n".join(x for x in lines if not x.lstrip().startswith(("==PROF==", "==WARNING==")))


_STEPS = {
    "": "starting, importing",
    "started": "importing",
    "subject": "drawing inputs",
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
