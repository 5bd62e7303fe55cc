"""The MLP study's cost model against PyTorch's own traffic, and its fits against known curves."""

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

from helpers.study_toys import FAST, noisy
from weft.core import WeftError
from weft.lab.study import fit, workload
from weft.lab.study.measure import Trainer, random_batch
from weft.lab.study.workload import Shape

SHAPES = st.builds(Shape, batch=st.integers(2, 9), depth=st.integers(1, 4), width=st.integers(2, 24))


class Bytes(TorchDispatchMode):
    """Count the bytes that each operator reads and writes, as PyTorch runs it; views count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        name = function.name()
        if not function.is_view and not name.startswith("profiler"):
            self.read += _size((args, kwargs))
            self.written += _size(outputs)
            if "_fused_adamw_" in name:  # in place: weights and two moments, not the gradients
                self.written += sum(_size(args[i]) for i in (0, 2, 3))
        return outputs


def _size(values: Any) -> int:
    """Return the bytes of the tensors that are no scalars."""
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.dim())
    return sum(t.numel() * t.element_size() for t in tensors)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, phase=st.sampled_from(workload.PHASES), dtype=st.sampled_from(["fp32", "bf16"]))
def test_cost_equals_what_pytorch_reads_writes_and_computes(shape: Shape, phase: str, dtype: str) -> None:
    shape = replace(shape, dtype=dtype)
    trainer = Trainer(shape.depth + 1, shape.width, dtype, "cpu")  # one layer more than is used
    x, target = random_batch(shape.batch, shape.width, dtype, "cpu")
    calls = {
        "forward": lambda: trainer.forward(x, shape.depth),
        "step": lambda: trainer.step(x, target, shape.depth),
    }
    calls[phase]()  # the optimizer allocates its moments at the first step
    with Bytes() as traffic, FlopCounterMode(display=False) as counter:
        calls[phase]()
    expected = workload.total_cost(shape, phase)
    assert counter.get_total_flops() == expected.flops
    assert (traffic.read, traffic.written) == (expected.read, expected.written)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(8, 8192),
    depth=st.integers(1, 40),
    phase=st.sampled_from(workload.PHASES),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_transition_batch_is_the_first_compute_bound_one(
    width: int, depth: int, phase: str, dtype: str
) -> None:
    shape = Shape(batch=1, depth=depth, width=width, dtype=dtype)
    at = workload.transition_batch(shape, phase, FAST)
    if at is None:
        memory, compute = workload.memory_and_compute_time(
            replace(shape, batch=workload.MAX_BATCH), phase, FAST
        )
        assert compute < memory
        return
    memory, compute = workload.memory_and_compute_time(replace(shape, batch=at), phase, FAST)
    assert compute >= memory
    if at > 1:
        memory, compute = workload.memory_and_compute_time(replace(shape, batch=at - 1), phase, FAST)
        assert compute < memory
    # A memory twice as fast moves the transition to a smaller batch. No floor is under the larger time.
    wider = replace(FAST, copy=2 * FAST.copy, read=2 * FAST.read, fill=2 * FAST.fill)
    assert (workload.transition_batch(shape, phase, wider) or 0) <= at
    limit = workload.floor(replace(shape, batch=at), phase, FAST)
    assert limit >= 0.98 * max(
        memory, compute
    )  # the operators' mixes of reads and writes have slightly different bandwidths


def test_costs_refuse_invalid_arguments() -> None:
    shape = Shape(batch=1, depth=1, width=8)
    for invalid in (
        lambda: Shape(batch=0, depth=1, width=8),
        lambda: Shape(batch=1, depth=1, width=8, dtype="fp8"),
        lambda: workload.operator_costs(shape, "backward"),
        lambda: workload.floor(shape, "step", replace(FAST, matrix={"bf16": 1e12})),
    ):
        with pytest.raises(WeftError):
            invalid()


# Fits


def test_fits_recover_a_line_and_a_power() -> None:
    xs = [1.0, 2.0, 4.0, 8.0, 16.0]
    line = fit.line(xs, noisy([30 + 7 * x for x in xs]))
    assert line.fixed_interval[0] < 30 < line.fixed_interval[1]
    assert line.each_interval[0] < 7 < line.each_interval[1] and line.each == pytest.approx(7, 0.05)
    exact = fit.line(xs, [30 + 7 * x for x in xs])
    assert (exact.fixed, exact.each) == (pytest.approx(30), pytest.approx(7))
    power = fit.power(xs, noisy([0.3 * x**1.9 for x in xs]))
    assert power.interval[0] < 1.9 < power.interval[1] and power.slope == pytest.approx(1.9, 0.02)
    # A 95 % interval misses the true value in about 5 % of the fits: 15 of 300.
    rng, missed = np.random.default_rng(3), 0
    for _ in range(300):
        fitted = fit.power(xs, [x**2 * math.exp(0.05 * rng.standard_normal()) for x in xs])
        missed += not fitted.interval[0] < 2 < fitted.interval[1]
    assert 4 <= missed <= 30


@pytest.mark.parametrize("bend", [12.0, 70.0, 300.0])
def test_broken_power_recovers_the_break(bend: float) -> None:
    xs = [float(2**i) for i in range(12)]
    fitted = fit.broken_power(xs, noisy([5 * (max(x, bend) / bend) for x in xs]))
    assert fitted.significant and fitted.at == pytest.approx(bend, 0.1)
    assert fitted.interval[0] <= bend * 1.05 and fitted.interval[1] >= bend * 0.95
    assert fitted.below == pytest.approx(0, abs=0.05) and fitted.above == pytest.approx(1, abs=0.05)
    steeper = fit.broken_power(xs, [5 * x**0.5 * max(1, x / bend) for x in xs])
    assert (steeper.below, steeper.above) == (
        pytest.approx(0.5, abs=0.02),
        pytest.approx(1.5, 0.02),
    )


def test_curves_without_a_break_have_no_significant_one() -> None:
    xs = [float(2**i) for i in range(10)]
    assert not fit.broken_power(xs, [3 * x for x in xs]).significant
    assert not fit.broken_power(xs, noisy([3 * x**0.5 for x in xs], 0.05)).significant
    assert not fit.broken_power(xs, [min(x, 30.0) for x in xs]).significant  # the slope falls instead
    # One outlier among five times, as a busy machine gave them: a bend fits equally well anywhere.
    assert not fit.broken_power([1, 4, 16, 64, 256], [21.9, 10.6, 22.4, 21.8, 21.6]).significant


def test_fits_refuse_too_few_and_unordered_points() -> None:
    for invalid in (
        lambda: fit.line([1, 2], [1, 2]),
        lambda: fit.broken_power([1, 2, 3, 4], [1, 2, 3, 4]),
        lambda: fit.power([1, 3, 2], [1, 2, 3]),
        lambda: fit.line([1, 2, 3], [1, 0, 3]),
    ):
        with pytest.raises(WeftError):
            invalid()
