"""Check: is an implementation right at a case? A verdict from named rules; see docs/checking.md.

Each seed is drawn into the same addresses and the call held to every rule of ``check_rules``. Then
the call is made again: several times over, in other memory with another poison after other work,
and on a stream of its own; the bits must be the same unless the implementation says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from weft import backends
from weft.core import Case, Finding, Implementation, Operator, Verdict
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.at_hand import same_bits
from weft.workbench.cell import CellDied, GuestError
from weft.workbench.check_rules import RULES, Run
from weft.workbench.hands import Hands, Holding, here
from weft.workbench.memory import HUGE, NAN
from weft.workbench.oracle import Oracle, for_outputs, fresh_seeds

SEEDS = 5
CALLS = 13  # in all, where a call is quick: more than the ten that a kernel may behave for
QUICK = 0.05  # seconds: what takes longer at every seed (an interpreter) is not repeated
SMALL = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements, above which judging each call takes too long
NO_ROOM = "checking this (reference, baseline, guards) takes more memory than this device has left"

# The rules that compare two answers, and what each says when it fails.
ACROSS = {
    "repeats": "the same inputs gave other bits",
    "again": "the same inputs gave other bits in other memory",
    "stream": "the same inputs gave other bits on another stream",
}


def check(
    operator: Operator,
    implementation: Implementation,
    case: Case,
    direction: str,
    device: str,
    *,
    seeds: Sequence[int] | None = None,
    n_seeds: int = SEEDS,
    oracle: Oracle | None = None,
    without: Collection[str] = (),
    baseline: Implementation | None = None,
    hands: Hands = here,
) -> Verdict:
    """Check one implementation at one case in one direction on ``device`` ('cpu' or 'cuda').

    Without ``seeds``, ``n_seeds`` of them come from the operating system; the verdict records them.
    An ``oracle`` made for the same case, direction and device is shared (its seeds are used), so
    that many implementations cost one reference. ``without`` names rules to leave out; ``baseline``
    sets the tolerance (default: the registry's); ``hands`` make the calls: of a stranger's code, in
    a process of its own. What the implementation does never raises here: it is a fail, with its
    reason.
    """
    trial = Trial(implementation, without, hands)
    if oracle is None:
        seeds = seeds or fresh_seeds(1 if "seeds" in without else n_seeds)
        oracle = Oracle(operator, case, direction, device, seeds, baseline)
    oracle = for_outputs(oracle, implementation)
    try:
        support = backends.support(implementation, case, device, direction)
    except (CellDied, GuestError) as error:  # a stranger's own word on what it takes
        return trial.verdict(oracle, FAIL, trial.broke(f"asked what it supports: {error}"))
    if not support:
        return trial.verdict(oracle, UNSUPPORTED, support.reason)
    try:
        _ = oracle.bounds
    except torch.OutOfMemoryError:
        return trial.verdict(oracle, UNSUPPORTED, NO_ROOM)
    except Exception as error:  # noqa: BLE001 - the reference or the baseline is at fault
        reason = f"no tolerance: {oracle.baseline.name} or the reference raised "
        return trial.verdict(oracle, FAIL, reason + f"{type(error).__name__}: {error}")
    try:
        reason = trial.run(oracle)
    except torch.OutOfMemoryError:
        return trial.verdict(oracle, UNSUPPORTED, NO_ROOM)
    except torch.AcceleratorError as error:
        # What a kernel broke stays broken for this process, and shows at any later call.
        reason = f"not checked: a kernel before this broke the device's context: {error}"
    except GuestError as error:
        if "OutOfMemoryError" in str(error):
            return trial.verdict(oracle, UNSUPPORTED, NO_ROOM)
        reason = trial.broke(f"its process could not go on: {error}")
    except CellDied as error:
        reason = trial.broke(error.reason)
    if reason:
        return trial.verdict(oracle, FAIL, reason)
    return trial.verdict(oracle, PASS, support.reason)


def _here(implementation: Implementation) -> Hands:
    return here


def check_all(
    operator: Operator,
    implementations: Iterable[Implementation],
    case: Case,
    direction: str,
    device: str,
    *,
    seeds: Sequence[int] | None = None,
    n_seeds: int = SEEDS,
    without: Collection[str] = (),
    baseline: Implementation | None = None,
    hands_of: Callable[[Implementation], Hands] = _here,
) -> Iterator[Verdict]:
    """The verdicts of many implementations at one case, on the same seeds, from one oracle.

    ``hands_of`` says for each implementation who makes its calls.
    """
    oracle = Oracle(operator, case, direction, device, seeds or fresh_seeds(n_seeds), baseline)
    for one in implementations:
        hands = hands_of(one)
        yield check(
            operator, one, case, direction, device, oracle=oracle, without=without, hands=hands
        )


class Trial:
    """The calls of one check, in order, and what the rules found of them."""

    def __init__(
        self, implementation: Implementation, without: Collection[str], hands: Hands
    ) -> None:
        self.implementation = implementation
        self.without = frozenset(without)
        self.hands = hands
        self.failed: Finding | None = None
        self.reached: list[str] = []
        self.share = self.rms = 0.0
        self.quickest = float("inf")
        self.unguarded = 0
        self.notes: dict[str, str] = {}

    def run(self, oracle: Oracle) -> str:
        """Make all the calls; the reason of the first failure, or an empty string."""
        stage = self.hands(self.implementation, oracle.scene, NAN)
        last: Run | None = None
        for seed in oracle.seeds:
            stage.fill(seed)
            last = self._call(stage, oracle, seed, f"seed {seed}")
            if last is None:
                return self._reason()
        assert last is not None
        if not self._repeats(stage, oracle, last):
            return self._reason()
        kept = tuple(out.clone() for out in last.outputs)
        seed = last.seed
        # While the first still stands, so that it lies elsewhere.
        other = self.hands(self.implementation, oracle.scene, HUGE)
        stage.close()
        del last, stage
        return "" if self._elsewhere(other, oracle, seed, kept) else self._reason()

    def broke(self, what: str) -> str:
        """The reason where the candidate's process ended before it answered."""
        self.failed = Finding(check="channel", status=FAIL, detail=what)
        return self._reason()

    def _call(
        self,
        stage: Holding,
        oracle: Oracle,
        seed: int,
        label: str,
        poison: int = NAN,
        aside: bool = False,
    ) -> Run | None:
        """One call held to every rule; None where one of them found something."""
        seen = stage.call(aside, self.without)
        self.quickest = min(self.quickest, seen.seconds)
        run = Run(oracle, seed, label, poison, seen)
        return run if self._judge(run) else None

    def _judge(self, run: Run) -> bool:
        for name, rule in RULES.items():
            if name in self.without:
                continue
            try:
                wrong = rule(run) if rule else run.seen.found.get(name, "")
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                # Only an answer of a form that cannot be compared gets here.
                wrong = f"could not be judged: {type(error).__name__}: {error}"
            if wrong:
                self.failed = Finding(check=name, status=FAIL, detail=f"{wrong} ({run.label})")
                if name in ("error", "drift"):
                    self._note(run)
                return False
            if name not in self.reached:
                self.reached.append(name)
        self._note(run)
        return True

    def _note(self, run: Run) -> None:
        self.unguarded += run.seen.unguarded
        self.notes |= run.notes
        if {"type", "shape"} & self.without:
            return
        self.share = max(self.share, run.share)
        for error, bound in zip(run.errors, run.oracle.bounds, strict=True):
            if bound.scale:
                self.rms = max(self.rms, error.rms / bound.scale)

    def _same(
        self, name: str, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], run: Run
    ) -> bool:
        if name in self.without:
            return True
        differ = same_bits(a, b)
        if differ:
            self.failed = Finding(
                check=name, status=FAIL, detail=f"{ACROSS[name]}: {differ} ({run.label})"
            )
            return False
        if name not in self.reached:
            self.reached.append(name)
        return True

    def _repeats(self, stage: Holding, oracle: Oracle, last: Run) -> bool:
        """The same call over and over on the same inputs, if it is quick and the case small."""
        elements = max(i.numel for i in oracle.case.inputs)
        elements = max([elements, *(t.numel() for t in last.outputs)])
        if self.quickest > QUICK or elements > SMALL[torch.device(oracle.device).type]:
            return True
        for number in range(len(oracle.seeds) + 1, CALLS):
            run = self._call(stage, oracle, last.seed, f"call {number}, seed {last.seed}")
            if run is None or not self._agree("repeats", last.outputs, run):
                return False
        return True

    def _elsewhere(
        self, stage: Holding, oracle: Oracle, seed: int, kept: tuple[torch.Tensor, ...]
    ) -> bool:
        """Once more in other memory under the other poison; on a GPU, on another stream too."""
        stage.fill(seed)
        _other_work(oracle.device)
        label = f"other memory, another poison, after other work, seed {seed}"
        run = self._call(stage, oracle, seed, label, HUGE)
        if run is None or not self._agree("again", kept, run):
            return False
        if not oracle.device.startswith("cuda") or "stream" in self.without:
            return True
        run = self._call(stage, oracle, seed, f"on a side stream, seed {seed}", HUGE, aside=True)
        if run is None and self.failed is not None:
            self.failed = Finding(check="stream", status=FAIL, detail=self.failed.detail)
        return run is not None and self._agree("stream", kept, run)

    def _agree(self, name: str, kept: tuple[torch.Tensor, ...], run: Run) -> bool:
        if not self.implementation.deterministic:
            return True
        return self._same(name, kept, run.outputs, run)

    def _reason(self) -> str:
        assert self.failed is not None
        return f"{self.failed.check}: {self.failed.detail}"

    def verdict(self, oracle: Oracle, status: str, reason: str) -> Verdict:
        """The verdict with a finding for each rule that was reached."""
        judged = status != UNSUPPORTED and bool(self.reached or self.failed)
        found = [
            Finding(check=n, status=PASS, detail=self._detail(n, oracle)) for n in self.reached
        ]
        if self.failed is not None:
            found = [f for f in found if f.check != self.failed.check] + [self.failed]
        measured = judged and (self.share > 0 or "error" in self.reached)
        baseline = [b.baseline_rms / b.scale for b in oracle.bounds if b.scale] if judged else []
        return Verdict(
            operator=oracle.operator.name,
            implementation=self.implementation.name,
            case=oracle.case.name,
            direction=oracle.direction,
            status=status,
            reason=reason,
            tolerance_used=self.share if measured else None,
            error=self.rms if measured else None,
            baseline_error=max(baseline, default=None),
            seeds=oracle.seeds if status != UNSUPPORTED else (),
            findings=tuple(found),
        )

    def _detail(self, name: str, oracle: Oracle) -> str:
        if name in self.notes:
            return self.notes[name]
        if name == "guards" and self.unguarded:
            return f"{self.unguarded} allocations were too large to guard"
        if name == "guards" and self.implementation.backend == "compile":
            return "around the inputs; compiled code allocates where no guard can be put"
        if name == "error" and any(b.blunt for b in oracle.bounds):
            return "zeros would be within the tolerance of this case"
        return f"{self.share:.0%} of the tolerance" if name == "error" else ""


def _other_work(device: str) -> None:
    """Work of another kind in between, so that nothing left in registers or caches helps."""
    a = torch.rand(64, 64, device=device)
    (a @ a).sort().values.sum().item()
