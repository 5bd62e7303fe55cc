"""Bottleneck of a kernel: rules from counters to one sentence, tried in order.

Where NVIDIA has a rule for the same thing, order and thresholds are those of its rules in the ``sections``
folder of Nsight Compute: 80 % of peak is a limit, under 60 % everywhere is latency, 10 % for conflicts and
local memory. Each rule names its source. The first rule that applies names the bottleneck; the last one
always applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.workbench.explain.ncu.counters import SECTOR, STALLS
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.report.scales import time, unit

HIGH, LOW = 80.0, 60.0  # % of peak: SpeedOfLight.py
CONFLICTS = 0.10  # of shared memory's wavefronts: SharedMemoryConflicts.py
LOCAL = 0.10  # of what the L1 moves: LocalMemoryUsage.py
USED = SECTOR / 2  # used bytes of a sector: below, most of the traffic is wasted
SPREAD = 20.0  # sectors a request: adjacent 16-byte accesses of a warp need 16, unaligned ones 17
TAIL = 0.20  # of the GPU's time idle in the last wave: LaunchStatistics.py
TENSOR = 70.0  # % of the tensor pipe's cycles; fast matrix products reach 70 to 90


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Input of the rules: a kernel, and the ratio of the call's DRAM bytes to the predicted ones."""

    kernel: Kernel
    ratio: float | None = None

    def at(self, key: str, default: float = 0.0) -> float:
        value = self.kernel.get(key)
        return default if value is None else value

    @property
    def all_units_low(self) -> bool:
        """True if every counted unit is under ``LOW`` % of its peak."""
        busiest = self.kernel.busiest
        return busiest is not None and busiest[1] < LOW

    @property
    def top_stall(self) -> tuple[str, float]:
        return self.kernel.stalls[0] if self.kernel.stalls else ("", 0.0)

    @property
    def waiting(self) -> str:
        """Top stall as the end of a sentence; empty if no stalls were counted."""
        reason, share = self.top_stall
        if not reason:
            return ""
        return f"; its warps wait {100 * share:.0f} % of their time for {STALLS[reason]} ({reason})"

    @property
    def idle(self) -> float:
        """Share of the GPU's time that is idle in the last wave of blocks."""
        waves = self.at("waves")
        return (math.ceil(waves) - waves) / math.ceil(waves) if waves > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule with the ``name`` of its bottleneck and its ``source``.

    ``describe`` returns the part of the sentence after the kernel's name, with the evidence.
    """

    name: str
    source: str
    applies: Callable[[Evidence], bool]
    describe: Callable[[Evidence], str]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """Name and sentence of the rule that applies."""

    name: str
    sentence: str


def _no_counters(s: Evidence) -> bool:
    return s.kernel.busiest is None


def _small(s: Evidence) -> bool:
    # Default 1: a kernel whose waves were not counted is not called small.
    return 0 < s.at("waves", 1.0) < 1 and s.all_units_low


def _scattered(s: Evidence, op: str) -> bool:
    """Return True if the loads or stores leave most of their sectors unused, and are a tenth of all sectors.

    The one result that each block of a sum stores does not count.
    """
    sectors = s.at("ld_sectors") + s.at("st_sectors")
    is_many = s.at(f"{op}_sectors") >= 0.1 * sectors > 0
    is_wasted = s.at(f"{op}_used", SECTOR) < USED or (s.kernel.sectors(op) or 0.0) > SPREAD
    return is_many and is_wasted


def _wasteful(s: Evidence) -> bool:
    """Return True if sectors are mostly unused and this costs time.

    It costs nothing if the DRAM is the limit and moves only the predicted bytes.
    """
    costs_time = s.at("dram_peak") < HIGH or (s.ratio or 0.0) > 1.25
    return costs_time and (_scattered(s, "ld") or _scattered(s, "st"))


def _spills(s: Evidence) -> bool:
    touched = SECTOR * (s.at("ld_sectors") + s.at("st_sectors"))
    # Global sectors and local bytes share the L1, so they are compared in bytes.
    spilled = s.kernel.spilled or 0.0
    return spilled > LOCAL * (touched + spilled) and s.at("dram_peak") < HIGH


def _conflicted(s: Evidence) -> bool:
    share = s.kernel.conflicts() or 0.0
    # Conflicts cost time only if warps wait for shared memory: our addition to NVIDIA's rule.
    waits = s.top_stall[0] in ("short_scoreboard", "mio_throttle")
    return share >= CONFLICTS and waits and s.at("dram_peak") < HIGH


def _tailed(s: Evidence) -> bool:
    # Under one wave no block waits for an earlier one: that is the rule `launch`.
    return s.at("waves") >= 1 and s.idle >= TAIL and (s.all_units_low or s.at("dram_peak") < HIGH)


def _describe_wasteful(s: Evidence) -> str:
    parts = []
    for op, word in (("ld", "loads"), ("st", "stores")):
        if _scattered(s, op):
            used, sectors = s.kernel.get(f"{op}_used"), s.kernel.sectors(op)
            bytes_used = f"{used:.1f} of {SECTOR} bytes a sector used" if used is not None else ""
            each = f"{sectors:.1f} sectors a request" if sectors is not None else ""
            parts.append(f"its global {word} are scattered ({', '.join(filter(None, (each, bytes_used)))})")
    return f"uncoalesced: {' and '.join(parts)}, with the DRAM at {s.at('dram_peak'):.0f} % of peak"


def _describe_latency(s: Evidence) -> str:
    k = s.kernel
    unit_, peak = k.busiest or ("no unit", 0.0)
    occupied = ""
    if k.get("occupancy") is not None and k.get("theoretical") is not None:
        by = f", limited by {k.limiter}" if k.limiter and s.at("theoretical") < 100 else ""
        occupied = f"; occupancy {s.at('occupancy'):.0f} % of {s.at('theoretical'):.0f} %{by}"
    return f"latency-bound: no unit is busy ({unit_} the most, {peak:.0f} % of peak){s.waiting}{occupied}"


def _describe_tail(s: Evidence) -> str:
    return (
        f"tail-bound: {s.at('waves'):.2f} waves of blocks, so that {100 * s.idle:.0f} % of the "
        "GPU's time is idle in the last one"
    )


def _describe_conflicts(s: Evidence) -> str:
    share = s.kernel.conflicts() or 0.0
    added = unit(s.at("conflicts_ld") + s.at("conflicts_st"), "")
    return (
        f"held back by bank conflicts: {100 * share:.0f} % of shared memory's wavefronts "
        f"({added.strip()}) are repeats{s.waiting}"
    )


def _describe_balanced(s: Evidence) -> str:
    unit_, peak = s.kernel.busiest or ("no unit", 0.0)
    return (
        f"between limits: {unit_} {'are' if unit_.endswith('s') else 'is'} the busiest, at "
        f"{peak:.0f} % of peak, under the {HIGH:.0f} % of a limit{s.waiting}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="unknown",
        source="none of the throughputs could be read",
        applies=_no_counters,
        describe=lambda s: f"of unknown limit: no throughput was counted, its {time(s.kernel.us)} only",
    ),
    Rule(
        name="launch",
        source="SpeedOfLight.py, 'Small Grid': both throughputs under 60 %, under one wave",
        applies=_small,
        describe=lambda s: (
            f"launch-bound: its blocks fill {s.at('waves'):.2f} of one wave, too few to keep the "
            f"GPU busy, in {time(s.kernel.us)}"
        ),
    ),
    Rule(
        # Before `memory`: a DRAM that is busy with unused sectors needs other accesses, not fewer bytes.
        name="uncoalesced",
        source="UncoalescedGlobalAccess.py, which has no threshold; half a sector is ours",
        applies=_wasteful,
        describe=_describe_wasteful,
    ),
    Rule(
        name="memory",
        source="SpeedOfLight.py, 'High Memory Throughput': 80 %",
        applies=lambda s: s.at("dram_peak") >= HIGH,
        describe=lambda s: (
            f"memory-bound: the DRAM is at {s.at('dram_peak'):.0f} % of its peak, moving "
            f"{unit((s.at('dram_read') + s.at('dram_write')) * 1e6 / s.kernel.us, 'B/s')}"
            if s.kernel.us
            else f"memory-bound: the DRAM is at {s.at('dram_peak'):.0f} % of its peak"
        ),
    ),
    Rule(
        # Before `compute`: the SMs' busiest pipe can be the tensor pipe, which has a lower threshold here.
        name="tensor",
        source="HighPipeUtilization.py: over 60 % is high; 70 % of elapsed cycles is ours",
        applies=lambda s: s.at("tensor_peak") >= TENSOR,
        describe=lambda s: (
            f"tensor-bound: the tensor pipe is busy in {s.at('tensor_peak'):.0f} % of all cycles"
        ),
    ),
    Rule(
        name="spills",
        source="LocalMemoryUsage.py: 10 %",
        applies=_spills,
        describe=lambda s: (
            f"held back by spills: {unit(s.kernel.spilled, 'B')} of local memory go through the "
            f"L1, with {s.at('registers'):.0f} registers a thread{s.waiting}"
        ),
    ),
    Rule(
        name="bank-conflicts",
        source="SharedMemoryConflicts.py: 10 % of the wavefronts; the stall is ours",
        applies=_conflicted,
        describe=_describe_conflicts,
    ),
    Rule(
        name="l2",
        source="SpeedOfLight.py, 'High Memory Throughput', where the breakdown names the L2",
        applies=lambda s: s.at("l2_peak") >= HIGH and s.at("l2_peak") >= s.at("sm_peak"),
        describe=lambda s: (
            f"L2-bound: the L2 is at {s.at('l2_peak'):.0f} % of its peak, the DRAM at "
            f"{s.at('dram_peak'):.0f} %"
        ),
    ),
    Rule(
        name="compute",
        source="SpeedOfLight.py, 'High Compute Throughput': 80 %",
        applies=lambda s: s.at("sm_peak") >= HIGH,
        describe=lambda s: (
            f"compute-bound: the SMs' busiest pipe is at {s.at('sm_peak'):.0f} % of its peak, the "
            f"DRAM at {s.at('dram_peak'):.0f} %"
        ),
    ),
    Rule(
        name="tail",
        source="LaunchStatistics.py, 'Tail Effect': 20 %",
        applies=_tailed,
        describe=_describe_tail,
    ),
    Rule(
        name="latency",
        source="SpeedOfLight.py, 'Latency Issue': both throughputs under 60 %",
        applies=lambda s: s.all_units_low,
        describe=_describe_latency,
    ),
    Rule(
        name="balanced",
        source="SpeedOfLight.py, 'Balanced Throughput': between 60 and 80 %",
        applies=lambda s: True,
        describe=_describe_balanced,
    ),
)


def find_bottleneck(evidence: Evidence) -> Bottleneck:
    """Return the bottleneck of a kernel: the first of :data:`RULES` that applies."""
    rule = next(r for r in RULES if r.applies(evidence))
    return Bottleneck(name=rule.name, sentence=f"{evidence.kernel.short} is {rule.describe(evidence)}.")
