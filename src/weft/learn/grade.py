"""Grade a solution: run its exercise's grader on it in a process of its own, within a time limit."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.json_files import loads
from weft.learn.exercise import Exercise

START_SECONDS = 120.0  # for the imports of the worker process; torch takes long on an overloaded machine
MAX_BYTES = 1 << 20  # of the worker's messages
MAX_OUTPUT = 1 << 16  # bytes of what the learner's code printed that are shown
ENVIRONMENT = {"triton": {"TRITON_INTERPRET": "1"}, "numba": {"NUMBA_ENABLE_CUDASIM": "1"}}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of grading: every check with its outcome, and the reason of the one that was not passed.

    ``printed`` is what the learner's code wrote to stdout and stderr.
    """

    exercise: str
    passed: bool
    reason: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    printed: str = ""

    def to_json(self) -> dict[str, Any]:
        reason = self.reason or None
        return {
            "exercise": self.exercise,
            "passed": self.passed,
            "reason": reason,
            "checks": self.checks,
        }


def grade(exercise: Exercise, file: Path, *, seed: int | None = None, seconds: float | None = None) -> Result:
    """Run the exercise's grader on a file; ``seed`` (default: a new one) decides its inputs.

    Raises :class:`WeftError` if the grader itself fails or a tool that it needs is missing.
    """
    seed = secrets.randbits(62) if seed is None else seed
    command = [sys.executable, "-m", "weft.learn.grade_main", exercise.id, str(file.resolve()), str(seed)]
    environment = {**os.environ, **ENVIRONMENT.get(exercise.track, {})}
    source = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, environment.get("PYTHONPATH"))))
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [*command, str(writer)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,  # so that killpg below reaches its child processes and nothing else
            )
        finally:
            os.close(writer)
        try:
            messages = list(_messages(reader, seconds))
        finally:
            os.close(reader)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        output.seek(0)
        printed = output.read(MAX_OUTPUT).decode(errors="replace")
    return _result(exercise, messages, code, printed)


def _messages(reader: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Yield the worker's messages until it ends or its time is over; then the last one has ``timeout``."""
    os.set_blocking(reader, False)
    buffer, total, limit = b"", 0, START_SECONDS
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                yield {"timeout": limit}
                return
            data = os.read(reader, 1 << 16)
            total += len(data)
            if not data or total > MAX_BYTES:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                try:
                    message = loads(line)
                except ValueError:
                    return  # the learner's code wrote into the channel
                if "seconds" in message:  # the imports are done, and the learner's time begins
                    limit = seconds or message["seconds"]
                    deadline = time.monotonic() + limit
                yield message


def _result(exercise: Exercise, messages: list[dict[str, Any]], code: int, printed: str) -> Result:
    names = [m["passed"] for m in messages if "passed" in m]
    checks = [{"name": name, "passed": True} for name in names]
    last = messages[-1] if messages else {}
    if "error" in last:
        raise WeftError(
            last["error"], expected=last.get("expected"), got=last.get("got"), hint=last.get("hint")
        )
    if last.get("done"):
        return Result(exercise=exercise.id, passed=True, checks=checks, printed=printed)
    if "refused" in last:
        name, reason = last["refused"], last["reason"]
    else:
        name = "run"
        reason = f"after {'the check ' + repr(names[-1]) if names else 'the start'}: "
        if "timeout" in last:
            reason += f"no result within {last['timeout']:g} s. Does a loop never end?"
        elif code < 0 and code != -signal.SIGKILL:
            reason += f"the process crashed ({signal.Signals(-code).name})"
        elif not any("seconds" in m for m in messages):
            raise WeftError("the grader did not start", got=printed.strip()[-500:] or f"exit code {code}")
        else:
            reason += "the process ended early. Does the code call exit, or take all memory?"
    checks.append({"name": name, "passed": False})
    text = reason if name == "run" else f"{name}: {reason}"
    return Result(exercise=exercise.id, passed=False, reason=text, checks=checks, printed=printed)
