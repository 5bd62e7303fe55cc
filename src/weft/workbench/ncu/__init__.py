"""Nsight Compute over one call of an implementation: what the hardware counted, and what it means.

The tool runs a process of its own (:mod:`target`), in which just the call's kernels are counted,
with all caches empty. Its counters become a table, a comparison of the DRAM's bytes with the
operator's predicted ones, and one sentence that names the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import WeftError, registry
from weft.core.operator import DIRECTIONS
from weft.workbench.ncu import find, running
from weft.workbench.ncu.counters import absent
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.ncu.report import Report

__all__ = ["Report", "profile"]


@dataclass(frozen=True, kw_only=True)
class Here:
    """The GPU that is counted on: its ``sm_XX``, its L2 in bytes, and the machine's fingerprint."""

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
    progress: Callable[[str], None],
) -> Report:
    """Count one call with Nsight Compute.

    ``files`` are somebody's own ``.py`` or ``.cu`` files, in which the implementation (and its
    operator) may be declared; they are read in the counted process only. ``progress`` is told, a
    line at a time, how far it is. Raises :class:`WeftError` for a name there is not, where ncu is
    not installed or may not count, and where the call cannot be made.
    """
    _check(operator, implementation, case, direction, files)
    program = find.needed()
    tool = find.version(program)
    place = here()
    job = {
        "operator": operator,
        "implementation": implementation,
        "case": case,
        "direction": direction,
        "sources": [_source(file) for file in files],
        "seed": 20260101,  # counters are no check; the same values every time
    }
    found = running.count(program, job, place.arch, progress)
    kernels = tuple(map(Kernel.of, found.printed.rows))
    return Report(
        operator=operator,
        implementation=implementation,
        backend=found.backend,
        case=case,
        direction=direction,
        kernels=kernels,
        cost=found.cost,
        l2_bytes=place.l2_bytes,
        absent=absent((k.counters for k in kernels), place.arch),
        tool=tool,
        machine=place.machine,
    )


def _source(file: str) -> dict[str, Any]:
    from weft.workbench.bring import Source

    return Source(kind="file", path=str(Path(file).resolve())).to_json()


def here() -> Here:
    """CUDA's device 0 and the fingerprint of this machine."""
    device = machine.query("cuda")
    return Here(
        arch=device.arch, l2_bytes=machine.l2_bytes("cuda"), machine=machine.fingerprint("cuda")
    )


def _check(
    operator: str, implementation: str, case: str, direction: str, files: Sequence[str]
) -> None:
    """Names that can be known to be wrong before anything is started; files are not read here."""
    if direction not in DIRECTIONS:
        raise WeftError("direction", expected=" or ".join(DIRECTIONS), got=direction)
    for file in files:
        if not Path(file).is_file():
            raise WeftError("--with", expected="a .py or .cu file", got=file)
    if files:
        return
    registry.operator(operator).case(case)
    registry.implementation(operator, implementation)
