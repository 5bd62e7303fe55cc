"""Plateaus of synthetic curves with ramps and noise."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.lab.hierarchy.curves import KIB, MIB, sizes
from weft.lab.hierarchy.plateaus import find, sweep

Curve = Callable[[int], float]


@st.composite
def staircases(draw: st.DrawFn) -> tuple[list[int], Curve, list[int]]:
    """Generate capacities, a noisy cost over sizes with a ramp after each, and expected sizes."""
    count = draw(st.integers(1, 3))
    capacities = [draw(st.integers(16 * KIB, 64 * KIB))]
    costs = [draw(st.floats(1, 50))]
    for _ in range(count - 1):
        capacities.append(round(capacities[-1] * 2 ** draw(st.floats(2.5, 6))))
    for _ in range(count):
        costs.append(costs[-1] * draw(st.floats(1.7, 6)))
    ramp = draw(st.floats(0.01, 0.4))  # doublings
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def cost(size: int) -> float:
        value = costs[0]
        for end, low, high in zip(capacities, costs, costs[1:], strict=False):
            if size > end:
                value = low + (high - low) * min(1.0, math.log2(size / end) / ramp)
        return value * math.exp(float(np.clip(random.normal(0, 0.03), -0.09, 0.09)))

    expected = [round(c * 2 ** draw(st.floats(-0.3, 0.3))) for c in capacities]
    return capacities, cost, expected


@settings(max_examples=40)
@given(staircases())
def test_breaks_are_within_ten_percent_of_the_capacities(
    case: tuple[list[int], Curve, list[int]],
) -> None:
    capacities, cost, expected = case
    planned = sizes(4 * KIB, capacities[-1] * 8, expected, 128)
    plateaus, breaks = find(*sweep(cost, planned, 128))
    assert len(plateaus) == len(capacities) + 1
    for capacity, edge in zip(capacities, breaks, strict=True):
        assert abs(edge.leaves / capacity - 1) < 0.1
        assert 0.85 < edge.holds / capacity < 1.25


def test_curves_without_steps_have_no_break() -> None:
    at = sizes(4 * KIB, 4 * MIB, (), 128)
    plateaus, breaks = find(at, [7.0] * len(at))
    assert [p.cost for p in plateaus] == [7.0] and breaks == []
    assert (plateaus[0].first, plateaus[0].last) == (at[0], at[-1])
    assert find(at, [float(s) for s in at]) == ([], [])  # a ramp all along
    for wrong in ([1.0], [0.0] * len(at)):
        with pytest.raises(ValueError, match="as many"):
            find(at, wrong)


def test_random_replacement_still_gives_the_capacity() -> None:
    """Beyond its capacity such a cache keeps a share of the lines: the plateau ends at the capacity, and
    the bytes in the cache never exceed it."""
    capacity = 256 * KIB
    planned = sizes(4 * KIB, 64 * MIB, [200 * KIB], 128)
    swept = sweep(lambda n: 30 + 200 * (1 - min(1.0, capacity / n) ** 2), planned, 128)
    (edge,) = find(*swept)[1]
    assert abs(edge.leaves / capacity - 1) < 0.1 and abs(edge.holds / capacity - 1) < 0.05


def test_an_l2_of_two_halves_with_copies_breaks_at_half_and_full_size() -> None:
    """Simulate the L2 of docs/speed/machine.md for one SM: lines of the far half are copied into the near
    one and evict its own lines; both halves evict the oldest line."""
    half_lines = 1024

    def mean_cost(nbytes: int) -> float:
        random = np.random.default_rng(nbytes)
        order = random.permutation(nbytes // 128).tolist()
        from_far = (random.random(nbytes // 128) < 0.5).tolist()
        near: OrderedDict[int, None] = OrderedDict()
        far: OrderedDict[int, None] = OrderedDict()
        total = 0
        for _ in range(2):  # the second round is the steady state
            total = 0
            for line in order:
                in_far = from_far[line] and line in far
                total += 200 if line in near else 300 if in_far else 800
                for half in (near, far) if from_far[line] and line not in near else (near,):
                    half[line] = None
                    half.move_to_end(line)
                    if len(half) > half_lines:
                        half.popitem(last=False)
        return total / len(order)

    whole = 2 * half_lines * 128
    planned = sizes(8 * KIB, 4 * whole, [whole // 2, whole], 128)
    plateaus, breaks = find(*sweep(mean_cost, planned, 128))
    assert len(plateaus) == 3 and plateaus[0].cost == 200 and plateaus[2].cost == 800
    for edge, expected in zip(breaks, (whole / 2, whole), strict=True):
        assert abs(edge.leaves / expected - 1) < 0.1 and abs(edge.holds / expected - 1) < 0.1


def test_sizes_are_dense_near_an_expected_break() -> None:
    planned = sizes(4 * KIB, 1 << 30, [256 * KIB, 60 * MIB], 128)
    assert planned[0] == 4 * KIB and planned[-1] == 1 << 30 and planned == sorted(set(planned))
    assert all(s % 128 == 0 for s in planned)
    for known in (256 * KIB, 60 * MIB):
        assert known in planned
        assert sum(known / 2**0.5 <= s < known * 2**0.5 for s in planned) >= 8
    assert len(planned) < 80
