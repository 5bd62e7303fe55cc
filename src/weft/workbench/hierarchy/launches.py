"""What a launch, a graph's node and an event cost on a GPU, when there is nothing to do.

On the device, times are slopes: of 1 and of ``MANY`` empty kernels queued behind a spin, so that
no launch from the host falls between the two events; what is left at none is the events' own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from weft.workbench.clock_cuda import LONGEST_SPIN, SPIN, CudaStand, capture
from weft.workbench.hierarchy.chases import SOURCE
from weft.workbench.hierarchy.result import Figure

MANY = 257  # kernels; a launch queue holds some thousand
BATCH = 100
ROUNDS = 21
Say = Callable[[str], None]


def overheads(say: Say) -> list[Figure]:
    """Times in us: on the host a launch, a graph's launch and an event; on the device the gap from
    launch to launch, from node to node, and of two events with nothing between."""
    say("launches, graphs and events with nothing to do")
    stand = CudaStand()
    empty = partial(SOURCE["nothing"], 1, 32)
    with stand.context():
        empty()
        one, _ = capture([empty], keep=False)
        many, _ = capture([empty] * MANY, keep=False)
        event = torch.cuda.Event(enable_timing=True)
        gap = slope(partial(behind_a_spin, stand), empty, partial(_times, MANY, empty))
        node = slope(partial(behind_a_spin, stand), one.replay, many.replay)
        nothing = behind_a_spin(stand, lambda: None)
        on_host = {
            "launch": per_call(empty, torch.cuda.synchronize),
            "graph": per_call(one.replay, torch.cuda.synchronize),
            "node": per_call(many.replay, torch.cuda.synchronize, batch=4) / MANY,
            "record": per_call(event.record, torch.cuda.synchronize),
        }
    told = (
        ("host_launch", "a launch, on the host", on_host["launch"]),
        ("device_gap", "a launch behind another, on the device", gap),
        ("host_graph", "a graph of one kernel, on the host", on_host["graph"]),
        ("host_node", f"a node of a graph of {MANY}, on the host", on_host["node"]),
        ("device_node", "a node behind another, on the device", node),
        ("host_record", "an event recorded, on the host", on_host["record"]),
        ("event_pair", "two events with nothing between", nothing),
    )
    return [Figure(key=k, label=label, value=us, unit="us") for k, label, us in told]


def _times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def behind_a_spin(stand: CudaStand, body: Callable[[], object]) -> float:
    """Median us between two events around ``body``, queued while the GPU spins; the spin grows
    until it outlasts the queueing. Raises RuntimeError where none does."""
    spin = 10 * SPIN
    seen: list[float] = []
    while len(seen) < ROUNDS:
        us = stand.timed(lambda: None, body, spin)
        if us >= 0:
            seen.append(us)
            continue
        spin *= 2
        if spin > LONGEST_SPIN:
            raise RuntimeError("the host does not get ahead of the GPU: is it busy elsewhere?")
    return statistics.median(seen)


def slope(
    timed: Callable[[Callable[[], object]], float],
    one: Callable[[], object],
    many: Callable[[], object],
) -> float:
    """The time that each of ``MANY`` adds to the first."""
    return (timed(many) - timed(one)) / (MANY - 1)


def per_call(
    call: Callable[[], object],
    wait: Callable[[], object],
    batch: int = BATCH,
    now: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Median us of the host a call, in batches that start with an empty queue and fit into it."""
    seen = []
    for _ in range(ROUNDS):
        wait()
        start = now()
        for _ in range(batch):
            call()
        seen.append((now() - start) / batch / 1e3)
    wait()
    return statistics.median(seen)
