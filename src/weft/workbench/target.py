"""A target: a process of Weft's that a vendor's tool (compute-sanitizer, Nsight Compute) watches.

It is given a job and tells what it does, an event a line, so that a run that ends early is seen to
have. This is what both sides have in common, whatever the tool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft
from weft.core import WeftError, registry

if TYPE_CHECKING:
    from weft.core import Implementation, Operator

Tell = Callable[..., None]


@dataclass(frozen=True)
class Place:
    """The files of one run, in a folder that goes when it is over."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def report(self) -> Path:
        """What the target tells."""
        return self.folder / "report.jsonl"

    @property
    def log(self) -> Path:
        """What the tool writes."""
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        """What either of them prints."""
        return self.folder / "output.txt"

    def start(
        self,
        tool: Sequence[str],
        module: str,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        """The tool over ``python -m module``, in a process group of its own."""
        self.job.write_text(json.dumps(job))
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*tool, sys.executable, "-m", module, str(self.job), str(self.report)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def environment(**more: str) -> dict[str, str]:
    """The user's, in which Weft is found, with ``more`` in it."""
    source = str(Path(weft.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return os.environ | more | {"PYTHONPATH": path}


def heard(report: Path) -> Iterator[dict[str, Any]]:
    """What a target has told so far; a line that has no end yet is being written."""
    text = report.read_text() if report.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


@contextmanager
def telling(arguments: Sequence[str]) -> Iterator[tuple[dict[str, Any], Tell]]:
    """In the target, of its arguments: the job, and what tells an event with its facts."""
    job = json.loads(Path(arguments[0]).read_text())
    os.environ["TMPDIR"] = str(Path(arguments[0]).parent)  # what it leaves goes with the folder
    tempfile.tempdir = None
    with Path(arguments[1]).open("w", buffering=1) as report:

        def tell(event: str, **more: Any) -> None:
            report.write(json.dumps({"event": event, **more}) + "\n")

        yield job, tell


def subject(job: Mapping[str, Any]) -> tuple[Operator, Implementation]:
    """In the target: the operator and the implementation of a job, the registry's or out of its
    ``sources``. Raises what a stranger's file raises, and :class:`WeftError` for a name there is
    not."""
    from weft.core.operator import unknown_name
    from weft.workbench import bring

    name, wanted = job["operator"], job["implementation"]
    files = [bring.load(bring.Source.from_json(source)) for source in job["sources"]]
    own = {o.name: o for brought in files for o in brought.operators}
    operator = own[name] if name in own else registry.operator(name)
    theirs = {i.name: i for b in files for i in b.implementations if i.operator == name}
    if wanted in theirs:
        return operator, theirs[wanted]
    ours = [] if name in own else registry.implementation_names(name)
    if wanted not in ours:
        raise unknown_name(f"implementation of {name}", wanted, [*theirs, *ours])
    return operator, registry.implementation(name, wanted)


def one_line(error: Exception) -> str:
    """An error as a target tells it."""
    text = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]
