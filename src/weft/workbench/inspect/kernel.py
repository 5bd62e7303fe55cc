"""One kernel taken apart: what the assembler gave it, what its code does, how many fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from weft.backends.cubin import Code
from weft.backends.take_apart import Program
from weft.machine.capability import multiprocessor
from weft.workbench.inspect.counts import Counts
from weft.workbench.inspect.occupancy import Occupancy, occupancy
from weft.workbench.inspect.ptx import body
from weft.workbench.inspect.rehearse import Launch

_EXTERN = re.compile(r"^\s*\.extern \.shared", re.MULTILINE)
_LOCAL = re.compile(r"^\s*\.local\s", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of an implementation, compiled for ``arch`` (90 for sm_90), in numbers.

    ``launch`` is how a case launches it, None where none of the operator's cases does; ``cases``
    names those that do. Sizes in bytes.
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
        """The kernel's name; numba's, which holds all argument types, cut to the function's."""
        if self.program.by.startswith("numba"):
            label = self.program.label
            return label.partition("-")[0]
        return self.code.name

    @property
    def title(self) -> str:
        """What tells it from the others: name, specimen, target."""
        label = self.program.label
        told = f"{self.name} ({label})" if label != self.name else self.name
        return f"{self.operator} {self.implementation}: {told}, {self.program.target}"

    @property
    def threads(self) -> int | None:
        """Threads a block: as launched, else as compiled for; None where neither tells."""
        launched = self.launch.block if self.launch else None
        return launched or self.code.threads

    @property
    def dynamic(self) -> int | None:
        """Dynamic shared memory; None where only a launch would tell and no case makes one."""
        if self.program.dynamic is not None:
            return self.program.dynamic
        if self.launch is not None and self.launch.shared is not None:
            return self.launch.shared
        return None if _EXTERN.search(self.program.ptx) else 0

    @property
    def spills(self) -> tuple[int, int] | None:
        """Bytes a thread that registers too few make it store and load; None where not known.

        Local memory that the source did not ask for is spills. Where the PTX has arrays of its own
        in local memory the two are not told apart.
        """
        moved = (self.counts.local_stores, self.counts.local_loads)
        if not any(moved):
            return moved
        lines = self.program.ptx.splitlines()
        own = "\n".join(lines[n - 1] for n in body(lines, self.code.name))
        return None if _LOCAL.search(own) else moved

    @property
    def occupancy(self) -> Occupancy | None:
        if self.threads is None or self.dynamic is None:
            return None
        return occupancy(
            multiprocessor(self.arch),
            threads=self.threads,
            registers=self.code.registers,
            shared=self.code.shared + self.dynamic,
        )

    @property
    def notes(self) -> list[str]:
        """What a reader must know of these numbers."""
        found = [self.program.note] if self.program.note else []
        unknown = [] if self.threads else ["its block"]
        unknown += ["its dynamic shared memory"] if self.dynamic is None else []
        if unknown:
            said = " and ".join(unknown)
            found.append(f"{said} is chosen at the launch, and no case launches it: no occupancy")
        if self.spills is None:
            found.append("it has arrays in local memory; how much of that is spilled is not known")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data, sizes in bytes, widths in bits."""
        full = self.occupancy
        spilled = self.spills
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
            "occupancy": full.to_json() if full else None,
            "counts": self.counts.to_json(),
            "cases": list(self.cases),
            "notes": self.notes,
        }
