"""An example call of each operator of the registry: its smallest case with enough elements, in float32.

The calls come from the registry, so the tests also call an operator that is added to it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import Case, registry
from weft.workbench.calls import inputs as drawing

FEWEST = 32  # elements of the first input: fewer do not test rows, columns and vectors
OTHER_FLOATS = ("float16", "bfloat16", "float64")
# Parameters that are probabilities. With 0 and 1 an operator uses no random numbers.
PROBABILITIES = ("p", "dropout_p")
# Operators whose first input is a list: the nonzeros of a sparse matrix.
WITH_LISTS = ("spmv", "spmm")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # operator, arguments by position, by name


def assert_refused(call: Call) -> None:
    """Assert that the call raises a WeftError that states the expected and the actual value."""
    name, arguments, options = call
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **options)
    assert caught.value.expected and caught.value.got


@dataclass(frozen=True)
class Example:
    """Arguments of a call by name: ``inputs`` are tensors, ``params`` scalars; ``leaves`` take gradients."""

    inputs: dict[str, torch.Tensor]
    params: dict[str, Any]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [x for x in self.inputs.values() if x.requires_grad]


@cache
def example_case(name: str) -> Case:
    """Return an operator's smallest case that is float32, normal, contiguous, and run by torch and triton."""
    operator = registry.operator(name)
    implementations = [i for i in registry.implementations(name) if i.name in ("torch", "triton")]
    taken = [c for c in operator.cases if {"check", "edge"} & c.tags and "cpu" in c.devices]
    chosen = [
        c
        for c in taken
        if _is_plain(c, name in WITH_LISTS) and all(i.supports(c, "cpu") for i in implementations)
    ]
    assert chosen, f"{name} has no contiguous float32 case of normal values with {FEWEST} elements or more"
    return min(chosen, key=lambda c: sum(i.numel for i in c.inputs))


def _is_plain(case: Case, may_be_list: bool) -> bool:
    shape = case.inputs[0].shape
    return (
        not any(i.dtype in OTHER_FLOATS for i in case.inputs)
        and all(i.layout == "contiguous" and i.values == "normal" and i.numel for i in case.inputs)
        and (len(shape) > 1 or may_be_list)
        and min(shape[-2:]) > 1
        and case.inputs[0].numel >= FEWEST
        and not any(case.params.get(p) in (0.0, 1.0) for p in PROBABILITIES)
    )


def example(name: str, seed: int = 0) -> Example:
    """Return the arguments of ``weft.ops.NAME`` at the operator's example case, new tensors in each call."""
    operator, case = registry.operator(name), example_case(name)
    tensors = drawing.make(case, "cpu", seed)
    tensors_by_name = dict(zip((i.name for i in case.inputs), tensors, strict=True))
    arguments = operator.public_arguments({**tensors_by_name, **case.params})
    inspect.signature(getattr(ops, name)).bind(
        **arguments
    )  # otherwise the test shows the error that a user would get
    for key in set(operator.differentiable) & set(tensors_by_name):  # optional inputs may be absent
        tensors_by_name[key].requires_grad_()
    inputs = {key: value for key, value in arguments.items() if key in tensors_by_name}
    return Example(inputs, {key: value for key, value in arguments.items() if key not in tensors_by_name})


def differentiable_operators() -> list[str]:
    return [name for name in registry.operator_names() if registry.operator(name).differentiable]
