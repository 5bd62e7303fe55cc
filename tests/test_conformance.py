"""Conformance: every operator x case x direction x implementation of the registry passes the check.

What cannot run here is skipped with its reason, and the run's summary lists each. Two kinds of
implementation are held to fewer cases, since each costs seconds: see :func:`_too_slow`. On a CPU
the same call is made thirteen times at one case of each dtype, and twice at the others.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from interpreting import asked_twice
from weft import backends
from weft.core import BACKWARD, FORWARD, Case, Implementation, Support, registry
from weft.core.record import PASS, UNSUPPORTED
from weft.workbench.check import SEEDS, check
from weft.workbench.oracle import Oracle, fresh_seeds

# numba.cuda's simulator takes a thread at a time, Triton's interpreter a program: elements up to
# which they are asked to.
SIMULATED_ELEMENTS = 300
INTERPRETED_ELEMENTS = {FORWARD: 3200, BACKWARD: 800}
LARGE = {"cpu": 1 << 18, "cuda": 1 << 28}  # elements, from where two seeds must do
MANY = 1 << 22
# Whose empty and transposed cases `compile` compiles on a CPU, too; the other operators' would show
# the same of Inductor, at four seconds a case.
STRIDED = "softmax"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small cases on one core: waking the others costs ten times the work where they are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _points(device: str) -> Iterator[object]:
    for name in registry.operator_names():
        operator = registry.operator(name)
        cases = [c for c in operator.cases if {"check", "edge"} & c.tags and device in c.devices]
        for case in cases:
            for direction in operator.directions:
                for one in registry.implementation_names(name):
                    values = (name, case.name, direction, one)
                    yield pytest.param(*values, id="-".join((name, case.name, direction, one)))


@lru_cache(maxsize=2)
def _oracle(name: str, case_name: str, direction: str, device: str, n_seeds: int) -> Oracle:
    operator = registry.operator(name)
    case = operator.case(case_name)
    return Oracle(operator, case, direction, device, fresh_seeds(n_seeds))


@lru_cache
def _first_of_each_dtype(name: str, device: str) -> dict[str, str]:
    first: dict[str, str] = {}
    for case in registry.operator(name).select("check", device):
        first.setdefault(case.dtype, case.name)
    return first


@lru_cache
def _smallest(name: str) -> str:
    """The smallest case in float32, of rows of more than one element, and no empty one."""
    known = [c for c in registry.operator(name).cases if c.dtype == "float32" and _numel(c)]
    long = [c for c in known if all(not i.shape or i.shape[-1] > 1 for i in c.inputs)]
    sized = sorted((sum(i.numel for i in c.inputs), c.name) for c in long)
    return next(c for elements, c in sized if elements > 1)


def _numel(case: Case) -> int:
    return min(i.numel for i in case.inputs)


def _too_slow(
    one: Implementation, case: Case, support: Support, device: str, direction: str
) -> str:
    """Why a case is left to ``weft check``, or an empty string."""
    first = case.name in _first_of_each_dtype(one.operator, device).values()
    if one.backend == "compile":
        empty = _numel(case) == 0 and case.dtype == "float32"
        if device == "cpu" and case.dtype != "float32":
            return "compile compiles anew for each case: on a CPU float32, all in `weft check`"
        some = one.operator == STRIDED or device != "cpu"
        if not some and direction == FORWARD and registry.operator(one.operator).differentiable:
            return "compile compiles both directions for a gradient: that here, all in `weft check`"
        if not (first or (some and (empty or "transposed" in case.layouts))):
            return "compile compiles anew for each case; one a dtype here, all in `weft check`"
    if not support.timed and case.dtype == "float16" and not first:
        return "interpreted as float32 is: one case in float16 here, all in `weft check`"
    elements = max(i.numel for i in case.inputs)
    if device == "cpu" and direction == BACKWARD and elements > MANY:
        return "gradients of millions of elements take a CPU half a minute: left to `weft check`"
    if "simulator" in support.reason and elements > SIMULATED_ELEMENTS:
        return "numba's simulator takes a thread at a time: large cases are left to `weft check`"
    if (
        "simulator" in support.reason
        and direction == BACKWARD
        and case.name != _smallest(one.operator)
    ):
        return "numba's simulator starts a thousand threads: one gradient here, all in `weft check`"
    if not support.timed and not first and elements > INTERPRETED_ELEMENTS[direction]:
        return "interpreted a program at a time: large cases are left to `weft check`"
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """One worker at a time: two cases of 2^31 elements do not fit on a card together."""
    with (Path(tempfile.gettempdir()) / "weft-large-cases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _oracle.cache_clear()
            torch.cuda.empty_cache()


def _check(name: str, case_name: str, direction: str, way: str, device: str) -> None:
    operator, one = registry.operator(name), registry.implementation(name, way)
    case = operator.case(case_name)
    support = backends.support(one, case, device, direction)
    if not support:
        pytest.skip(support.reason)
    if reason := _too_slow(one, case, support, device, direction):
        pytest.skip(reason)
    large = max(i.numel for i in case.inputs) > LARGE[device]
    with _alone() if large and device == "cuda" else nullcontext():
        seeds = 1 if not support.timed else 2 if large else SEEDS  # what is interpreted takes long
        oracle = _oracle(name, case_name, direction, device, seeds)
        first = case.name in _first_of_each_dtype(name, device).values()
        with asked_twice(not support.timed or (device == "cpu" and not first)):
            verdict = check(operator, one, case, direction, device, oracle=oracle)
    if verdict.status == UNSUPPORTED:
        pytest.skip(verdict.reason)
    if "AcceleratorError" in verdict.reason and "PYTEST_XDIST_WORKER" in os.environ:
        # What broke the device's context fails all that this process runs after it.
        print(f"{name} {case_name} {direction} {way}: {verdict.reason}", file=sys.__stderr__)
        os._exit(1)  # xdist starts another worker
    assert verdict.status == PASS, f"{verdict.reason} (seeds {verdict.seeds})"


@pytest.mark.parametrize(("name", "case_name", "direction", "way"), list(_points("cpu")))
def test_conforms_on_a_cpu(name: str, case_name: str, direction: str, way: str) -> None:
    _check(name, case_name, direction, way, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case_name", "direction", "way"), list(_points("cuda")))
def test_conforms_on_a_gpu(name: str, case_name: str, direction: str, way: str) -> None:
    _check(name, case_name, direction, way, "cuda")
