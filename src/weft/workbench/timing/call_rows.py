"""Calls in a row: many calls, one directly after the other, each on other contents than the one before.

Checked calls have pauses between them, in which inputs are written and outputs compared. A candidate that
measures the time between its calls, or counts those of a row, could be right in those alone. So the re-check
makes rows of calls as well. Nothing happens between two calls of a row: its buffers are written before, its
schedule is ready, and its outputs are looked at when it is over. Two contents alternate in random order, so
that the answer to an earlier call is often wrong. Outputs on the same contents are compared by digests, and
each that differs is judged by the oracle. The length of a row is random.

The kept outputs are alive at once, so that no two of them may have the same memory: a candidate that writes
its outputs into a ring of buffers is refused if the ring has fewer buffers than outputs are kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

ROW_US = 200_000.0  # a row has as many calls as take this long, half of it to one and a half times
MAX_ROW_CALLS = 4096
# Outputs that are alive at once, to find a ring of buffers: where they are small, and calls quick.
RING_CALLS, RING_US = 128, 1_000_000.0
KEPT_OUTPUTS, KEPT_BYTES = 256, 1 << 28
# Of a candidate that refers to all its earlier outputs, as a ring does and an honest one seldom, or whose
# outputs are in memory that torch did not allocate, as those from numpy are. It has more calls than outputs
# that are kept: of random ones in a ring of n, about sqrt(2 n) show two in one place.
SUSPECT_OUTPUTS, SUSPECT_BYTES, SUSPECT_CALLS = 2048, 1 << 30, 1 << 16
RETAINED, FOREIGN = "retained", "foreign"
SUSPECT_US = {RETAINED: 10_000_000.0, FOREIGN: 1_000_000.0}
SHORT_ROWS, SHORT_CALLS = 0.25, 32  # share of the later rounds with a row, of fewer calls
LEAST_CALL_US = {"cpu": 0.5, "cuda": 10.0}  # the time of a call from Python
# Outputs of a row that are judged: each that differs, of which a deterministic candidate has two, and a few
# more, since the digests come from the candidate's process.
JUDGED_OUTPUTS, JUDGED_AGAIN = 24, 2


@dataclass(frozen=True)
class CallRow:
    """Buffer of each call of a row, and the positions of the calls whose outputs are kept."""

    buffers: list[int]
    kept_positions: list[int]

    def choose_judged(self, digests: Sequence[object]) -> list[int]:
        """Return the positions of outputs to judge, at random, from the digests of the kept ones."""
        groups: dict[tuple[int, object], list[int]] = {}
        for position, digest in zip(self.kept_positions, digests, strict=True):
            groups.setdefault((self.buffers[position], digest), []).append(position)
        different = [_random.choice(group) for group in groups.values()]
        again = _random.sample(self.kept_positions, min(JUDGED_AGAIN, len(self.kept_positions)))
        return sorted({*_random.sample(different, min(JUDGED_OUTPUTS, len(different))), *again})


def plan_row(buffers: int, call_us: float, output_bytes: int, round_number: int) -> CallRow | None:
    """Plan a row of calls for this round, or return None for a round without one.

    The first round has a long row. Calls of which no two outputs may be kept have none.
    """
    most = min(KEPT_OUTPUTS, KEPT_BYTES // max(1, output_bytes))
    if most < 2 or (round_number and _random.random() >= SHORT_ROWS):
        return None
    count = int(ROW_US * (0.5 + _random.random()) / call_us)
    if round_number:
        count = min(count, 2 + _random.randrange(SHORT_CALLS))
    else:
        ring = min(RING_CALLS * (1.0 + 0.25 * _random.random()), RING_US / call_us)
        count = min(MAX_ROW_CALLS, max(count, int(ring)))
    return _row(buffers, max(2, count), most)


def plan_suspect_row(buffers: int, call_us: float, output_bytes: int, suspicion: str) -> CallRow:
    """Plan a row of a candidate whose outputs may be in a ring: as long as memory and time allow."""
    in_memory = SUSPECT_BYTES // max(1, output_bytes)
    most = max(2, min(SUSPECT_OUTPUTS, in_memory))
    # The candidate may keep all outputs, without a ring.
    count = min(SUSPECT_CALLS, max(most, 2 * in_memory), int(SUSPECT_US[suspicion] / call_us))
    return _row(buffers, max(2, count), most)


def _row(buffers: int, count: int, most: int) -> CallRow:
    # An even and an odd one: neighbours have different contents.
    chosen = [2 * _random.randrange((buffers + 1) // 2)]
    if buffers > 1:
        chosen.append(1 + 2 * _random.randrange(buffers // 2))
    order = [_random.choice(chosen) for _ in range(count)]
    order[: len(chosen)] = _random.sample(chosen, len(chosen))
    inner = _random.sample(range(1, count - 1), min(count, most) - 2)
    return CallRow(buffers=order, kept_positions=[0, *sorted(inner), count - 1])
