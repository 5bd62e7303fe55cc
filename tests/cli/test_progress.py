"""Progress in a pipe by an injected clock, the last line's groups of reasons, and signals in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from weft.cli import ending, progress
from weft.core import Interrupted, WeftError

INTERVAL = progress.INTERVAL


class Clock:
    """Clock of a test that only advances when it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines() -> list[str]:
    return []


def in_pipe(clock: Clock, lines: list[str], **options: Any) -> progress.Progress:
    return progress.Progress(clock=clock, write=lines.append, **options)


def test_a_pipe_gets_a_line_every_ten_seconds_and_no_more(clock: Clock, lines: list[str]) -> None:
    status = in_pipe(clock, lines, total=1000)
    printed_at = []
    for _ in range(140):  # 35 seconds
        clock.now += 0.25
        before = len(lines)
        status("a point")
        status.advance()
        if len(lines) > before:
            printed_at.append(clock.now - 100)
    assert printed_at == [INTERVAL, 2 * INTERVAL, 3 * INTERVAL]
    assert lines[0] == "[40/1000] a point (10 s, about 5 min left)"


def test_a_long_step_is_not_silent(clock: Clock, lines: list[str]) -> None:
    status = in_pipe(clock, lines, total=4)
    status("a slow point")
    assert lines == []
    clock.now += 12
    status.show()  # as the thread does while the step is running
    clock.now += 5
    status.show()
    assert lines == ["[1/4] a slow point (12 s)"]


def test_steps_that_are_few_are_printed_each_once(clock: Clock, lines: list[str]) -> None:
    status = in_pipe(clock, lines, every_line=True)
    for line in ("compiling", "compiling", "latency"):
        status(line)
    assert lines == ["compiling (0.0 s)", "latency (0.0 s)"]


def test_a_count_in_a_line_is_that_of_the_step_unless_it_is_of_a_part(clock: Clock, lines: list[str]) -> None:
    status = in_pipe(clock, lines, total=9, at_once=True)
    status("[3/40] softmax: timing")
    assert lines.pop() == "[3/40] softmax: timing (0.0 s, about 10 s left)"
    status = in_pipe(clock, lines, total=9, at_once=True)
    status.describe("[1/1] softmax: timing")
    assert lines.pop() == "[1/9] softmax: timing (0.0 s)"


def test_what_is_left_is_estimated_from_the_table_and_corrected_by_what_is_done(
    clock: Clock, lines: list[str]
) -> None:
    status = in_pipe(clock, lines)
    status.expect([10.0] * 10 + [100.0] * 2, "12 points")
    assert lines == ["12 points will take about 5 min"]
    assert status.remaining() == 300
    clock.now += 200  # twice as slow as expected
    for _ in range(10):
        status.advance()
    remaining = status.remaining()
    assert remaining is not None and 380 < remaining < 400  # 200 seconds by the table, about doubled
    status.expect([1.0] * 12, "12 points")
    assert len(lines) == 1, "a command that is soon done announces nothing"


def test_reasons_are_counted_in_groups() -> None:
    reasons = [("cuda", "CUDA C++ needs a GPU to run")] * 3
    reasons += [("numba", "4096 elements need a GPU"), ("numba", "no float16 arithmetic"), ("x", "strange")]
    text = ending.not_run_text(reasons)
    assert text == "; not run: 6 (4 no GPU: cuda, numba; 1 data type: numba; 1 other reasons: x)"
    assert ending.not_run_text([]) == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_work_with_its_partial_result(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    signal.signal(number, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        after = work(lambda: os.kill(os.getpid(), number))
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert (after.exit_code, after.partial, after.to_json()) == (code, [1], {"stopped": True})
    progress.raise_if_stopped()  # the request is over


def work(interrupt: Callable[[], None]) -> progress.StopRequest:
    with progress.stoppable() as stop:
        try:
            interrupt()
        except KeyboardInterrupt as error:
            raise Interrupted([1]) from error
        pytest.fail("the signal did not arrive")
    return stop


def test_a_swallowed_interrupt_is_raised_again(clock: Clock, lines: list[str]) -> None:
    status = in_pipe(clock, lines)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress.stoppable() as stop:
            with suppress(KeyboardInterrupt):  # as a callback of a library may
                os.kill(os.getpid(), signal.SIGTERM)
            status("the next step")
            pytest.fail("the work goes on")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop


def test_an_error_of_its_own_is_not_taken_for_a_stop() -> None:
    with pytest.raises(ZeroDivisionError), progress.stoppable():
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), progress.stoppable():
        raise KeyboardInterrupt  # not from the handler


def test_the_interval_can_be_set_and_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.INTERVAL_VARIABLE, "soon")
    with pytest.raises(WeftError, match="a number of seconds"):
        progress.Progress()
    monkeypatch.setenv(progress.INTERVAL_VARIABLE, "0")
    lines: list[str] = []
    show = progress.Progress(clock=lambda: 1.0, write=lines.append)
    show("a step")
    assert len(lines) == 1  # at once, not after ten seconds
