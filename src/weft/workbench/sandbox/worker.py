"""Handlers of a worker process: load a candidate's source and make the requested calls.

This runs in the process of a :class:`~weft.workbench.sandbox.process.Sandbox`. It receives cases
and seeds and never an expected output.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from weft.core import Case, Implementation, Operator, registry
from weft.core.implementation import anywhere
from weft.workbench.calls.call import LocalCaller
from weft.workbench.calls.staging import CallSpec, StagedCall, TensorForm
from weft.workbench.check.batch_invariance import compare_rows
from weft.workbench.sandbox import worker_timing
from weft.workbench.sandbox.caller import forms_from_json
from weft.workbench.sources.source import LoadedFile, Source, load
from weft.workbench.timing import integrity

TIMING_MODULES = {False: "weft.workbench.timing.cpu", True: "weft.workbench.timing.cuda"}
MAX_CACHED_BYTES = 1 << 30  # GPU memory that the allocator may cache after a caller is closed
Result = tuple[dict[str, Any], Sequence[torch.Tensor]]
Handler = Callable[[dict[str, Any], list[torch.Tensor]], Result]


class WorkerState:
    """State of a worker: the declarations of its source, and its callers by id."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.callers: dict[int, LocalCaller] = {}
        self.n_callers = 0
        self._output_forms: dict[tuple[str, ...], Sequence[TensorForm]] = {}

    @cached_property
    def loaded(self) -> LoadedFile:
        """Declarations of the source; loaded at the first request, within its limits."""
        return load(self.source)

    def operator(self, name: str) -> Operator:
        """Return an operator by name: the source's own, or the registry's."""
        own = {o.name: o for o in self.loaded.operators}
        return own[name] if name in own else registry.operator(name)

    def point(self, payload: Mapping[str, Any]) -> tuple[Operator, Implementation, Case, str, str]:
        """Return the operator, implementation, case, direction and device of a request."""
        operator = self.operator(payload["operator"])
        implementation = self.loaded.implementation(operator.name, payload["implementation"])
        case = operator.case(payload["case"])
        return operator, implementation, case, payload["direction"], payload["device"]

    def output_forms(self, payload: Mapping[str, Any]) -> Sequence[TensorForm] | None:
        """Return the forms of the outputs at a point; None where no caller was created for it."""
        return self._output_forms.get(_point_key(payload))

    def remember_output_forms(self, payload: Mapping[str, Any], forms: Sequence[TensorForm]) -> None:
        """Store the forms that the parent process sent for the check: timed calls must have them too."""
        self._output_forms[_point_key(payload)] = forms


def _point_key(payload: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(payload[n] for n in ("operator", "implementation", "case", "direction", "device"))


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Handler]:
    """Return the handlers of a worker for one source."""
    # Imported before the candidate's file, so that the snapshot below includes the timing's functions.
    importlib.import_module(TIMING_MODULES[torch.cuda.is_available()])
    integrity.snapshot()  # Weft's own functions, before the candidate's file is loaded
    # A backward runs more than once here (retain_graph): compiled code may not eat its saved tensors.
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010
    _start_no_monitor_of_tqdm()
    state = WorkerState(Source.from_json(argument["source"]))
    verbs = {
        "load": _load,
        "supports": _supports,
        "create_caller": _create_caller,
        "load_inputs": _load_inputs,
        "call": _call,
        "close_caller": _close_caller,
        "compare_rows": _compare_rows,
    }
    own = {name: _with_state(state, verb) for name, verb in verbs.items()}
    return {**own, **worker_timing.handlers(state)}


def _start_no_monitor_of_tqdm() -> None:
    """Let tqdm, which torch.compile uses, start no thread that wakes every ten seconds.

    A process that is stopped between its turns wakes it when it continues, outside of every call, and the
    check of threads would take that for work that a call left behind.
    """
    with suppress(ImportError):
        importlib.import_module("tqdm").tqdm.monitor_interval = 0


def _with_state(state: WorkerState, verb: Callable[[WorkerState, dict[str, Any]], Result]) -> Handler:
    return lambda payload, tensors: verb(state, payload)


def _load(state: WorkerState, payload: dict[str, Any]) -> Result:
    declared = [
        {
            "operator": i.operator,
            "name": i.name,
            "backend": i.backend,
            "deterministic": i.deterministic,
            "directions": list(i.directions),
            "idea": i.idea,
            "devices": list(i.devices),
            "has_supports": i.supports is not anywhere,
        }
        for i in state.loaded.implementations
    ]
    return {
        "operators": [o.name for o in state.loaded.operators],
        "implementations": declared,
        "parameters": list(state.loaded.parameters),
    }, ()


def _supports(state: WorkerState, payload: dict[str, Any]) -> Result:
    implementation = state.loaded.implementation(payload["operator"], payload["implementation"])
    case = state.operator(payload["operator"]).case(payload["case"])
    return asdict(implementation.supports(case, payload["device"])), ()


def _create_caller(state: WorkerState, payload: dict[str, Any]) -> Result:
    operator, implementation, case, direction, device = state.point(payload)
    output_forms, grad_form = forms_from_json(payload)
    state.remember_output_forms(payload, output_forms)
    spec = CallSpec(
        operator=operator,
        case=case,
        direction=direction,
        device=device,
        output_forms=output_forms,
        grad_form=grad_form,
    )
    state.n_callers += 1
    state.callers[state.n_callers] = LocalCaller(implementation, StagedCall(spec, payload["poison"]))
    return {"caller": state.n_callers}, ()


def _load_inputs(state: WorkerState, payload: dict[str, Any]) -> Result:
    state.callers[payload["caller"]].load(payload["seed"])
    return {}, ()


def _call(state: WorkerState, payload: dict[str, Any]) -> Result:
    caller = state.callers[payload["caller"]]
    result = caller.call(payload["on_side_stream"], payload["without"])
    # After the call: the file may replace a function when it is loaded or only when it is called.
    if replaced := integrity.replaced_functions():
        names = ", ".join(replaced[:3])
        result.violations["replaced"] = f"functions of torch or Weft were replaced: {names}"
    fields = {
        "layouts": [asdict(layout) for layout in result.layouts],
        "violations": result.violations,
        "seconds": result.seconds,
        "unguarded": result.unguarded,
    }
    # A tensor on the meta device has no contents to send.
    outputs = [torch.empty(0, dtype=o.dtype) if o.is_meta else o for o in result.outputs]
    return fields, outputs


def _close_caller(state: WorkerState, payload: dict[str, Any]) -> Result:
    state.callers.pop(payload["caller"]).close()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MAX_CACHED_BYTES:
        gc.collect()
        torch.cuda.empty_cache()  # the parent process and other workers need the memory, too
    return {}, ()


def _compare_rows(state: WorkerState, payload: dict[str, Any]) -> Result:
    """Compare the rows of a batch and of its parts: of bits alone, so that nothing is judged here."""
    return asdict(compare_rows(*state.point(payload), payload["seed"])), ()
