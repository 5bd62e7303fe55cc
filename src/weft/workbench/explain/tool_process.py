"""Process of a vendor's tool (ncu, nsys) over one call: its files, its progress, its limits and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core import Cost, Log, WeftError
from weft.workbench.sandbox import process_tree
from weft.workbench.sanitizer.subprocess_target import EventState, RunFiles

MAX_MEMORY = 48 << 30  # bytes of host memory of all processes; ncu keeps a copy of what kernels write
MAX_OUTPUT = 64 << 20  # bytes
REFUSALS = {
    "refused": "not supported",
    "unusable": "it cannot be read",
    "raised": "the call raised under the profiler",
}


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


class ToolProcess:
    """Process of a tool that runs ``python -m module`` on a job.

    Args:
        tool: the program and its options; its name is that of the program's file.
        title: the tool's name for messages, such as Nsight Compute.
        module: the target's module.
        job: what the target reads.
        files: the run's files, in a folder that exists.
        environment: environment of all processes.
        steps: text of the log after each event of the target.
        timeout: seconds until ``deadline``, for the message.
    """

    def __init__(
        self,
        tool: Sequence[str],
        *,
        title: str,
        module: str,
        job: Mapping[str, Any],
        files: RunFiles,
        environment: Mapping[str, str],
        steps: Mapping[str, str],
        timeout: float,
        hint: str,
    ) -> None:
        self.name, self.title, self.files, self.steps = Path(tool[0]).name, title, files, steps
        self.timeout, self.hint = timeout, hint
        self.is_external, self.stop_reason = bool(job["sources"]), ""
        self.process = files.start(tool, module, job, environment)

    def text(self) -> str:
        """Return the tool's log, and the output of the tool and the target."""
        files = (f for f in (self.files.log, self.files.output) if f.exists())
        return "\n".join(f.read_text(errors="replace") for f in files)

    def cannot_go_on(self) -> str:
        """Return why the tool's log says that the run is in vain; empty by default."""
        return ""

    def known_problem(self) -> WeftError | None:
        """Return an error with a hint for a problem that the tool's output names; None by default."""
        return None

    def wait(self, deadline: float, log: Log) -> None:
        """Wait until the run ends; beyond a limit kill it and all that it started."""
        last_line = ""
        try:
            while self.process.poll() is None and not self.stop_reason:
                state = TargetState.read(self.files.report)
                line = f"{self.name}: {self.steps.get(state.last, 'starting')}"
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
            return f"it was not done within {self.timeout:.0f} s"
        if self.files.output.stat().st_size > MAX_OUTPUT:
            return f"it printed more than {MAX_OUTPUT >> 20} MiB"
        if reason := self.cannot_go_on():
            return reason
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

    def final_state(self, *, succeeded: bool) -> TargetState:
        """Return the target's state after a complete run; raises :class:`WeftError` with the first problem.

        ``succeeded`` says that the tool has recorded something, which shows that it can work here.
        """
        problem = None if succeeded else self.known_problem()
        if problem is not None:
            raise problem
        state = TargetState.read(self.files.report)
        # After the known problems: one of them also stops the run, and its own error has a better hint.
        if self.stop_reason:
            step = self.steps.get(state.last, "starting")
            raise WeftError(f"the profile was stopped: {self.stop_reason} ({step})", hint=self.hint)
        if not state.pid:
            raise WeftError(f"{self.title} could not start Python here", got=self.tail())
        for event, message in REFUSALS.items():
            if event in state.why:
                raise WeftError(f"{message}: {state.why[event]}")
        if not state.finished or state.cost is None:
            raise WeftError(
                f"the process ended before the call was over (exit code {self.process.returncode})",
                got=self.tail(),
            )
        return state

    def tail(self) -> str:
        """Return the end of the output, which has the reason; 300 characters fit in an error line."""
        return " ".join(self.text().split())[-300:] or "it printed nothing"
