"""Process of one judgement in a suite: it asks for a job, memory and time, then sends its judgement.

All imports are done before it asks for the job. It opens a GPU afterwards: another process may be measuring
time there.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.sandbox import fork_client
from weft.workbench.sandbox.process import Limits


def main() -> None:
    """Judge what a line of JSON on stdin names; messages go to stdout, one line each."""
    # The reference may print: its lines must not be taken for messages.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the worker process on the way out

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    def wait(resource: str, nbytes: int) -> str:
        send({"wait": resource, "bytes": nbytes})
        answer = sys.stdin.readline()
        if not answer:  # the suite has ended
            sys.exit(1)
        return answer

    fork_client.prepare()
    importlib.import_module("torch._dynamo")  # the meta device, where a problem's size is found, imports it
    fork_client.prepare(wait=True)
    send({"judgement": judge_job(json.loads(wait("job", 0)), wait)})


def judge_job(job: dict[str, Any], wait: Callable[[str, int], object]) -> dict[str, Any]:
    """Return the judgement of a job as JSON; a mistake in the problem is a reason too."""
    reference, candidate = Path(job.pop("reference")), Path(job.pop("candidate"))
    limits = Limits(**job.pop("limits", {}))
    try:
        judgement = judge(reference, candidate, JudgeOptions(limits=limits, wait=wait, **job))
    except WeftError as error:
        return {"correct": False, "reason": f"not run: {error}", "speedup": None}
    return judgement.to_json()
