"""Threads that use different precisions of cuBLAS at once: each gets its own, and the user's is restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.ops._common import cublas
from weft.ops._common.cublas import call_at_precision, held_at_precision

SWITCHES = torch.backends.cuda.matmul
NAMES = {
    torch.float32: "fp32_precision",
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the switches after a test; monkeypatch cannot restore attributes of this kind."""
    before = {name: getattr(SWITCHES, name) for name in NAMES.values()}
    yield
    for name, value in before.items():
        setattr(SWITCHES, name, value)


def on_a_gpu(dtype: torch.dtype) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("start", [0, 1])
def test_a_switch_is_set_for_one_call_and_restored(dtype: torch.dtype, start: int) -> None:
    values = ["ieee", "tf32"] if dtype == torch.float32 else [False, True]
    setattr(SWITCHES, NAMES[dtype], values[start])
    for call in (call_at_precision, lambda f, x, precision: held_at_precision(f, x, precision)()):
        assert call(lambda: getattr(SWITCHES, NAMES[dtype]), on_a_gpu(dtype), "ieee") == values[0]
        assert getattr(SWITCHES, NAMES[dtype]) == values[start]
    with pytest.raises(ValueError, match="not today"):
        call_at_precision(_fail, on_a_gpu(dtype), "ieee")
    assert getattr(SWITCHES, NAMES[dtype]) == values[start]


@pytest.mark.parametrize("user", [(True, True), (False, True), (False, False)])
def test_the_users_choice_about_splits_along_k_remains(user: tuple[bool, bool]) -> None:
    name, split_k = NAMES[torch.bfloat16], f"{NAMES[torch.bfloat16]}_split_k"

    def read() -> tuple[bool, bool]:
        return getattr(SWITCHES, name), getattr(SWITCHES, split_k)

    setattr(SWITCHES, name, user)
    assert call_at_precision(read, on_a_gpu(torch.bfloat16), "ieee") == (False, user[1])
    assert read() == user


def _fail() -> None:
    raise ValueError("not today")


def test_threads_with_different_precisions_see_their_own_throughout_a_call() -> None:
    SWITCHES.fp32_precision = "none"
    # Each "tf32" call waits until an "ieee" call is about to begin, which would change the value at once.
    begins = threading.Semaphore(0)

    def call(number: int) -> list[str]:
        precision = ("tf32", "ieee")[number % 2]
        if precision == "ieee":
            begins.release()

        def current() -> str:
            return {"none": "ieee"}.get(SWITCHES.fp32_precision, SWITCHES.fp32_precision)

        def read() -> list[str]:
            before = current()
            if precision == "tf32":
                begins.acquire(timeout=0.5)
                threading.Event().wait(0.01)  # long enough for the other thread to enter, if it is allowed to
            return [precision, before, current()]

        if number % 3:
            return held_at_precision(read, on_a_gpu(torch.float32), precision)()  # type: ignore[no-any-return]
        return call_at_precision(read, on_a_gpu(torch.float32), precision)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(call, range(40)))
    assert all(set(values) == {values[0]} for values in results), results
    assert SWITCHES.fp32_precision == "none"


def test_threads_with_one_precision_run_at_once() -> None:
    both = threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(call_at_precision, both.wait, on_a_gpu(torch.float32), "tf32") for _ in range(2)
        ]
        assert sorted(c.result() for c in calls) == [0, 1]


def test_the_first_change_waits_for_calls_without_a_lock() -> None:
    value, seen, inside, leave = ["ieee"], [], threading.Event(), threading.Event()
    switch = cublas._Switch(lambda: value[0], lambda new: value.__setitem__(0, new))

    def wait_inside() -> None:
        seen.append(value[0])
        inside.set()
        leave.wait(20)
        seen.append(value[0])

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(switch.hold(wait_inside, "ieee"))
        inside.wait(20)
        second = threads.submit(switch.hold(lambda: value[0], "tf32"))
        threading.Event().wait(0.02)  # long enough for the second to change the value, if it is allowed to
        leave.set()
        first.result()
        assert seen == ["ieee", "ieee"] and second.result() == "tf32" and value == ["ieee"]
    assert switch.hold(lambda: value[0], "ieee")() == "ieee" and not switch._without_lock
