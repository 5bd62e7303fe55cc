"""Call candidates in a worker process.

The parent process has the expected outputs and requests calls. The worker loads the candidate's
file and makes the calls; it never receives an expected output. Its replies are numbers, text and
output tensors, which the parent judges.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from weft.core import Case, Implementation, Support
from weft.core.implementation import anywhere
from weft.core.text import printable
from weft.workbench.calls.call import Caller, CallResult, RepeatBudget, TensorLayout
from weft.workbench.calls.staging import CallSpec, TensorForm
from weft.workbench.sandbox.process import Limits, Reply, Sandbox
from weft.workbench.sources.source import Source
from weft.workbench.timing.conditions import Conditions
from weft.workbench.timing.conditions import read as read_conditions

# Parts of error messages after which the GPU's context of that process may be unusable.
CUDA_ERRORS = ("CUDA error", "CUDA_ERROR")

# Of further repeats, for each implementation and direction: enough for one case with all of MAX_CALLS.
REPEAT_SECONDS = 3.0
MAX_CACHED_BYTES = 1 << 30  # GPU memory that this process's allocator may cache during a remote call


class WorkerProcess:
    """A worker process that has loaded a source, and the source's declarations.

    ``implementations`` describe the worker's: they name them and cannot be called here.
    ``parameters`` are those that :class:`LoadedFile` names. Closing ends the process. Raises
    :class:`~weft.workbench.calls.errors.SandboxDied` or ``WorkerError`` if the source cannot be loaded.
    """

    def __init__(self, source: Source, limits: Limits | None = None) -> None:
        self.source, self.limits = source, limits or Limits()
        # By implementation and direction.
        self.repeat_budgets: defaultdict[tuple[str, str], RepeatBudget] = defaultdict(
            partial(RepeatBudget, REPEAT_SECONDS)
        )
        # Read before any of the source's code has run, which could change them for other processes.
        self.parent_conditions = read_conditions(os.getpid())
        self.start_conditions: list[Conditions] = []  # of each start's worker, before it loads the source
        declared = self._start()
        self.operators: tuple[str, ...] = tuple(declared["operators"])
        self.parameters = tuple(map(str, declared["parameters"]))
        self.implementations = tuple(self._proxy(d) for d in declared["implementations"])

    def _start(self) -> Mapping[str, Any]:
        self.is_broken = False
        self.sandbox = Sandbox(limits=self.limits, argument={"source": self.source.to_json()})
        try:
            self.start_conditions.append(read_conditions(self.sandbox.pid))
            return self.sandbox.request("load").payload
        except BaseException:
            self.sandbox.close()
            raise

    def restart(self) -> None:
        """Start a new process for the same source, after a failure or to begin with no state."""
        self.sandbox.close()
        self._start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sandbox.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self.sandbox.pid

    @property
    def paused_cpu_seconds(self) -> float:
        """CPU time that the worker's processes used although they were stopped."""
        return self.sandbox.paused_cpu_seconds

    def pause(self) -> None:
        """Stop the worker and all processes that it started, until the next request."""
        self.sandbox.pause()

    def _proxy(self, declared: Mapping[str, Any]) -> Implementation:
        """Return the description of a worker's implementation; its forward cannot be called."""
        supports = partial(self._supports, declared["operator"], declared["name"])
        return Implementation(
            operator=declared["operator"],
            name=declared["name"],
            backend=declared["backend"],
            forward=_not_callable_here,
            supports=supports if declared["has_supports"] else anywhere,
            deterministic=declared["deterministic"],
            directions=tuple(declared["directions"]),
            idea=declared["idea"],
            devices=tuple(declared["devices"]),
        )

    def _supports(self, operator: str, name: str, case: Case, device: str) -> Support:
        self.restart_if_broken()
        payload = {"operator": operator, "implementation": name, "case": case.name, "device": device}
        return Support(**self.request("supports", payload).payload)

    def make_caller(self, implementation: Implementation, spec: CallSpec, poison: int) -> Caller:
        """Return a caller in the worker; the worker is restarted if the last call broke it."""
        self.restart_if_broken()
        return RemoteCaller(self, implementation, spec, poison)

    def restart_if_broken(self) -> None:
        """Start a new process if the last request ended the one before."""
        # Not at once on failure: a verdict needs no new process if nothing else is asked of it.
        if self.is_broken:
            self.restart()

    def request(self, verb: str, payload: dict[str, Any], device: str = "cpu") -> Reply:
        """Send a request to the worker; note the end of its process, and raise what ended it.

        The tensors of the reply arrive on ``device``.
        """
        try:
            return self.sandbox.request(verb, payload, device=device)
        finally:
            self.is_broken |= self.sandbox.has_ended


def _not_callable_here(*_: object, **__: object) -> Any:
    raise AssertionError("an external candidate is never called in the parent process")


def _form_to_json(form: TensorForm) -> dict[str, Any]:
    return {**asdict(form), "dtype": str(form.dtype).removeprefix("torch.")}


def _form_from_json(data: Mapping[str, Any]) -> TensorForm:
    strides = data["strides"]
    dtype = getattr(torch, data["dtype"])
    return TensorForm(tuple(data["shape"]), dtype, None if strides is None else tuple(strides))


def spec_to_json(spec: CallSpec, implementation: Implementation) -> dict[str, Any]:
    """Describe a call to the worker: names and forms, no expected output."""
    return {
        "operator": spec.operator.name,
        "implementation": implementation.name,
        "case": spec.case.name,
        "direction": spec.direction,
        "device": spec.device,
        "output_forms": [_form_to_json(f) for f in spec.output_forms],
        "grad_form": _form_to_json(spec.grad_form) if spec.grad_form else None,
    }


def forms_from_json(data: Mapping[str, Any]) -> tuple[tuple[TensorForm, ...], TensorForm | None]:
    """Return the forms of the outputs and of the gradient from :func:`spec_to_json`."""
    grad = data["grad_form"]
    outputs = tuple(_form_from_json(f) for f in data["output_forms"])
    return outputs, _form_from_json(grad) if grad else None


class RemoteCaller:
    """A candidate at one case and direction in its worker process."""

    sends_copies = True

    def __init__(
        self, worker: WorkerProcess, implementation: Implementation, spec: CallSpec, poison: int
    ) -> None:
        self.worker, self.device = worker, spec.device
        self.repeat_budget = worker.repeat_budgets[implementation.name, spec.direction]
        payload = {**spec_to_json(spec, implementation), "poison": poison}
        self.caller_id = worker.request("create_caller", payload).payload["caller"]

    def load(self, seed: int) -> None:
        self.worker.request("load_inputs", {"caller": self.caller_id, "seed": seed})

    def call(self, on_side_stream: bool, without: Collection[str] = ()) -> CallResult:
        _release_cached_memory()
        payload = {
            "caller": self.caller_id,
            "on_side_stream": on_side_stream,
            "without": sorted(without),
        }
        reply = self.worker.request("call", payload, self.device)
        result = reply.payload
        # A CUDA error stays in its process and would fail the next candidate's call.
        raised = result["violations"].get("returns", "")
        self.worker.is_broken |= any(text in raised for text in CUDA_ERRORS)
        layouts = tuple(
            TensorLayout(tuple(d["shape"]), d["dtype"], d["device"], tuple(d["strides"]))
            for d in result["layouts"]
        )
        return CallResult(
            outputs=tuple(reply.tensors),
            layouts=layouts,
            violations={str(k): printable(str(v)) for k, v in result["violations"].items()},
            seconds=float(result["seconds"]),
            unguarded=int(result["unguarded"]),
        )

    def close(self) -> None:
        self.worker.request("close_caller", {"caller": self.caller_id})


def _release_cached_memory() -> None:
    """Release the GPU memory that this process's allocator caches: the worker needs it now."""
    if torch.cuda.is_initialized():
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if cached > MAX_CACHED_BYTES:
            torch.cuda.empty_cache()
