"""Requested counters: their names, the architectures that have them, and their units.

The names are Nsight Compute's (Profiling Guide, "Metrics Reference", and ``ncu --query-metrics --chip``),
and exist on sm_80, sm_90 and sm_100 alike. A counter that a newer tool has renamed has both names here; the
second is requested if the tool does not know the first. Sections are not used, since their content changes
between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SECTOR = 32  # bytes of a cache sector, the unit of a transfer


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counter of a kernel: our ``key`` and the tool's ``names``, the most common first.

    ``archs`` are the architectures that have it; empty means all. ``scale`` converts the tool's base unit
    to ours.
    """

    key: str
    names: tuple[str, ...]
    archs: tuple[str, ...] = ()
    scale: float = 1.0


def _counter(key: str, *names: str, archs: tuple[str, ...] = (), scale: float = 1.0) -> Counter:
    return Counter(key=key, names=names, archs=archs, scale=scale)


_OF_PEAK = "avg.pct_of_peak_sustained_elapsed"
_L1 = "l1tex__t_{}_pipe_lsu_mem_{}_op_{}.sum"
_L2 = "lts__t_sectors_{}op_{}.sum"
_BYTES_USED = "smsp__sass_average_data_bytes_per_sector_mem_global_op_{}.ratio"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

# Stall reason -> what the warp waits for ('selected' is no stall: the warp issues). The reasons and their
# meanings are those of the Profiling Guide, "Warp Stall Reasons".
STALLS: Mapping[str, str] = {
    "long_scoreboard": "data from global or local memory",
    "short_scoreboard": "data from shared memory or a special function",
    "lg_throttle": "space in the queue of global and local accesses",
    "mio_throttle": "space in the queue of shared memory and special functions",
    "tex_throttle": "space in the queue of texture accesses",
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
# Reasons that not every generation has. Requesting a missing one ends the tool's run.
_ONLY = {"imc_miss": ("sm_80", "sm_86", "sm_89", "sm_90"), "gmma": ("sm_90",)}

COUNTERS: tuple[Counter, ...] = (
    _counter("duration", "gpu__time_duration.sum", scale=1e-3),  # ns, here us
    _counter("dram_read", "dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    _counter("dram_write", "dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    _counter("dram_peak", f"dram__throughput.{_OF_PEAK}", f"gpu__dram_throughput.{_OF_PEAK}"),
    _counter("l2_peak", f"lts__throughput.{_OF_PEAK}"),
    _counter("l2_hits", "lts__t_sector_hit_rate.pct"),
    # Only what the SMs request; the second names count other units' requests too.
    _counter("l2_read", _L2.format("srcunit_tex_", "read"), _L2.format("", "read"), scale=SECTOR),
    _counter("l2_write", _L2.format("srcunit_tex_", "write"), _L2.format("", "write"), scale=SECTOR),
    _counter("sm_peak", f"sm__throughput.{_OF_PEAK}"),
    _counter(
        "tensor_peak",
        f"sm__pipe_tensor_cycles_active.{_OF_PEAK}",
        f"sm__inst_executed_pipe_tensor.{_OF_PEAK}",
    ),
    *(_counter(f"{op}_sectors", _L1.format("sectors", "global", op)) for op in ("ld", "st")),
    *(_counter(f"{op}_requests", _L1.format("requests", "global", op)) for op in ("ld", "st")),
    *(_counter(f"{op}_used", _BYTES_USED.format(op)) for op in ("ld", "st")),
    *(_counter(f"local_{op}", _L1.format("sectors", "local", op), scale=SECTOR) for op in ("ld", "st")),
    *(_counter(f"shared_{op}", _WAVEFRONTS.format(op)) for op in ("ld", "st")),
    *(_counter(f"conflicts_{op}", _CONFLICTS.format(op)) for op in ("ld", "st")),
    _counter("occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    _counter("theoretical", "sm__maximum_warps_per_active_cycle_pct"),
    *(
        _counter(f"limit_{resource}", f"launch__occupancy_limit_{resource}")
        for resource in ("blocks", "registers", "shared_mem", "warps")
    ),
    _counter("waves", "launch__waves_per_multiprocessor"),
    _counter("registers", "launch__registers_per_thread"),
    _counter("shared_static", "launch__shared_mem_per_block_static"),
    _counter("shared_dynamic", "launch__shared_mem_per_block_dynamic"),
    _counter(f"stall_{ISSUED}", _STALL.format(ISSUED)),
    *(_counter(f"stall_{r}", _STALL.format(r), archs=_ONLY.get(r, ())) for r in STALLS),
)
NEEDED = ("duration", "dram_read", "dram_write")  # without these there is no report


def metric_names(arch: str, unknown: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names to request on a device of this ``arch``, without those in ``unknown``."""
    unknown_names = frozenset(unknown)
    available = (c for c in COUNTERS if not c.archs or arch in c.archs)
    names = (next((n for n in c.names if n not in unknown_names), None) for c in available)
    return tuple(name for name in names if name is not None)


def by_key(values: Mapping[str, float]) -> dict[str, float]:
    """Convert the tool's values in base units to our keys and units; missing values stay missing."""
    return {
        counter.key: values[name] * counter.scale
        for counter in COUNTERS
        for name in counter.names
        if name in values
    }


def missing_counters(kernels: Iterable[Mapping[str, float]], arch: str) -> tuple[str, ...]:
    """Return the keys that ``arch`` has and for which no kernel has a value."""
    counted = {key for values in kernels for key in values}
    available = (c for c in COUNTERS if not c.archs or arch in c.archs)
    return tuple(c.key for c in available if c.key not in counted)
