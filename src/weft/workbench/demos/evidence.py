"""What a kernel's code tells with no GPU: compiled by NVRTC, disassembled, and counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from weft import machine
from weft.backends import cubin, disassemble
from weft.backends.nvrtc import CudaSource
from weft.machine.capability import multiprocessor
from weft.workbench.inspect import counts, sass
from weft.workbench.inspect.occupancy import occupancy as theoretical
from weft.workbench.inspect.sass import Instruction

Code = Sequence[Instruction]


@cache
def _codes(source: CudaSource, arch: str) -> dict[str, tuple[Instruction, ...]]:
    return sass.parse(disassemble.sass(source.compile(arch)))


def code(source: CudaSource, arch: str, kernel: str) -> Code:
    """A kernel's instructions for a target such as ``sm_90``; raises :class:`WeftError` where the
    compiler or the disassembler is missing."""
    return _codes(source, arch)[kernel]


def count(source: CudaSource, arch: str, kernel: str, kind: str) -> int:
    """How many instructions of a kind (``LDS``) stand in the code."""
    return sum(i.kind == kind for i in code(source, arch, kernel))


def widest_load(source: CudaSource, arch: str, kernel: str) -> int:
    """The widest global load in bits; 0 where there is none."""
    loads = (i.opcode for i in code(source, arch, kernel) if i.kind == "LDG")
    return max(map(counts.width, loads), default=0)


def loops(instructions: Code) -> list[Code]:
    """The bodies of the innermost and other loops: from a label to a branch back to it."""
    at = {i.label: n for n, i in enumerate(instructions) if i.label}
    found = []
    for n, one in enumerate(instructions):
        label = re.search(r"\.L_\w+", one.operands) if one.kind == "BRA" else None
        if label and at.get(label[0], n + 1) <= n:
            found.append(instructions[at[label[0]] : n + 1])
    return found


def per_step(source: CudaSource, arch: str, kernel: str, kind: str) -> float:
    """Instructions for each one of this kind, in the loop that has the most of it."""
    bodies = loops(code(source, arch, kernel))
    tallies = [(sum(i.kind == kind for i in body), len(body)) for body in bodies]
    steps, length = max(tallies)
    return length / steps


def occupancy(
    source: CudaSource, arch: str, kernel: str, block: int, *, whole_shared: bool = False
) -> float:
    """Percent of an SM's threads that blocks of this kernel can fill; ``whole_shared``: launched
    with as much dynamic shared memory as a block can have."""
    number = int(re.sub(r"\D", "", arch))
    sm = multiprocessor(number)
    it = next(k for k in cubin.kernels(source.compile(arch), number) if k.name == kernel)
    shared = sm.shared_per_block if whole_shared else it.shared
    return 100 * theoretical(sm, threads=block, registers=it.registers, shared=shared).share


@cache
def shared_of_a_block() -> int:
    """The most shared memory that a block can have on this GPU, in bytes."""
    most = machine.query("cuda").shared_per_block_optin
    assert most is not None, "the driver did not tell"
    return most


@cache
def sms() -> int:
    """How many SMs this GPU has."""
    found = machine.query("cuda").units
    assert found is not None, "the driver did not tell"
    return found
