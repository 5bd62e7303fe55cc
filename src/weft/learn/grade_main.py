"""Worker process of a grading: ``python -m weft.learn.grade_main EXERCISE FILE SEED DESCRIPTOR``.

It writes a JSON object a line to the descriptor: ``{"seconds": limit}`` when the learner's time begins, then
``{"passed": check}`` for each check, and at last ``{"done": true}``, ``{"refused": check, "reason": ...}`` or
``{"error": ...}`` for what is no fault of the learner.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import WeftError
from weft.learn.candidate import Candidate
from weft.learn.exercise import find
from weft.learn.grading import Refused

SECONDS = 20.0  # for the learner's code, unless the exercise's grade.py has SECONDS
MEMORY_BYTES = 16 << 30  # of address space; importing torch reserves several GiB


def main(exercise_id: str, file: str, seed: str, descriptor: str) -> None:
    channel = int(descriptor)
    os.set_inheritable(channel, False)

    def send(**message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    sys.path.insert(0, str(Path(file).parent))
    try:
        exercise = find(exercise_id)
        grader = exercise.grader()
        if exercise.track == "cuda":
            from weft.learn import cuda_program

            cuda_program.prepare()  # seconds at the first use, which are not the learner's
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        send(seconds=getattr(grader, "SECONDS", SECONDS))
        for check in grader.grade(Candidate(Path(file)), np.random.default_rng(int(seed))):
            send(passed=check)
        send(done=True)
    except Refused as refused:
        send(refused=refused.check, reason=refused.reason)
    except MemoryError:
        send(refused="memory", reason=f"the code takes more than {MEMORY_BYTES >> 30} GiB of memory")
    except WeftError as error:  # nothing that the learner can mend in the file
        send(error=error.what, expected=error.expected, got=error.got, hint=error.hint)
    except Exception as error:  # noqa: BLE001 - a result of another form can raise anything in the grader
        traceback.print_exc()
        send(refused="result", reason=f"the grader cannot use the result: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
