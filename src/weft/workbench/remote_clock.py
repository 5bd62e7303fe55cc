"""The clock's part that the judge does for a candidate in a process of its own.

Samples are taken there, by that process's clock, since no message is as quick as a kernel. So the
judge looks at its own watch too: it asks for the timed calls many times over, back to back, so
often that an ask's own cost is small, and the wall time of that ask must not be longer than what
the samples claimed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from weft.workbench.plan import BUSIEST, Candidate, Caught, Estimate, Plan
from weft.workbench.slots import Form, MakeSlot, Result, Slot

_now = time.perf_counter_ns

LASTS = 20_000.0  # us that the repeats last at least by the judge's own watch
TRIES = 8  # times that the clocks may disagree before it is called suspect
PAUSE = 0.01  # seconds between two of them, longer by as much each time
SAMPLES = 5  # that tell how busy the machine has become
EMPTY = 9  # empty asks that show what an ask costs
MARGIN = 1.1


class Asked(Protocol):
    """What is asked of a cell (``cell.Cell``)."""

    def ask(
        self,
        verb: str,
        payload: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        seconds: float | None = None,
    ) -> Any: ...


def named(
    operator: str, implementation: str, case: str, direction: str, device: str, grad: Form | None
) -> dict[str, Any]:
    """A point as a guest is told of it: names, and the form of the gradient for a backward."""
    told: dict[str, Any] = {
        "operator": operator,
        "implementation": implementation,
        "case": case,
        "direction": direction,
        "device": device,
    }
    if grad is not None:
        told["grad"] = [list(grad[0]), str(grad[1]).removeprefix("torch.")]
    return told


def first_call(cell: Asked, point: Mapping[str, Any], seed: int) -> float:
    """Wall time (us), by the judge's watch, of binding and calling for the first time in a guest,
    the drawing of its inputs included."""
    start = _now()
    cell.ask("clock.first", {**point, "seed": seed})
    return (_now() - start) / 1000


class RemoteStand:
    """The measuring stand in a guest's process, for one candidate at one point.

    ``point`` is what :func:`named` says of it.
    """

    def __init__(
        self,
        cell: Asked,
        point: Mapping[str, Any],
        device: str,
        without: Collection[str] = (),
    ) -> None:
        self.cell, self.point, self.device = cell, dict(point), device
        self.without = frozenset(without)
        said = cell.ask("clock.stand", self.point | {"without": sorted(without)}).payload
        self.number = int(said["timed"])
        self.cache, self.slow = int(said["cache"]), float(said["slow"])
        self.overhead = float(said["overhead"])
        self.flags: set[str] = set()

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def ask(self, verb: str, **said: Any) -> Any:
        """One of the guest's verbs on this timing; flags that it raised there are raised here."""
        reply = self.cell.ask(f"clock.{verb}", {"timed": self.number, **said})
        self.flags.update(map(str, reply.payload.get("flags", ())))
        if names := ", ".join(map(str, reply.payload.get("threads", ()))):
            self.flags.add(f"suspect: threads: {names} outlived a call")
        return reply

    def memory(self) -> int:
        return int(self.ask("memory").payload["bytes"])

    def estimate(self, candidate: Candidate, slot: Slot) -> Estimate:
        said = self.ask("estimate", seed=slot.seed).payload
        return Estimate(us=float(said["us"]), output_bytes=int(said["output_bytes"]))

    def entrant(
        self, candidate: Candidate, slots: Sequence[Slot], contents: MakeSlot, plan: Plan
    ) -> RemoteRig:
        return RemoteRig(self, [slot.seed for slot in slots], plan)


@dataclass(frozen=True)
class Afar:
    """Answers that lie in a guest's process; what is picked of them comes here."""

    stand: RemoteStand
    label: str
    count: int

    def __len__(self) -> int:
        return self.count

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Result]:
        reply = self.stand.ask("pick", indexes=list(indexes))
        tensors = iter([t.to(self.stand.device) for t in reply.tensors])
        found: dict[int, Result] = {}
        told = zip(indexes, reply.payload["groups"], reply.payload["single"], strict=True)
        for index, size, single in told:
            group = tuple(next(tensors) for _ in range(int(size)))
            found[index] = group[0] if single and len(group) == 1 else group
        return found


class RemoteRig:
    """A candidate made ready in its guest. Times are in us a call, as the guest claims them."""

    near = False

    def __init__(self, stand: RemoteStand, seeds: Sequence[int], plan: Plan) -> None:
        self.stand, self.plan, self.flags = stand, plan, stand.flags
        said = stand.ask("rig", seeds=list(seeds), calls=plan.calls, flush=plan.flush)
        self.calls = int(said.payload["calls"])
        if self.calls != len(seeds):
            raise Caught("its process made other calls ready than were asked for")
        self.audited = self.calls

    def sample(self) -> float:
        said = self.stand.ask("sample").payload
        self.audited = max(1, min(self.calls, int(said["audited"])))
        return float(said["us"])

    def warm(self) -> float:
        return float(self.stand.ask("side", warm=True).payload["us"])

    def host(self) -> float:
        return float(self.stand.ask("side", warm=False).payload["us"])

    def replaced(self) -> list[str]:
        return [str(n) for n in self.stand.cell.ask("clock.replaced").payload["replaced"]]

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """The guest's own two clocks against each other, and the judge's against what it claims."""
        told = [str(t) for t in self.stand.ask("cross").payload["told"]]
        if "wall" in self.stand.without:
            return told
        told += self._by_the_wall(cold, busy, warm=False)
        if self.plan.flush:  # a sample is cold then, its repeats are not: hold warm to warm as well
            warm = float(np.median([self.warm() for _ in range(5)]))
            told += self._by_the_wall(warm, busy, warm=True)
        return told

    def _by_the_wall(self, claimed: float, busy: float, warm: bool) -> list[str]:
        """Repeats of the timed calls against the judge's watch, until it agrees or never did.

        A machine that has become busier since the samples shows in what the guest claims of the
        repeats themselves. That is believed up to ``busy`` times the headline, or times the samples
        as they are by now, and up to ``BUSIEST`` times the headline at most.
        """
        each = max(claimed, 0.01) * self.calls
        per_ask = 3.0 * self._empty_ask()
        repeats, lasts = 1, max(LASTS, 10.0 * per_ask)
        wall = 0.0
        for number in range(TRIES):
            wall, said = self._repeat(repeats, warm)
            while wall < lasts and repeats * each < lasts and repeats < 1 << 20:
                repeats *= 2
                wall, said = self._repeat(repeats, warm)
            now = each if number == 0 else self.calls * self._now_claimed(warm)
            most = min(busy * max(each, now), BUSIEST * each) if self._queued else float("inf")
            believed = min(max(said / repeats, each), most)
            overhead = self.stand.overhead * (self.calls if self._per_call else 1)
            if wall <= repeats * (MARGIN * believed + overhead) + per_ask:
                return []
            time.sleep(number * PAUSE)
        return [
            f"suspect: the parent's clock disagrees ({wall / repeats / self.calls:.1f} us a call "
            f"by its watch, {claimed:.1f} us claimed{' warm' if warm else ''})"
        ]

    def _now_claimed(self, warm: bool) -> float:
        """What samples come to by now, on average: one may fall between two of somebody else's."""
        take = self.warm if warm else self.sample
        return float(np.mean([take() for _ in range(SAMPLES)]))

    @property
    def _queued(self) -> bool:
        """Whether repeats run without gaps, as samples do: calls that no graph holds are launched
        one by one, and only two clocks around the very same repeats can be compared."""
        return not any(f.startswith(("no-graph", "host-bound")) for f in self.flags)

    @property
    def _per_call(self) -> bool:
        """Whether the stand's overhead is a call's (the loop on a CPU) and not a sample's."""
        return self.stand.device == "cpu"

    def _repeat(self, repeats: int, warm: bool) -> tuple[float, float]:
        """Wall time here and the time claimed there (us) of the timed calls, repeated."""
        start = _now()
        said = self.stand.ask("repeat", repeats=repeats, warm=warm).payload
        return (_now() - start) / 1000, float(said["us"])

    def _empty_ask(self) -> float:
        """Wall time (us) of an ask for nothing, as a rule."""
        spent = []
        for _ in range(EMPTY):
            start = _now()
            self.stand.cell.ask("clock.nothing")
            spent.append((_now() - start) / 1000)
        return float(np.median(spent))

    def audit(self, seeds: Sequence[int]) -> tuple[float | None, Afar]:
        said = self.stand.ask("audit", seeds=list(seeds)).payload
        if "caught" in said:
            raise Caught(str(said["caught"]))
        us = None if said["us"] is None else float(said["us"])
        return us, Afar(self.stand, "timed", int(said["count"]))

    def audited_again(self, calls: int) -> float | None:
        us = self.stand.ask("audit", seeds=[], calls=calls).payload["us"]
        return None if us is None else float(us)

    def rerun(self, seeds: Sequence[int], turn: int) -> Iterator[Afar]:
        asked = list(seeds)
        while True:
            said = self.stand.ask("rerun", seeds=asked, turn=turn).payload
            if "caught" in said:
                raise Caught(str(said["caught"]))
            if "label" not in said:
                return
            if int(said["count"]) != self.calls:
                raise Caught(f"{said['count']} calls were made where {self.calls} were due")
            yield Afar(self.stand, str(said["label"]), int(said["count"]))
            asked = []
