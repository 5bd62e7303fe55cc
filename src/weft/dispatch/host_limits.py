"""Small eager calls, whose time is the host's: which implementation the host calls in the least time.

In a stream of calls the host prepares one while the device computes another, so that a call takes the longer
of the two times. Where a call's device time is short, PyTorch's several launches lose to one of ours, however
far the nearest measured point is. The host's times are those of calls that come again, with and without a
gradient, measured through the public functions at one size for each dtype (lab/host_time.py). They are an
entry of the device's table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# dtype -> operator -> implementation -> us without a gradient; and if measured, forward with one, backward.
HostTimes = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
SAME_CALLS = {"float16": "bfloat16"}  # dtype that takes the same launches as another one
MUST_BEAT = 0.9  # of PyTorch's host time: ours must be below it, also on another host
HOST_ABOVE = 2.0  # times the predicted device time: ours must keep the host busy for longer than that


def of_calls(measured: HostTimes, operator: str, dtype: str, grad: bool) -> dict[str, float]:
    """Return the host's time of a call by implementation: in both directions with ``grad``."""
    by_operator = measured.get(dtype) or measured.get(SAME_CALLS.get(dtype, dtype), {})
    times = by_operator.get(operator, {})
    return {impl: us[1] + us[2] if grad else us[0] for impl, us in times.items() if len(us) == 3 or not grad}


def cheapest(
    host: Mapping[str, float],
    baselines: Collection[str],
    directions: Sequence[Mapping[str, tuple[float, float]]],
    count: int,
) -> str | None:
    """Return the implementation of ours that the host calls in the least time, if it decides.

    ``directions`` are the times (device, host) that a model predicts for each direction from each of
    ``count`` points. None if the device's time may be seen, or if PyTorch's own costs the host no more.
    """
    least = min((host[b] for b in baselines if b in host), default=0.0)

    def is_hidden(name: str) -> bool:
        if not directions or not all(name in times for times in directions):
            return False
        device_us = sum(times[name][0] for times in directions) / count
        return HOST_ABOVE * device_us <= host[name]

    names = [n for n, us in host.items() if n not in baselines and us < MUST_BEAT * least and is_hidden(n)]
    return min(names, key=host.__getitem__, default=None)
