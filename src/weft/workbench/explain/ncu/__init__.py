"""Hardware counters of one call of an implementation by Nsight Compute, and what they mean.

The tool runs a process of its own (:mod:`target`), in which only the kernels of the call are counted, with
empty caches. The counters become a table, a comparison of the DRAM's bytes with the operator's predicted
ones, and one sentence that names the bottleneck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import Log, WeftError, registry
from weft.core.operator import DIRECTIONS
from weft.workbench.explain.ncu import find, process
from weft.workbench.explain.ncu.counters import missing_counters
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.explain.ncu.report import Report

__all__ = ["Report", "profile"]


@dataclass(frozen=True, kw_only=True)
class CountedDevice:
    """GPU that is counted on: its ``sm_XX``, its L2 in bytes, and the machine's fingerprint."""

    arch: str
    l2_bytes: int
    machine: dict[str, Any]


def profile(
    *,
    operator: str,
    implementation: str,
    case: str,
    direction: str,
    files: Sequence[str],
    log: Log,
) -> Report:
    """Count one call with Nsight Compute.

    ``files`` are external ``.py`` or ``.cu`` files that may define the implementation and its operator;
    only the counted process reads them. Raises :class:`WeftError` for an unknown name, if ncu is not
    installed or may not count, and if the call fails.
    """
    job = call_job(operator, implementation, case, direction, files)
    program = find.require()
    version = find.version(program)
    device = counted_device()
    run = process.count(program, job, device.arch, log)
    kernels = tuple(map(Kernel.from_row, run.output.rows))
    return Report(
        operator=operator,
        implementation=implementation,
        backend=run.backend,
        case=case,
        direction=direction,
        kernels=kernels,
        cost=run.cost,
        l2_bytes=device.l2_bytes,
        absent=missing_counters((k.counters for k in kernels), device.arch),
        tool=version,
        machine=device.machine,
    )


def call_job(
    operator: str, implementation: str, case: str, direction: str, files: Sequence[str]
) -> dict[str, Any]:
    """Return the job of a target that calls an implementation; raises :class:`WeftError` for a wrong name."""
    _check_names(operator, implementation, case, direction, files)
    return {
        "operator": operator,
        "implementation": implementation,
        "case": case,
        "direction": direction,
        "sources": [_source(file) for file in files],
        "seed": 20260101,  # a fixed seed: profiles are compared between runs, and check nothing
    }


def _source(file: str) -> dict[str, Any]:
    from weft.workbench.sources.source import Source

    return Source(kind="file", path=str(Path(file).resolve())).to_json()


def counted_device() -> CountedDevice:
    """Return CUDA's device 0 with the fingerprint of this machine."""
    device = machine.query("cuda")
    return CountedDevice(
        arch=device.arch, l2_bytes=machine.l2_bytes("cuda"), machine=machine.fingerprint("cuda")
    )


def _check_names(operator: str, implementation: str, case: str, direction: str, files: Sequence[str]) -> None:
    """Raise for names that are known to be wrong before a process starts; files are not read here."""
    if direction not in DIRECTIONS:
        raise WeftError("direction", expected=" or ".join(DIRECTIONS), got=direction)
    for file in files:
        if not Path(file).is_file():
            raise WeftError("--with", expected="a .py or .cu file", got=file)
    if files:
        return  # they may define any of the names
    registry.operator(operator).case(case)
    registry.implementation(operator, implementation)
