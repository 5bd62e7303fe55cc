"""L1 load misses of the variants in C by the CPU's own counters, where ``perf stat`` may read them.

Counters are often out of reach: in a virtual machine, in a container, or for a user without the right. Each
variant is therefore only counted if a first call of ``perf stat`` succeeds, and the reason is kept if not.

``python -m weft.lab.loops.counters LIBRARY FUNCTION PROGRAM SIZE CALLS`` is the counted process: it makes the
calls and nothing else. Two runs that differ in the number of calls differ in the misses of those calls; what
Python's start costs is in both.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from weft.lab.loops.in_c import Library
from weft.lab.loops.problem import NORMAL, Problem
from weft.lab.loops.variants import VARIANTS, Variant

EVENT = "L1-dcache-load-misses"
FEW, MANY = 1, 4  # calls in the two runs
SECONDS = 120.0


class NotCounted(RuntimeError):
    """Raised where ``perf`` counts nothing; the message is the reason that a user reads."""


def perf_stat(command: list[str]) -> int:
    """Return a command's L1 load misses in user mode, by ``perf stat``; raise :class:`NotCounted`."""
    perf = shutil.which("perf")
    if perf is None:
        raise NotCounted("perf is not installed")
    try:
        output = subprocess.run(
            [perf, "stat", "-x", ",", "-e", f"{EVENT}:u", "--", *command],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCounted(f"perf stat failed: {error}") from error
    for line in output.stderr.splitlines():
        count, *fields = line.split(",")
        if any(EVENT in field for field in fields):
            if output.returncode == 0 and count.isdigit():
                return int(count)
            raise NotCounted(f"perf stat: {EVENT} is {count.strip('<>') or 'empty'} here")
    lines = [line for line in output.stderr.splitlines() if re.search(r"\w", line)]
    raise NotCounted(f"perf stat failed: {lines[0].strip() if lines else f'exit {output.returncode}'}")


def reason_without_counters() -> str:
    """Return why ``perf stat`` counts no L1 misses here; empty if it does."""
    try:
        perf_stat(["true"])
    except NotCounted as error:
        return str(error)
    return ""


def l1_load_misses(library: Library, variant: Variant, size: int) -> float:
    """Return the L1 load misses of one call at a size; raise :class:`NotCounted`."""
    command = [sys.executable, "-m", "weft.lab.loops.counters", str(library.path), variant.function]
    command += [variant.program, str(size)]
    few, many = (perf_stat([*command, str(calls)]) for calls in (FEW, MANY))
    return max(0, many - few) / (MANY - FEW)


def make_calls(path: str, function: str, program: str, size: int, calls: int) -> None:
    """Make ``calls`` calls of a compiled function, as the counted process."""
    (variant,) = (v for v in VARIANTS if v.function == function)
    problem = Problem(program, size)
    problem.fill(NORMAL)
    library = Library(path=Path(path), compiler="", version="")
    call = library.call(variant, problem.arrays(variant), problem.shape, threads=1)
    for _ in range(calls):
        call()


if __name__ == "__main__":
    make_calls(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
