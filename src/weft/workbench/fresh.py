"""Contents that nobody has seen, under the clock: an answer that was kept is an answer saved.

A candidate that looks its answer up by a hash of the contents, or by their first bytes, is right
and quick on inputs that come again, as those of a timing do. So the slots get contents never used
before, old answers are poisoned, the cache is filled with clean lines of something else (a buffer
is read, not written, so that nothing waits to be written back), and the calls are timed once. No
honest call is slower so; one that must now compute is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.workbench.plan import Answers, Caught, Entrant
from weft.workbench.recheck import Judge, MakeJudge
from weft.workbench.slots import MakeSlot

# What the least of several audits may take: a share of the headline and some us. A CPU's calls
# are disturbed by whatever else runs; a GPU's are not, but for an instruction cache gone cold.
ALLOWED = {"cuda": (1.25, 2.0), "cpu": (1.5, 20.0)}
AUDITS = 12  # at most; the first that is quick enough ends it
CONTROLS = 3
CONTROLLED = 2  # audits before a control counts, for it to be as lucky as they were
JUDGED = 2  # audits of which an answer is judged, too
PAUSE = 0.01  # seconds, longer by as much after each audit, to outlast whatever else runs


@dataclass(frozen=True, kw_only=True)
class Found:
    """What audits came to: the least of their times (us) and whether it is more than is honest,
    or why an answer of theirs is wrong."""

    least: float | None
    slower: bool = False
    refusal: str = ""


class Fresh:
    """The audits of one race. ``unseen()`` gives a seed that was never used."""

    def __init__(
        self,
        seeds: list[int],
        contents: MakeSlot,
        make_judge: MakeJudge | None,
        unseen: Callable[[], int],
        device: str,
    ) -> None:
        self.seeds, self.contents, self.make_judge = seeds, contents, make_judge
        self.unseen, self.allowed = unseen, ALLOWED[device]
        self.rounds: list[list[int]] = []
        self.judges: dict[tuple[int, int], Judge] = {}
        self.random = random.SystemRandom()

    def limit(self, us: float) -> float:
        factor, more = self.allowed
        return factor * us + more

    def _round(self, number: int, calls: int) -> list[int]:
        """The seeds of a round; the same for all candidates, none of which has seen them."""
        while len(self.rounds) <= number:
            self.rounds.append([])
        seeds = self.rounds[number]
        while len(seeds) < calls:
            seeds.append(self.unseen())
        return seeds[:calls]

    def candidate(self, entrant: Entrant, best: float, busy: float) -> Found:
        """Audit one candidate against the ``best`` of its samples, as often as it takes to be sure.

        The least against the least: what else runs makes a time longer, never shorter. A machine
        that has become busier since is told by a control, the same calls on the same contents,
        which by then have been seen. The least of these stands in for the best sample, from the
        third audit on, but counts for no more than ``busy`` times that.
        """
        least, control = float("inf"), float("inf")
        for number in range(AUDITS):
            seeds = self._round(number, entrant.audited)
            try:
                us, answers = entrant.audit(seeds)
            except Caught as caught:
                return Found(least=None, refusal=str(caught))
            if self.make_judge is not None and number < JUDGED:
                reason = self._wrong(seeds, answers, self.make_judge)
                if reason is not None:
                    return Found(least=None, refusal=reason)
            if us is not None:
                least = min(least, us)
                if least <= self.limit(best):
                    return Found(least=least)
                seen = [entrant.audited_again(len(seeds)) for _ in range(CONTROLS)]
                control = min(control, *(s for s in seen if s is not None), float("inf"))
                believed = min(max(control, best), busy * best)
                if number >= CONTROLLED and least <= self.limit(believed):
                    return Found(least=least)
            time.sleep(number * PAUSE)
        return Found(least=least if least < float("inf") else None, slower=True)

    def _wrong(self, seeds: list[int], answers: Answers, make_judge: MakeJudge) -> str | None:
        """Why an answer picked at random is wrong; None where it is right."""
        index = self.random.randrange(len(seeds))
        (output,) = answers.pick([index]).values()
        reason = self._judge(index, seeds[index], make_judge)(output)
        if reason is None:
            return None
        told = f"call {index + 1} of {len(seeds)} on contents it had not seen is wrong"
        return f"{told}: {reason}"

    def _judge(self, index: int, seed: int, make_judge: MakeJudge) -> Judge:
        key = (index, seed)
        if key not in self.judges:
            slot = self.contents(seed)
            if slot.grad is not None:  # the forward's inputs are the slot's own, as they were
                slot = replace(self.contents(self.seeds[index]), grad=slot.grad)
            self.judges[key] = make_judge(slot)
        return self.judges[key]
