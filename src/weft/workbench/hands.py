"""Hands: where a candidate is called, in this process or in one of its own.

The judge holds the answers and asks for calls. For Weft's own implementations the call is made
here. A stranger's is made by its guest, a process that has read the stranger's file and knows no
answer; what comes back is numbers and words, and it is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import torch

from weft.core import Case, Implementation, Support
from weft.core.implementation import anywhere
from weft.workbench.at_hand import Hand, Lay, Observed
from weft.workbench.bring import Source
from weft.workbench.cell import Cell, CellDied, Limits, Reply
from weft.workbench.stage import Form, Scene, Stage


class Holding(Protocol):
    """A candidate at a stage: filled with a seed's inputs, then called."""

    def fill(self, seed: int) -> None: ...
    def call(self, aside: bool, without: Collection[str] = ()) -> Observed: ...
    def close(self) -> None: ...


# In what a call raised, by PyTorch or by the driver, where the GPU's context may be lost with it.
BROKE = ("CUDA error", "CUDA_ERROR")

IDLE = 1 << 30  # bytes of a GPU that the judge may keep for later

Hands = Callable[[Implementation, Scene, int], Holding]


def here(implementation: Implementation, scene: Scene, poison: int) -> Holding:
    """Calls in this process."""
    return Hand(implementation, Stage(scene, poison))


class Guest:
    """A stranger's source in a process of its own, and what it declares.

    ``implementations`` stand for what the guest holds: they name it and cannot be called here.
    Closing ends the process. Raises :class:`~weft.workbench.cell.CellDied` or ``GuestError`` where
    the source cannot be read.
    """

    def __init__(self, source: Source, limits: Limits | None = None) -> None:
        self.source, self.limits = source, limits or Limits()
        said = self._start()
        self.operators: tuple[str, ...] = tuple(said["operators"])
        self.implementations = tuple(self._stands_for(d) for d in said["implementations"])

    def _start(self) -> Mapping[str, Any]:
        self.broken = False
        self.cell = Cell(limits=self.limits, argument={"source": self.source.to_json()})
        try:
            return self.cell.ask("load").payload
        except BaseException:
            self.cell.close()
            raise

    def restart(self) -> None:
        """A new process for the same source: after one that broke, or to start from nothing."""
        self.cell.close()
        self._start()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.cell.close()

    def _stands_for(self, said: Mapping[str, Any]) -> Implementation:
        supports = partial(self._supports, said["operator"], said["name"])
        return Implementation(
            operator=said["operator"],
            name=said["name"],
            backend=said["backend"],
            forward=_elsewhere,
            supports=supports if said["picky"] else anywhere,
            deterministic=said["deterministic"],
            directions=tuple(said["directions"]),
            idea=said["idea"],
            devices=tuple(said["devices"]),
        )

    def _supports(self, operator: str, name: str, case: Case, device: str) -> Support:
        asked = {"operator": operator, "implementation": name, "case": case.name, "device": device}
        self._mend()
        return Support(**self.ask("supports", asked).payload)

    def hands(self, implementation: Implementation, scene: Scene, poison: int) -> Holding:
        """A stage of this scene in the guest; in a new one, where the last call broke it."""
        self._mend()
        return Away(self, implementation, scene, poison)

    def _mend(self) -> None:
        if self.broken:
            self.restart()

    def ask(self, verb: str, asked: dict[str, Any]) -> Reply:
        """Ask the guest; an end of its process is remembered, and passed on."""
        try:
            return self.cell.ask(verb, asked)
        except CellDied:
            self.broken = True
            raise


def _elsewhere(*_: object, **__: object) -> Any:
    raise AssertionError("a stranger's code is never called in the judge's process")


def _form_to_json(form: Form) -> dict[str, Any]:
    return {**asdict(form), "dtype": str(form.dtype).removeprefix("torch.")}


def _form_from_json(data: Mapping[str, Any]) -> Form:
    strides = data["strides"]
    dtype = getattr(torch, data["dtype"])
    return Form(tuple(data["shape"]), dtype, None if strides is None else tuple(strides))


def scene_to_json(scene: Scene, implementation: Implementation) -> dict[str, Any]:
    """What the guest is told of a scene: names, forms, and no answer."""
    return {
        "operator": scene.operator.name,
        "implementation": implementation.name,
        "case": scene.case.name,
        "direction": scene.direction,
        "device": scene.device,
        "forms": [_form_to_json(f) for f in scene.forms],
        "grad_form": _form_to_json(scene.grad_form) if scene.grad_form else None,
    }


def forms_from_json(data: Mapping[str, Any]) -> tuple[tuple[Form, ...], Form | None]:
    """The forms of the outputs and of the gradient, as :func:`scene_to_json` told them."""
    grad = data["grad_form"]
    return tuple(_form_from_json(f) for f in data["forms"]), _form_from_json(grad) if grad else None


def _make_room() -> None:
    """Give back the GPU memory that this process keeps for later: the guest needs it now."""
    if torch.cuda.is_initialized():
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if idle > IDLE:
            torch.cuda.empty_cache()


class Away:
    """A candidate at a stage in its guest."""

    def __init__(self, guest: Guest, implementation: Implementation, scene: Scene, poison: int):
        self.guest, self.device = guest, scene.device
        asked = {**scene_to_json(scene, implementation), "poison": poison}
        self.stage = guest.ask("stage", asked).payload["stage"]

    def fill(self, seed: int) -> None:
        self.guest.ask("fill", {"stage": self.stage, "seed": seed})

    def call(self, aside: bool, without: Collection[str] = ()) -> Observed:
        _make_room()
        asked = {"stage": self.stage, "aside": aside, "without": sorted(without)}
        reply = self.guest.ask("call", asked)
        said = reply.payload
        # What a kernel broke stays broken for its process, and would be the next one's fault.
        raised = said["found"].get("returns", "")
        self.guest.broken |= any(words in raised for words in BROKE)
        lays = tuple(
            Lay(tuple(d["shape"]), d["dtype"], d["device"], tuple(d["strides"]))
            for d in said["lays"]
        )
        return Observed(
            outputs=tuple(t.to(self.device) for t in reply.tensors),
            lays=lays,
            found={str(k): str(v) for k, v in said["found"].items()},
            seconds=float(said["seconds"]),
            unguarded=int(said["unguarded"]),
        )

    def close(self) -> None:
        self.guest.ask("drop", {"stage": self.stage})
