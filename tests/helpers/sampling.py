"""Random samples of tests that are too many for every run. The seed of a run decides the sample.

``@pytest.mark.sampled(3)`` runs three of a test's parameters, ``sampled(1, each=key)`` one of each group
that share ``key(**parameters)``. ``@pytest.mark.pooled(2, "stopped commands")`` runs two of all tests
with this pool, each with its own sample. A run with --exhaustive or on a machine with a GPU runs all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
REASON = "sampled: another part each run; all with --exhaustive or on a machine with a GPU"


def seed() -> int:
    """Return the seed of all samples of this run; pytest's header shows it."""
    return int(os.environ["WEFT_SAMPLE_SEED"])  # conftest.py sets it for all workers of a run


def runs_all() -> bool:
    """Return True if this run samples nothing; conftest.py sets the variable for all its processes."""
    return bool(os.environ.get("WEFT_SAMPLE_ALL"))


def sample(population: Sequence[T], count: int, name: str) -> list[T]:
    """Return ``count`` elements (all, if there are fewer) in their order. ``name`` keeps samples apart."""
    if runs_all():
        return list(population)
    generator = random.Random(f"{seed()}/{name}")
    chosen = generator.sample(range(len(population)), min(count, len(population)))
    return [population[i] for i in sorted(chosen)]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items that are not in the samples of this run, by the markers ``pooled`` and ``sampled``."""
    items = list(items)
    idle = _idle_tests(items)
    groups: dict[str, list[pytest.Item]] = {}  # by the name of the sample
    counts: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and not item.get_closest_marker("exhaustive"):
            name = _test(item)
            each: Callable[..., object] | None = marker.kwargs.get("each")
            if each is not None:
                name += f"/{each(**item.callspec.params)}"  # type: ignore[attr-defined]
            groups.setdefault(name, []).append(item)
            counts[name] = marker.args[0]
    chosen = {id(item) for name, group in groups.items() for item in sample(group, counts[name], name)}
    not_sampled = {id(item) for group in groups.values() for item in group} - chosen
    return [item for item in items if id(item) in not_sampled or _test(item) in idle]


def _test(item: pytest.Item) -> str:
    """Return the name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def _idle_tests(items: Iterable[pytest.Item]) -> set[str]:
    """Return the tests that this run leaves out of their pools."""
    pools: dict[str, dict[str, int]] = {}  # tests with the number that their markers give
    for item in items:
        marker = item.get_closest_marker("pooled")
        if marker and not item.get_closest_marker("exhaustive"):
            count, pool = marker.args
            pools.setdefault(pool, {})[_test(item)] = count
    idle: set[str] = set()
    for name, tests in pools.items():
        if len(set(tests.values())) > 1:
            raise pytest.UsageError(f"{name}: one pool has one number of tests, got {tests}")
        idle |= set(tests) - set(sample(list(tests), next(iter(tests.values())), name))
    return idle
