"""Judge a candidate in somebody else's format: read, check, ask the file's own check, time.

The reference is run in this process: whoever poses the problem is trusted. The candidate is run in
a cell, which is told the generator and never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.backends import support
from weft.core import FORWARD, Case, Ceilings, Finding, Implementation, Verdict, WeftError
from weft.core.operator import unknown_name
from weft.core.record import FAIL, PASS
from weft.workbench.bring import Source
from weft.workbench.cell import CellDied, GuestError, Limits
from weft.workbench.check import check
from weft.workbench.formats import gpumode, kernelbench
from weft.workbench.formats.detect import KERNELBENCH, detect
from weft.workbench.formats.files import Facts, facts
from weft.workbench.formats.judgement import (
    NOT_RUN,
    Judgement,
    OwnCheck,
    sorted_checks,
    take_records,
    take_verdicts,
)
from weft.workbench.formats.problem import Problem
from weft.workbench.hands import Guest
from weft.workbench.memory import NAN
from weft.workbench.oracle import Oracle, fresh_seeds
from weft.workbench.ran import of_stranger

SEEDS = 4  # a case; KernelBench's problems with weights are two cases
LARGE = 1 << 24  # elements, above which a case is not timed on a CPU
ON_A_GPU = {"cuda": "CUDA C++", "numba": "numba.cuda"}  # the simulator takes no torch tensors
# On a CPU a floor that is beaten says nothing, and measuring its ceilings takes longer than this.
NO_CEILINGS = Ceilings(device="none", copy=1e30, read=1e30, fill=1e30, matrix={}, measured="never")
# How PyTorch, Triton and the compilers say that there is no GPU here.
_NEEDS_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|CUDA_HOME|\bnvcc\b|active drivers|No CUDA GPUs|"
    r"CUDA driver|libcuda|CUDA error|needs? a GPU|Expected a 'cuda'|CUDA is not available",
    re.IGNORECASE,
)
Say = Callable[[str], None]


def _silent(line: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a judging is asked for. ``seed`` fixes every seed, to repeat a failure."""

    device: str = "cpu"
    cases: Sequence[str] = ()
    seed: int | None = None
    time: bool = True
    limits: Limits = field(default_factory=Limits)


def judge(
    reference: Path, candidate: Path, wanted: Wanted | None = None, say: Say = _silent
) -> Judgement:
    """The verdict on ``candidate`` by ``reference``, in whichever format they are.

    Raises :class:`WeftError` where the call was wrong: no such file, a reference that is in no
    known format or cannot be run, a case that is not there. Whatever the candidate does is a
    verdict.
    """
    wanted = wanted or Wanted()
    kind = detect(reference, candidate)
    reader = kernelbench if kind == KERNELBENCH else gpumode
    say(f"running the reference of {reference}")
    problem = reader.problem(reference, wanted.device, wanted.seed)
    found = Judgement(format=kind, operator=problem.operator.name, notes=list(problem.notes))
    cases = _chosen(problem, wanted)
    if what := _needs_gpu(candidate, wanted.device):
        found.refuse("import", f"needs a GPU: the candidate is in {what}", NOT_RUN)
        return found
    source = Source(
        kind=kind,
        path=str(candidate.resolve()),
        reference=str(reference.resolve()),
        extra=problem.extra,
    )
    say("reading the candidate")
    try:
        with Guest(source, wanted.limits) as guest:
            _judged(problem, guest, cases, wanted, found, say)
    except (CellDied, GuestError) as error:
        _broke(found, error, wanted.device, "channel" if found.checks else "import")
    found.checks = sorted_checks(found.checks)
    return found


def _chosen(problem: Problem, wanted: Wanted) -> list[Case]:
    names = [c.name for c in problem.operator.cases]
    for name in wanted.cases:
        if name not in names:
            raise unknown_name(f"case of {problem.operator.name}", name, names)
    cases = problem.operator.cases
    return [c for c in cases if c.name in wanted.cases or not wanted.cases]


def _needs_gpu(candidate: Path, device: str) -> str:
    """What it is in that runs on a GPU only; what cannot be parsed is for the guest to say."""
    try:
        said: Facts = facts(candidate)
    except (SyntaxError, ValueError, OSError):
        return ""
    return ON_A_GPU.get(said.backend, "") if device == "cpu" else ""


def _judged(
    problem: Problem,
    guest: Guest,
    cases: Sequence[Case],
    wanted: Wanted,
    found: Judgement,
    say: Say,
) -> None:
    (implementation,) = guest.implementations
    found.backend = implementation.backend
    found.checks.append(Finding(check="import", status=PASS))
    to_check = [c for c in cases if "check" in c.tags] or list(cases)
    verdicts: list[Verdict] = []
    for case in to_check:
        say(f"checking {case.name}")
        seeds = fresh_seeds(SEEDS) if wanted.seed is None else range(wanted.seed, wanted.seed + 4)
        oracle = Oracle(problem.operator, case, FORWARD, wanted.device, seeds, problem.baseline)
        _stands(oracle)
        _ask_own(problem, guest, implementation, oracle, found)
        verdicts.append(
            check(
                problem.operator,
                implementation,
                case,
                FORWARD,
                wanted.device,
                oracle=oracle,
                hands=guest.hands,
            )
        )
        if verdicts[-1].status == FAIL:
            break
    take_verdicts(found, verdicts)
    if found.reason and wanted.device == "cpu" and _NEEDS_GPU.search(found.reason):
        found.reason = f"{NOT_RUN}: needs a GPU: {found.reason}"
    if found.correct:
        say("looking at what ran")
        _what_ran(guest, implementation, to_check[-1], wanted.device, found)
    if found.correct:
        _timed(problem, guest, implementation, cases, wanted, found, say)


def _stands(oracle: Oracle) -> None:
    """Compute the answers; what goes wrong here is the reference's, and the call was wrong."""
    try:
        _ = oracle.bounds
    except WeftError:
        raise
    except torch.OutOfMemoryError:
        return  # the check itself says that there was no room
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise WeftError(f"the reference at {oracle.case.name}", got=got) from error


def _ask_own(
    problem: Problem,
    guest: Guest,
    implementation: Implementation,
    oracle: Oracle,
    found: Judgement,
) -> None:
    """What the file's own check says of one call at its own seed; the first no stays."""
    if found.own is not None and (problem.kind == KERNELBENCH or found.own.passed is not True):
        return
    said: tuple[bool | None, str]
    try:
        if not support(implementation, oracle.case, oracle.device):
            said = None, "the case cannot be run here"
        else:
            said = _own(problem, guest, implementation, oracle)
    except (CellDied, GuestError) as error:
        said = False, getattr(error, "reason", str(error))
    except WeftError:
        raise
    except Exception as error:  # noqa: BLE001 - the file's own check, on whatever came back
        said = False, f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    found.own = OwnCheck(passed=said[0], detail=said[1], rule=problem.own_rule)


def _own(
    problem: Problem, guest: Guest, implementation: Implementation, oracle: Oracle
) -> tuple[bool, str]:
    holding = guest.hands(implementation, oracle.scene, NAN)
    holding.fill(problem.own_seed)
    seen = holding.call(False)
    if not seen.outputs:
        return False, seen.found.get("returns") or seen.found.get("type") or "no output"
    output = seen.outputs[0] if len(seen.outputs) == 1 else seen.outputs
    told = problem.own_check(oracle.case, problem.own_seed, output)
    holding.close()
    return told


def _broke(found: Judgement, error: CellDied | GuestError, device: str, where: str) -> None:
    why = error.reason if isinstance(error, CellDied) else str(error)
    if device == "cpu" and _NEEDS_GPU.search(why):
        found.refuse(where, f"needs a GPU: {why}", NOT_RUN)
    else:
        found.refuse(where, why)


def _what_ran(
    guest: Guest, implementation: Implementation, case: Case, device: str, found: Judgement
) -> None:
    """Name the kernels that ran, and hold them to the backend that the file is written in."""
    ran = of_stranger(guest.source, implementation, case, device, limits=guest.limits)
    found.kernels = list(ran.kernels)
    if ran.note:
        found.flags.append(f"kernels {ran.note}")
    for name in ("provenance", "observed"):
        if name in ran.against:
            found.refuse(name, ran.against[name])
        elif ran.kernels and not (name == "observed" and ran.note):
            found.checks.append(Finding(check=name, status=PASS))


def _timed(
    problem: Problem,
    guest: Guest,
    implementation: Implementation,
    cases: Sequence[Case],
    wanted: Wanted,
    found: Judgement,
    say: Say,
) -> None:
    """Time it against the reference at the cases meant for that, and name what ran there."""
    if not wanted.time:
        found.flags.append("not timed: left out")
        return
    answer = support(implementation, cases[0], wanted.device)
    if not answer.timed:
        found.flags.append(f"not timed: {answer.reason}")
        return
    from weft.workbench.bench import run_points

    names = [c.name for c in _to_time(cases, wanted.device)]
    for records in run_points(
        [problem.operator],
        [problem.baseline, implementation],
        names,
        [FORWARD],
        wanted.device,
        quick=wanted.device == "cpu",
        ceilings=None if wanted.device == "cuda" else NO_CEILINGS,
        guests={implementation.name: guest},
        baselines={problem.operator.name: problem.baseline},
        on_event=say,
    ):
        take_records(found, records, implementation.name)


def _to_time(cases: Sequence[Case], device: str) -> list[Case]:
    """Those tagged for it; of KernelBench's the first, since weights change no time."""
    bench = [c for c in cases if "bench" in c.tags]
    if device == "cpu":
        bench = [c for c in bench if sum(i.numel for i in c.inputs) <= LARGE]
    if bench:
        return bench
    return [max(cases, key=lambda c: (sum(i.numel for i in c.inputs), c.name))]
