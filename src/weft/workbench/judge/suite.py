"""Judge many candidates by a folder of problems: match, schedule, save, resume and score.

Each judgement is a process of its own, so that one that exhausts memory, breaks the GPU's context or
crashes costs one row. The processes report the memory that they need and wait for permission: they
check side by side as far as memory allows, and each is alone while it measures time. One more process, the
spare, does its imports meanwhile and waits for the next job.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import weft
from weft.core import WeftError, json_files
from weft.workbench.judge.source_facts import format_of

SPEEDS = (0.0, 1.0, 1.5, 2.0)  # the p of fast_p
CORRECT, WRONG, NOT_RUN, NO_CANDIDATE = "correct", "wrong", "not run", "no candidate"
MEMORY_SHARE = 0.9  # of the free memory: allocators round up
MAX_JOBS = {"cuda": 4, "cpu": 4}
CORES_FOR_IMPORTS = 8  # of a machine with a GPU on which the spare process may import while time is measured
CORES_PER_JOB = 4  # on a CPU one judgement already uses several cores
END_SECONDS = 10.0  # for a judgement to end its worker process after SIGTERM
# Names of KernelBench's own runs: level_1_problem_19_sample_0_kernel.py
_RUN_NAME = re.compile(r"level_(\d+)_problem_(\d+)(?:_sample_\d+)?(?:_kernel)?$")
# A child process runs this; its options come as JSON.
_CHILD = "from weft.workbench.judge.suite_process import main; main()"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A problem and a candidate for it; ``candidate`` is None if there is none. ``name`` is unique."""

    name: str
    reference: Path
    candidate: Path | None

    def digest(self) -> str:
        """Return a hash of the contents of both files, of a GPU MODE folder all its ``.py`` and ``.yml``."""
        hasher = hashlib.sha256()
        reference = [self.reference]
        if self.reference.name == "reference.py":
            folder = self.reference.parent
            reference += [f for n in ("task.yml", "utils.py", "task.py") if (f := folder / n).is_file()]
        for path in (*reference, *([self.candidate] if self.candidate else [])):
            data = path.read_bytes()
            # With lengths, since text that moves from one file to the next must change the hash.
            hasher.update(f"{len(data)}:".encode() + data)
        return hasher.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Options of all judgements of a suite; ``jobs`` None chooses by cores and memory."""

    device: str = "cpu"
    jobs: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # fields of JudgeOptions, as plain data


# -- matching ----------------------------------------------------------------------------------


def find_pairs(problems: Path, candidates: Path) -> list[Pair]:
    """Match the problems in a folder with candidates by name; raise :class:`WeftError` without any.

    A candidate of ``level1/19_ReLU.py`` is ``level1/19_ReLU.py`` or ``19_ReLU.py`` in the other
    folder, each ``.py`` file of a folder ``19_ReLU``, or KernelBench's ``level_1_problem_19_*.py``.
    ``candidates`` may be one file if there is one problem.
    """
    references = _problems(problems)
    if not references:
        raise WeftError(f"{problems}", expected="problems in KernelBench's or GPU MODE's format", got="none")
    if not candidates.exists():
        raise WeftError("--candidates", expected="a folder or a file", got=f"{candidates}: no such file")
    if candidates.is_file():
        if len(references) > 1:
            raise WeftError(
                "--candidates", expected="a folder", got=f"one file for {len(references)} problems"
            )
        ((name, reference),) = references.items()
        return [Pair(name=name, reference=reference, candidate=candidates)]
    by_number = _files_of_runs(candidates)
    pairs: list[Pair] = []
    for name, reference in references.items():
        files = _candidates_of(name, candidates) or by_number.get(_problem_number(reference, name), [])
        several = len(files) > 1
        pairs += [
            Pair(name=f"{name}/{f.stem}" if several else name, reference=reference, candidate=f)
            for f in files
        ]
        if not files:
            pairs.append(Pair(name=name, reference=reference, candidate=None))
    if all(p.candidate is None for p in pairs):
        raise WeftError(
            f"--candidates {candidates}",
            expected=f"a file or a folder named after a problem, such as {pairs[0].name}.py",
            got="none",
        )
    return pairs


def _problems(folder: Path) -> dict[str, Path]:
    """Return the reference files below a folder by the problem's name, in natural order."""
    references: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py"), key=_natural_key):
        if any(part.startswith((".", "__")) for part in path.relative_to(folder).parts):
            continue
        if not format_of(path):
            continue
        relative = path.relative_to(folder)
        # A problem in a folder of its own is named after the folder.
        name = relative.parent if path.stem == "reference" else relative.with_suffix("")
        references[name.as_posix()] = path
    return references


def _natural_key(path: Path) -> list[tuple[int, int | str]]:
    """Sort 2_x before 10_x."""
    parts = re.split(r"(\d+)", path.as_posix())
    # The leading 0 or 1 keeps Python from comparing a number with text, which raises.
    return [(0, int(p)) if p.isdigit() else (1, p) for p in parts if p]


def _candidates_of(name: str, folder: Path) -> list[Path]:
    for stem in dict.fromkeys((name, name.rpartition("/")[2])):
        if (file := folder / f"{stem}.py").is_file():
            return [file]
        if (inner := folder / stem).is_dir():
            files = sorted((f for f in inner.glob("*.py") if f.stem != "reference"), key=_natural_key)
            if files:
                return files
    return []


def _files_of_runs(folder: Path) -> dict[tuple[int, int], list[Path]]:
    """Return the candidates that are named as KernelBench names those of a run, by level and number."""
    by_number: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(folder.rglob("level_*.py"), key=_natural_key):
        if match := _RUN_NAME.match(path.stem):
            by_number.setdefault((int(match[1]), int(match[2])), []).append(path)
    return by_number


def _problem_number(reference: Path, name: str) -> tuple[int, int]:
    """Return KernelBench's level and number of a problem, (0, 0) if its path has none."""
    level = re.fullmatch(r"level_?(\d+)", reference.resolve().parent.name)
    number = re.match(r"(\d+)_", name.rpartition("/")[2])
    # KernelBench counts levels from 1, so (0, 0) matches no run.
    return (int(level[1]), int(number[1])) if level and number else (0, 0)


# -- results -----------------------------------------------------------------------------------


def status_of(row: Mapping[str, Any]) -> str:
    """Return ``correct``, ``wrong``, ``not run`` or ``no candidate`` for a row of the results."""
    if row.get("candidate") is None:
        return NO_CANDIDATE
    if row["correct"]:
        return CORRECT
    return NOT_RUN if row["reason"].startswith(NOT_RUN) else WRONG


def score(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return counts by status, fast_p, and the geometric mean of the speedups of correct candidates.

    ``fast_p`` is the share of all rows that are correct and faster than p times the reference, where a
    difference is shown at all; ``fast_0`` is the share of correct ones, timed or not.
    """
    statuses = [status_of(r) for r in rows]
    correct = [r for r, s in zip(rows, statuses, strict=True) if s == CORRECT]
    speedups = [float(r["speedup"]) for r in correct if r["speedup"]]
    shown = [float(r["speedup"]) for r in correct if r["speedup"] and r.get("difference_shown")]
    own = [r["own_check"]["passed"] for r in rows if r.get("own_check")]
    total = max(len(rows), 1)
    fast = {f"{p:g}": (len(correct) if p == 0 else sum(s > p for s in shown)) / total for p in SPEEDS}
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
    return {
        "problems": len(rows),
        "counts": {s: statuses.count(s) for s in (CORRECT, WRONG, NOT_RUN, NO_CANDIDATE)},
        "own_check_accepts": sum(p is True for p in own),
        "fast_p": fast,
        "timed": len(speedups),
        "speedup": mean,
    }


def read_done(path: Path, pairs: Sequence[Pair], options: SuiteOptions) -> dict[str, dict[str, Any]]:
    """Return the rows of a results file that need not be judged again, by the pair's name.

    A row counts if it has the same contents of both files, the same options and Weft's version. A
    line that was cut off is ignored. The last row of a name is returned. Raises :class:`WeftError` for a
    file that cannot be read.
    """
    if not path.exists():
        return {}
    try:
        lines = json_files.read_text(path, errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise WeftError("--save", expected="a file of results, to resume from", got=error) from error
    keys = {p.name: _key(p, options) for p in pairs}
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError):
            row = json_files.loads(line)
            # Default "": a row without a key must not equal the None of an unknown problem.
            if row.get("key") == keys.get(row.get("problem"), "") and _is_row(row):
                rows[row["problem"]] = row
    return rows


def _is_row(row: Mapping[str, Any]) -> bool:
    """Return True if the fields that are read from a stored row are of the types that were written."""
    own = row.get("own_check")
    return (
        isinstance(row.get("correct"), bool)
        and isinstance(row.get("reason"), str)
        and isinstance(row.get("seconds"), int | float)
        and isinstance(row.get("speedup"), int | float | None)
        and isinstance(row.get("difference_shown"), bool | None)
        and (own is None or (isinstance(own, dict) and isinstance(own.get("passed"), bool | None)))
    )


def _key(pair: Pair, options: SuiteOptions) -> str:
    """Return what a result depends on: files, options and version."""
    arguments = json.dumps([options.device, dict(options.arguments)], sort_keys=True)
    return hashlib.sha256(f"{pair.digest()} {arguments} {weft.__version__}".encode()).hexdigest()


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a results file as one line, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In this mode every write goes to the end of the file, also after the read below.
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a line that was cut off must not swallow this one
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


# -- schedule ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Child:
    """Process of one judgement. ``state`` is what it does or waits for; a spare one has no ``pair`` yet."""

    process: subprocess.Popen[str]
    errors: IO[str]
    pair: Pair | None = None
    began: float = 0.0  # when it got its pair
    # importing, waits for a job, reading, waits for memory, checking, waits for time, timing
    state: str = "importing"
    needs: int = 0
    row: dict[str, Any] | None = None


def free_memory(device: str) -> int:
    """Return the free bytes of the device: of the GPU's memory, or of the host's."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    from weft.workbench.calls.memory import available_host_bytes

    return available_host_bytes()


def default_jobs(device: str) -> int:
    """Return the largest number of judgements at once; memory may allow fewer."""
    if device == "cuda":
        return MAX_JOBS[device]
    return max(1, min(MAX_JOBS[device], len(os.sched_getaffinity(0)) // CORES_PER_JOB))


class Suite:
    """Judgements of many pairs. Iterating yields a row for each, in the order in which they end."""

    def __init__(self, pairs: Sequence[Pair], options: SuiteOptions) -> None:
        self.waiting = [p for p in pairs if p.candidate is not None]
        self.without = [p for p in pairs if p.candidate is None]
        self.options = options
        self.jobs = options.jobs or default_jobs(options.device)
        # Once, before any judgement starts; what each of them takes is counted by its `needs`.
        self.memory = int(MEMORY_SHARE * free_memory(options.device))
        self.running: list[_Child] = []
        self.spare: _Child | None = None
        # Imports take a core, and none of a GPU's time.
        self.imports_disturb = options.device == "cpu" or len(os.sched_getaffinity(0)) < CORES_FOR_IMPORTS
        self._spares_end = False  # a spare that ended before its job: no other is started
        self._events: queue.Queue[tuple[_Child, str | None]] = queue.Queue()

    def __iter__(self) -> Generator[dict[str, Any]]:
        for pair in self.without:
            yield self._row(pair, {"correct": False, "reason": "no candidate", "speedup": None}, 0.0)
        try:
            while self.waiting or self.running:
                # No new one while others wait to be timed: its start would delay or disturb them.
                timers = any(c.state in ("waits for time", "timing") for c in self.running)
                while self.waiting and len(self.running) < self.jobs and not timers:
                    self._assign(self.waiting.pop(0))
                # One import at a time: several at once take far longer than one after another.
                importing = any(c.state == "importing" for c in self.running)
                if self.waiting and self.spare is None and not (timers or importing or self._spares_end):
                    self.spare = self._start()
                # Without a timeout: the thread of each child sends None at its end, however it ends.
                child, line = self._events.get()
                if line is None and child is self.spare:
                    self.spare, self._spares_end = None, True
                    self._close(child)
                elif line is None:
                    yield self._finish(child)
                else:
                    self._handle(child, json.loads(line))
                self._grant()
        finally:  # also where the caller stops: Ctrl-C leaves no process behind
            self._end_all()

    def activity(self) -> list[tuple[str, str]]:
        """Return the name and the state of each running judgement."""
        return [(c.pair.name, c.state) for c in self.running if c.pair is not None]

    def _assign(self, pair: Pair) -> None:
        """Give the pair to the spare process, or to a new one."""
        child = self.spare or self._start()
        self.spare = None
        child.pair, child.began = pair, time.monotonic()
        self.running.append(child)
        if child.state == "waits for a job":
            self._send_job(child)

    def _send_job(self, child: _Child) -> None:
        assert child.pair is not None
        job = {
            "reference": str(child.pair.reference),
            "candidate": str(child.pair.candidate),
            "device": self.options.device,
            **self.options.arguments,
        }
        self._go(child, "reading", json.dumps(job))

    def _start(self) -> _Child:
        # A file, not a pipe: it is read only after the end, and a full pipe would block the child.
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the child
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C goes to this process, which ends the others
        )
        child = _Child(process, errors)
        threading.Thread(target=self._read, args=(child,), daemon=True).start()
        return child

    def _read(self, child: _Child) -> None:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            self._events.put((child, line))
        # Always its last event: the suite takes it as the end of the process.
        self._events.put((child, None))

    def _handle(self, child: _Child, message: Mapping[str, Any]) -> None:
        if "judgement" in message:
            child.row = message["judgement"]
        elif message["wait"] == "job":
            child.state = "waits for a job"
            if child.pair is not None:
                self._send_job(child)
        elif message["wait"] == "memory":
            child.state, child.needs = "waits for memory", int(message["bytes"])
        elif message["wait"] == "time":
            child.state = "waits for time"

    def _grant(self) -> None:
        """Let waiting judgements go on: one that measures time is alone."""
        if any(c.state == "timing" for c in self.running):
            return
        # Only those that use the cores now. One that waits for its permission does not disturb a measurement.
        processes = [*self.running, *([self.spare] if self.spare and self.imports_disturb else [])]
        busy = [c for c in processes if c.state in ("importing", "reading", "checking")]
        timers = [c for c in self.running if c.state == "waits for time"]
        if timers and not busy:
            self._go(timers[0], "timing")
            return
        # One that waits to be timed still holds its tensors.
        used = sum(c.needs for c in self.running if c.state in ("checking", "waits for time"))
        for child in self.running:
            # One alone always may: it reports itself if memory is too small.
            if child.state == "waits for memory" and (not used or used + child.needs <= self.memory):
                used += child.needs
                self._go(child, "checking")

    def _go(self, child: _Child, state: str, line: str = "go") -> None:
        child.state = state
        assert child.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its end is the next event
            child.process.stdin.write(f"{line}\n")
            child.process.stdin.flush()

    def _finish(self, child: _Child) -> dict[str, Any]:
        code = child.process.wait()
        self.running.remove(child)
        assert child.pair is not None
        judgement = child.row
        if judgement is None:
            judgement = {"correct": False, "reason": self._why_it_ended(child, code), "speedup": None}
        self._close(child)
        return self._row(child.pair, judgement, time.monotonic() - child.began)

    @staticmethod
    def _why_it_ended(child: _Child, code: int) -> str:
        if code == -signal.SIGKILL:
            return f"{NOT_RUN}: out of memory: the system killed the judging process"
        child.errors.seek(0)
        lines = [line for line in child.errors.read().splitlines() if line.strip()]
        last = lines[-1] if lines else f"it ended with code {code}"
        return f"{NOT_RUN}: the judging process failed: {last[:300]}"

    def _row(self, pair: Pair, judgement: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        return {
            "problem": pair.name,
            "reference": str(pair.reference),
            "candidate": str(pair.candidate) if pair.candidate else None,
            "seconds": round(seconds, 2),
            "weft": weft.__version__,
            "key": _key(pair, self.options),
            **judgement,
        }

    def _end_all(self) -> None:
        children = [*self.running, *([self.spare] if self.spare else [])]
        for child in children:
            # All get the signal before one is waited for, so that they end side by side.
            with suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        for child in children:
            try:
                child.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._close(child)
        self.running.clear()
        self.spare = None

    @staticmethod
    def _close(child: _Child) -> None:
        # Not stdout: the thread that reads it may still use it.
        for stream in (child.process.stdin, child.errors):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]


__all__ = ["Pair", "Suite", "SuiteOptions", "append", "find_pairs", "read_done", "score", "status_of"]
