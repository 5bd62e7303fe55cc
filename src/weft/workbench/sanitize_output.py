"""Reading what compute-sanitizer printed: its faults, its own count of them, and its troubles.

Each report is a line at the margin (what) and indented ones below it (where, by whom). The form
has changed over the years; each of those known is read, and a count that no line explains is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

ERROR, WARNING = "error", "warning"

_LINE = re.compile(r"^={6,10}(?: (?P<text>.*))?$")
_SUMMARY = re.compile(r"^ERROR SUMMARY: ([\d,]+) errors?$")
_RACES = re.compile(r"^RACECHECK SUMMARY: .*\(([\d,]+) errors?, ([\d,]+) warnings?\)")
# The other lines at the margin that are no report.
_SILENT = re.compile(
    r"COMPUTE-SANITIZER|(?:ERROR|LEAK|RACECHECK|INITCHECK) SUMMARY|Tracking kernels"
)
_TROUBLE = re.compile(
    r"Internal Sanitizer Error|Error: (?!Race |Potential |\(|\w+ access)|Target application"
    r"|Unable to|Warning: (?!Race |Potential |\()|Failed|No kernels"
)
_RACE = re.compile(
    r"^(?:(?P<level>Error|Warning): )?(?P<kind>.*\bRace reported between \w+ access)"
)
_HAZARD = re.compile(r"^(?:(?P<level>Error|Warning): )?(?P<kind>.*Potential \w+ hazard detected)")
_HERE = re.compile(
    r"^(?:at |by thread|Address |Access |and |Device Frame|Host Frame|Saved host|in )"
)
_AT = re.compile(r"(?:^|access |Thread \([\d,]+\) )at (.+)$")
_FRAME = re.compile(r"^Device Frame:\s*(.+)$")
_WHO = re.compile(r"^by thread (\([\d,]+\)) in block (\([\d,]+\))")
_WHAT = re.compile(r"^(?:Address|Access to) .*$")
_HAZARDS = re.compile(r"\[([\d,]+) hazards?\]")
# name+0x70 in file.cu:41, name():0x160 in ...; and of old 0x70 in file.cu:41:name, 0x70 in name.
_PLACES = (
    re.compile(r"^(?P<name>.+?)[+:]0x[0-9a-f]+(?: in (?P<file>\S+:\d+))?"),
    re.compile(r"^0x[0-9a-f]+ in (?P<file>\S+?:\d+):(?P<name>.+?)(?: \[[\d,]+ hazards?\])?$"),
    re.compile(r"^0x[0-9a-f]+ in (?P<name>.+?)(?: \[[\d,]+ hazards?\])?$"),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault at one place: ``times`` it was reported; ``detail`` is of the first."""

    kind: str
    kernel: str = ""
    where: str = ""
    detail: str = ""
    level: str = ERROR
    times: int = 1

    @property
    def line(self) -> str:
        """One line for a reader."""
        text = self.kind
        text += f" in {self.kernel}" if self.kernel else ""
        text += f" at {self.where}" if self.where else ""
        text += f" ({self.detail})" if self.detail else ""
        return text + (f", {self.times} times" if self.times > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """``count`` is the tool's own number of errors; None where it printed no summary."""

    faults: tuple[Fault, ...] = ()
    count: int | None = None
    troubles: tuple[str, ...] = ()


def parse(text: str) -> Parsed:
    """The reports in a log of compute-sanitizer, whichever of its tools wrote it."""
    faults: dict[tuple[str, str, str, str], Fault] = {}
    troubles: list[str] = []
    count: int | None = None
    for head, below in _blocks(text):
        summary = _SUMMARY.match(head) or _RACES.match(head)
        if summary:
            count = max(count or 0, _number(summary[1]))
        elif _SILENT.search(head):
            continue
        elif _TROUBLE.match(head):
            troubles.append(head)
        else:
            fault = _fault(head, below)
            key = (fault.kind, fault.kernel, fault.where, fault.level)
            before = faults.get(key)
            faults[key] = replace(before, times=before.times + 1) if before else fault
    return Parsed(faults=tuple(faults.values()), count=count, troubles=tuple(troubles))


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each line at the margin with the lines that belong to it."""
    head, below = "", list[str]()
    for raw in text.splitlines():
        found = _LINE.match(raw.rstrip())
        if found is None:
            continue  # the program's own output
        line = found["text"] or ""
        if head and line.strip() and (line.startswith("  ") or _HERE.match(line)):
            below.append(line.strip())
            continue
        if head:
            yield head, below
        head, below = line.strip(), []
    if head:
        yield head, below


def _fault(head: str, below: Sequence[str]) -> Fault:
    found = _RACE.match(head) or _HAZARD.match(head)
    lines = [head, *below] if found else list(below)
    level = WARNING if found and found["level"] == "Warning" else ERROR
    places = [_place(m[1]) for m in map(_AT.search, lines) if m]
    frames = [_place(m[1]) for m in map(_FRAME.match, below) if m]
    names = [name for name, _ in (*frames[::-1], *places) if name]  # the outermost is the kernel
    files = [file for _, file in (*places, *frames) if file]
    return Fault(
        kind=found["kind"] if found else head.rstrip("."),
        kernel=names[0] if names else "",
        where=" and ".join(dict.fromkeys(files)) if found else (files[0] if files else ""),
        detail=_detail(below),
        level=level,
    )


def _place(text: str) -> tuple[str, str]:
    """The function and the file:line of '... at <text>', each '' where it is not told."""
    text = re.sub(r"^\[clone .*?\] ", "", text)
    for pattern in _PLACES:
        found = pattern.match(text)
        if found:
            groups = found.groupdict()
            file = (groups.get("file") or "").rsplit("/", 1)[-1]
            return _without_parameters(groups["name"]), file
    return "", ""


def _without_parameters(name: str) -> str:
    """``void f<(int)4>(int *)`` is f<(int)4>; what is in brackets in front belongs to the name."""
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth and not name.startswith("(anonymous namespace)", at):
            name = name[:at]
            break
    return name.removeprefix("void ").strip()


def _detail(below: Sequence[str]) -> str:
    parts = [f"thread {m[1]} of block {m[2]}" for m in map(_WHO.match, below) if m][:1]
    parts += [line for line in below if _WHAT.match(line)][:1]
    parts += [line.removeprefix("and ") for line in below if "nearest allocation" in line][:1]
    hazards = sum(_number(n) for line in below for n in _HAZARDS.findall(line))
    if hazards:
        parts.append(f"{hazards} hazards")
    return ", ".join(parts)


def _number(text: str) -> int:
    return int(text.replace(",", ""))
