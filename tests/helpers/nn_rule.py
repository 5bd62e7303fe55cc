"""Tolerance of the check for whole modules. The reference is the module in float64; the error may be twice
that of torch's own module in the same dtype, plus two units in the last place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from weft.core import Tolerance
from weft.workbench.check import tolerance

Answers = dict[str, torch.Tensor]
Call = Callable[[Any], torch.Tensor]


def answers(module: torch.nn.Module, call: Callable[[Any], Any], *leaves: torch.Tensor) -> Answers:
    """Return the outputs of ``call(module)`` by number, and the gradient of every parameter and leaf for
    a fixed weighting of their elements."""
    module.zero_grad(set_to_none=True)
    result = call(module)
    outputs = result if isinstance(result, tuple) else (result,)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64) + 0.25
        total = total + (output.double().flatten() * weights).sum()
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(total, [*named.values(), *leaves], allow_unused=True)
    tensors = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    names = [*(f"gradient of {n}" for n in named), *(f"gradient of leaf {i}" for i in range(9))]
    for name, gradient in zip(names, gradients, strict=False):
        if gradient is not None:
            tensors[name] = gradient
    return tensors


def in_float64(module: torch.nn.Module) -> Any:
    return copy.deepcopy(module).double()


def assert_within(got: Answers, own: Answers, truth: Answers) -> None:
    """Assert that ``got`` has every tensor of ``truth``, within the tolerance by torch's results ``own``."""
    assert set(got) == set(own) == set(truth)
    too_far = {}
    for name, want in truth.items():
        assert got[name].dtype == own[name].dtype and got[name].shape == own[name].shape, name
        baseline = [tolerance.measure(own[name], want)]
        allowed = tolerance.bound(
            Tolerance(),
            got[name].dtype,
            tolerance.rms(want),
            baseline,
            tolerance.participants(want),
        )
        error = tolerance.measure(got[name], want, allowed)
        if error.misplaced or allowed.share(error) > 1.0:
            too_far[name] = allowed.share(error)
    assert not too_far
