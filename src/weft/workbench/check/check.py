"""Check: is an implementation right at a case? A verdict from named rules; see docs/trust/correct.md.

Each seed's inputs are loaded into the same addresses, and every call is held to all rules of
``rules``. Then the call is repeated: several times, in other memory with another poison after other
work, and on a side stream. The bits must be equal unless the implementation declares otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from weft import backends
from weft.core import Case, Finding, Implementation, Operator, Verdict
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.machine.nvtx import annotate
from weft.workbench.calls.call import (
    Caller,
    CallerFactory,
    describe_bit_differences,
    make_local_caller,
)
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.guarded_memory import HUGE, NAN
from weft.workbench.calls.memory import gpu_shortage, is_shortage
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.growth import describe_growth
from weft.workbench.check.oracle import Oracle, for_outputs
from weft.workbench.check.rules import OF_BITS, RULES, CheckedCall

SEEDS = 5
CALLS = 13  # calls in all where a call is quick: more than the ten that a kernel may behave for
# Of external code, of which a call in fifty may be wrong: as many calls at a case as its budget allows.
MAX_CALLS, MAX_SECONDS = 250, 3.0
# The first case that is repeated gets so many whatever the budget: a busy machine makes few in that time.
LEAST_CALLS, LEAST_SECONDS = 120, 30.0
QUICK = 0.05  # seconds; a call that is slower at every seed (an interpreter's) is not repeated
SMALL = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements above which judging each repeat takes too long
NO_MEMORY = "checking this (reference, baseline, guards) takes more memory than this device has left"

# Rules that compare two calls, by their bits or by their errors, each with the message of a failure.
ACROSS = {
    "repeats": "the same inputs gave other bits",
    "again": "the same inputs gave other bits in other memory",
    "stream": "the same inputs gave other bits on another stream",
    "growth": "the error grows with the length of a sum",
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
    make_caller: CallerFactory = make_local_caller,
) -> Verdict:
    """Check one implementation at one case in one direction on ``device`` ('cpu' or 'cuda').

    Without ``seeds``, ``n_seeds`` of them come from the operating system; the verdict records them.
    An ``oracle`` for the same case, direction and device can be shared by many implementations (its
    seeds are used), so that they cost one reference. ``without`` names rules to leave out;
    ``baseline`` sets the tolerance (default: the registry's); ``make_caller`` makes the calls, of
    external code in a worker process. Whatever the implementation does, this function does not
    raise: it returns a fail with the reason.
    """
    run = CheckRun(implementation, without, make_caller)
    if oracle is None:
        seeds = seeds or fresh_seeds(1 if "seeds" in without else n_seeds)
        oracle = Oracle(operator, case, direction, device, seeds, baseline)
    oracle = for_outputs(oracle, implementation)
    point = (operator, case, direction, device)
    try:
        support = backends.support(implementation, case, device, direction)
    except (SandboxDied, WorkerError) as error:  # an external candidate's own `supports`
        return run.verdict(oracle, FAIL, run.fail_channel(f"asked what it supports: {error}"))
    if not support:
        return run.verdict(oracle, UNSUPPORTED, support.reason)
    title = f"{operator.name} {implementation.name} {case.name} {direction}"
    reference_range = annotate(f"check {title}: reference")
    try:
        with reference_range:
            _ = oracle.bounds
        fault = oracle.baseline_fault
    except torch.OutOfMemoryError:
        return run.verdict(oracle, UNSUPPORTED, gpu_shortage(*point) or NO_MEMORY)
    except Exception as error:  # noqa: BLE001 - the reference or the baseline is at fault
        reason = f"no tolerance: {oracle.baseline.name} or the reference raised "
        return run.verdict(oracle, FAIL, reason + f"{type(error).__name__}: {error}")
    if fault:
        # A wrong baseline sets a wrong tolerance, which would pass or fail others for the baseline's error.
        return run.verdict(oracle, FAIL, run.fail("yardstick", fault))
    try:
        with annotate(f"check {title}: calls"):
            reason = run.run(oracle)
    except torch.OutOfMemoryError:
        return run.verdict(oracle, UNSUPPORTED, gpu_shortage(*point) or NO_MEMORY)
    except torch.AcceleratorError as error:
        # A context that a kernel broke stays broken for this process; any later call shows it.
        reason = f"not checked: a kernel before this broke the device's context: {error}"
    except WorkerError as error:
        if "OutOfMemoryError" in str(error):
            return run.verdict(oracle, UNSUPPORTED, gpu_shortage(*point) or NO_MEMORY)
        reason = run.fail_channel(f"its process could not go on: {error}")
    except SandboxDied as error:
        reason = run.fail_channel(error.reason)
    if reason and is_shortage(reason) and (shortage := gpu_shortage(*point)):
        run.failed = None  # it says nothing of the code: others hold the memory that the check needs
        return run.verdict(oracle, UNSUPPORTED, shortage)
    if reason:
        return run.verdict(oracle, FAIL, reason)
    return run.verdict(oracle, PASS, support.reason)


def _always_local(implementation: Implementation) -> CallerFactory:
    return make_local_caller


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
    factory_of: Callable[[Implementation], CallerFactory] = _always_local,
) -> Iterator[Verdict]:
    """Yield the verdicts of many implementations at one case, on the same seeds, from one oracle.

    ``factory_of`` returns for each implementation the factory of its caller.
    """
    oracle = Oracle(operator, case, direction, device, seeds or fresh_seeds(n_seeds), baseline)
    for implementation in implementations:
        yield check(
            operator,
            implementation,
            case,
            direction,
            device,
            oracle=oracle,
            without=without,
            make_caller=factory_of(implementation),
        )


class CheckRun:
    """Calls of one check, in order, and the findings of the rules."""

    def __init__(
        self, implementation: Implementation, without: Collection[str], make_caller: CallerFactory
    ) -> None:
        self.implementation = implementation
        self.without = frozenset(without)
        self.make_caller = make_caller
        self.failed: Finding | None = None
        self.reached: list[str] = []
        self.share = self.rms = self.local_share = 0.0
        self.quickest = float("inf")
        self.unguarded = 0
        self.notes: dict[str, str] = {}

    def run(self, oracle: Oracle) -> str:
        """Make all the calls; return the reason of the first failure, or an empty string."""
        # The candidate learns a seed only with its inputs, and the seeds are new for each check: an output
        # cannot be prepared in advance.
        caller = self.make_caller(self.implementation, oracle.call_spec, NAN)
        last: CheckedCall | None = None
        for seed in oracle.seeds:
            caller.load(seed)
            last = None  # its outputs, before those of the next call arrive
            last = self._call(caller, oracle, seed, f"seed {seed}")
            if last is None:
                return self._reason()
        assert last is not None
        if not self._repeat(caller, oracle, last):
            return self._reason()
        # A copy: the candidate's own memory may be reused once the first caller is closed.
        expected = last if caller.sends_copies else last.copy()
        if not self._error_is_steady(caller, oracle, expected):
            return self._reason()
        # The second caller is made while the first one's memory is in use, so that it gets other
        # addresses.
        other = self.make_caller(self.implementation, oracle.call_spec, HUGE)
        caller.close()
        del last, caller
        agrees = self._call_elsewhere(other, oracle, expected)
        other.close()  # its memory is needed by what follows
        return "" if agrees else self._reason()

    def fail_channel(self, detail: str) -> str:
        """Record that the candidate's process ended before it answered; return the reason."""
        return self.fail("channel", detail)

    def fail(self, rule: str, detail: str) -> str:
        """Record a failure without a call of the candidate; return the reason."""
        self.failed = Finding(check=rule, status=FAIL, detail=detail)
        return self._reason()

    def _call(
        self,
        caller: Caller,
        oracle: Oracle,
        seed: int,
        label: str,
        poison: int = NAN,
        on_side_stream: bool = False,
        expected: CheckedCall | None = None,
    ) -> CheckedCall | None:
        """Make one call and apply every rule; return None where one fails.

        ``expected`` is a call on the same inputs that passed: equal bits are not judged again.
        """
        result = caller.call(on_side_stream, self.without)
        self.quickest = min(self.quickest, result.seconds)
        checked = CheckedCall(oracle, seed, label, poison, result)
        if expected is not None and expected.has_same_bits(checked):
            checked.passed = expected
        return checked if self._apply_rules(checked) else None

    def _apply_rules(self, checked: CheckedCall) -> bool:
        for name, rule in RULES.items():
            if name in self.without or (checked.passed is not None and name in OF_BITS):
                continue
            try:
                violation = rule(checked) if rule else checked.result.violations.get(name, "")
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                # Only outputs of a form that cannot be compared get here.
                violation = f"could not be judged: {type(error).__name__}: {error}"
            if violation:
                detail = f"{violation} ({checked.label})"
                self.failed = Finding(check=name, status=FAIL, detail=detail)
                if name in ("error", "drift", "local"):
                    self._note(checked)
                return False
            if name not in self.reached:
                self.reached.append(name)
        self._note(checked)
        return True

    def _note(self, checked: CheckedCall) -> None:
        """Add a call to the figures of the verdict."""
        self.unguarded += checked.result.unguarded
        self.notes |= checked.notes
        if {"type", "shape"} & self.without:
            return  # outputs of any form may be here: they have no error
        self.share = max(self.share, checked.share)
        self.local_share = max(self.local_share, checked.local_share)
        for error, bound in zip(checked.errors, checked.oracle.bounds, strict=True):
            if bound.scale:
                self.rms = max(self.rms, error.rms / bound.scale)

    def _repeat(self, caller: Caller, oracle: Oracle, last: CheckedCall) -> bool:
        """Repeat the call on the same inputs, if it is quick and the case small."""
        elements = max(i.numel for i in oracle.case.inputs)
        elements = max([elements, *(t.numel() for t in last.outputs)])
        if self.quickest > QUICK or elements > SMALL[torch.device(oracle.device).type]:
            return True
        # A race may show in one call of many, and a cheat may begin after the tenth call.
        for number in range(len(oracle.seeds) + 1, CALLS):
            if not self._repeat_once(caller, oracle, last, number):
                return False
        return "many" in self.without or self._repeat_external(caller, oracle, last)

    def _repeat_external(self, caller: Caller, oracle: Oracle, last: CheckedCall) -> bool:
        """Repeat a call of external code as often as its budget allows; Weft's own code has no budget."""
        budget, start = caller.repeat_budget, time.monotonic()
        limit = min(budget.seconds, MAX_SECONDS)
        least = 0 if budget.least_is_done else LEAST_CALLS
        number = CALLS
        while number < MAX_CALLS:
            seconds = time.monotonic() - start
            if seconds >= (LEAST_SECONDS if number < least else limit):
                break
            if not self._repeat_once(caller, oracle, last, number):
                return False
            number += 1
        budget.least_is_done |= number >= LEAST_CALLS
        budget.seconds -= time.monotonic() - start
        return True

    def _repeat_once(self, caller: Caller, oracle: Oracle, last: CheckedCall, number: int) -> bool:
        label = f"call {number}, seed {last.seed}"
        checked = self._call(caller, oracle, last.seed, label, expected=last)
        return checked is not None and self._bits_agree("repeats", last, checked)

    def _error_is_steady(self, caller: Caller, oracle: Oracle, expected: CheckedCall) -> bool:
        """Compare the error with that of shorter sums (:mod:`~weft.workbench.check.growth`)."""
        if {"growth", "type", "shape", "dtype"} & self.without:
            return True

        def outputs_at(seed: int) -> tuple[torch.Tensor, ...]:
            caller.load(seed)
            return caller.call(False, self.without).outputs

        if growth := describe_growth(oracle, expected.seed, expected.errors, outputs_at):
            detail = f"{ACROSS['growth']}: {growth} ({expected.label})"
            self.failed = Finding(check="growth", status=FAIL, detail=detail)
            return False
        self.reached.append("growth")
        return True

    def _call_elsewhere(self, caller: Caller, oracle: Oracle, expected: CheckedCall) -> bool:
        """Call in other memory under the other poison; on a GPU, on a side stream too."""
        seed = expected.seed
        caller.load(seed)
        _other_work(oracle.device)
        # Another poison and other addresses: an output that depends on unwritten or foreign memory changes.
        label = f"other memory, another poison, after other work, seed {seed}"
        checked = self._call(caller, oracle, seed, label, HUGE, expected=expected)
        if checked is None or not self._bits_agree("again", expected, checked):
            return False
        del checked  # of a large output, memory that the next call needs
        if not oracle.device.startswith("cuda") or "stream" in self.without:
            return True
        label = f"on a side stream, seed {seed}"
        checked = self._call(caller, oracle, seed, label, HUGE, on_side_stream=True, expected=expected)
        if checked is None and self.failed is not None:
            self.failed = Finding(check="stream", status=FAIL, detail=self.failed.detail)
        return checked is not None and self._bits_agree("stream", expected, checked)

    def _bits_agree(self, name: str, expected: CheckedCall, checked: CheckedCall) -> bool:
        if not self.implementation.deterministic or name in self.without:
            return True
        same = checked.passed is expected  # compared already
        difference = "" if same else describe_bit_differences(expected.outputs, checked.outputs)
        if difference:
            detail = f"{ACROSS[name]}: {difference} ({checked.label})"
            self.failed = Finding(check=name, status=FAIL, detail=detail)
            return False
        if name not in self.reached:
            self.reached.append(name)
        return True

    def _reason(self) -> str:
        assert self.failed is not None
        return f"{self.failed.check}: {self.failed.detail}"

    def verdict(self, oracle: Oracle, status: str, reason: str) -> Verdict:
        """Return the verdict with a finding for each rule that was reached."""
        judged = status != UNSUPPORTED and bool(self.reached or self.failed)
        findings = [Finding(check=n, status=PASS, detail=self._detail(n, oracle)) for n in self.reached]
        if self.failed is not None:
            findings = [f for f in findings if f.check != self.failed.check] + [self.failed]
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
            findings=tuple(findings),
        )

    def _detail(self, name: str, oracle: Oracle) -> str:
        if name in self.notes:
            return self.notes[name]
        if name == "guards" and self.unguarded:
            return f"{self.unguarded} allocations were too large to guard"
        if name == "guards" and self.implementation.backend == "compile":
            return "around the inputs; compiled code allocates where no guard can be put"
        if name == "local" and (zeros := oracle.local.zero_share(oracle.bounds)) is not None:
            used = f"{self.local_share:.0%} of the tolerance in a slice"
            return f"{used}; {zeros:.2g} of the elements could be zeros without notice"
        if name == "error" and any(b.passes_zeros for b in oracle.bounds):
            return "zeros would be within the tolerance of this case"
        return f"{self.share:.0%} of the tolerance" if name == "error" else ""


def _other_work(device: str) -> None:
    """Run kernels of another kind, so that nothing left in registers or caches helps.

    The generator is its own: the device's default one may still belong to a graph capture of an
    implementation, and then raises "Offset increment outside graph capture".
    """
    generator = torch.Generator(device=device)
    generator.seed()
    a = torch.rand(64, 64, device=device, generator=generator)
    (a @ a).sort().values.sum().item()
