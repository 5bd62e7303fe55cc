"""The clock: candidates of one case timed side by side, round by round, in random order.

What a number means, and what it cannot see, is in docs/timing.md. ``race.py`` holds what is common
to every device; ``clock_cuda.py`` and ``clock_cpu.py`` know how one sample is taken;
``remote_clock.py`` and ``guest_clock.py`` take it in a stranger's process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from weft.machine.clocks import Sampler
from weft.workbench.guard import ClockReplaced, remember, replaced
from weft.workbench.plan import Budget, Candidate, Outcome, Stand
from weft.workbench.race import Race
from weft.workbench.readings import Readings
from weft.workbench.recheck import MakeJudge
from weft.workbench.slots import MakeSlot


def stand_for(device: str, without: Collection[str] = ()) -> Stand:
    """The measuring stand of a device, 'cuda' or 'cpu', in this process."""
    if device == "cuda":
        from weft.workbench.clock_cuda import CudaStand

        return CudaStand(whole_cache="cache" not in without)
    from weft.workbench.clock_cpu import CpuStand

    return CpuStand()


def measure(
    candidates: Sequence[Candidate],
    make_slot: MakeSlot,
    *,
    device: str,
    budget: Budget | None = None,
    make_judge: MakeJudge | None = None,
    seed: int | None = 0,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
    without: Collection[str] = (),
) -> dict[str, Outcome]:
    """Time candidates side by side at one case and direction; one outcome a name.

    ``make_slot(seed)`` gives one call's inputs; ``make_judge(slot)`` gives what compares an output
    with the oracle at the slot's contents (without it nothing is re-checked, for tests of the
    clock alone). ``seed`` None takes every seed from the operating system, as is due where a
    stranger is timed. ``on_round(round, medians)`` is called after each round. ``without`` names
    checks of the clock to leave out (``plan.CHECKS``).
    Raises :class:`ClockReplaced` where the clock's functions were replaced before it began.
    """
    if "replaced" not in without and replaced():
        raise ClockReplaced(f"replaced: {', '.join(replaced())}")
    stand = stand_for(device, without)
    with stand.context():
        budget = budget or Budget.of(device)
        race = Race(stand, candidates, make_slot, budget, seed, device=device, without=without)
        race.prepare()
        race.sample(Readings(Sampler(device)), on_round)
        race.side_numbers()
        race.audit(make_judge)
        if make_judge is not None:
            race.recheck(make_judge)
        return race.outcomes()


remember()
