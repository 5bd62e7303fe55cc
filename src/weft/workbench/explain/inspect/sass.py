"""Parser of SASS as nvdisasm prints it: instructions with the source and PTX lines they came from.

A line of code is ``/*0150*/  @P0 LDG.E.128 R4, [R6.64] ;``. Labels and source locations are between such
lines: ``//## File "gelu.cu", line 15 inlined at "gelu.cu", line 103`` is the location of the instructions
after it, with one line for each inlined call, the innermost first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PTX_FILE = ".nv_debug_ptx_txt"  # nvdisasm's name for the PTX that a cubin keeps
# Groups: offset, predicate, opcode with its modifiers, operands.
_CODE = re.compile(r"\s*/\*([0-9a-f]{4,16})\*/\s+(?:(@!?U?P(?:T|\d+))\s+)?([A-Z]\w*(?:\.\w+)*)(.*)")
_LOCATION = re.compile(r'\s*//## File "([^"]*)", line (\d{1,9})')
_KERNEL = re.compile(r"\.text\.([^\s:]+):\s*$")
_LABEL = re.compile(r"(\.L_\w+|\$[^\s:]+):\s*$")
# A branch names a label where nvdisasm has made one, and otherwise an address.
_TARGET = re.compile(r"`\((\.L_\w+)\)|\b0x([0-9a-f]+)\b")
PADDING = ("NOP",)  # instructions that fill a kernel's code up to its alignment


@dataclass(frozen=True)
class SourceLocation:
    """Line of a source file."""

    file: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """Instruction at ``offset`` bytes in its kernel.

    ``locations`` are the source lines it came from, the innermost inlined call first; ``ptx`` is the line
    of the PTX; both are empty without line information. ``label`` is the label before it, if any.
    """

    offset: int
    opcode: str
    operands: str = ""
    predicate: str = ""
    locations: tuple[SourceLocation, ...] = ()
    ptx: int | None = None
    label: str = ""

    @property
    def kind(self) -> str:
        """Opcode without its modifiers, ``LDG`` of ``LDG.E.128``."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        """Predicate, opcode and operands as one line."""
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))

    @property
    def is_self_branch(self) -> bool:
        """True for the branch to itself that follows a kernel's end."""
        target = _TARGET.search(self.operands) if self.kind == "BRA" else None
        if target is None:
            return False
        return target[1] == self.label if target[1] else int(target[2], 16) == self.offset


def parse(text: str) -> dict[str, tuple[Instruction, ...]]:
    """Parse nvdisasm's output into the instructions of each kernel by name; never raises.

    Code before any kernel's name (raw instructions) has the name "".
    """
    instructions: dict[str, list[Instruction]] = {}
    state = _State()
    for line in text.splitlines():
        if code := _CODE.match(line):  # most lines are
            instructions.setdefault(state.kernel, []).append(state.instruction(code))
        elif kernel := _KERNEL.match(line):
            state = _State(kernel[1])
        elif label := _LABEL.match(line):
            state.label = label[1]
        elif location := _LOCATION.match(line):
            state.set_location(location[1], int(location[2]))
    return {name: tuple(_trimmed(code)) for name, code in instructions.items()}


class _State:
    """Kernel, label and locations that apply to the next instruction."""

    def __init__(self, kernel: str = "") -> None:
        self.kernel = kernel
        self.label = ""
        self.locations: tuple[SourceLocation, ...] = ()
        self.ptx: int | None = None
        self._starts_chain = True  # the next location starts a new chain of inlined calls

    def set_location(self, file: str, line: int) -> None:
        if file == PTX_FILE:
            self.ptx = line
            return
        # One line for each inlined call follows the innermost location: they form one chain.
        callees = () if self._starts_chain else self.locations
        self.locations = (*callees, SourceLocation(file, line))
        self._starts_chain = False

    def instruction(self, code: re.Match[str]) -> Instruction:
        instruction = Instruction(
            offset=int(code[1], 16),
            predicate=code[2] or "",
            opcode=code[3],
            operands=code[4].strip().rstrip(";}").strip(),
            locations=self.locations,
            ptx=self.ptx,
            label=self.label,
        )
        # Locations stay valid for the next instruction; the label belongs to this one alone.
        self.label, self._starts_chain = "", True
        return instruction


def _trimmed(code: list[Instruction]) -> Iterator[Instruction]:
    """Yield the code without what follows its end: a branch to itself, and padding."""
    return (i for i in code if i.kind not in PADDING and not i.is_self_branch)
