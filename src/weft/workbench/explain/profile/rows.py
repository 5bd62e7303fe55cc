"""Rows of a profile's table: kernels of a GPU, or on a CPU operators by self time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.core import Implementation, registry
from weft.workbench.explain.profile.instruments import ON_DEVICE, step_spans
from weft.workbench.explain.profile.stacks import HOST, NO_OPERATOR, Folded
from weft.workbench.kernels.names import decode, plain

Shape = tuple[int, ...]
UNKNOWN = "unknown"  # origin of a kernel whose name bears no library's mark
EXTERNAL = "own code"  # origin of the kernels that an external candidate wrote itself


@dataclass(frozen=True, kw_only=True)
class Row:
    """Kernel, or operator, of all active steps together.

    ``library`` is the origin of the kernel and ``says`` the decoded name. ``share`` is of all device time
    on a GPU, of the wall time on a CPU. ``us`` is the time of all ``launches``; on a CPU the self time.
    ``grid`` and ``block`` belong to the launch, ``registers`` to a thread, and ``shared`` bytes to a
    block; None if the trace does not have them.
    """

    name: str
    short: str
    library: str
    says: str
    us: float
    share: float
    launches: int | None
    grid: Shape | None = None
    block: Shape | None = None
    registers: int | None = None
    shared: int | None = None

    @property
    def us_a_launch(self) -> float | None:
        return self.us / self.launches if self.launches else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"us_a_launch": self.us_a_launch}


def is_builtin(implementation: Implementation) -> bool:
    """Return True if the implementation is the registry's own."""
    operator, name = implementation.operator, implementation.name
    known = operator in registry.operator_names() and name in registry.implementation_names(operator)
    # By identity: an external file may use a name of the registry's.
    return known and registry.implementation(operator, name) is implementation


def kernel_names(implementation: Implementation) -> frozenset[str]:
    """Return the names of an implementation's own kernels, from those it can compile ahead of time."""
    names: set[str] = set()
    for aot_kernel in implementation.aot_kernels:
        names.update(getattr(aot_kernel, "kernels", ()))  # a CUDA source has several kernels
        kernel = getattr(aot_kernel, "kernel", None)
        function = getattr(kernel, "py_func", kernel)  # numba's dispatcher wraps the function
        names.add(getattr(function, "__name__", ""))
    return frozenset(map(plain, names - {""}))


def kernel_origin(name: str, implementation: Implementation) -> str:
    """Return the origin of a kernel that an implementation launched.

    The origin is a library by its mark in the name, ``<backend> (weft)`` for a kernel of a built-in
    implementation, and ``own code`` for a kernel that an external candidate wrote. Other names are
    ``unknown``.
    """
    library = decode(name).library
    # numba mangles its kernels, so their names bear a mark, which is numba's own and no library's.
    if library not in (UNKNOWN, implementation.backend):
        return library
    if not is_builtin(implementation):
        return EXTERNAL
    is_own = library == implementation.backend or plain(name) in kernel_names(implementation)
    return f"{implementation.backend} (weft)" if is_own else UNKNOWN


def on_device(trace: Mapping[str, Any], implementation: Implementation) -> list[Row]:
    """Return kernels, copies and fills, the longest first; one row for each launch configuration.

    Kernels that began before the first active step are left out. The share is of the sum of all times,
    so that shares add up to 1 even if kernels ran side by side.
    """
    steps = step_spans(dict(trace))
    begin = steps[0][0] if steps else float("-inf")
    durations: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X" or event.get("cat") not in ON_DEVICE or event["ts"] < begin:
            continue
        args = event.get("args", {})
        shape = (_shape(args.get("grid")), _shape(args.get("block")))
        resources = (args.get("registers per thread"), args.get("shared memory"))
        durations[(str(event["name"]), *shape, *resources)].append(float(event["dur"]))
    # Not the busy time: kernels that overlap each count in full, so that shares add up to 1.
    total = sum(map(sum, durations.values()))
    rows = []
    for (name, grid, block, registers, shared), times in durations.items():
        decoded = decode(name)
        rows.append(
            Row(
                name=name,
                short=decoded.short,
                library=kernel_origin(name, implementation),
                says=decoded.summary(),
                us=sum(times),
                share=sum(times) / total if total else 0.0,
                launches=len(times),
                grid=grid,
                block=block,
                registers=registers,
                shared=shared,
            )
        )
    return sorted(rows, key=lambda r: -r.us)


def _shape(sizes: Any) -> Shape | None:
    return tuple(int(n) for n in sizes) if sizes else None


def on_host(trace: Mapping[str, Any], folded: Folded) -> list[Row]:
    """Return operators by their self time on the host's threads, the longest first.

    The last row is the time in no operator: Python, and compiled code that no operator announces.
    """
    self_us: dict[str, float] = defaultdict(float)
    outside_us = 0.0
    for i, lane in enumerate(x for x in folded.lanes if x.kind == HOST):
        for stack, ns in lane.stacks.items():
            if stack != (NO_OPERATOR,):
                self_us[stack[-1]] += ns / 1000
            elif i == 0:  # another thread without an operator only waits
                outside_us = ns / 1000
    steps = step_spans(dict(trace))
    begin, end = (steps[0][0], steps[-1][1]) if steps else (float("-inf"), float("inf"))
    calls: dict[str, int] = defaultdict(int)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X" and begin <= event["ts"] < end:
            calls[str(event["name"])] += 1
    rows = [_operator_row(name, us, us / folded.root_us, calls[name]) for name, us in self_us.items()]
    rows.sort(key=lambda r: -r.us)
    return [*rows, _operator_row(NO_OPERATOR, outside_us, outside_us / folded.root_us, None)]


def _operator_row(name: str, us: float, share: float, launches: int | None) -> Row:
    decoded = decode(name)
    is_known = decoded.library != UNKNOWN
    return Row(
        name=name,
        short=decoded.short if is_known else name,
        library=decoded.library if is_known else name.partition("::")[0] if "::" in name else "",
        says=decoded.summary(),
        us=us,
        share=share,
        launches=launches,
    )
