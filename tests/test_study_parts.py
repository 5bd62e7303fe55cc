"""The MLP study's parts: costs are what PyTorch moves, fits find again what was planted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from study_toys import FAST, noisy
from weft.core import WeftError
from weft.workbench.study import cost, fit
from weft.workbench.study.cost import Shape
from weft.workbench.study.model import Trainer, draw

SHAPES = st.builds(
    Shape, batch=st.integers(2, 9), depth=st.integers(1, 4), width=st.integers(2, 24)
)


class Bytes(TorchDispatchMode):
    """Counts what each operator that moves data reads and writes, as PyTorch runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        named = function.name()
        if not function.is_view and not named.startswith("profiler"):
            self.read += _size((args, kwargs))
            self.written += _size(found)
            if "_fused_adamw_" in named:  # in place: weights and two moments, not the gradients
                self.written += sum(_size(args[i]) for i in (0, 2, 3))
        return found


def _size(values: Any) -> int:
    """Bytes of the tensors that hold more than a number."""
    found = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.dim())
    return sum(t.numel() * t.element_size() for t in found)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, phase=st.sampled_from(cost.PHASES), dtype=st.sampled_from(["fp32", "bf16"]))
def test_cost_is_what_pytorch_runs(shape: Shape, phase: str, dtype: str) -> None:
    shape = replace(shape, dtype=dtype)
    trainer = Trainer(shape.depth + 1, shape.width, dtype, "cpu")  # one layer more than is used
    x, target = draw(shape.batch, shape.width, dtype, "cpu")
    calls = {
        "forward": lambda: trainer.forward(x, shape.depth),
        "step": lambda: trainer.step(x, target, shape.depth),
    }
    calls[phase]()  # the optimizer makes its moments at the first step
    with Bytes() as moved, FlopCounterMode(display=False) as counted:
        calls[phase]()
    expected = cost.total(shape, phase)
    assert counted.get_total_flops() == expected.flops
    assert (moved.read, moved.written) == (expected.read, expected.written)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(8, 8192),
    depth=st.integers(1, 40),
    phase=st.sampled_from(cost.PHASES),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_the_turn_is_the_first_batch_that_arithmetic_bounds(
    width: int, depth: int, phase: str, dtype: str
) -> None:
    shape = Shape(batch=1, depth=depth, width=width, dtype=dtype)
    at = cost.turning_batch(shape, phase, FAST)
    if at is None:
        by_bytes, by_flops = cost.times(replace(shape, batch=cost.MOST), phase, FAST)
        assert by_flops < by_bytes
        return
    by_bytes, by_flops = cost.times(replace(shape, batch=at), phase, FAST)
    assert by_flops >= by_bytes
    if at > 1:
        by_bytes, by_flops = cost.times(replace(shape, batch=at - 1), phase, FAST)
        assert by_flops < by_bytes
    # A memory twice as fast turns sooner; no floor is under the larger of the two times.
    wider = replace(FAST, copy=2 * FAST.copy, read=2 * FAST.read, fill=2 * FAST.fill)
    assert (cost.turning_batch(shape, phase, wider) or 0) <= at
    limit = cost.floor(replace(shape, batch=at), phase, FAST)
    assert limit >= 0.98 * max(by_bytes, by_flops)  # bandwidths of the parts' mixes differ a little


def test_costs_refuse_what_they_do_not_know() -> None:
    shape = Shape(batch=1, depth=1, width=8)
    for wrong in (
        lambda: Shape(batch=0, depth=1, width=8),
        lambda: Shape(batch=1, depth=1, width=8, dtype="fp8"),
        lambda: cost.parts(shape, "backward"),
        lambda: cost.floor(shape, "step", replace(FAST, matrix={"bf16": 1e12})),
    ):
        with pytest.raises(WeftError):
            wrong()


# Fits


def test_a_line_and_a_power_are_found_again() -> None:
    xs = [1.0, 2.0, 4.0, 8.0, 16.0]
    line = fit.line(xs, noisy([30 + 7 * x for x in xs]))
    assert line.fixed_interval[0] < 30 < line.fixed_interval[1]
    assert line.each_interval[0] < 7 < line.each_interval[1] and line.each == pytest.approx(7, 0.05)
    exact = fit.line(xs, [30 + 7 * x for x in xs])
    assert (exact.fixed, exact.each) == (pytest.approx(30), pytest.approx(7))
    power = fit.power(xs, noisy([0.3 * x**1.9 for x in xs]))
    assert power.interval[0] < 1.9 < power.interval[1] and power.slope == pytest.approx(1.9, 0.02)
    # A 95 % interval from few points misses now and then, and no oftener.
    rng, missed = np.random.default_rng(3), 0
    for _ in range(300):
        found = fit.power(xs, [x**2 * math.exp(0.05 * rng.standard_normal()) for x in xs])
        missed += not found.interval[0] < 2 < found.interval[1]
    assert 4 <= missed <= 30


@pytest.mark.parametrize("place", [12.0, 70.0, 300.0])
def test_a_turn_is_found_where_it_was_planted(place: float) -> None:
    xs = [float(2**i) for i in range(12)]
    turn = fit.turn(xs, noisy([5 * (max(x, place) / place) for x in xs]))
    assert turn.turns and turn.at == pytest.approx(place, 0.1)
    assert turn.interval[0] <= place * 1.05 and turn.interval[1] >= place * 0.95
    assert turn.below == pytest.approx(0, abs=0.05) and turn.above == pytest.approx(1, abs=0.05)
    steeper = fit.turn(xs, [5 * x**0.5 * max(1, x / place) for x in xs])
    assert (steeper.below, steeper.above) == (
        pytest.approx(0.5, abs=0.02),
        pytest.approx(1.5, 0.02),
    )


def test_what_does_not_turn_has_no_turn() -> None:
    xs = [float(2**i) for i in range(10)]
    assert not fit.turn(xs, [3 * x for x in xs]).turns
    assert not fit.turn(xs, noisy([3 * x**0.5 for x in xs], 0.05)).turns
    assert not fit.turn(xs, [min(x, 30.0) for x in xs]).turns  # the other way round
    # One odd time among five, as a busy machine gave them: it bends, and anywhere as well.
    assert not fit.turn([1, 4, 16, 64, 256], [21.9, 10.6, 22.4, 21.8, 21.6]).turns


def test_fits_refuse_too_few_and_unordered_points() -> None:
    for wrong in (
        lambda: fit.line([1, 2], [1, 2]),
        lambda: fit.turn([1, 2, 3, 4], [1, 2, 3, 4]),
        lambda: fit.power([1, 3, 2], [1, 2, 3]),
        lambda: fit.line([1, 2, 3], [1, 0, 3]),
    ):
        with pytest.raises(WeftError):
            wrong()
