"""Evidence for a demonstration's cause: instructions counted in its code, and hardware counters.

The code's evidence needs no GPU: NVRTC compiles the kernels, and a disassembler lists them. The
counters come from Nsight Compute, which runs this module as a program:

    python -m weft.lab.demos.evidence NAME

It launches both variants of the demonstration, the bad one first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from weft import machine
from weft.backends import cubin, disassemble
from weft.backends.nvrtc import CudaSource
from weft.core.errors import WeftError
from weft.lab.demos.demo import COUNTED, SIDES, Counter, Demo, Fact
from weft.machine.capability import sm_limits
from weft.workbench.explain.inspect import counts, sass
from weft.workbench.explain.inspect.occupancy import occupancy as theoretical_occupancy
from weft.workbench.explain.inspect.sass import Instruction
from weft.workbench.explain.ncu import find
from weft.workbench.explain.ncu import process as ncu_process
from weft.workbench.explain.ncu.output import parse

SEED = 20260101
TIMEOUT = 300.0  # seconds; a usual run takes about 20, most of it importing torch under the tool
Code = Sequence[Instruction]


@cache
def _instructions_by_kernel(source: CudaSource, arch: str) -> dict[str, tuple[Instruction, ...]]:
    return sass.parse(disassemble.sass(source.compile(arch)))


def code(source: CudaSource, arch: str, kernel: str) -> Code:
    """Return a kernel's instructions for a target such as ``sm_90``.

    Raises :class:`WeftError` if the compiler or the disassembler is missing.
    """
    return _instructions_by_kernel(source, arch)[kernel]


def count(source: CudaSource, arch: str, kernel: str, kind: str) -> int:
    """Return the number of instructions of a kind (``LDS``) in the code."""
    return sum(i.kind == kind for i in code(source, arch, kernel))


def widest_load(source: CudaSource, arch: str, kernel: str) -> int:
    """Return the width of the widest global load in bits; 0 if there is none."""
    loads = (i.opcode for i in code(source, arch, kernel) if i.kind == "LDG")
    return max(map(counts.width, loads), default=0)


def loops(instructions: Code) -> list[Code]:
    """Return the bodies of all loops: from a label to a branch back to it."""
    positions = {i.label: n for n, i in enumerate(instructions) if i.label}
    bodies = []
    for n, instruction in enumerate(instructions):
        label = re.search(r"\.L_\w+", instruction.operands) if instruction.kind == "BRA" else None
        # A branch to itself (n <= n) is the padding behind EXIT; it is a body without arithmetic.
        if label and positions.get(label[0], n + 1) <= n:
            bodies.append(instructions[positions[label[0]] : n + 1])
    return bodies


def instructions_per_step(source: CudaSource, arch: str, kernel: str, kind: str) -> float:
    """Return the instructions for each one of this kind, in the loop that has the most of it."""
    bodies = loops(code(source, arch, kernel))
    tallies = [(sum(i.kind == kind for i in body), len(body)) for body in bodies]
    steps, length = max(tallies)
    return length / steps


def occupancy(
    source: CudaSource, arch: str, kernel: str, block: int, *, max_dynamic_shared: bool = False
) -> float:
    """Return the percentage of an SM's threads that blocks of this kernel can fill.

    ``max_dynamic_shared``: launched with as much dynamic shared memory as a block can have.
    """
    number = int(re.sub(r"\D", "", arch))
    sm = sm_limits(number)
    attributes = next(k for k in cubin.kernels(source.compile(arch), number) if k.name == kernel)
    shared = sm.shared_per_block if max_dynamic_shared else attributes.shared
    return 100 * theoretical_occupancy(sm, threads=block, registers=attributes.registers, shared=shared).share


@cache
def max_shared_per_block() -> int:
    """Return the most shared memory that a block can have on this GPU, in bytes."""
    nbytes = machine.query("cuda").shared_per_block_optin
    assert nbytes is not None, "the driver did not report it"
    return nbytes


@cache
def num_sms() -> int:
    """Return the number of SMs of this GPU."""
    units = machine.query("cuda").units
    assert units is not None, "the driver did not report it"
    return units


def count_with_ncu(demo: Demo) -> Fact:
    """Read the demonstration's counter for both variants with Nsight Compute.

    Raises :class:`WeftError` if the tool is missing, may not read counters here, or failed.
    """
    assert demo.counter is not None
    return read_counter(demo.counter, profile("weft.lab.demos.evidence", [demo.name], demo.counter.metrics))


def profile(module: str, arguments: Sequence[str], metrics: Sequence[str]) -> str:
    """Run a module as a program under Nsight Compute and return the tool's log and all that was printed."""
    program = find.require()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        log = Path(folder, "log.txt")
        command = [str(program), *ncu_process.options(log, metrics), sys.executable, "-m", module, *arguments]
        printed = _run_in_own_session(command)
        logged = log.read_text(errors="replace") if log.exists() else ""
    return f"{logged}\n{printed}"


def _run_in_own_session(command: list[str]) -> str:
    """Run the tool and return its output; end every process that it started."""
    process = subprocess.Popen(
        command,
        env=ncu_process.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that killpg below reaches ncu's children and nothing else
    )
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired as error:
        raise WeftError(f"{find.TOOL} did not finish within {TIMEOUT:.0f} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_counter(counter: Counter, text: str) -> Fact:
    """Parse the counter of both variants from the tool's output; the bad variant's row comes first."""
    rows = parse(text).rows
    missing = {m for row in rows for m in counter.metrics if m not in row.values}
    if len(rows) != len(SIDES) or missing:
        end = " ".join(text.split())[-300:] or "it printed nothing"
        raise find.explain_problem(text) or WeftError(
            f"{find.TOOL} did not count both kernels",
            expected=f"{len(SIDES)} rows with {', '.join(counter.metrics)}",
            got=end,
        )
    bad, good = (counter.of(row.values) for row in rows)
    return Fact(label=counter.label, bad=bad, good=good, source=COUNTED)


def main(arguments: Sequence[str]) -> int:
    """Launch both variants once inside the profiler's range; Nsight Compute counts these launches."""
    import torch

    from weft.lab import demos

    demo = demos.demo(arguments[0])
    calls = [demo.variant(side).call for side in SIDES]
    assert demo.inputs is not None
    inputs = demo.inputs(SEED)
    # Compilation and first calls happen outside the range, so that only two launches are counted.
    # The list keeps the outputs alive, so that the counted calls get memory of their own.
    outputs = [call(*inputs) for call in calls if call is not None]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    outputs += [call(*inputs) for call in calls if call is not None]
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
