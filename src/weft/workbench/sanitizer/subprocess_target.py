"""Processes of Weft that a vendor's tool watches: compute-sanitizer and Nsight Compute share this code.

The tool starts ``python -m MODULE JOB REPORT``. The target reads its job from the first file and writes
one event a line to the second, so that a run that ends early is recognised. The functions of the parent
come first, those of the target after them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import weft
from weft.core import WeftError, registry
from weft.core.json_files import read_json

if TYPE_CHECKING:
    from weft.core import Implementation, Operator

WriteEvent = Callable[..., None]
MAX_ERROR_TEXT = 300  # characters of an error in a report: enough for a type and its first sentence


@dataclass(frozen=True)
class RunFiles:
    """Files of one run, in a temporary folder."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def report(self) -> Path:
        """Events that the target writes."""
        return self.folder / "report.jsonl"

    @property
    def log(self) -> Path:
        """Log file of the tool."""
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        """Output of the tool and of the target, stdout and stderr together."""
        return self.folder / "output.txt"

    def start(
        self,
        tool: Sequence[str],
        module: str,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        """Start the tool over ``python -m module``, in a process group of its own."""
        self.job.write_text(json.dumps(job))
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*tool, sys.executable, "-m", module, str(self.job), str(self.report)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: at the end one killpg reaches the tool and all its children.
                start_new_session=True,
            )


def environment(**variables: str) -> dict[str, str]:
    """Return the user's environment with ``variables`` and with Weft on PYTHONPATH."""
    source = str(Path(weft.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return os.environ | variables | {"PYTHONPATH": path}


def read_events(report: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that a target has written so far."""
    text = report.read_text() if report.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):  # a line without its end is still being written
            yield json.loads(line)


class EventState(ABC):
    """State of a target, as its events describe it; a subclass has the fields."""

    @abstractmethod
    def update(self, event: dict[str, Any]) -> None:
        """Change the fields as an event says."""

    @classmethod
    def read(cls, report: Path) -> Self:
        """Return the state after the events that the target has written so far."""
        state = cls()
        for event in read_events(report):
            state.update(event)
        return state


@contextmanager
def open_job(arguments: Sequence[str]) -> Iterator[tuple[dict[str, Any], WriteEvent]]:
    """Yield the job and a function that writes an event. The target calls this on its arguments."""
    job = read_json(Path(arguments[0]))
    # Temporary files of the candidate go into the folder of the run, which the parent removes.
    os.environ["TMPDIR"] = str(Path(arguments[0]).parent)
    tempfile.tempdir = None  # forget the folder that was chosen before
    # Line buffering: an event reaches the parent even if the process dies right after it.
    with Path(arguments[1]).open("w", buffering=1) as report:

        def write_event(event: str, **fields: Any) -> None:
            report.write(json.dumps({"event": event, **fields}) + "\n")

        yield job, write_event


def load_subject(job: Mapping[str, Any]) -> tuple[Operator, Implementation]:
    """Return the operator and the implementation of a job, from the registry or its ``sources``.

    Raises :class:`WeftError` for an unknown name, and any exception that a source raises.
    """
    from weft.core.operator import unknown_name
    from weft.workbench.sources.source import Source, load

    operator_name, implementation_name = job["operator"], job["implementation"]
    files = [load(Source.from_json(source)) for source in job["sources"]]
    file_operators = {o.name: o for file in files for o in file.operators}
    is_external = operator_name in file_operators
    operator = file_operators[operator_name] if is_external else registry.operator(operator_name)
    external = {i.name: i for f in files for i in f.implementations if i.operator == operator_name}
    if implementation_name in external:
        return operator, external[implementation_name]
    builtin = [] if is_external else registry.implementation_names(operator_name)
    if implementation_name not in builtin:
        known = [*external, *builtin]
        raise unknown_name(f"implementation of {operator_name}", implementation_name, known)
    return operator, registry.implementation(operator_name, implementation_name)


def error_line(error: Exception) -> str:
    """Return an error as one line of text."""
    text = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_ERROR_TEXT]
