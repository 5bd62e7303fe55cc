"""What a guest does: it reads a stranger's source, and stages and makes the calls it is asked for.

This runs in the process of a :class:`~weft.workbench.cell.Cell`. It is told cases and seeds and
never an answer.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from weft.core import Case, Implementation, Operator, registry
from weft.core.implementation import anywhere
from weft.workbench import guard
from weft.workbench.at_hand import Hand
from weft.workbench.bring import Brought, Source, load
from weft.workbench.hands import forms_from_json
from weft.workbench.stage import Scene, Stage

CLOCKS = {False: "weft.workbench.clock_cpu", True: "weft.workbench.clock_cuda"}
LARGE = 1 << 30  # bytes of a GPU that are given back where nobody stands on a stage
Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
Verb = Callable[[dict[str, Any], list[torch.Tensor]], Answer]


class State:
    """What a guest holds: what its source declares, and the stages that stand."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.hands: dict[int, Hand] = {}
        self.stages = 0

    @cached_property
    def brought(self) -> Brought:
        """What the source declares; read at the first question, within the limits of one."""
        return load(self.source)

    def operator(self, name: str) -> Operator:
        """An operator by name: the source's own, or the registry's."""
        own = {o.name: o for o in self.brought.operators}
        return own[name] if name in own else registry.operator(name)

    def point(self, said: Mapping[str, Any]) -> tuple[Operator, Implementation, Case, str, str]:
        """What a request names: operator, implementation, case, direction and device."""
        operator = self.operator(said["operator"])
        implementation = self.brought.implementation(operator.name, said["implementation"])
        case = operator.case(said["case"])
        return operator, implementation, case, said["direction"], said["device"]


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Verb]:
    """The verbs that a guest answers, for one source."""
    from weft.workbench import guest_clock

    importlib.import_module(CLOCKS[torch.cuda.is_available()])
    guard.remember()  # the house's functions, before a stranger's file is read
    state = State(Source.from_json(argument["source"]))
    verbs = {
        "load": _load,
        "supports": _supports,
        "stage": _stage,
        "fill": _fill,
        "call": _call,
        "drop": _drop,
    }
    own = {name: _with(state, verb) for name, verb in verbs.items()}
    return {**own, **guest_clock.verbs(state)}


def _with(state: State, verb: Callable[[State, dict[str, Any]], Answer]) -> Verb:
    return lambda said, tensors: verb(state, said)


def _load(state: State, said: dict[str, Any]) -> Answer:
    found = state.brought
    told = [
        {
            "operator": i.operator,
            "name": i.name,
            "backend": i.backend,
            "deterministic": i.deterministic,
            "directions": list(i.directions),
            "idea": i.idea,
            "devices": list(i.devices),
            "picky": i.supports is not anywhere,
        }
        for i in found.implementations
    ]
    return {"operators": [o.name for o in found.operators], "implementations": told}, ()


def _supports(state: State, said: dict[str, Any]) -> Answer:
    implementation = state.brought.implementation(said["operator"], said["implementation"])
    case = state.operator(said["operator"]).case(said["case"])
    return asdict(implementation.supports(case, said["device"])), ()


def _stage(state: State, said: dict[str, Any]) -> Answer:
    operator, implementation, case, direction, device = state.point(said)
    forms, grad_form = forms_from_json(said)
    scene = Scene(
        operator=operator,
        case=case,
        direction=direction,
        device=device,
        forms=forms,
        grad_form=grad_form,
    )
    state.stages += 1
    state.hands[state.stages] = Hand(implementation, Stage(scene, said["poison"]))
    return {"stage": state.stages}, ()


def _fill(state: State, said: dict[str, Any]) -> Answer:
    state.hands[said["stage"]].fill(said["seed"])
    return {}, ()


def _call(state: State, said: dict[str, Any]) -> Answer:
    seen = state.hands[said["stage"]].call(said["aside"], said["without"])
    if gone := guard.replaced():
        seen.found["replaced"] = f"the house's own functions were replaced: {', '.join(gone[:3])}"
    told = {
        "lays": [asdict(lay) for lay in seen.lays],
        "found": seen.found,
        "seconds": seen.seconds,
        "unguarded": seen.unguarded,
    }
    return told, [_to_send(out) for out in seen.outputs]


def _to_send(out: torch.Tensor) -> torch.Tensor:
    """The output on the CPU; nothing where there is nothing to read (the meta device)."""
    return torch.empty(0, dtype=out.dtype) if out.is_meta else out.cpu()


def _drop(state: State, said: dict[str, Any]) -> Answer:
    state.hands.pop(said["stage"]).close()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > LARGE:
        gc.collect()
        torch.cuda.empty_cache()  # the judge, and other guests, need room too
    return {}, ()
