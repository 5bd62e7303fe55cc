"""What ran: the kernels behind a timing, looked at after it, and held to the declared backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from weft.core import Implementation
from weft.workbench import guest_kernels, provenance
from weft.workbench.bind import bind
from weft.workbench.cell import CellDied, GuestError
from weft.workbench.guests import Guest
from weft.workbench.oracle import fresh_seeds
from weft.workbench.points import Point
from weft.workbench.slots import Form, Slot, deal


@dataclass(frozen=True)
class Ran:
    """Names of kernels, the longest first, and a flag where they are not what was declared."""

    kernels: tuple[str, ...] = ()
    flag: str = ""


def look(
    point: Point, implementation: Implementation, grad: Form | None, guest: Guest | None
) -> Ran:
    """The kernels of one call of an implementation that was timed.

    A stranger's are listed by a profiler and again without one, in a process of their own; Weft's
    own by the profiler alone, here. What cannot be looked at is said, and is no agreement.
    """
    seed = fresh_seeds(1)[0]
    try:
        if guest is None:
            slot = deal(point.case, point.device, grad, seed)
            call = partial(_call, point, implementation, slot)
            found = provenance.kernels(call, point.device)
            return Ran(found.names, _accused(implementation, found))
        return _strange(point, implementation, guest, seed)
    except (CellDied, GuestError, torch.OutOfMemoryError) as error:
        return Ran(flag=f"kernels not looked at: {' '.join(str(error).split())[:120]}")


def _call(point: Point, one: Implementation, slot: Slot) -> object:
    case, direction = point.case, point.direction
    return bind(point.operator, one, case, direction, slot.inputs, slot.grad)()


def _strange(point: Point, implementation: Implementation, guest: Guest, seed: int) -> Ran:
    asked = {
        "operator": point.operator.name,
        "implementation": implementation.name,
        "case": point.case.name,
        "direction": point.direction,
        "device": point.device,
        "seed": seed,
    }
    found, again = guest_kernels.ask(guest.source, asked, guest.limits)
    flag = _accused(implementation, found)
    differ = provenance.compare(found, again)
    if not flag and differ and not differ.startswith(provenance.NOT_LOOKED):
        flag = f"suspect: kernels: {differ}"
    return Ran(found.names, flag)


def _accused(implementation: Implementation, found: provenance.Kernels) -> str:
    why = provenance.verdict(implementation.backend, found)
    return f"suspect: kernels: {why}" if why else ""
