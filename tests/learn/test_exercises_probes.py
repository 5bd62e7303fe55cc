"""The graders' probes show a fault in every run: missing barriers, stray accesses, misread clocks."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.learn.candidate import Candidate
from weft.learn.exercise import find
from weft.learn.grade import grade
from weft.learn.grading import Refused, compare
from weft.learn.probes.fake_device import LAUNCH, SYNCHRONIZE, FakeDevice, FakeKernel
from weft.learn.probes.lockstep import python_function, run_in_lockstep
from weft.learn.probes.returned import function_returning
from weft.learn.probes.single import Single

cuda: Any = None  # a kernel's cuda, which the probe replaces


def kernel_from(function: Any) -> Any:
    """Return what @cuda.jit makes of a function, as far as the probe needs it."""
    return SimpleNamespace(py_func=function)


def shift_left(x, out):
    s = cuda.shared.array(8, np.dtype(np.float32))
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()
    out[t] = s[(t + 1) % cuda.blockDim.x]


def shift_left_without_barrier(x, out):
    s = cuda.shared.array(8, np.dtype(np.float32))
    t = cuda.threadIdx.x
    s[t] = x[t]
    out[t] = s[(t + 1) % cuda.blockDim.x]


def barrier_in_a_branch(x, out):
    if cuda.threadIdx.x < 2:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]


def past_the_end(x, out):
    out[cuda.grid(1) + 1] = x[cuda.grid(1)]


@pytest.mark.parametrize("descending", [False, True])
def test_lockstep_runs_a_right_kernel(descending: bool) -> None:
    x, out = np.arange(4, dtype=np.float32), np.full(4, np.nan, np.float32)
    run_in_lockstep(kernel_from(shift_left), (1,), (4,), (x, out), "a case", descending=descending)
    assert out.tolist() == [1, 2, 3, 0]


def test_lockstep_shows_a_missing_barrier_in_every_run() -> None:
    for _ in range(3):
        x, out = np.arange(4, dtype=np.float32), np.full(4, np.nan, np.float32)
        run_in_lockstep(kernel_from(shift_left_without_barrier), (1,), (4,), (x, out), "a case")
        # Thread 3 runs last, and alone finds what it reads: nobody has cleared shared memory for the others.
        assert np.isnan(out[:3]).all() and out[3] == 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [(barrier_in_a_branch, "others wait at a barrier"), (past_the_end, "thread 3 of block 0: IndexError")],
)
def test_lockstep_refuses(function: Any, reason: str) -> None:
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    with pytest.raises(Refused, match=reason):
        run_in_lockstep(kernel_from(function), (1,), (4,), (x, out), "a case")


def test_a_function_without_jit_is_no_kernel() -> None:
    with pytest.raises(Refused, match="no @cuda"):
        python_function(shift_left)


def test_single_rounds_each_operation_and_cannot_leave_float32() -> None:
    big, one = Single(2.0**24), Single(1.0)
    Single.operations = 0
    assert Single.exact((big + one) - big) == 0.0 and Single.operations == 2
    assert Single.exact(1 / Single(3.0)) == float(np.float32(1) / np.float32(3))
    assert abs(Single(-2.0)) > one and -one < 0 and one <= 1 and one >= 1.0
    with pytest.raises(Refused, match="float32 only"):
        math.fsum([one])
    assert Single.exact(np.float64(2.0**24) + one) == 2.0**24  # a float64 beside it is rounded too


def test_the_fake_clock_counts_what_a_real_one_would() -> None:
    device = FakeDevice(l2_bytes=0)
    buffer, kernel = device.allocate(1000), FakeKernel(device, 100.0)
    kernel(buffer)
    device.synchronize()
    start = device.now()
    for _ in range(3):
        kernel(buffer)
    assert device.now() - start == 3 * LAUNCH  # only the launches: the device is still at work
    device.synchronize()
    assert device.now() - start == LAUNCH + 3 * 100.0 + SYNCHRONIZE


def test_the_fake_cache_evicts_what_was_used_longest_ago() -> None:
    device = FakeDevice(l2_bytes=3000)
    a, b, c, d = (device.allocate(1000) for _ in range(4))
    assert [device.touch(x) for x in (b, c, d)] == [True, True, True]
    assert not device.touch(a) and not device.touch(b) and device.touch(d)


def test_a_result_of_the_wrong_type_is_a_reason() -> None:
    def candidate(result: Any) -> Any:
        return SimpleNamespace(function=lambda name: lambda *arguments: result)

    assert function_returning("a pair of numbers", candidate((1, 2.5)), "f")() == (1, 2.5)
    for kind, result in (("a number", None), ("an integer", 1.5), ("a pair of numbers", (1,))):
        with pytest.raises(Refused, match=f"expected {kind}, got"):
            function_returning(kind, candidate(result), "f")()


def test_where_infinity_is_expected_only_infinity_passes() -> None:
    expected = np.array([-np.inf, 1.0])
    compare("equal", np.array([-np.inf, 1.0]), expected, tolerance=1e-5)
    for wrong in (0.0, np.inf, np.nan, -1e300):
        with pytest.raises(Refused, match="element 0"):
            compare("different", np.array([wrong, 1.0]), expected, tolerance=1e-5)


# exercise, replacement in the answer, the reason: mistakes whose results are right in Triton's interpreter
HIDDEN = {
    "a load without a mask": (
        "layer_norm_forward",
        "w = tl.load(w_ptr + columns, mask=inside)",
        "w = tl.load(w_ptr + columns)",
        "element 45 of w, which has the elements 0 to 44",
    ),
    "lanes without a value": (
        "sum_long_rows",
        "mask=columns < n_cols, other=0.0",
        "mask=columns < n_cols",
        "got nan",
    ),
    "a maximum of lanes without a value": (
        "mask_other",
        'mask=inside, other=float("-inf")',
        "mask=inside",
        "got inf",
    ),
    "an input that is changed": (
        "softmax_row",
        "    e = tl.exp(",
        "    tl.store(x_ptr + row * x_stride + columns, x + 1, mask=inside)\n    e = tl.exp(",
        "changed its input x",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HIDDEN)
def test_the_watched_interpreter_refuses(name: str, tmp_path: Path) -> None:
    identifier, old, new, reason = HIDDEN[name]
    exercise = find(identifier)
    text = exercise.source_file("answer").read_text()
    assert old in text
    path = tmp_path / "solution.py"
    path.write_text(text.replace(old, new))
    result = grade(exercise, path)
    assert not result.passed and reason in result.reason, result.reason


def test_the_listings_of_the_learner_and_of_the_grader_are_one(tmp_path: Path) -> None:
    for identifier in ("read_ptx", "read_sass"):
        exercise = find(identifier)
        assert Candidate(exercise.source_file("start")).module.LISTING == exercise.grader().LISTING
        path = tmp_path / f"{identifier}.py"
        path.write_text(
            exercise.source_file("answer").read_text().replace("v4.f32", "f32").replace("128", "64")
        )
        with pytest.raises(Refused, match="listing was changed"):
            list(exercise.grader().grade(Candidate(path), np.random.default_rng(1)))
