"""Compiled kernel: registers and memory, instruction counts, and theoretical occupancy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.backends.aot import Program
from weft.backends.cubin import Code
from weft.machine.capability import sm_limits
from weft.workbench.explain.inspect.counts import Counts
from weft.workbench.explain.inspect.dry_run import Launch
from weft.workbench.explain.inspect.occupancy import Occupancy, occupancy

_EXTERN = re.compile(r"^\s*\.extern \.shared", re.MULTILINE)
_LOCAL = re.compile(r"^\s*\.local\s", re.MULTILINE)


def ptx_lines_of(lines: Sequence[str], name: str) -> range:
    """Return the line numbers, from 1, of a kernel in a PTX file: from ``.entry`` to its closing brace."""
    entry = re.compile(rf"\.entry\s+{re.escape(name)}\s*(?:\(|$)")
    first = next((i for i, line in enumerate(lines) if entry.search(line)), None)
    if first is None:
        return range(0)
    # Compilers indent nested scopes, so the first brace in column 0 closes the kernel.
    last = next((i for i in range(first, len(lines)) if lines[i].startswith("}")), len(lines) - 1)
    # Indices count from 0, line numbers from 1, and a range excludes its end.
    return range(first + 1, last + 2)


@dataclass(frozen=True, kw_only=True)
class ElementsPerThread:
    """Elements of a call's outputs over the threads of one of its launches.

    It is ``exact`` if the launch is the only one of the call, so that it writes all of them, and each thread
    has the same whole number. Otherwise it is an estimate of what a thread does.
    """

    elements: int
    threads: int
    launches: int

    @property
    def mean(self) -> float:
        return self.elements / self.threads

    @property
    def exact(self) -> bool:
        return self.launches == 1 and self.elements % self.threads == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "mean": self.mean,
            "elements": self.elements,
            "threads": self.threads,
            "launches": self.launches,
            "exact": self.exact,
        }


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kernel of an implementation, compiled for ``arch`` (90 for sm_90). Sizes are in bytes.

    ``cases`` are the cases that launch it, and ``launch`` is the launch of the first; None without one.
    """

    operator: str
    implementation: str
    arch: int
    program: Program
    code: Code
    counts: Counts
    launch: Launch | None = None
    cases: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Name of the kernel; numba's mangled name, which has all argument types, as the function's name."""
        if self.program.by.startswith("numba"):
            label = self.program.label
            return label.partition("-")[0]
        return self.code.name

    @property
    def title(self) -> str:
        """Name, label and target, which distinguish it from the other kernels."""
        label = self.program.label
        name = f"{self.name} ({label})" if label != self.name else self.name
        return f"{self.operator} {self.implementation}: {name}, {self.program.target}"

    @property
    def threads(self) -> int | None:
        """Threads a block, of the launch or the compilation; None if neither has them."""
        # Triton's launches have no block size; the compiled code has it.
        launched = self.launch.block if self.launch else None
        return launched or self.code.threads

    @property
    def dynamic(self) -> int | None:
        """Dynamic shared memory; None if only a launch determines it and no case launches the kernel."""
        if self.program.dynamic is not None:
            return self.program.dynamic
        if self.launch is not None and self.launch.shared is not None:
            return self.launch.shared
        # Without an extern declaration the kernel cannot use dynamic shared memory.
        return None if _EXTERN.search(self.program.ptx) else 0

    @property
    def spills(self) -> tuple[int, int] | None:
        """Spilled bytes a thread, stored and loaded; None if unknown.

        Accesses to local memory are spills if the PTX has no local arrays. If it has some, the two cannot
        be distinguished.
        """
        moved = (self.counts.local_stores, self.counts.local_loads)
        if not any(moved):
            return moved
        return None if _LOCAL.search("\n".join(self.ptx_lines)) else moved

    @property
    def ptx_lines(self) -> list[str]:
        """PTX of this kernel; a program may hold several."""
        lines = self.program.ptx.splitlines()
        return [lines[n - 1] for n in ptx_lines_of(lines, self.code.name)]

    @property
    def occupancy(self) -> Occupancy | None:
        if self.threads is None or self.dynamic is None:
            return None
        return occupancy(
            sm_limits(self.arch),
            threads=self.threads,
            registers=self.code.registers,
            shared=self.code.shared + self.dynamic,
        )

    @property
    def elements_a_thread(self) -> ElementsPerThread | None:
        """Elements of the outputs for each thread; None without a launch, a block size or an output."""
        if self.launch is None or not self.threads or not self.launch.elements:
            return None
        return ElementsPerThread(
            elements=self.launch.elements,
            threads=math.prod(self.launch.grid) * self.threads,
            launches=self.launch.launches,
        )

    @property
    def notes(self) -> list[str]:
        """Remarks that limit what the numbers mean."""
        notes = [self.program.note] if self.program.note else []
        unknown = [] if self.threads else ["its block"]
        unknown += ["its dynamic shared memory"] if self.dynamic is None else []
        if unknown:
            missing = " and ".join(unknown)
            notes.append(f"{missing} is chosen at the launch, and no case launches it: no occupancy")
        if self.spills is None:
            notes.append("it has arrays in local memory; how much of that is spilled is not known")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with sizes in bytes and widths in bits."""
        occupied = self.occupancy
        spilled = self.spills
        elements = self.elements_a_thread
        return {
            "operator": self.operator,
            "implementation": self.implementation,
            "kernel": self.name,
            "label": self.program.label,
            "target": self.program.target,
            "compiler": self.program.by,
            "registers": self.code.registers,
            "spill_stores": spilled[0] if spilled else None,
            "spill_loads": spilled[1] if spilled else None,
            "stack": self.code.stack,
            "shared_static": self.code.shared,
            "shared_dynamic": self.dynamic,
            "threads": self.threads,
            "grid": list(self.launch.grid) if self.launch else None,
            "elements_a_thread": elements.to_json() if elements else None,
            "occupancy": occupied.to_json() if occupied else None,
            "counts": self.counts.to_json(),
            "cases": list(self.cases),
            "notes": self.notes,
        }
