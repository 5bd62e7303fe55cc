"""Run an implementation under NVIDIA's compute-sanitizer and turn its log into a verdict.

The tool instruments every memory access of every kernel in a process of its own. PyTorch's caching
allocator is off there, so that each tensor is an allocation that an access can overrun. The file has
two parts: running the tool, and reading its log.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import Finding, Log, Verdict, WeftError, no_log
from weft.core.operator import DIRECTIONS
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.kernels.names import is_library, origin
from weft.workbench.sanitizer.subprocess_target import EventState, RunFiles, environment
from weft.workbench.sources.source import Source

TOOLS = {
    "memcheck": "accesses out of bounds or misaligned",
    "racecheck": "races in shared memory",
    "initcheck": "reads of global memory that nothing has written",
    "synccheck": "barriers that not all threads reach",
}
NAME = "compute-sanitizer"
TIMEOUT = 900.0  # seconds: importing PyTorch alone takes some twenty of them under the tool
FAULT_EXIT_CODE = 87  # the tool's exit code if it reports an error; no usual program ends with it
MAX_SHOWN = 3
HINT = (
    "it comes with the CUDA toolkit (then set PATH or CUDA_HOME), or alone, without one: "
    "pip install nvidia-cuda-sanitizer-api"
)
_FOLDERS = ("bin", "compute-sanitizer", "extras/compute-sanitizer")
ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of one kind at one source line, reported ``times`` times; ``detail`` is of the first report."""

    kind: str
    kernel: str = ""
    where: str = ""
    detail: str = ""
    level: str = ERROR
    times: int = 1

    @property
    def line(self) -> str:
        """Fault as one line of text."""
        text = self.kind
        text += f" in {self.kernel}" if self.kernel else ""
        text += f" at {self.where}" if self.where else ""
        text += f" ({self.detail})" if self.detail else ""
        return text + (f", {self.times} times" if self.times > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of one run of the tool; ``status`` is pass, fail or unsupported, ``reason`` says why.

    ``faults`` are the candidate's, equal ones merged; ``count`` is the tool's own number of errors.
    ``left_out`` counts warnings and reports in kernels of libraries, which do not fail a run.
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
        """First faults, one line each."""
        return tuple(f.line for f in self.faults[:MAX_SHOWN])

    def verdict(self, operator: str, implementation: str, direction: str) -> Verdict:
        """Return the report as a verdict with one finding, ``sanitize``, for all its cases together."""
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
        left_out = f", {self.left_out} warnings or reports of libraries left out"
        return f"{self.tool} found nothing at {len(self.cases)} cases in {self.seconds:.0f} s" + (
            left_out if self.left_out else ""
        )


def find() -> Path | None:
    """Return the path of compute-sanitizer: on PATH, in a CUDA toolkit, or in its own wheel."""
    on_path = shutil.which(NAME)
    if on_path:
        return Path(on_path)
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    # The newest toolkit first.
    roots += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        roots += sorted(map(str, Path(folder).glob("cu[0-9]*")), reverse=True)
    for root in filter(None, roots):
        for subfolder in _FOLDERS:
            path = Path(root, subfolder, NAME)
            if path.is_file() and os.access(path, os.X_OK):
                return path
    return None


def tools() -> tuple[str, ...]:
    """Return the tools that can run here; none if compute-sanitizer is not installed."""
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
    log: Log = no_log,
) -> Report:
    """Run one tool over an implementation, with one call at each of these cases.

    Without ``cases`` a few small ones are chosen. ``with_file`` is the file or source that defines the
    implementation; this process does not execute it. Raises :class:`WeftError` for an unknown tool or
    direction. If the tool is missing or refuses the device, the report is ``unsupported`` with the reason.
    """
    if tool not in TOOLS:
        raise WeftError("--sanitize", expected=", ".join(TOOLS), got=tool)
    if direction not in DIRECTIONS:
        raise WeftError("direction", expected=" or ".join(DIRECTIONS), got=direction)
    program = find()
    if program is None:
        return Report(tool=tool, status=UNSUPPORTED, reason=f"{NAME} is not installed here: {HINT}")
    if device == "cuda" and not machine.has_gpu():
        reason = f"{NAME} checks kernels on a GPU: {machine.gpu_reason()}"
        return Report(tool=tool, status=UNSUPPORTED, reason=reason)
    if isinstance(with_file, Path | str):
        with_file = Source(kind="file", path=str(Path(with_file).resolve()), operator=operator)
    job = {
        "operator": operator,
        "implementation": implementation,
        "cases": list(cases),
        "direction": direction,
        "device": device,
        # A new seed a run, so that a candidate cannot know the values.
        "seed": fresh_seeds(1)[0],
        "sources": [with_file.to_json()] if with_file else [],
    }
    with tempfile.TemporaryDirectory(prefix="weft-sanitize-") as folder:
        process = SanitizerProcess(program, tool, job, Path(folder), log)
        process.wait(timeout)
        return process.report()


@dataclass
class TargetState(EventState):
    """State of the target, from the events that it has written so far."""

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

    def update(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name in ("started", "finished"):
            setattr(self, name, True)
        elif name == "cases":
            self.cases, self.backend = tuple(event["names"]), event["backend"]
        elif name == "unusable":
            self.unusable = event["why"]
        elif name == "refused":
            self.refused.append(event["why"])
        elif name == "raised":
            self.raised, self.memory = f"{event['why']} ({event['case']})", event["memory"]
        else:  # begun, done
            getattr(self, name).append(event["case"])


class SanitizerProcess:
    """Run of the tool: its process, its files and its progress."""

    def __init__(self, program: Path, tool: str, job: dict[str, Any], folder: Path, log: Log) -> None:
        self.tool, self.log = tool, log
        self.files = RunFiles(folder)
        self.start_time, self.timed_out = time.monotonic(), False
        command = [str(program), *options(tool, self.files.log)]
        # Without the caching allocator every tensor is its own cudaMalloc, whose end memcheck knows.
        variables = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        self.process = self.files.start(command, "weft.workbench.sanitizer.target", job, variables)

    def wait(self, timeout: float) -> None:
        """Wait until the run ends; after ``timeout`` seconds kill it and all that it started."""
        last_line = ""
        try:
            while self.process.poll() is None:
                if time.monotonic() - self.start_time > timeout:
                    self.timed_out = True
                    return
                state = TargetState.read(self.files.report)
                current = f", {state.begun[-1]}" if state.begun else ", importing"
                line = f"{self.tool}: {len(state.done)} of {len(state.cases) or '?'} cases{current}"
                if line != last_line:
                    self.log(line)
                    last_line = line
                # Short against a run of tens of seconds, and long enough that polling costs nothing.
                time.sleep(0.1)
        finally:
            self._kill_group()

    def _kill_group(self) -> None:
        """Kill the process group: the tool, the target, and what the candidate started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all of the group have ended
        finally:
            self.process.wait()

    def report(self) -> Report:
        log = self.files.log.read_text(errors="replace") if self.files.log.exists() else ""
        output = self.files.output.read_bytes()[-300:].decode(errors="replace")
        return conclude(
            self.tool,
            log,
            TargetState.read(self.files.report),
            code=self.process.returncode,
            seconds=time.monotonic() - self.start_time,
            timed_out=self.timed_out,
            output_tail=" ".join(output.split()),
        )


def options(tool: str, log: Path) -> list[str]:
    """Return the tool's options; each exists since CUDA 12."""
    chosen = [f"--tool={tool}", f"--error-exitcode={FAULT_EXIT_CODE}", f"--log-file={log}"]
    chosen += ["--print-limit=1000", "--show-backtrace=device", "--launch-timeout=120"]
    chosen += ["--target-processes=application-only"]
    if tool == "memcheck":
        # PyTorch asks the driver for features that may be missing and continues without them, so API
        # errors are not reported; the check itself sees a launch that fails. The padding keeps an
        # overrun of one tensor from ending inside the next one.
        chosen += ["--report-api-errors=no", "--padding=1024"]
    return chosen


def conclude(
    tool: str,
    log: str,
    state: TargetState,
    *,
    code: int,
    seconds: float = 0.0,
    timed_out: bool = False,
    output_tail: str = "",
) -> Report:
    """Return the report that follows from the tool's log, the target's events and the exit code.

    The rules are tried in this order: faults of the candidate, an incomplete run, the tool's own count.
    A device that the tool refuses makes the report unsupported.
    """
    parsed = parse(log)
    faults = [f for f in parsed.faults if f.level == ERROR and not _in_library(f, state.backend)]
    if faults:
        # The tool prints at most --print-limit reports, but its summary counts all of them.
        count = max(parsed.count or 0, sum(f.times for f in faults))
        lines = "; ".join(f.line for f in faults[:MAX_SHOWN])
        status, reason = FAIL, f"{tool} found {count} error{'s'[: count != 1]}: {lines}"
    else:
        duration = f" after {seconds:.0f} s" if timed_out else ""
        incomplete = _incomplete(tool, parsed, state, code, duration, output_tail)
        status, reason = incomplete or _check_count(tool, parsed, code)
    # Overrides the verdict above: on a refused device the tool reports errors that are its own.
    refusal = next((t for t in parsed.troubles if "not supported" in t), "")
    if refusal:
        status = UNSUPPORTED
        reason = f"{NAME} refuses this device: {refusal.removeprefix('Error: ')}"
    return Report(
        tool=tool,
        status=status,
        reason=" ".join(reason.split()),
        faults=tuple(faults),
        count=parsed.count or 0,
        left_out=sum(f.times for f in parsed.faults if f not in faults),
        cases=tuple(state.begun) or state.cases,
        seconds=seconds,
    )


def _in_library(fault: Fault, backend: str) -> bool:
    """Return True for a fault in a library's kernel, which the candidate cannot have written."""
    if backend not in ("triton", "cuda", "numba") or not fault.kernel:
        return False
    kernel_origin = origin(fault.kernel)
    return kernel_origin == "memory" or is_library(kernel_origin, fault.kernel, backend)


def _incomplete(
    tool: str, parsed: ParsedLog, state: TargetState, code: int, timeout: str, output_tail: str
) -> tuple[str, str] | None:
    """Return status and reason if not every call was made; else None.

    ``timeout`` is the text of the time limit if it was reached.
    """
    at_case = f" at {state.begun[-1]}" if state.begun else ""
    if timeout:
        return UNSUPPORTED, f"{tool} was not done{timeout}{at_case}"
    if not state.started:
        why = "; ".join(parsed.troubles) or output_tail or "it wrote nothing"
        return UNSUPPORTED, f"{NAME} could not run Python here: {why}"
    if state.unusable:
        return FAIL, state.unusable
    if state.raised:
        # The tool needs memory of its own, so running out of it is no fault of the candidate.
        status = UNSUPPORTED if state.memory else FAIL
        return status, f"the call raised under {tool}: {state.raised}"
    if not state.finished:
        return FAIL, f"the process ended before its last case{at_case} (exit code {code})"
    if not state.done:
        return UNSUPPORTED, next(iter(state.refused), "no case is small enough for it")
    return None


def _check_count(tool: str, parsed: ParsedLog, code: int) -> tuple[str, str]:
    """Return status and reason of a complete run without faults: its count and exit code must agree."""
    if parsed.troubles:
        return UNSUPPORTED, f"{NAME} did not see all of it: {'; '.join(parsed.troubles)}"
    if parsed.count is None:
        return UNSUPPORTED, f"{NAME} printed no summary; it may have checked nothing"
    if code not in (0, FAULT_EXIT_CODE):
        return UNSUPPORTED, f"{NAME} ended with exit code {code} after the last case"
    explained = sum(f.times for f in parsed.faults if f.level == ERROR)
    if parsed.count > explained or (code == FAULT_EXIT_CODE and not parsed.faults):
        return FAIL, f"{tool} counts {parsed.count} errors, of which {explained} could be read"
    return PASS, ""


# Reading the log. Each report is a line at the margin that names the fault, with indented lines below it
# for the source line, thread and address. The format has changed since 2021; all known forms are read.
_LINE = re.compile(r"^={6,10}(?: (?P<text>.*))?$")
_SUMMARY = re.compile(r"^ERROR SUMMARY: ([\d,]+) errors?$")
_RACES = re.compile(r"^RACECHECK SUMMARY: .*\(([\d,]+) errors?, ([\d,]+) warnings?\)")
_NO_REPORT = re.compile(r"COMPUTE-SANITIZER|(?:ERROR|LEAK|RACECHECK|INITCHECK) SUMMARY|Tracking kernels")
_TROUBLE = re.compile(
    r"Internal Sanitizer Error|Error: (?!Race |Potential |\(|\w+ access)|Target application"
    r"|Unable to|Warning: (?!Race |Potential |\()|Failed|No kernels"
)
_RACE = re.compile(r"^(?:(?P<level>Error|Warning): )?(?P<kind>.*\bRace reported between \w+ access)")
_HAZARD = re.compile(r"^(?:(?P<level>Error|Warning): )?(?P<kind>.*Potential \w+ hazard detected)")
_DETAIL_LINE = re.compile(r"^(?:at |by thread|Address |Access |and |Device Frame|Host Frame|Saved host|in )")
_AT = re.compile(r"(?:^|access |Thread \([\d,]+\) )at (.+)$")
_FRAME = re.compile(r"^Device Frame:\s*(.+)$")
_THREAD = re.compile(r"^by thread (\([\d,]+\)) in block (\([\d,]+\))")
_ADDRESS = re.compile(r"^(?:Address|Access to) .*$")
_HAZARDS = re.compile(r"\[([\d,]+) hazards?\]")
# name+0x70 in file.cu:41, name():0x160 in ...; older: 0x70 in file.cu:41:name, 0x70 in name.
_LOCATIONS = (
    re.compile(r"^(?P<name>.+?)[+:]0x[0-9a-f]+(?: in (?P<file>\S+:\d+))?"),
    re.compile(r"^0x[0-9a-f]+ in (?P<file>\S+?:\d+):(?P<name>.+?)(?: \[[\d,]+ hazards?\])?$"),
    re.compile(r"^0x[0-9a-f]+ in (?P<name>.+?)(?: \[[\d,]+ hazards?\])?$"),
)


@dataclass(frozen=True, kw_only=True)
class ParsedLog:
    """Content of a log. ``count`` is the tool's number of errors, None without a summary line.

    ``troubles`` are messages about the tool itself: it failed or did not see everything.
    """

    faults: tuple[Fault, ...] = ()
    count: int | None = None
    troubles: tuple[str, ...] = ()


def parse(text: str) -> ParsedLog:
    """Parse a log of compute-sanitizer, of any of its tools."""
    faults: dict[tuple[str, str, str, str], Fault] = {}
    troubles: list[str] = []
    count: int | None = None
    for head, details in _blocks(text):
        summary = _SUMMARY.match(head) or _RACES.match(head)
        if summary:
            # racecheck prints a second summary line with its own count.
            count = max(count or 0, _integer(summary[1]))
        elif _NO_REPORT.search(head):
            continue
        elif _TROUBLE.match(head):
            troubles.append(head)
        else:
            fault = _parse_fault(head, details)
            key = (fault.kind, fault.kernel, fault.where, fault.level)
            earlier = faults.get(key)
            faults[key] = replace(earlier, times=earlier.times + 1) if earlier else fault
    return ParsedLog(faults=tuple(faults.values()), count=count, troubles=tuple(troubles))


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line at the margin with the indented lines below it."""
    head, details = "", list[str]()
    for raw in text.splitlines():
        match = _LINE.match(raw.rstrip())
        if match is None:
            continue  # output of the program itself
        line = match["text"] or ""
        if head and line.strip() and (line.startswith("  ") or _DETAIL_LINE.match(line)):
            details.append(line.strip())
            continue
        if head:
            yield head, details
        head, details = line.strip(), []
    if head:
        yield head, details


def _parse_fault(head: str, details: Sequence[str]) -> Fault:
    race = _RACE.match(head) or _HAZARD.match(head)
    lines = [head, *details] if race else list(details)
    level = WARNING if race and race["level"] == "Warning" else ERROR
    locations = [_location(m[1]) for m in map(_AT.search, lines) if m]
    frames = [_location(m[1]) for m in map(_FRAME.match, details) if m]
    names = [name for name, _ in (*frames[::-1], *locations) if name]  # the outermost frame is the kernel
    files = [file for _, file in (*locations, *frames) if file]
    return Fault(
        kind=race["kind"] if race else head.rstrip("."),
        kernel=names[0] if names else "",
        where=" and ".join(dict.fromkeys(files)) if race else (files[0] if files else ""),
        detail=_fault_detail(details),
        level=level,
    )


def _location(text: str) -> tuple[str, str]:
    """Return the function and the file:line of '... at <text>', each '' if it is missing."""
    text = re.sub(r"^\[clone .*?\] ", "", text)
    for pattern in _LOCATIONS:
        match = pattern.match(text)
        if match:
            groups = match.groupdict()
            file = (groups.get("file") or "").rsplit("/", 1)[-1]
            return _without_parameters(groups["name"]), file
    return "", ""


def _without_parameters(name: str) -> str:
    """Remove return type and parameters: ``void f<(int)4>(int *)`` becomes ``f<(int)4>``.

    Parentheses inside a template's arguments belong to the name.
    """
    depth = 0
    for index, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth and not name.startswith("(anonymous namespace)", index):
            name = name[:index]
            break
    return name.removeprefix("void ").strip()


def _fault_detail(details: Sequence[str]) -> str:
    parts = [f"thread {m[1]} of block {m[2]}" for m in map(_THREAD.match, details) if m][:1]
    parts += [line for line in details if _ADDRESS.match(line)][:1]
    parts += [line.removeprefix("and ") for line in details if "nearest allocation" in line][:1]
    hazards = sum(_integer(n) for line in details for n in _HAZARDS.findall(line))
    if hazards:
        parts.append(f"{hazards} hazards")
    return ", ".join(parts)


def _integer(text: str) -> int:
    """Parse a number with separators, ``1,000``."""
    return int(text.replace(",", ""))
