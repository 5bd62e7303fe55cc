"""What a kernel's instructions do, counted: loads by width, tensor cores, copies, barriers.

A count is of instructions in the code, not of executions: a load in a loop counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from weft.workbench.inspect.sass import Instruction

# kind -> where it is counted. The names are NVIDIA's ("CUDA Binary Utilities", instruction sets).
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
    *("HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA"),  # a warp's (mma.sync)
    *("HGMMA", "IGMMA", "QGMMA", "BGMMA"),  # a warp group's, from shared memory (wgmma, sm_90)
    *("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA", "UTCMXQMMA"),  # into tensor memory (sm_100)
)
TENSOR_MEMORY = ("LDTM", "STTM", "UTCCP", "UTCATOMSWS")
BARRIERS = ("BAR", "BARRIER", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT", "WARPSYNC", "UTCBAR")
BRANCHES = ("BRA", "BRX", "BRXU", "JMP", "JMX", "CALL", "RET")
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDAS")
SHUFFLES = ("SHFL", "REDUX", "CREDUX", "VOTE", "VOTEU", "MATCH")
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
TILE = 128  # bits that a matrix load of four 8 x 8 tiles gives each thread
Tally = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of instructions, by what they do.

    ``memory`` goes by kind and width in bits: ``{"global loads": {"128": 2}}``. ``spill_stores``
    and ``spill_loads`` are bytes a thread that code moves to and from local memory, each
    instruction counted once, as ptxas counts them.
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

    def widest(self, what: str) -> int:
        """The widest access of a kind in bits; 0 where there is none."""
        return max(map(int, self.memory.get(what, {})), default=0)


@cache
def width(opcode: str) -> int:
    """How many bits a thread's access moves: the modifier that tells, else 32.

    >>> width("LDG.E.128.CONSTANT"), width("LDSM.16.M88.4"), width("STS")
    (128, 128, 32)
    """
    kind, *modifiers = opcode.split(".")
    if kind in ("LDSM", "STSM"):
        tiles = next((m for m in modifiers if m in ("2", "4")), "1")
        return TILE * int(tiles) // 4
    return next((WIDTHS[m] for m in reversed(modifiers) if m in WIDTHS), 32)


def count(code: Iterable[Instruction]) -> Counts:
    """Everything that a summary tells of a kernel's instructions."""
    memory: dict[str, Counter[str]] = {}
    tallies: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for opcode, n in Counter(one.opcode for one in code).items():
        kind = opcode.partition(".")[0]
        total["instructions"] += n
        if kind in MEMORY:
            memory.setdefault(MEMORY[kind], Counter())[str(width(opcode))] += n
        elif kind in BRANCHES:
            total["calls" if kind in ("CALL", "RET") else "branches"] += n
        elif (where := _tally(opcode)) is not None:
            tallies.setdefault(where[0], Counter())[where[1]] += n
        if kind in ("STL", "LDL"):
            total[kind] += n * width(opcode) // 8
    return Counts(
        instructions=total["instructions"],
        branches=total["branches"],
        calls=total["calls"],
        memory={name: dict(sorted(by.items(), key=_by_width)) for name, by in memory.items()},
        local_stores=total["STL"],
        local_loads=total["LDL"],
        **{name: dict(sorted(by.items())) for name, by in tallies.items()},
    )


def _by_width(item: tuple[str, int]) -> int:
    return int(item[0])


def _tally(opcode: str) -> tuple[str, str] | None:
    """Which tally counts an instruction that neither moves data of a width nor branches."""
    kind = opcode.partition(".")[0]
    if kind in BULK:
        return "bulk", BULK[kind]
    if kind in TENSOR:
        return "tensor", opcode
    if kind in TENSOR_MEMORY:
        return "tensor_memory", kind
    if kind in BARRIERS:
        return "barriers", ".".join(opcode.split(".")[:2])
    if kind == "MUFU":
        return "fast_math", opcode
    if kind in ATOMICS:
        return "atomics", kind
    if kind in SHUFFLES:
        return "shuffles", kind
    return None
