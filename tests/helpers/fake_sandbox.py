"""A worker in the test's process with one toy implementation, for tests of the timing of external code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from weft.core import Case, Implementation, Input, Operator, case
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.calls.staging import TensorForm
from weft.workbench.sandbox import worker_timing
from weft.workbench.sandbox.process import Reply

Forward = Callable[..., torch.Tensor]
POINT = case(Input(name="x", shape=(160, 128)), tags="bench", devices=("cpu",))


def compute(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x) + x
    return x


class OnePoint:
    """Worker state with one implementation of one toy operator."""

    def __init__(self, forward: Forward) -> None:
        self.implementation = Implementation(operator="toy", name="theirs", backend="torch", forward=forward)

    def point(self, payload: Any) -> tuple[Operator, Implementation, Case, str, str]:
        # The timing of a forward reads no other attribute of the operator.
        operator: Any = type("Toy", (), {"in_place": ()})()
        return operator, self.implementation, POINT, payload["direction"], payload["device"]

    def output_forms(self, payload: Any) -> tuple[TensorForm, ...]:
        return (TensorForm((160, 128), torch.float32, (128, 1)),)


class FakeSandbox:
    """A worker in this process with JSON requests and replies; it runs each request inside ``context``."""

    def __init__(self, forward: Forward, context: Callable[[], Any] = nullcontext) -> None:
        self.verbs = worker_timing.handlers(OnePoint(forward))
        self.context, self.verbs_called = context, []

    def request(self, verb: str, payload: Any = None, tensors: Sequence[Any] = (), **_: Any) -> Reply:
        self.verbs_called.append(verb)
        with self.context():
            fields, sent = self.verbs[verb](json.loads(json.dumps(payload or {})), list(tensors))
        return Reply(payload=json.loads(json.dumps(fields)), tensors=[t.clone() for t in sent])


def judge_of(buffers: InputBuffers) -> Callable[[object], str | None]:
    expected = compute(buffers.inputs[0].double())

    def judge(output: object) -> str | None:
        assert isinstance(output, torch.Tensor)
        error = (output.double() - expected).abs().max().item()
        return None if error < 1e-4 else f"off by {error}"

    return judge


def unavailable(buffers: InputBuffers) -> Callable[[], torch.Tensor]:
    raise AssertionError("an external candidate is not called in the parent process")
