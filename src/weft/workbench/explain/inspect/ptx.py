"""Guided reading of PTX: the kind of each line, its meaning, and what to look for.

PTX is what the compiler hands to the assembler. It has no registers of the machine, no spills and no order of
execution yet; it shows which memory is accessed how wide, which arithmetic is done in which type, and where
threads wait for one another. The opcodes are those of NVIDIA's "Parallel Thread Execution ISA".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of line. ``pattern`` matches the beginning of its opcodes."""

    name: str
    pattern: str
    does: str
    look_for: str = ""
    has_width: bool = False


_FLOAT = r"(?:\.\w+)*\.(?:bf16x2|f16x2|bf16|f16|f32)$"
_INTEGER = r"(?:\.\w+)*\.[bsu](?:8|16|32|64|16x2)$"
# The first kind whose pattern matches is a line's.
KINDS: tuple[Kind, ...] = (
    Kind(
        name="local array",
        pattern=r"\.local\b",
        does="memory of one thread, which lies in the caches and DRAM",
        look_for="an array that is indexed at run time: unroll the loop, or use shared memory",
    ),
    Kind(
        name="shared array",
        pattern=r"(?:\.extern\s+)?\.shared\b",
        does="memory of a block",
        look_for="its size: it limits the blocks on an SM",
    ),
    Kind(
        name="launch bound",
        pattern=r"\.(?:maxntid|reqntid|minnctapersm|maxnreg|maxnctapersm|reqnctapercluster)\b",
        does="limits of the launch, from the source or an option",
        look_for="a minimum of blocks that costs spilled registers",
    ),
    Kind(
        name="parameter",
        pattern=r"(?:ld|st)\.param\b",
        does="reads an argument of the kernel, or passes one to a call",
    ),
    Kind(
        name="tensor core",
        pattern=r"(?:w?mma|wgmma\.mma_async|tcgen05\.mma)\b",
        does="a matrix product by a warp (mma) or a warp group (wgmma)",
        look_for="wgmma on sm_90, whose full rate mma cannot reach. The last types are the inputs'",
    ),
    Kind(
        name="tensor core order",
        pattern=r"(?:wgmma|tcgen05)\.",
        does="orders asynchronous products and waits for them",
        look_for="wait_group 0 in the loop: nothing overlaps",
    ),
    Kind(
        name="TMA copy",
        pattern=r"cp\.(?:reduce\.)?async\.bulk\.(?!commit|wait)",
        does="one thread starts the copy of a tile or a row by the copy engine",
        look_for="it needs no registers. An mbarrier or a bulk group says when it is done",
    ),
    Kind(
        name="async copy",
        pattern=r"cp\.async\.(?:ca|cg)\b",
        does="copies from global to shared memory without registers",
        look_for="16 bytes each, and more than one group in flight",
    ),
    Kind(
        name="copy group",
        pattern=r"cp\.async\.",
        does="closes a group of copies, or waits for groups",
        look_for="wait_group 0 in the loop: the copies do not overlap with work",
    ),
    Kind(
        name="global load",
        pattern=r"ld(?:\.\w+)*\.global\b",
        does="reads global memory; nc: through the read-only path",
        look_for="v4 of 32 bits (128 bits): the widest. Narrow ones belong to a tail or an odd layout",
        has_width=True,
    ),
    Kind(
        name="global store",
        pattern=r"st(?:\.\w+)*\.global\b",
        does="writes global memory",
        look_for="the same width as the loads",
        has_width=True,
    ),
    Kind(
        name="shared load",
        pattern=r"(?:ld(?:\.\w+)*\.shared|ldmatrix)\b",
        does="reads shared memory; ldmatrix loads tiles for mma",
        look_for="128 bits; bank conflicts are in the addresses, which ncu counts",
        has_width=True,
    ),
    Kind(
        name="shared store",
        pattern=r"(?:st(?:\.\w+)*\.shared|stmatrix|st\.async|red\.async)\b",
        does="writes shared memory, of another block of the cluster too",
        look_for="128 bits; a barrier before others read it",
        has_width=True,
    ),
    Kind(
        name="local access",
        pattern=r"(?:ld|st)(?:\.\w+)*\.local\b",
        does="reads or writes a local array",
        look_for="none. Spills are not here: the assembler makes them (line: spills)",
        has_width=True,
    ),
    Kind(
        name="generic access",
        pattern=r"(?:ld|st)(?:\.(?!const)\w+)*\.(?:v[248]\.)?[bsuf]\d+$",
        does="an access by a pointer whose memory the compiler does not know",
        look_for="none: access arguments and shared arrays directly, not by a pointer that can be either",
        has_width=True,
    ),
    Kind(name="constant load", pattern=r"ld(?:\.\w+)*\.const\b", does="reads constant memory"),
    Kind(
        name="prefetch or policy",
        pattern=r"(?:prefetchu?|createpolicy|applypriority|discard|cachepolicy)\b",
        does="asks for data early, or says how long a cache should keep it",
    ),
    Kind(
        name="address space",
        pattern=r"(?:cvta|isspacep|mapa|getctarank)\b",
        does="turns a generic pointer into one of global or shared memory, or of another block",
        look_for="one for each pointer, before the loop",
    ),
    Kind(
        name="atomic",
        pattern=r"(?:atom|red)\.",
        does="reads, changes and writes a word so that no other thread is between",
        look_for="red needs no answer and is cheaper; many threads on one word wait for each other",
    ),
    Kind(
        name="mbarrier",
        pattern=r"mbarrier\.",
        does="a barrier in shared memory that copies and threads arrive at",
        look_for="try_wait with the parity of the pipeline's round",
    ),
    Kind(
        name="block barrier",
        pattern=r"(?:bar|barrier)\.(?!cluster|warp)",
        does="all threads of a block, or of a named barrier, wait for each other",
        look_for="as few as possible in a loop; none under a condition that threads disagree on",
    ),
    Kind(
        name="cluster barrier",
        pattern=r"barrier\.cluster\b",
        does="all blocks of a cluster wait for each other",
        look_for="work between arrive and wait",
    ),
    Kind(
        name="warp barrier",
        pattern=r"bar\.warp\b",
        does="the threads of a warp wait for each other",
    ),
    Kind(
        name="fence",
        pattern=r"(?:membar|fence)\b",
        does="orders the memory accesses before it and after it",
        look_for="membar.gl and fence.*.sys are slow: one for each tile, not one for each element",
    ),
    Kind(
        name="shuffle or vote",
        pattern=r"(?:shfl|vote|match|redux|activemask|elect)\b",
        does="exchanges values between the threads of a warp, without shared memory",
        look_for="5 for a sum over a warp; redux does it in one for integers",
    ),
    Kind(
        name="kernel order",
        pattern=r"griddepcontrol\b",
        does="programmatic dependent launch: waits for, or releases, the neighbouring kernel",
    ),
    Kind(
        name="register share",
        pattern=r"setmaxnreg\b",
        does="a warp group gives registers back, or takes more",
        look_for="producers give, consumers take",
    ),
    Kind(
        name="float64",
        pattern=r"(?:abs|add|sub|mul|mad|fma|neg|min|max|div|rcp|sqrt|rsqrt|setp|set|selp|copysign|testp)"
        r"(?:\.\w+)*\.f64$",
        does="arithmetic in float64",
        look_for="none, unless the data are float64: a constant without f, or exp instead of expf",
    ),
    Kind(
        name="conversion to f64",
        pattern=r"cvt(?:\.\w+)*\.f64(?:\.\w+)?$",
        does="converts to or from float64",
        look_for="none, unless float64 is intended",
    ),
    Kind(
        name="conversion",
        pattern=r"cvt\b",
        does="converts between types or widths",
        look_for="bf16x2 and f16x2: two values in one. Those of addresses belong before the loop",
    ),
    Kind(
        name="fast function",
        pattern=r"(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:approx|full)\b",
        does="an approximation by the special-function unit, at a fraction of the rate of fma",
        look_for="the accuracy that you need; one reciprocal instead of many divisions",
    ),
    Kind(
        name="exact division",
        pattern=r"(?:div|rcp|sqrt)\.r[nzmp]\b",
        does="a correctly rounded division or root: several instructions",
        look_for="a reciprocal outside the loop, where its rounding is allowed",
    ),
    Kind(
        name="integer division",
        pattern=r"(?:div|rem)\.[su]\d+\b",
        does="division or remainder of integers: tens of instructions",
        look_for="a divisor that is known when compiling; a power of two; none in the loop",
    ),
    Kind(
        name="fma",
        pattern=rf"(?:fma|mad){_FLOAT}",
        does="a product and a sum with one rounding",
        look_for="most of the arithmetic; packed (bf16x2, f16x2) where that is accurate enough",
    ),
    Kind(
        name="float arithmetic",
        pattern=rf"(?:add|sub|mul|neg|abs|min|max|copysign){_FLOAT}",
        does="arithmetic of float32 and shorter",
        look_for="a product and a sum apart: rounding forbids fma there",
    ),
    Kind(
        name="comparison",
        pattern=r"setp?\b",
        does="compares, and writes a predicate",
    ),
    Kind(
        name="selection",
        pattern=r"(?:selp|slct)\b",
        does="takes one of two values by a predicate, without a branch",
    ),
    Kind(
        name="integer multiply",
        pattern=rf"(?:mad|mul|mul24|mad24|dp4a|dp2a|madc){_INTEGER}",
        does="products of integers, for indices: mad.lo is i * n + j, mul.wide gives 64 bits",
        look_for="few in the loop; 64-bit ones cost several instructions",
    ),
    Kind(
        name="integer",
        pattern=r"(?:addc?|subc?|neg|abs|min|max|and|or|xor|not|cnot|shl|shr|shf|lop3|prmt|bfe|bfi|bfind|"
        r"bmsk|brev|clz|popc|fns|szext|sad|vadd\w*|vset\w*)\.",
        does="arithmetic of integers and bits, mostly addresses and conditions",
        look_for="what could be computed once, before the loop",
    ),
    Kind(
        name="move",
        pattern=r"mov\b",
        does="copies, packs or splits values, or reads %tid, %ctaid and others",
        look_for="nothing: the assembler removes most of them",
    ),
    Kind(
        name="branch",
        pattern=r"(?:bra|brx)\b",
        does="jumps; with a predicate (@p) only the threads for which it holds",
        look_for="threads of a warp that disagree: the warp runs both sides",
    ),
    Kind(
        name="call",
        pattern=r"call\b",
        does="calls a function that was not inlined",
        look_for="none in a kernel's loop",
    ),
    Kind(name="end", pattern=r"(?:ret|exit|trap|brkpt|nanosleep)\b", does="ends or stops the thread"),
    Kind(
        name="declaration",
        pattern=r"\.(?:reg|param|visible|entry|func|const|global|align|pragma|version|target|address_size|"
        r"noreturn|explicitcluster|blocksareclusters|weak|extern|maxclusterrank|branchtargets|callprototype|"
        r"calltargets)\b",
        does="names registers, parameters and the kernel itself",
        look_for="nothing: virtual registers are not those of the machine",
    ),
)
NOTHING = "nothing"
OTHER = Kind(name="other", pattern="", does="an instruction that this table does not know")
_COMPILED = tuple((kind, re.compile(kind.pattern)) for kind in KINDS)

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_LABEL = re.compile(r"[$%\w]+\s*:(?!:)\s*")
_PREDICATE = re.compile(r"@!?[%\w]+\s+")
_OPCODE = re.compile(r"\.?[A-Za-z][\w.:]*(?:\s+\.shared\b)?")
_DEBUG = re.compile(r"\.(?:loc|file|section|b\d+)\b")  # lines about the source
_VECTOR = re.compile(r"\.v([248])\b")
_TYPE = re.compile(r"\.[bsuf](\d+)$")
_TILES = re.compile(r"\.x([124])\b")


class Statement(NamedTuple):
    """Statement of a line. ``bits`` are those that a thread moves; 0 where that has no meaning."""

    kind: Kind
    opcode: str
    predicated: bool
    bits: int


@dataclass
class KindCount:
    """Number of statements of a kind, of those with a predicate, and of each width in bits a thread."""

    kind: Kind
    count: int = 0
    predicated: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind.name,
            "count": self.count,
            "predicated": self.predicated,
            "widths": {str(bits): n for bits, n in sorted(self.widths.items())},
            "does": self.kind.does,
            "look_for": self.kind.look_for,
        }


def kind_of(opcode: str) -> Kind:
    """Return the kind of an opcode or a directive.

    >>> kind_of("ld.global.nc.v4.u32").name, kind_of("mad.lo.s32").name, kind_of("fma.rn.f64").name
    ('global load', 'integer multiply', 'float64')
    """
    return next((kind for kind, pattern in _COMPILED if pattern.match(opcode)), OTHER)


def width(opcode: str) -> int:
    """Return the bits that a thread moves: vector times element.

    >>> width("ld.global.nc.v4.u32"), width("st.shared.b16"), width("ldmatrix.sync.aligned.m8n8.x4.b16")
    (128, 16, 128)
    """
    if opcode.startswith(("ldmatrix", "stmatrix")):
        # A tile of 8 x 8 elements of 16 bits is 32 bits for each of 32 threads.
        tiles = _TILES.search(opcode)
        return 32 * int(tiles[1]) if tiles else 32
    element, vector = _TYPE.search(opcode), _VECTOR.search(opcode)
    return int(element[1]) * (int(vector[1]) if vector else 1) if element else 0


def statements(lines: Iterable[str]) -> Iterator[list[Statement]]:
    """Yield for each line the statements that begin on it."""
    is_open = False  # a statement that began on an earlier line goes on
    for line in lines:
        begun: list[Statement] = []
        text = _COMMENT.sub("", line).strip()
        while text:
            if not is_open:
                text = _LABEL.sub("", text.lstrip("{}() \t"), count=1)
                if not text:
                    break
                if (statement := _statement(text)) is not None:
                    begun.append(statement)
            body, semicolon, text = text.partition(";")
            # A directive without a semicolon, such as .maxntid, ends with its line.
            is_open = not semicolon and not (not is_open and body.startswith("."))
            text = text.strip()
        yield begun


def _statement(text: str) -> Statement | None:
    predicate = _PREDICATE.match(text)
    opcode = _OPCODE.match(text[predicate.end() :] if predicate else text)
    if opcode is None or _DEBUG.match(opcode[0]):
        return None
    kind = kind_of(opcode[0])
    return Statement(kind, opcode[0], predicate is not None, width(opcode[0]) if kind.has_width else 0)


def count_kinds(lines: Iterable[str]) -> list[KindCount]:
    """Return the kinds of a kernel's lines with their numbers, in the order of ``KINDS``."""
    counts: dict[str, KindCount] = {}
    for line in statements(lines):
        for kind, _, predicated, bits in line:
            row = counts.setdefault(kind.name, KindCount(kind))
            row.count += 1
            row.predicated += predicated
            if bits:
                row.widths[bits] += 1
    order = [kind.name for kind in (*KINDS, OTHER)]
    return sorted(counts.values(), key=lambda row: order.index(row.kind.name))


def markdown_table() -> str:
    """Return the kinds as a table for the documentation."""
    from weft.workbench.report.markdown import table

    rows = [(kind.name, kind.does, kind.look_for or NOTHING) for kind in KINDS]
    return table(("kind", "what it does", "what to look for"), rows)


def remarks(counts: Sequence[KindCount]) -> list[str]:
    """Return what stands out in this kernel, one sentence each; nothing for a kernel without surprises."""
    by_name = {row.kind.name: row for row in counts}
    lines = []
    for name in ("global load", "global store"):
        if (row := by_name.get(name)) and (narrow := sum(n for b, n in row.widths.items() if b < 128)):
            widest = f"(the widest: {max(row.widths)} bits)"
            lines.append(f"{narrow} of {row.count} {name}s move fewer than 128 bits a thread {widest}")
    for name, problem in (
        ("float64", "of float64 arithmetic: intended? A constant without f makes it"),
        ("conversion to f64", "of conversion to or from float64: intended?"),
        ("local array", "of arrays in local memory, which has the latency of global memory"),
        ("generic access", "of access by generic pointers, whose memory is looked up at run time"),
        ("integer division", "of integer division: tens of instructions each"),
        ("exact division", "of exact division or root: several instructions each"),
        ("call", "of calls: functions that were not inlined"),
        ("other", "that this reading does not know"),
    ):
        if row := by_name.get(name):
            lines.append(f"{row.count} line{'s'[: row.count != 1]} {problem}")
    return lines
