"""The clock: candidates of one case timed side by side, round by round, in random order.

What a number means, and what it cannot see, is in docs/timing.md. ``race.py`` holds what is common
to every device; ``clock_cuda.py`` and ``clock_cpu.py`` know how one sample is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.machine.clocks import Sampler
from weft.workbench.plan import Budget, Candidate, ClockReplaced, Outcome, Stand, replaced
from weft.workbench.race import Race
from weft.workbench.readings import Readings
from weft.workbench.recheck import MakeJudge
from weft.workbench.slots import MakeSlot


def stand_for(device: str) -> Stand:
    """The measuring stand of a device, 'cuda' or 'cpu'."""
    if device == "cuda":
        from weft.workbench.clock_cuda import CudaStand

        return CudaStand()
    from weft.workbench.clock_cpu import CpuStand

    return CpuStand()


def measure(
    candidates: Sequence[Candidate],
    make_slot: MakeSlot,
    *,
    device: str,
    budget: Budget | None = None,
    make_judge: MakeJudge | None = None,
    seed: int = 0,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[str, Outcome]:
    """Time candidates side by side at one case and direction; one outcome a name.

    ``make_slot(seed)`` gives one call's inputs; ``make_judge(slot)`` gives what compares an output
    with the oracle at the slot's contents (without it nothing is re-checked, for tests of the
    clock alone). ``on_round(round, medians)`` is called after each round.
    Raises :class:`ClockReplaced` where the clock's functions were replaced before it began.
    """
    if replaced():
        raise ClockReplaced(f"replaced: {', '.join(replaced())}")
    stand = stand_for(device)
    with stand.context():
        race = Race(stand, candidates, make_slot, budget or Budget.of(device), seed)
        race.prepare()
        race.sample(Readings(Sampler(device)), on_round)
        race.side_numbers()
        if make_judge is not None:
            race.recheck(make_judge)
        return race.outcomes()
