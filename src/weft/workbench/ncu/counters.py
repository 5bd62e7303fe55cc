"""The counters that are asked for: what each is called, on which machines, and in what unit.

Names are Nsight Compute's own (its Profiling Guide, "Metrics Reference", and what
``ncu --query-metrics --chip`` lists), and only those that sm_80, sm_90 and sm_100 have alike; where
a newer tool has renamed one, both names stand here and the second is tried when the first is
unknown. Sections are left alone: what is in them changes from one version to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SECTOR = 32  # bytes that the caches move at once


@dataclass(frozen=True, kw_only=True)
class Counter:
    """One figure of a kernel, by our ``key`` and the tool's ``names``, the best known first.

    ``archs``: only there; empty is everywhere. ``times`` turns the tool's base unit into ours.
    """

    key: str
    names: tuple[str, ...]
    archs: tuple[str, ...] = ()
    times: float = 1.0


def _one(key: str, *names: str, archs: tuple[str, ...] = (), times: float = 1.0) -> Counter:
    return Counter(key=key, names=names, archs=archs, times=times)


_OF_PEAK = "avg.pct_of_peak_sustained_elapsed"
_L1 = "l1tex__t_{}_pipe_lsu_mem_{}_op_{}.sum"
_L2 = "lts__t_sectors_{}op_{}.sum"
_BYTES_USED = "smsp__sass_average_data_bytes_per_sector_mem_global_op_{}.ratio"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

# What a warp waits for between two of its instructions, in a reader's words ('selected' is no
# stall: it issues). The reasons and their meanings: Profiling Guide, "Warp Stall Reasons".
STALLS: Mapping[str, str] = {
    "long_scoreboard": "data from global or local memory",
    "short_scoreboard": "data from shared memory or a special function",
    "lg_throttle": "room in the queue of global and local accesses",
    "mio_throttle": "room in the queue of shared memory and special functions",
    "tex_throttle": "room in the queue of texture accesses",
    "math_pipe_throttle": "an arithmetic pipe that is busy",
    "wait": "the fixed latency of the instruction before",
    "barrier": "other warps at a barrier",
    "membar": "a memory fence",
    "branch_resolving": "a branch's target",
    "sleeping": "the end of its sleep",
    "no_instruction": "instructions (an instruction cache's miss, or the end of a jump)",
    "dispatch_stall": "the dispatcher",
    "drain": "its last stores, before it ends",
    "misc": "something else",
    "not_selected": "its turn: another warp was issued",
    "imc_miss": "a constant that was in no cache",
    "gmma": "operands of a warp-group's matrix product",
}
ISSUED = "selected"
# Reasons that not every generation has; asking for one that is not there ends the tool's run.
_ONLY = {"imc_miss": ("sm_80", "sm_86", "sm_89", "sm_90"), "gmma": ("sm_90",)}

COUNTERS: tuple[Counter, ...] = (
    _one("duration", "gpu__time_duration.sum", times=1e-3),  # ns, here us
    _one("dram_read", "dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    _one("dram_write", "dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    _one("dram_peak", f"dram__throughput.{_OF_PEAK}", f"gpu__dram_throughput.{_OF_PEAK}"),
    _one("l2_peak", f"lts__throughput.{_OF_PEAK}"),
    _one("l2_hits", "lts__t_sector_hit_rate.pct"),
    _one("l2_read", _L2.format("srcunit_tex_", "read"), _L2.format("", "read"), times=SECTOR),
    _one("l2_write", _L2.format("srcunit_tex_", "write"), _L2.format("", "write"), times=SECTOR),
    _one("sm_peak", f"sm__throughput.{_OF_PEAK}"),
    _one(
        "tensor_peak",
        f"sm__pipe_tensor_cycles_active.{_OF_PEAK}",
        f"sm__inst_executed_pipe_tensor.{_OF_PEAK}",
    ),
    *(_one(f"{op}_sectors", _L1.format("sectors", "global", op)) for op in ("ld", "st")),
    *(_one(f"{op}_requests", _L1.format("requests", "global", op)) for op in ("ld", "st")),
    *(_one(f"{op}_used", _BYTES_USED.format(op)) for op in ("ld", "st")),
    *(_one(f"local_{op}", _L1.format("sectors", "local", op), times=SECTOR) for op in ("ld", "st")),
    *(_one(f"shared_{op}", _WAVEFRONTS.format(op)) for op in ("ld", "st")),
    *(_one(f"conflicts_{op}", _CONFLICTS.format(op)) for op in ("ld", "st")),
    _one("occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    _one("theoretical", "sm__maximum_warps_per_active_cycle_pct"),
    *(
        _one(f"limit_{what}", f"launch__occupancy_limit_{what}")
        for what in ("blocks", "registers", "shared_mem", "warps")
    ),
    _one("waves", "launch__waves_per_multiprocessor"),
    _one("registers", "launch__registers_per_thread"),
    _one("shared_static", "launch__shared_mem_per_block_static"),
    _one("shared_dynamic", "launch__shared_mem_per_block_dynamic"),
    _one(f"stall_{ISSUED}", _STALL.format(ISSUED)),
    *(_one(f"stall_{r}", _STALL.format(r), archs=_ONLY.get(r, ())) for r in STALLS),
)
NEEDED = ("duration", "dram_read", "dram_write")  # without these there is no report


def asked(arch: str, unknown: Iterable[str] = ()) -> tuple[str, ...]:
    """The names to ask for on a device of this ``arch``, none of which is in ``unknown``."""
    missing = frozenset(unknown)
    here = (c for c in COUNTERS if not c.archs or arch in c.archs)
    found = (next((n for n in c.names if n not in missing), None) for c in here)
    return tuple(name for name in found if name is not None)


def keyed(values: Mapping[str, float]) -> dict[str, float]:
    """The tool's values in base units, by our keys and in our units; what is not there is not."""
    return {
        counter.key: values[name] * counter.times
        for counter in COUNTERS
        for name in counter.names
        if name in values
    }


def absent(kernels: Iterable[Mapping[str, float]], arch: str) -> tuple[str, ...]:
    """The keys that should be there on ``arch`` and that no kernel has a value for."""
    seen = {key for values in kernels for key in values}
    here = (c for c in COUNTERS if not c.archs or arch in c.archs)
    return tuple(c.key for c in here if c.key not in seen)
