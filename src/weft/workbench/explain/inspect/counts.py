"""Counts of a kernel's instructions: loads by width, tensor cores, copies, barriers.

Instructions in the code are counted, not executions: a load in a loop counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from weft.workbench.explain.inspect.sass import Instruction

# Opcode -> kind of access. The opcodes are NVIDIA's ("CUDA Binary Utilities", instruction sets).
MEMORY = {
    "LDG": "global loads",
    "STG": "global stores",
    "LD": "generic loads",
    "ST": "generic stores",
    "LDS": "shared loads",
    "STS": "shared stores",
    "LDSM": "shared matrix loads",
    "STSM": "shared matrix stores",
    "LDL": "local loads",
    "STL": "local stores",
    "LDGSTS": "async copies",
}
BULK = {
    "UTMALDG": "TMA loads",
    "UTMASTG": "TMA stores",
    "UTMAREDG": "TMA reductions",
    "UTMAPF": "TMA prefetches",
    "UBLKCP": "bulk copies",
    "UBLKRED": "bulk reductions",
    "UBLKPF": "bulk prefetches",
}
TENSOR = (
    *("HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA"),  # by a warp (mma.sync)
    *("HGMMA", "IGMMA", "QGMMA", "BGMMA"),  # by a warp group, from shared memory (wgmma, sm_90)
    *("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA", "UTCMXQMMA"),  # into tensor memory (sm_100)
)
TENSOR_MEMORY = ("LDTM", "STTM", "UTCCP", "UTCATOMSWS")
BARRIERS = ("BAR", "BARRIER", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT", "WARPSYNC", "UTCBAR")
BRANCHES = ("BRA", "BRX", "BRXU", "JMP", "JMX", "CALL", "RET")
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDAS")
SHUFFLES = ("SHFL", "REDUX", "CREDUX", "VOTE", "VOTEU", "MATCH")
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
TILE = 128  # bits a thread of a matrix load of four 8 x 8 tiles of 16-bit elements
Tally = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of instructions of each kind.

    ``memory`` is by kind and width in bits: ``{"global loads": {"128": 2}}``. ``local_stores`` and
    ``local_loads`` are bytes a thread to and from local memory, each instruction counted once, as ptxas
    counts them.
    """

    instructions: int = 0
    branches: int = 0
    calls: int = 0
    memory: dict[str, Tally] = field(default_factory=dict)
    bulk: Tally = field(default_factory=dict)
    tensor: Tally = field(default_factory=dict)
    tensor_memory: Tally = field(default_factory=dict)
    barriers: Tally = field(default_factory=dict)
    fast_math: Tally = field(default_factory=dict)
    atomics: Tally = field(default_factory=dict)
    shuffles: Tally = field(default_factory=dict)
    local_stores: int = 0
    local_loads: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def widest(self, kind: str) -> int:
        """Return the widest access of a kind in bits; 0 without any."""
        return max(map(int, self.memory.get(kind, {})), default=0)


@cache
def width(opcode: str) -> int:
    """Return the bits a thread of an access: from the opcode's modifiers, else 32.

    >>> width("LDG.E.128.CONSTANT"), width("LDSM.16.M88.4"), width("STS")
    (128, 128, 32)
    """
    kind, *modifiers = opcode.split(".")
    if kind in ("LDSM", "STSM"):
        # The modifier is the number of 8 x 8 tiles that a warp moves at once; none means one.
        tiles = next((m for m in modifiers if m in ("2", "4")), "1")
        return TILE * int(tiles) // 4
    return next((WIDTHS[m] for m in reversed(modifiers) if m in WIDTHS), 32)


def count(code: Iterable[Instruction]) -> Counts:
    """Count a kernel's instructions."""
    memory: dict[str, Counter[str]] = {}
    tallies: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    # Each opcode once: a kernel has thousands of instructions, but few different opcodes.
    for opcode, n in Counter(instruction.opcode for instruction in code).items():
        kind = opcode.partition(".")[0]
        total["instructions"] += n
        if kind in MEMORY:
            memory.setdefault(MEMORY[kind], Counter())[str(width(opcode))] += n
        elif kind in BRANCHES:
            total["calls" if kind in ("CALL", "RET") else "branches"] += n
        elif (entry := _tally(opcode)) is not None:
            tallies.setdefault(entry[0], Counter())[entry[1]] += n
        # ptxas reports spills in bytes a thread, so the widths are added up.
        if kind in ("STL", "LDL"):
            total[kind] += n * width(opcode) // 8
    return Counts(
        instructions=total["instructions"],
        branches=total["branches"],
        calls=total["calls"],
        memory={name: dict(sorted(by_width.items(), key=_width_key)) for name, by_width in memory.items()},
        local_stores=total["STL"],
        local_loads=total["LDL"],
        **{name: dict(sorted(tally.items())) for name, tally in tallies.items()},
    )


def _width_key(item: tuple[str, int]) -> int:
    return int(item[0])


def _tally(opcode: str) -> tuple[str, str] | None:
    """Return tally and entry of an instruction that is no access of a known width and no branch."""
    kind = opcode.partition(".")[0]
    if kind in BULK:
        return "bulk", BULK[kind]
    if kind in TENSOR:
        return "tensor", opcode
    if kind in TENSOR_MEMORY:
        return "tensor_memory", kind
    if kind in BARRIERS:
        # With the first modifier: BAR.SYNC waits, BAR.ARV only arrives.
        return "barriers", ".".join(opcode.split(".")[:2])
    if kind == "MUFU":
        return "fast_math", opcode
    if kind in ATOMICS:
        return "atomics", kind
    if kind in SHUFFLES:
        return "shuffles", kind
    return None
