"""What ran: the kernels behind a candidate's name, looked at and held to its declared backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.core import FORWARD, Case, Implementation
from weft.workbench import guest_kernels, provenance
from weft.workbench.bind import bind
from weft.workbench.bring import Source
from weft.workbench.cell import CellDied, GuestError, Limits
from weft.workbench.hands import Guest
from weft.workbench.oracle import fresh_seeds
from weft.workbench.points import Point
from weft.workbench.slots import Form, Slot, deal


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Names of kernels, the longest first.

    ``against`` says what is wrong by the check that says so: ``provenance`` (a library's kernel
    where the candidate's own was declared) or ``observed`` (other kernels when somebody looks).
    ``note`` says what could not be looked at, which is no agreement.
    """

    kernels: tuple[str, ...] = ()
    against: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def flags(self) -> set[str]:
        """As a record is flagged."""
        found = {f"suspect: kernels: {why}" for why in self.against.values()}
        return found | ({f"kernels {self.note}"} if self.note else set())


def look(
    point: Point, implementation: Implementation, grad: Form | None, guest: Guest | None
) -> Ran:
    """The kernels of one call of an implementation that was timed.

    A stranger's are looked at in a process of their own (:func:`of_stranger`); Weft's own by the
    profiler alone, here. On a CPU, where compiled code has no kernels to name, nothing is said of
    Weft's own that shows none.
    """
    if guest is not None:
        return of_stranger(
            guest.source, implementation, point.case, point.device, point.direction, guest.limits
        )
    slot = deal(point.case, point.device, grad, fresh_seeds(1)[0])
    try:
        found = provenance.kernels(partial(_call, point, implementation, slot), point.device)
    except torch.OutOfMemoryError:
        return Ran(note=provenance.NOT_LOOKED + "out of memory")
    expected = implementation.backend_of(point.direction)
    why = provenance.verdict(expected, found, implementation.around)
    note = found.note if point.device != "cpu" else ""
    return Ran(kernels=found.names, against={"provenance": why} if why else {}, note=note)


def _call(point: Point, one: Implementation, slot: Slot) -> object:
    case, direction = point.case, point.direction
    return bind(point.operator, one, case, direction, slot.inputs, slot.grad)()


def of_stranger(
    source: Source,
    implementation: Implementation,
    case: Case,
    device: str,
    direction: str = FORWARD,
    limits: Limits | None = None,
) -> Ran:
    """What a stranger's implementation runs, by a profiler and again by none, in a new process.

    One that dies or raises while it is looked at, having passed its check, is held against it.
    """
    asked = {
        "operator": implementation.operator,
        "implementation": implementation.name,
        "case": case.name,
        "direction": direction,
        "device": device,
        "seed": fresh_seeds(1)[0],
    }
    try:
        found, again = guest_kernels.ask(source, asked, limits)
    except (CellDied, GuestError) as error:
        if "OutOfMemoryError" in str(error):
            return Ran(note=provenance.NOT_LOOKED + "out of memory")
        why = error.reason if isinstance(error, CellDied) else f"raised {error}"
        return Ran(against={"observed": f"while its kernels were looked at, it {why}"})
    against = {}
    if foreign := provenance.verdict(implementation.backend, found):
        against["provenance"] = foreign
    differ = provenance.compare(found, again)
    if differ.startswith(provenance.NOT_LOOKED):
        return Ran(kernels=found.names, against=against, note=differ)
    if differ:
        against["observed"] = differ
    return Ran(kernels=found.names, against=against)
