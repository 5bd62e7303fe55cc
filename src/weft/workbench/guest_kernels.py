"""What ran in a guest: its candidate's kernels by a profiler, and again by none, for the judge.

The lists are made where the candidate is; what they mean is judged elsewhere (``provenance``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from weft.core import BACKWARD
from weft.workbench import inputs as drawing
from weft.workbench import provenance
from weft.workbench.bind import bind, graded
from weft.workbench.bring import Source
from weft.workbench.cell import Cell, Limits
from weft.workbench.guest import Answer, State, Verb
from weft.workbench.provenance import Kernels


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Verb]:
    """A cell's entry with this one verb."""
    state = State(Source.from_json(argument["source"]))
    return {"kernels": lambda said, tensors: kernels(state, said)}


def kernels(state: State, said: Mapping[str, Any]) -> Answer:
    """Both lists at a point, on inputs of the seed that is given."""
    operator, implementation, case, direction, device = state.point(said)
    inputs = drawing.make(case, device, said["seed"])
    grad = None
    if direction == BACKWARD:
        like = graded(operator, implementation.forward(*inputs, **case.params))
        grad = drawing.gradient_like(like, said["seed"], device=device)
    call = bind(operator, implementation, case, direction, inputs, grad)
    return {
        "profiled": _told(provenance.kernels(call, device)),
        "observed": _told(provenance.observed(call, device)),
    }, ()


def _told(found: Kernels) -> dict[str, Any]:
    return asdict(found) | {"seen": sorted(found.seen)}


def ask(
    source: Source, point: Mapping[str, Any], limits: Limits | None = None
) -> tuple[Kernels, Kernels]:
    """Both lists, from a process of their own; raises what a cell raises."""
    entry, argument = "weft.workbench.guest_kernels:handlers", {"source": source.to_json()}
    with Cell(entry, limits=limits, argument=argument) as it:
        said = it.ask("kernels", dict(point)).payload
    return _heard(said["profiled"]), _heard(said["observed"])


def _heard(said: Mapping[str, Any]) -> Kernels:
    return Kernels(
        names=tuple(map(str, said["names"])),
        shares=tuple(map(float, said["shares"])),
        source=str(said["source"]),
        origins=tuple(map(str, said["origins"])),
        counts=tuple(map(int, said["counts"])),
        seen=frozenset(map(str, said["seen"])),
        note=str(said["note"]),
    )
