"""The function that makes the calls of a candidate: of checks and timings, of samples and re-checks alike.

A candidate sees its callers' frames. The innermost one is always this function at the same line, so that it
does not say what the output is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# One call: the index of the outputs that is emptied before it, the index of its output, and the closure.
ScheduledCall = tuple[int, int, Callable[[], Any]]


def schedule(closures: Sequence[Callable[[], Any]], indexes: Sequence[int]) -> list[ScheduledCall]:
    """Return the schedule of the calls of these indexes; ``outputs`` needs one place more than closures.

    An output lives until the next call of its index has returned, so that outputs rotate through memory as
    inputs do. Of an index that comes several times it is released before its next call, which then finds
    the same memory.
    """
    spare = len(closures)
    repeats = len(set(indexes)) < len(indexes)
    return [(i if repeats else spare, i, closures[i]) for i in indexes]


def schedule_row(
    closures: Sequence[Callable[[], Any]], indexes: Sequence[int], kept_positions: Sequence[int]
) -> list[ScheduledCall]:
    """Return the schedule of calls whose outputs are kept by position, at the ``kept_positions``.

    All others are released before the next call. ``outputs`` needs one place more than there are calls.
    """
    spare, positions = len(indexes), frozenset(kept_positions)
    return [(spare, p if p in positions else spare, closures[i]) for p, i in enumerate(indexes)]


def make_calls(scheduled: Sequence[ScheduledCall], outputs: list[Any]) -> None:
    """Make the calls in order; store each output at its index."""
    for emptied, index, call in scheduled:
        outputs[emptied] = None
        outputs[index] = call()


def call_once(closure: Callable[[], Any]) -> Any:
    """Make one call; return its output."""
    outputs: list[Any] = [None, None]
    make_calls([(1, 0, closure)], outputs)
    return outputs[0]
