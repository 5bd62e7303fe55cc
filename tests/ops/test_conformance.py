"""Conformance: every operator x case x direction x implementation of the registry passes the check.

Points that cannot run here are skipped with their reason, and the run's summary lists each. On a CPU a
run takes a random sixth of the points; pytest's header shows the seed, and ``WEFT_SAMPLE_SEED`` repeats it.
The sample has a point of each operator, implementation, direction and dtype. For triton, and for either eager
or torch, it also has a point of each layout, kind of values and kind of size. Costly points are fewer:
``compile`` runs for a fifth of the operators, and the interpreted kernels of ``DEAR`` operators run at a
sixth of their cases besides the first. A GPU and ``--exhaustive`` run all points.

Two kinds of implementation have fewer cases, since each case takes seconds: see :func:`_too_slow`. On a CPU
the check makes the same call thirteen times at one case of each dtype, and twice at the others.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache

import pytest
import torch

from helpers import sampling
from helpers.alone import is_large, only_large_case
from helpers.interpreting import asked_twice
from helpers.margins import SHARE
from weft import backends
from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator, Support, registry
from weft.core.record import PASS, UNSUPPORTED
from weft.workbench.calls.case_kinds import kinds
from weft.workbench.calls.memory import is_shortage
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.check import SEEDS, check
from weft.workbench.check.oracle import Oracle

# numba.cuda's simulator runs one thread at a time, Triton's interpreter one program: the numbers of
# elements up to which they are run.
SIMULATED_ELEMENTS = 300
INTERPRETED_ELEMENTS = {FORWARD: 3200, BACKWARD: 800}
LARGE_ON_A_CPU = 1 << 18  # elements from which two seeds are enough
MANY = 1 << 22
# Operators with empty and transposed cases that `compile` also compiles on a CPU. Those of the other
# operators would test the same part of Inductor, at four seconds a case.
STRIDED = "softmax"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run small cases on one core: on a busy machine, waking threads takes ten times as long as the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Point = tuple[str, str, str, str]  # operator, case, direction, implementation


def _points(device: str) -> list[Point]:
    points = []
    for name in registry.operator_names():
        operator = registry.operator(name)
        cases = [c for c in operator.cases if {"check", "edge"} & c.tags and device in c.devices]
        for case in cases:
            for direction in operator.directions:
                for implementation in registry.implementation_names(name):
                    points.append((name, case.name, direction, implementation))
    return points


COMPILED_IN = 5  # an operator is compiled by one of so many seeds
DEAR = ("sort", "sort_keys")  # operators whose kernels take Triton's interpreter over a second a case
DEAR_IN = 6  # such a case is interpreted by one of so many seeds
SAMPLED_SHARE = 0.05  # share of all points, before the additional ones that combinations and kinds need


def _kinds(case: Case, operator: Operator) -> Iterator[str]:
    """Yield the kinds of edge case that a case covers: its layouts and values, and its kinds of size."""
    yield from (f"layout {i.layout}" for i in case.inputs)
    yield from (f"values {i.values}" for i in case.inputs)
    yield from kinds(case, operator)


def _is_left_to_other_seeds(point: Point, seed: int) -> bool:
    """Return True for points that take seconds, except at one of several seeds.

    These are ``compile`` at most operators, and three of four interpreted points of the dear operators. Their
    first case in float32 is never left out, so that each operator, implementation and direction has a point.
    """
    name, case, _, implementation = point
    if implementation == "compile":
        return (registry.operator_names().index(name) - seed) % COMPILED_IN != 0
    if name not in DEAR or implementation != "triton" or case == _first_of_each_dtype(name, "cpu")["float32"]:
        return False
    return ([c.name for c in registry.operator(name).cases].index(case) - seed) % DEAR_IN != 0


@cache
def _keys(point: Point, seed: int) -> frozenset[tuple[str, ...]]:
    """Return the combination that a point covers, and the kinds of edge case where it certainly runs here."""
    if _is_left_to_other_seeds(point, seed):
        return frozenset()
    name, case_name, direction, implementation = point
    operator = registry.operator(name)
    case = operator.case(case_name)
    combination = (name, direction, implementation, case.dtype)
    # Seeds alternate between the two implementations that have no kernel of Weft's.
    if implementation not in ("triton", ("eager", "torch")[seed % 2]):
        return frozenset({combination})
    edge_kinds = {(name, direction, implementation, kind) for kind in _kinds(case, operator)}
    return frozenset(edge_kinds | {combination})


def _all_keys(points: Iterable[Point], seed: int) -> set[tuple[str, ...]]:
    return set().union(*(_keys(p, seed) for p in points))


def sample(points: list[Point], seed: int) -> set[Point]:
    """Return a random twentieth of the points, and more until each combination and kind of edge is covered.

    The first case of a dtype covers a combination, since it is never left out as too slow.
    """
    shuffled = random.Random(seed).sample(points, len(points))
    chosen = set(shuffled[: round(SAMPLED_SHARE * len(points))])
    chosen |= {p for p in points if p[1] in _first_of_each_dtype(p[0], "cpu").values()}
    chosen = {p for p in chosen if not _is_left_to_other_seeds(p, seed)}
    covered = _all_keys(chosen, seed)
    for point in shuffled:
        if keys := _keys(point, seed) - covered:
            chosen.add(point)
            covered |= keys
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_name" not in metafunc.fixturenames:
        return
    device = "cuda" if metafunc.definition.get_closest_marker("gpu") else "cpu"
    points = _points(device)
    if device == "cpu" and not metafunc.config.getoption("--exhaustive"):
        chosen = sample(points, sampling.seed())
        points = [p for p in points if p in chosen]
    parameters = [pytest.param(*p, id="-".join(p), marks=_marks(p, device)) for p in points]
    metafunc.parametrize(("name", "case_name", "direction", "impl"), parameters)


def _marks(point: Point, device: str) -> list[pytest.MarkDecorator]:
    operator = registry.operator(point[0])
    large = device == "cuda" and is_large(operator, operator.case(point[1]))
    return [pytest.mark.large] if large else []


def test_the_sample_meets_every_combination_and_kind() -> None:
    points, seed = _points("cpu"), sampling.seed()
    chosen = sample(points, seed)
    assert chosen == sample(points, seed) and chosen != sample(points, seed + 1)
    assert _all_keys(chosen, seed) == _all_keys(points, seed)
    # Each implementation has its operator's first case in each direction at every seed, except ``compile``.
    first = {
        name: next(iter(_first_of_each_dtype(name, "cpu").values())) for name in registry.operator_names()
    }
    in_each_run = {p for p in points if p[1] == first[p[0]] and p[3] != "compile"}
    assert in_each_run <= chosen
    others = {(p[0], p[2], p[3]) for p in points if p[3] != "compile"}
    assert {(p[0], p[2], p[3]) for p in in_each_run} == others
    # Other seeds cover the rest: one of five seeds each combination, one of two each kind.
    every = [_all_keys(points, s) for s in range(2 * COMPILED_IN)]
    compiled = {(p[0], p[2], p[3]) for p in points if p[3] == "compile"}
    assert {key[:3] for keys in every for key in keys if key[2] == "compile"} == compiled
    sliced = [{key[2] for key in keys if key[3] == "layout sliced"} for keys in every]
    assert sliced[:2] == [{"eager", "triton"}, {"torch", "triton"}]
    dear = [p for p in points if p[0] in DEAR and p[3] == "triton"]
    assert all(any(not _is_left_to_other_seeds(p, s) for s in range(DEAR_IN)) for p in dear)
    assert all(2 * sum(_is_left_to_other_seeds(p, s) for p in dear) > len(dear) for s in range(DEAR_IN))
    assert len(chosen) < 0.5 * len(points)


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
    """Return the smallest float32 case that is not empty and has rows of more than one element."""
    known = [c for c in registry.operator(name).cases if c.dtype == "float32" and _numel(c)]
    long = [c for c in known if all(not i.shape or i.shape[-1] > 1 for i in c.inputs)]
    sized = sorted((sum(i.numel for i in c.inputs), c.name) for c in long)
    return next(c for elements, c in sized if elements > 1)


def _numel(case: Case) -> int:
    return min(i.numel for i in case.inputs)


def _too_slow(one: Implementation, case: Case, support: Support, device: str, direction: str) -> str:
    """Return the reason to leave a case to ``weft check``, or an empty string."""
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
    if "simulator" in support.reason and direction == BACKWARD and case.name != _smallest(one.operator):
        return "numba's simulator starts a thousand threads: one gradient here, all in `weft check`"
    if not support.timed and not first and elements > INTERPRETED_ELEMENTS[direction]:
        return "interpreted a program at a time: large cases are left to `weft check`"
    return ""


@contextmanager
def _only_large_case(point: tuple[str, str, str]) -> Iterator[None]:
    """Hold the lock of large cases, and drop the references of other points, which are as large."""
    with only_large_case():
        if _latest_large and _latest_large != [point]:
            _oracle.cache_clear()
        _latest_large[:] = [point]
        try:
            yield
        finally:
            # In a process of its own, the next implementation at this point shares the reference.
            if "PYTEST_XDIST_WORKER" in os.environ:
                _oracle.cache_clear()
            torch.cuda.empty_cache()


_latest_large: list[tuple[str, str, str]] = []


def _check(name: str, case_name: str, direction: str, impl: str, device: str) -> float:
    """Check one point; return the share of its tolerance that it used."""
    operator, one = registry.operator(name), registry.implementation(name, impl)
    case = operator.case(case_name)
    support = backends.support(one, case, device, direction)
    if not support:
        pytest.skip(support.reason)
    if reason := _too_slow(one, case, support, device, direction):
        pytest.skip(reason)
    on_gpu = device == "cuda"
    large = is_large(operator, case) if on_gpu else max(i.numel for i in case.inputs) > LARGE_ON_A_CPU
    with _only_large_case((name, case_name, direction)) if large and on_gpu else nullcontext():
        seeds = 1 if not support.timed else 2 if large else SEEDS  # interpreted kernels are slow
        oracle = _oracle(name, case_name, direction, device, seeds)
        first = case.name in _first_of_each_dtype(name, device).values()
        with asked_twice(not support.timed or (device == "cpu" and not first)):
            verdict = check(operator, one, case, direction, device, oracle=oracle)
            if on_gpu and not large and is_shortage(verdict.reason):
                with only_large_case():  # another process's large case had the memory
                    verdict = check(operator, one, case, direction, device, oracle=oracle)
    if verdict.status == UNSUPPORTED:
        pytest.skip(verdict.reason)
    if "AcceleratorError" in verdict.reason and "PYTEST_XDIST_WORKER" in os.environ:
        # After an error that broke the device's context, every later test of this process would fail.
        print(f"{name} {case_name} {direction} {impl}: {verdict.reason}", file=sys.__stderr__)
        os._exit(1)  # xdist starts another worker
    assert verdict.status == PASS, f"{verdict.reason} (seeds {verdict.seeds})"
    return verdict.tolerance_used or 0.0


Recorder = Callable[[str, object], None]  # pytest's record_property


def test_conforms_on_a_cpu(
    name: str, case_name: str, direction: str, impl: str, record_property: Recorder
) -> None:
    record_property(SHARE, _check(name, case_name, direction, impl, "cpu"))


@pytest.mark.gpu
def test_conforms_on_a_gpu(
    name: str, case_name: str, direction: str, impl: str, record_property: Recorder
) -> None:
    record_property(SHARE, _check(name, case_name, direction, impl, "cuda"))
