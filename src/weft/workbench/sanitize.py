"""Sanitize: an implementation's calls under compute-sanitizer, and what that found as a verdict.

The tool instruments every memory access of every kernel, in a process of its own, with PyTorch's
caching allocator off, so that each tensor is an allocation that can be overrun.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import Finding, Verdict, WeftError
from weft.core.operator import DIRECTIONS
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.bring import Source
from weft.workbench.kernel_names import is_library, origin
from weft.workbench.oracle import fresh_seeds
from weft.workbench.sanitize_output import ERROR, Fault, Parsed, parse
from weft.workbench.target import Place, environment, heard

TOOLS = {
    "memcheck": "accesses out of bounds or misaligned",
    "racecheck": "races in shared memory",
    "initcheck": "reads of global memory that nothing has written",
    "synccheck": "barriers that not all threads reach",
}
NAME = "compute-sanitizer"
TIMEOUT = 900.0  # seconds: importing PyTorch alone takes some twenty of them under the tool
FOUND = 87  # the tool's exit code where it found something
SHOWN = 3
HINT = (
    "it comes with the CUDA toolkit (then set PATH or CUDA_HOME), or alone, without one: "
    "pip install nvidia-cuda-sanitizer-api"
)
_FOLDERS = ("bin", "compute-sanitizer", "extras/compute-sanitizer")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run of the tool found; ``status`` is pass, fail or unsupported, ``reason`` why.

    ``faults`` are the candidate's, alike ones as one; ``count`` is the tool's number of errors.
    ``left_out`` counts reports in kernels of a library's and warnings, which fail nothing.
    """

    tool: str
    status: str
    reason: str = ""
    faults: tuple[Fault, ...] = ()
    count: int = 0
    left_out: int = 0
    cases: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def lines(self) -> tuple[str, ...]:
        """The first faults, one line each."""
        return tuple(f.line for f in self.faults[:SHOWN])

    def verdict(self, operator: str, implementation: str, direction: str) -> Verdict:
        """The report as a verdict with one finding, ``sanitize``, at all its cases together."""
        finding = Finding(check="sanitize", status=self.status, detail=self._detail())
        return Verdict(
            operator=operator,
            implementation=implementation,
            case=" ".join(self.cases),
            direction=direction,
            status=self.status,
            reason=f"sanitize: {self.reason}" if self.status == FAIL else self.reason,
            findings=() if self.status == UNSUPPORTED else (finding,),
        )

    def _detail(self) -> str:
        if self.status == FAIL:
            return self.reason
        left = f", {self.left_out} warnings or reports of libraries left out"
        return f"{self.tool} found nothing at {len(self.cases)} cases in {self.seconds:.0f} s" + (
            left if self.left_out else ""
        )


def find() -> Path | None:
    """Where compute-sanitizer is: on PATH, in a CUDA toolkit, or out of its own wheel."""
    on_path = shutil.which(NAME)
    if on_path:
        return Path(on_path)
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        roots += sorted(map(str, Path(folder).glob("cu[0-9]*")), reverse=True)
    for root in filter(None, roots):
        for inner in _FOLDERS:
            path = Path(root, inner, NAME)
            if path.is_file() and os.access(path, os.X_OK):
                return path
    return None


def tools() -> tuple[str, ...]:
    """The tools that can be run here; none where compute-sanitizer is not installed."""
    return tuple(TOOLS) if find() else ()


def run(
    operator: str,
    implementation: str,
    cases: Sequence[str] = (),
    direction: str = "forward",
    tool: str = "memcheck",
    *,
    with_file: Path | str | Source | None = None,
    timeout: float = TIMEOUT,
    device: str = "cuda",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run one tool over an implementation's calls at these cases, one call each.

    Without ``cases``, a few small ones are chosen. ``with_file`` is the file (or the source) that
    the implementation comes from; nothing of it is run in this process. ``progress`` is told, a
    line at a time, how far it is. Raises :class:`WeftError` for a tool or direction there is not;
    where the tool is missing or refuses the device, the report is ``unsupported``, with the reason.
    """
    if tool not in TOOLS:
        raise WeftError("--sanitize", expected=", ".join(TOOLS), got=tool)
    if direction not in DIRECTIONS:
        raise WeftError("direction", expected=" or ".join(DIRECTIONS), got=direction)
    program = find()
    if program is None:
        return Report(tool=tool, status=UNSUPPORTED, reason=f"{NAME} is not here: {HINT}")
    if device == "cuda" and not machine.has_gpu():
        reason = f"{NAME} looks at kernels on a GPU, and {machine.gpu_reason()}"
        return Report(tool=tool, status=UNSUPPORTED, reason=reason)
    if isinstance(with_file, Path | str):
        with_file = Source(kind="file", path=str(Path(with_file).resolve()), operator=operator)
    job = {
        "operator": operator,
        "implementation": implementation,
        "cases": list(cases),
        "direction": direction,
        "device": device,
        "seed": fresh_seeds(1)[0],
        "sources": [with_file.to_json()] if with_file else [],
    }
    with tempfile.TemporaryDirectory(prefix="weft-sanitize-") as folder:
        process = Watched(program, tool, job, Path(folder), progress)
        process.wait(timeout)
        return process.report()


@dataclass
class Told:
    """What the target wrote in its report as it went."""

    started: bool = False
    finished: bool = False
    unusable: str = ""
    backend: str = ""
    cases: tuple[str, ...] = ()
    begun: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    raised: str = ""
    memory: bool = False

    @staticmethod
    def read(path: Path) -> Told:
        told = Told()
        for line in heard(path):
            told._take(line)
        return told

    def _take(self, line: dict[str, Any]) -> None:
        event = line["event"]
        if event in ("started", "finished"):
            setattr(self, event, True)
        elif event == "cases":
            self.cases, self.backend = tuple(line["names"]), line["backend"]
        elif event == "unusable":
            self.unusable = line["why"]
        elif event == "refused":
            self.refused.append(line["why"])
        elif event == "raised":
            self.raised, self.memory = f"{line['why']} ({line['case']})", line["memory"]
        else:
            getattr(self, event).append(line["case"])


class Watched:
    """One run of the tool: its process, its folder, and what is told of it while it runs."""

    def __init__(
        self,
        program: Path,
        tool: str,
        job: dict[str, Any],
        folder: Path,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.tool, self.progress = tool, progress
        self.place = place = Place(folder)
        self.began, self.late = time.monotonic(), False
        command = [str(program), *options(tool, place.log)]
        module = "weft.workbench.sanitize_target"
        self.process = place.start(command, module, job, _environment())

    def wait(self, timeout: float) -> None:
        """Until it has ended, or has been killed with all it started."""
        shown = ""
        try:
            while self.process.poll() is None:
                if time.monotonic() - self.began > timeout:
                    self.late = True
                    return
                told = Told.read(self.place.report)
                at = f", {told.begun[-1]}" if told.begun else ", importing"
                text = f"{self.tool}: {len(told.done)} of {len(told.cases) or '?'} cases{at}"
                if self.progress and text != shown:
                    self.progress(text)
                    shown = text
                time.sleep(0.1)
        finally:
            self._end()

    def _end(self) -> None:
        """Kill what is left of the tool's process group: what it started, and what that did."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # none is left
        finally:
            self.process.wait()

    def report(self) -> Report:
        log = self.place.log.read_text(errors="replace") if self.place.log.exists() else ""
        printed = self.place.output.read_bytes()[-300:].decode(errors="replace")
        return conclude(
            self.tool,
            log,
            Told.read(self.place.report),
            code=self.process.returncode,
            seconds=time.monotonic() - self.began,
            late=self.late,
            printed=" ".join(printed.split()),
        )


def conclude(
    tool: str,
    log: str,
    told: Told,
    *,
    code: int,
    seconds: float = 0.0,
    late: bool = False,
    printed: str = "",
) -> Report:
    """What the tool's log, the target's own report and the exit code come to together.

    ``late`` says that it was killed for its time, ``printed`` is the end of its output.
    """
    found = parse(log)
    mine = [f for f in found.faults if f.level == ERROR and not _foreign(f, told.backend)]
    if mine:
        count = max(found.count or 0, sum(f.times for f in mine))
        lines = "; ".join(f.line for f in mine[:SHOWN])
        status, reason = FAIL, f"{tool} found {count} error{'s'[: count != 1]}: {lines}"
    else:
        ended = _ended(tool, found, told, code, f" after {seconds:.0f} s" if late else "", printed)
        status, reason = ended or _counted(tool, found, code)
    refusal = next((t for t in found.troubles if "not supported" in t), "")
    if refusal:
        status = UNSUPPORTED
        reason = f"{NAME} refuses this device: {refusal.removeprefix('Error: ')}"
    return Report(
        tool=tool,
        status=status,
        reason=" ".join(reason.split()),
        faults=tuple(mine),
        count=found.count or 0,
        left_out=sum(f.times for f in found.faults if f not in mine),
        cases=tuple(told.begun) or told.cases,
        seconds=seconds,
    )


def _ended(
    tool: str, found: Parsed, told: Told, code: int, late: str, printed: str
) -> tuple[str, str] | None:
    """Status and reason where not all was done that the tool was to look at; else None."""
    at = f" at {told.begun[-1]}" if told.begun else ""
    if late:
        return UNSUPPORTED, f"{tool} was not done{late}{at}"
    if not told.started:
        why = "; ".join(found.troubles) or printed or "it wrote nothing"
        return UNSUPPORTED, f"{NAME} could not run Python here: {why}"
    if told.unusable:
        return FAIL, told.unusable
    if told.raised:
        status = UNSUPPORTED if told.memory else FAIL
        return status, f"the call raised under {tool}: {told.raised}"
    if not told.finished:
        return FAIL, f"the process ended before its last case{at} (exit code {code})"
    if not told.done:
        return UNSUPPORTED, next(iter(told.refused), "there is no case small enough for it")
    return None


def _counted(tool: str, found: Parsed, code: int) -> tuple[str, str]:
    """All calls were made, and no kernel of the candidate's is accused: does the count agree?"""
    if found.troubles:
        return UNSUPPORTED, f"{NAME} did not see all of it: {'; '.join(found.troubles)}"
    if found.count is None:
        return UNSUPPORTED, f"{NAME} printed no summary; it may have looked at nothing"
    if code not in (0, FOUND):
        return UNSUPPORTED, f"{NAME} ended with exit code {code} after the last case"
    explained = sum(f.times for f in found.faults if f.level == ERROR)
    if found.count > explained or (code == FOUND and not found.faults):
        return FAIL, f"{tool} counts {found.count} errors, of which {explained} could be read"
    return PASS, ""


def options(tool: str, log: Path) -> list[str]:
    """The tool's own options; only those that it has had since CUDA 12."""
    chosen = [f"--tool={tool}", f"--error-exitcode={FOUND}", f"--log-file={log}"]
    chosen += ["--print-limit=1000", "--show-backtrace=device", "--launch-timeout=120"]
    chosen += ["--target-processes=application-only"]
    if tool == "memcheck":
        # Torch asks the driver for what it may not have, and goes on; a launch that fails, the
        # check itself sees. Padding, so that an overrun does not end in the next tensor.
        chosen += ["--report-api-errors=no", "--padding=1024"]
    return chosen


def _environment() -> dict[str, str]:
    return environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def _foreign(fault: Fault, backend: str) -> bool:
    """Whether a fault lies in a library's kernel, which the candidate cannot have written."""
    if backend not in ("triton", "cuda", "numba") or not fault.kernel:
        return False
    whose = origin(fault.kernel)
    return whose == "memory" or is_library(whose, fault.kernel, backend)
