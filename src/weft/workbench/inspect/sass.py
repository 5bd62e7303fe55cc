"""SASS as nvdisasm prints it, read into instructions with the source and PTX lines they came of.

A line of code is ``/*0150*/  @P0 LDG.E.128 R4, [R6.64] ;``. Between such lines stand labels and
``//## File "gelu.cu", line 15 inlined at "gelu.cu", line 103``: the place that the instructions
after it came of, the innermost call first, one line a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PTX_FILE = ".nv_debug_ptx_txt"  # nvdisasm's name for the PTX that a cubin keeps
_CODE = re.compile(r"\s*/\*([0-9a-f]{4,16})\*/\s+(?:(@!?U?P(?:T|\d+))\s+)?([A-Z]\w*(?:\.\w+)*)(.*)")
_PLACE = re.compile(r'\s*//## File "([^"]*)", line (\d{1,9})')
_KERNEL = re.compile(r"\.text\.([^\s:]+):\s*$")
_LABEL = re.compile(r"(\.L_\w+|\$[^\s:]+):\s*$")
_TARGET = re.compile(r"`\((\.L_\w+)\)|\b0x([0-9a-f]+)\b")
IDLE = ("NOP",)  # what fills a kernel's code up to its alignment


@dataclass(frozen=True)
class Place:
    """A line of a source file."""

    file: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction at ``offset`` bytes in its kernel.

    ``places`` are the source lines it came of, the innermost inlined call first; ``ptx`` is the
    line of the PTX; both empty where the code holds no line information. ``label`` stands before.
    """

    offset: int
    opcode: str
    operands: str = ""
    predicate: str = ""
    places: tuple[Place, ...] = ()
    ptx: int | None = None
    label: str = ""

    @property
    def kind(self) -> str:
        """The opcode without its modifiers, ``LDG`` of ``LDG.E.128``."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        """As it is read: predicate, opcode, operands."""
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))

    @property
    def parks(self) -> bool:
        """Whether this is the branch to itself that stands after a kernel's end."""
        target = _TARGET.search(self.operands) if self.kind == "BRA" else None
        if target is None:
            return False
        return target[1] == self.label if target[1] else int(target[2], 16) == self.offset


def parse(text: str) -> dict[str, tuple[Instruction, ...]]:
    """Each kernel's instructions, by its name, of what nvdisasm printed; never raises.

    Code before any kernel's name (a raw stretch of instructions) goes by the name "".
    """
    found: dict[str, list[Instruction]] = {}
    state = _State()
    for line in text.splitlines():
        if code := _CODE.match(line):  # most lines are
            found.setdefault(state.kernel, []).append(state.instruction(code))
        elif kernel := _KERNEL.match(line):
            state = _State(kernel[1])
        elif label := _LABEL.match(line):
            state.label = label[1]
        elif place := _PLACE.match(line):
            state.at(place[1], int(place[2]))
    return {name: tuple(_trimmed(code)) for name, code in found.items()}


class _State:
    """What holds for the next instruction."""

    def __init__(self, kernel: str = "") -> None:
        self.kernel = kernel
        self.label = ""
        self.places: tuple[Place, ...] = ()
        self.ptx: int | None = None
        self._fresh = True  # the next place begins a new one, and is not a caller of the last

    def at(self, file: str, line: int) -> None:
        if file == PTX_FILE:
            self.ptx = line
            return
        self.places = (Place(file, line),) if self._fresh else (*self.places, Place(file, line))
        self._fresh = False

    def instruction(self, code: re.Match[str]) -> Instruction:
        made = Instruction(
            offset=int(code[1], 16),
            predicate=code[2] or "",
            opcode=code[3],
            operands=code[4].strip().rstrip(";}").strip(),
            places=self.places,
            ptx=self.ptx,
            label=self.label,
        )
        self.label, self._fresh = "", True
        return made


def _trimmed(code: list[Instruction]) -> Iterator[Instruction]:
    """The code without what stands after its end: a branch to itself, and idle instructions."""
    return (i for i in code if i.kind not in IDLE and not i.parks)
