"""What holds a kernel back: rules from counters to one sentence, tried in order.

The order and the thresholds are those that NVIDIA's own rules have, in the ``sections`` folder that
comes with Nsight Compute (80 % of peak is a limit, under 60 % everywhere is latency, 10 % for
conflicts and local memory), where a rule of ours is about the same thing. Each rule says where it
is from. The first that holds names the bottleneck; the last one always holds, so exactly one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.workbench.ncu.counters import SECTOR, STALLS
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.report.scales import time, unit

HIGH, LOW = 80.0, 60.0  # % of peak: SpeedOfLight.py
CONFLICTS = 0.10  # of shared memory's wavefronts: SharedMemoryConflicts.py
LOCAL = 0.10  # of what the L1 moves: LocalMemoryUsage.py
USED = SECTOR / 2  # bytes of a sector, under which most of what is moved is moved for nothing
SPREAD = 20.0  # sectors a request: 16 is a warp of 16-byte accesses side by side, 17 off an edge
TAIL = 0.20  # of the machine idle in the last wave: LaunchStatistics.py
TENSOR = 70.0  # % of the tensor pipe's cycles; products that are called fast reach 70 to 90


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the rules look at: a kernel, and the call's DRAM bytes over the predicted ones."""

    kernel: Kernel
    ratio: float | None = None

    def at(self, key: str, default: float = 0.0) -> float:
        value = self.kernel.get(key)
        return default if value is None else value

    @property
    def slack(self) -> bool:
        """Every unit that was read is under ``LOW`` % of its peak."""
        busiest = self.kernel.busiest
        return busiest is not None and busiest[1] < LOW

    @property
    def top(self) -> tuple[str, float]:
        return self.kernel.stalls[0] if self.kernel.stalls else ("", 0.0)

    @property
    def waiting(self) -> str:
        """The stalls in words: ', and a warp waits for ... 61 % of the time'; may be empty."""
        reason, share = self.top
        if not reason:
            return ""
        return f"; its warps wait {100 * share:.0f} % of their time for {STALLS[reason]} ({reason})"

    @property
    def idle(self) -> float:
        """The share of the machine that the last wave of blocks leaves idle, over all waves."""
        waves = self.at("waves")
        return (math.ceil(waves) - waves) / math.ceil(waves) if waves > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``name`` is one word for the bottleneck, ``source`` where the rule is from; ``says`` is the
    sentence's second half, after the kernel's name, and holds the evidence."""

    name: str
    source: str
    holds: Callable[[Seen], bool]
    says: Callable[[Seen], str]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The rule that holds, by name, and its sentence."""

    name: str
    sentence: str


def _no_counters(s: Seen) -> bool:
    return s.kernel.busiest is None


def _small(s: Seen) -> bool:
    return 0 < s.at("waves", 1.0) < 1 and s.slack


def _scattered(s: Seen, op: str) -> bool:
    """Whether the loads or stores leave most of their sectors unused, and are a tenth of all: the
    one result that a block of a sum stores is no matter."""
    sectors = s.at("ld_sectors") + s.at("st_sectors")
    many = s.at(f"{op}_sectors") >= 0.1 * sectors > 0
    wasted = s.at(f"{op}_used", SECTOR) < USED or (s.kernel.sectors(op) or 0.0) > SPREAD
    return many and wasted


def _wasteful(s: Seen) -> bool:
    """Sectors are mostly unused, and that costs: the DRAM is not the limit, or moves too much."""
    costs = s.at("dram_peak") < HIGH or (s.ratio or 0.0) > 1.25
    return costs and (_scattered(s, "ld") or _scattered(s, "st"))


def _spills(s: Seen) -> bool:
    touched = SECTOR * (s.at("ld_sectors") + s.at("st_sectors"))
    spilled = s.kernel.spilled or 0.0
    return spilled > LOCAL * (touched + spilled) and s.at("dram_peak") < HIGH


def _conflicted(s: Seen) -> bool:
    share = s.kernel.conflicts() or 0.0
    waits = s.top[0] in ("short_scoreboard", "mio_throttle")
    return share >= CONFLICTS and waits and s.at("dram_peak") < HIGH


def _tailed(s: Seen) -> bool:
    return s.at("waves") >= 1 and s.idle >= TAIL and (s.slack or s.at("dram_peak") < HIGH)


def _say_wasteful(s: Seen) -> str:
    parts = []
    for op, word in (("ld", "loads"), ("st", "stores")):
        if _scattered(s, op):
            used, sectors = s.kernel.get(f"{op}_used"), s.kernel.sectors(op)
            of = f"{used:.1f} of {SECTOR} bytes a sector used" if used is not None else ""
            each = f"{sectors:.1f} sectors a request" if sectors is not None else ""
            parts.append(f"its global {word} are scattered ({', '.join(filter(None, (each, of)))})")
    return f"uncoalesced: {' and '.join(parts)}, with the DRAM at {s.at('dram_peak'):.0f} % of peak"


def _say_latency(s: Seen) -> str:
    k = s.kernel
    unit_, peak = k.busiest or ("no unit", 0.0)
    occupied = ""
    if k.get("occupancy") is not None and k.get("theoretical") is not None:
        by = f", limited by {k.limiter}" if k.limiter and s.at("theoretical") < 100 else ""
        occupied = f"; occupancy {s.at('occupancy'):.0f} % of {s.at('theoretical'):.0f} %{by}"
    return (
        f"latency-bound: no unit is busy ({unit_} the most, {peak:.0f} % of peak)"
        f"{s.waiting}{occupied}"
    )


def _say_tail(s: Seen) -> str:
    return (
        f"tail-bound: {s.at('waves'):.2f} waves of blocks, so that {100 * s.idle:.0f} % of the "
        "machine's time is spent idle in the last one"
    )


def _say_conflicts(s: Seen) -> str:
    share = s.kernel.conflicts() or 0.0
    added = unit(s.at("conflicts_ld") + s.at("conflicts_st"), "")
    return (
        f"held back by bank conflicts: {100 * share:.0f} % of shared memory's wavefronts "
        f"({added.strip()}) are repeats{s.waiting}"
    )


def _say_balanced(s: Seen) -> str:
    unit_, peak = s.kernel.busiest or ("no unit", 0.0)
    return (
        f"between limits: {unit_} {'are' if unit_.endswith('s') else 'is'} the busiest, at "
        f"{peak:.0f} % of peak, under the {HIGH:.0f} % of a limit{s.waiting}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="unknown",
        source="none of the throughputs could be read",
        holds=_no_counters,
        says=lambda s: f"of unknown limit: no throughput was counted, its {time(s.kernel.us)} only",
    ),
    Rule(
        name="launch",
        source="SpeedOfLight.py, 'Small Grid': both throughputs under 60 %, under one wave",
        holds=_small,
        says=lambda s: (
            f"launch-bound: its blocks fill {s.at('waves'):.2f} of one wave, too few to keep the "
            f"machine busy, in {time(s.kernel.us)}"
        ),
    ),
    Rule(
        name="uncoalesced",
        source="UncoalescedGlobalAccess.py, which has no threshold; half a sector is ours",
        holds=_wasteful,
        says=_say_wasteful,
    ),
    Rule(
        name="memory",
        source="SpeedOfLight.py, 'High Memory Throughput': 80 %",
        holds=lambda s: s.at("dram_peak") >= HIGH,
        says=lambda s: (
            f"memory-bound: the DRAM is at {s.at('dram_peak'):.0f} % of its peak, moving "
            f"{unit((s.at('dram_read') + s.at('dram_write')) * 1e6 / s.kernel.us, 'B/s')}"
            if s.kernel.us
            else f"memory-bound: the DRAM is at {s.at('dram_peak'):.0f} % of its peak"
        ),
    ),
    Rule(
        name="tensor",
        source="HighPipeUtilization.py: over 60 % is high; 70 % of elapsed cycles is ours",
        holds=lambda s: s.at("tensor_peak") >= TENSOR,
        says=lambda s: (
            f"tensor-bound: the tensor pipe is busy in {s.at('tensor_peak'):.0f} % of all cycles"
        ),
    ),
    Rule(
        name="spills",
        source="LocalMemoryUsage.py: 10 %",
        holds=_spills,
        says=lambda s: (
            f"held back by spills: {unit(s.kernel.spilled, 'B')} of local memory go through the "
            f"L1, with {s.at('registers'):.0f} registers a thread{s.waiting}"
        ),
    ),
    Rule(
        name="bank-conflicts",
        source="SharedMemoryConflicts.py: 10 % of the wavefronts; the stall is ours",
        holds=_conflicted,
        says=_say_conflicts,
    ),
    Rule(
        name="l2",
        source="SpeedOfLight.py, 'High Memory Throughput', where the breakdown names the L2",
        holds=lambda s: s.at("l2_peak") >= HIGH and s.at("l2_peak") >= s.at("sm_peak"),
        says=lambda s: (
            f"L2-bound: the L2 is at {s.at('l2_peak'):.0f} % of its peak, the DRAM at "
            f"{s.at('dram_peak'):.0f} %"
        ),
    ),
    Rule(
        name="compute",
        source="SpeedOfLight.py, 'High Compute Throughput': 80 %",
        holds=lambda s: s.at("sm_peak") >= HIGH,
        says=lambda s: (
            f"compute-bound: the SMs' busiest pipe is at {s.at('sm_peak'):.0f} % of its peak, the "
            f"DRAM at {s.at('dram_peak'):.0f} %"
        ),
    ),
    Rule(
        name="tail",
        source="LaunchStatistics.py, 'Tail Effect': 20 %",
        holds=_tailed,
        says=_say_tail,
    ),
    Rule(
        name="latency",
        source="SpeedOfLight.py, 'Latency Issue': both throughputs under 60 %",
        holds=lambda s: s.slack,
        says=_say_latency,
    ),
    Rule(
        name="balanced",
        source="SpeedOfLight.py, 'Balanced Throughput': between 60 and 80 %",
        holds=lambda s: True,
        says=_say_balanced,
    ),
)


def name(seen: Seen) -> Bottleneck:
    """The bottleneck of a kernel: the first of :data:`RULES` that holds, and its sentence."""
    rule = next(r for r in RULES if r.holds(seen))
    return Bottleneck(name=rule.name, sentence=f"{seen.kernel.short} is {rule.says(seen)}.")
