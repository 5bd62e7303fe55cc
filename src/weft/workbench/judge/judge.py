"""Judge a candidate in another suite's format: check it, apply the file's own check, time it.

The reference runs in this process, because the author of a problem is trusted. The candidate runs
in a worker process, which receives the input generator and never an expected output. To be timed under
the candidate's conditions the reference has a worker of its own, which starts when the check has passed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.backends import support
from weft.core import (
    FORWARD,
    Case,
    Ceilings,
    Finding,
    Implementation,
    Interrupted,
    Log,
    Record,
    Verdict,
    WeftError,
    no_log,
)
from weft.core.operator import unknown_name
from weft.core.record import FAIL, PASS
from weft.workbench.bench import free_memory, run_points
from weft.workbench.calls.buffers import release_unused_memory
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.guarded_memory import NAN
from weft.workbench.calls.memory import GIB, free_bytes, is_shortage
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.output_judge import OutputJudges
from weft.workbench.judge import gpumode, kernelbench, trace_problem
from weft.workbench.judge.backward import name_missing_gradient
from weft.workbench.judge.definition import NotSupported
from weft.workbench.judge.judgement import NOT_RUN, Judgement, OwnCheck
from weft.workbench.judge.memory import PEAK_FACTOR, Shortage
from weft.workbench.judge.problem import Problem, error_line
from weft.workbench.judge.source_facts import GPUMODE, KERNELBENCH, TRACE, reference_facts, source_facts
from weft.workbench.judge.suite import Pair
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.observed_kernels import ObservedKernels, observe_in_worker
from weft.workbench.sandbox.process import Limits
from weft.workbench.sources.source import Source
from weft.workbench.timing.plan import CHECKS, Budget

N_SEEDS = 4  # for each case; a KernelBench problem with weights has two cases
# Bytes of inputs, outputs and weights above which a case gets fewer seeds: each costs a reference in
# float64. Two still show an output that was cached from the first call.
LARGE = {"cpu": 1 << 26, "cuda": 1 << 30}
LARGE_SEEDS = (2, 1)  # for the first case, and for further ones
UNUSED_BYTES = 1 << 28  # of GPU memory that this process's allocator may keep between two steps
LEAST_FACTOR = 2  # multiple of the problem's own bytes below which a judgement cannot end well
# Time of a GPU's candidate and reference together; their difference is large against the noise.
CUDA_BUDGET = Budget(seconds=5.0, warmup=0.3, recheck_seconds=3.0)
CONFIRM_SHARE = 0.3  # of its seconds, for a second timing in new processes where a difference was shown
MAX_CPU_ELEMENTS = 1 << 24  # a case with more input elements is not timed on a CPU
GPU_ONLY = {"cuda": "CUDA C++", "numba": "numba.cuda"}  # numba's simulator takes no torch tensors
# No limits on a CPU: a time below the floor shows nothing there, and measuring the ceilings would
# take longer than the judging.
NO_CEILINGS = Ceilings(device="none", copy=1e30, read=1e30, fill=1e30, matrix={}, measured="never")
# Messages of PyTorch, Triton and the compilers on a machine without a GPU.
_NEEDS_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|CUDA_HOME|\bnvcc\b|active drivers|No CUDA GPUs|"
    r"CUDA driver|libcuda|CUDA error|needs? a GPU|Expected a 'cuda'|CUDA is not available",
    re.IGNORECASE,
)


def _no_wait(resource: str, nbytes: int) -> object:
    """Go on at once: the default where no other judgement runs."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Options of a judgement. ``seed`` fixes every seed, to repeat a failure.

    ``backward`` judges the gradients of inputs and parameters in place of the outputs. ``workloads`` is
    the file of the workloads, if the reference is a definition and they are not beside it. ``without``
    names checks to leave out, for the selftest; "weights" and "constants" are the values that vary in place
    of constants. ``wait`` is called before memory is used, with "memory" and about the bytes that are
    needed, and before time is measured, with "time" and 0: it returns when the judgement may go on.
    """

    device: str = "cpu"
    backward: bool = False
    workloads: Path | None = None
    cases: Sequence[str] = ()
    seed: int | None = None
    time: bool = True
    limits: Limits = field(default_factory=Limits)
    without: Collection[str] = ()
    wait: Callable[[str, int], object] = _no_wait


def judge(
    reference: Path, candidate: Path, options: JudgeOptions | None = None, log: Log = no_log
) -> Judgement:
    """Judge ``candidate`` by ``reference``, in whichever format they are.

    Raises :class:`WeftError` for a mistake in the request: a missing file, a reference in no known
    format or that cannot be run, an unknown case. Anything that the candidate does is a verdict. Raises
    :class:`Interrupted` with the judgement so far for a ``KeyboardInterrupt``.
    """
    with ExitStack() as stack:
        return _judge(reference, candidate, options or JudgeOptions(), log, stack)


def _judge(reference: Path, candidate: Path, options: JudgeOptions, log: Log, stack: ExitStack) -> Judgement:
    """Judge the candidate; ``stack`` holds the temporary folder of its sources."""
    # By reading the source, not by importing it: neither file runs before its format is known.
    kind = detect_format(reference, candidate)
    nbytes = kernelbench.estimate_bytes(reference) if kind == KERNELBENCH else 0
    judgement = Judgement(format=kind, operator=kernelbench.problem_name(reference), problem_bytes=nbytes)
    # Before the problem is read, since that already allocates its weights and inputs.
    options.wait("memory", PEAK_FACTOR * nbytes)
    if shortage := _expected_shortage(nbytes, options):
        judgement.run_out_of_memory(shortage)
        return judgement
    log(f"running the reference of {reference}")
    try:
        with judgement.step("reading the problem"):
            problem = _read_problem(kind, reference, candidate, options, stack)
            # What the runs that observed the reference left in the allocator: the workers need it.
            release_unused_memory(UNUSED_BYTES)
        judgement.operator, judgement.problem_bytes = problem.operator.name, problem.nbytes
        judgement.direction = problem.direction
        judgement.notes += problem.notes
        cases = _select_cases(problem, options)
        if language := _gpu_only_language(candidate, options.device):
            judgement.refuse("import", f"needs a GPU: the candidate is in {language}", NOT_RUN)
            return judgement
        _judge_problem(problem, candidate, cases, options, judgement, log)
    except NotSupported as error:
        judgement.refuse("import", str(error), NOT_RUN)
    except KeyboardInterrupt as error:
        judgement.stop()
        raise Interrupted(judgement) from error
    except Exception as error:
        if not is_shortage(error):
            raise
        judgement.reason = f"{type(error).__name__}: {error}"
    if not judgement.correct and is_shortage(judgement.reason):
        judgement.run_out_of_memory(_shortage(judgement, options))
    free_memory(options.device)
    judgement.sort_checks()
    return judgement


def _judge_problem(
    problem: Problem,
    candidate: Path,
    cases: Sequence[Case],
    options: JudgeOptions,
    judgement: Judgement,
    log: Log,
) -> None:
    """Load the candidate in a worker process and judge it."""
    source = Source(
        kind=judgement.format,
        path=str(candidate.resolve()),
        reference=str(problem.path.resolve()),
        extra=problem.extra,
    )
    log("loading the candidate")
    # Before the candidate runs: it could write to the reference's files, which are read again for timing.
    digest = _digest(problem)
    try:
        with judgement.step("loading the candidate"):
            worker = WorkerProcess(source, options.limits)
        with worker:
            # The loaded candidate's parameters decide which gradients can be compared.
            if problem.for_parameters is not None:
                problem = problem.for_parameters(worker.parameters)
                judgement.name_gradients(problem.operator.output_names, problem.not_compared)
            _Judging(problem, worker, options, judgement, log, digest).run(cases)
    except (SandboxDied, WorkerError) as error:
        # No check yet means that the process ended while it loaded the candidate's file.
        check_name = "channel" if judgement.checks else "import"
        why = error.reason if isinstance(error, SandboxDied) else str(error)
        if options.device == "cpu" and _NEEDS_GPU.search(why):
            judgement.refuse(check_name, f"needs a GPU: {why}", NOT_RUN)
        else:
            judgement.refuse(check_name, why)


def _expected_shortage(nbytes: int, options: JudgeOptions) -> Shortage | None:
    """Return the shortage that is certain before anything is allocated, if there is one."""
    free = free_bytes(options.device)
    if LEAST_FACTOR * nbytes > free:
        return Shortage(where="the problem", needed=PEAK_FACTOR * nbytes, free=free)
    limit = options.limits.memory_bytes
    if options.device == "cpu" and nbytes > limit:  # it holds inputs, outputs and weights at least
        hint = "the limit --memory of the candidate's process"
        return Shortage(where="the candidate", needed=LEAST_FACTOR * nbytes, free=limit, message=hint)
    return None


def _shortage(judgement: Judgement, options: JudgeOptions) -> Shortage:
    """Return the shortage that a refusal reports in other words."""
    free_memory(options.device)
    limit = options.limits.memory_bytes
    by_limit = "used more than" in judgement.reason
    return Shortage(
        where="the candidate" if judgement.checks or by_limit else "the reference",
        needed=max(PEAK_FACTOR * judgement.problem_bytes, limit if by_limit else 0),
        free=limit if by_limit else free_bytes(options.device),
        message=judgement.reason,
    )


def _read_problem(
    kind: str, reference: Path, candidate: Path, options: JudgeOptions, stack: ExitStack
) -> Problem:
    if kind == KERNELBENCH:
        return kernelbench.read_problem(
            reference, options.device, options.seed, options.backward, options.without
        )
    if options.workloads is not None and kind != TRACE:
        raise WeftError("--workloads", expected="a definition in JSON as REFERENCE", got=reference)
    if options.backward:
        raise WeftError(
            "--backward",
            expected="a KernelBench problem: class Model with get_inputs()",
            got=f"a problem in the format {kind}",
            hint="a backward in this format is a problem of its own, judged without --backward",
        )
    if kind == TRACE:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-solution-")))
        files = (reference, candidate, options.workloads)
        return trace_problem.read_problem(*files, options.device, options.seed, folder)
    return gpumode.read_problem(reference, options.device, options.seed, options.without)


def detect_format(reference: Path, candidate: Path) -> str:
    """Return the format's name, derived from the reference's definitions; nothing is run.

    Raises :class:`WeftError` if the reference is in no known format. The candidate only has to
    exist: a mistake in it is a verdict.
    """
    if not reference.exists():
        raise WeftError("REFERENCE", expected="a file or a folder", got=f"{reference}: no such file")
    if not candidate.is_file():
        raise WeftError("CANDIDATE", expected="a .py file, or a solution in JSON", got=candidate)
    if trace_problem.is_trace_reference(reference):
        return TRACE
    path = gpumode.reference_file(reference)
    names = reference_facts(path).names
    if {"generate_input", "ref_kernel", "check_implementation"} & names:
        return GPUMODE
    if {"Model", "get_inputs", "get_init_inputs"} & names:
        return KERNELBENCH
    raise WeftError(
        f"{path} is in no known format",
        expected="class Model with get_inputs() (KernelBench), or generate_input() with "
        "ref_kernel() (GPU MODE), or a definition in JSON",
        got=f"a file that defines {', '.join(sorted(names)) or 'nothing'}",
        hint="to check an operator of your own, use --with: weft help kernel",
    )


def _select_cases(problem: Problem, options: JudgeOptions) -> list[Case]:
    cases = problem.operator.cases
    names = [c.name for c in cases]
    for name in options.cases:
        if name not in names:
            raise unknown_name(f"case of {problem.operator.name}", name, names)
    return [c for c in cases if c.name in options.cases or not options.cases]


def _gpu_only_language(candidate: Path, device: str) -> str:
    """Return the candidate's language if it runs on a GPU only and there is none, else ''."""
    try:
        backend = source_facts(candidate).backend
    except (SyntaxError, ValueError, OSError):
        return ""  # the worker process reports why it cannot load the file
    return GPU_ONLY.get(backend, "") if device == "cpu" else ""


class _Judging:
    """Judgement in progress: the steps that call the candidate in its worker process."""

    def __init__(
        self,
        problem: Problem,
        worker: WorkerProcess,
        options: JudgeOptions,
        judgement: Judgement,
        log: Log,
        digest: str,
    ) -> None:
        self.problem, self.worker, self.options = problem, worker, options
        self.judgement, self.log, self.digest = judgement, log, digest
        self.implementation: Implementation = worker.implementations[0]
        self.passed: dict[tuple[str, str], Verdict] = {}  # by implementation and case
        self.output_judges: dict[str, OutputJudges] = {}  # of timed outputs, by case
        self.observed: dict[tuple[str, str], ObservedKernels] = {}  # by implementation and case

    def run(self, cases: Sequence[Case]) -> None:
        """Check the cases, then observe the kernels and time them if the candidate is correct."""
        judgement = self.judgement
        judgement.backend = self.implementation.backend
        judgement.checks.append(Finding(check="import", status=PASS))
        # A request may name only cases for timing; these are checked then.
        check_cases = [c for c in cases if "check" in c.tags] or list(cases)
        with judgement.step("checking"):
            verdicts = self._check(check_cases)
        judgement.add_verdicts(verdicts)
        self.passed = {(v.implementation, v.case): v for v in verdicts if v.status == PASS}
        if judgement.reason and self.options.device == "cpu" and _NEEDS_GPU.search(judgement.reason):
            judgement.reason = f"{NOT_RUN}: needs a GPU: {judgement.reason}"
        if judgement.correct:
            self.log("observing its kernels")
            with judgement.step("observing kernels"):
                # At a case that is timed, where one is checked: its kernels are then listed once.
                timed = _bench_cases(cases, self.options.device)
                self._observe_kernels(next((c for c in reversed(check_cases) if c in timed), check_cases[-1]))
        if judgement.correct:
            self._time(cases)

    def _check(self, cases: Sequence[Case]) -> list[Verdict]:
        seed, device, operator = self.options.seed, self.options.device, self.problem.operator
        verdicts: list[Verdict] = []
        for number, case in enumerate(cases):
            self.log(f"checking {case.name}")
            n_seeds = self._n_seeds(number)
            seeds = fresh_seeds(n_seeds) if seed is None else range(seed, seed + n_seeds)
            oracle = Oracle(
                operator,
                case,
                FORWARD,
                device,
                seeds,
                self.problem.baseline,
                # The checks of these formats compare values alone.
                accepts_dense_layouts=self.problem.kind in (KERNELBENCH, GPUMODE),
            )
            # Before the candidate is called: an error here is the reference's and must not count as its.
            _compute_reference(oracle)
            free_memory(device)
            self._apply_own_check(oracle)
            free_memory(device)
            verdict = check(
                operator,
                self.implementation,
                case,
                FORWARD,
                device,
                oracle=oracle,
                without=self.options.without,
                make_caller=self.worker.make_caller,
            )
            verdicts.append(name_missing_gradient(verdict))
            if verdict.status == PASS:  # the timing needs the same bounds
                judges = OutputJudges(operator, case, FORWARD, device, self.problem.baseline)
                judges.share_bounds_of(oracle)
                self.output_judges[case.name] = judges
            del oracle  # its answers: what follows needs the memory
            release_unused_memory(UNUSED_BYTES)
            # One failure decides, and each further case costs its references in float64.
            if verdicts[-1].status == FAIL:
                break
        return verdicts

    def _n_seeds(self, number: int) -> int:
        """Return how many seeds case ``number`` is checked at; a note says if they are fewer."""
        if "seeds" in self.options.without:
            return 1
        nbytes = self.problem.nbytes
        if nbytes <= LARGE[self.options.device]:
            return N_SEEDS
        note = f"checked at {LARGE_SEEDS[0]} seeds, not {N_SEEDS}: the problem has {nbytes / GIB:.3g} GiB"
        if note not in self.judgement.notes:
            self.judgement.notes.append(note)
        return LARGE_SEEDS[min(number, 1)]

    def _apply_own_check(self, oracle: Oracle) -> None:
        """Apply the file's own check to one call at its own seed; the first failure is final."""
        own = self.judgement.own
        # It uses a seed of its own, which is a further one.
        if self.problem.own_check is None or "seeds" in self.options.without:
            return
        # KernelBench has one check of one input set; GPU MODE checks each case until one fails.
        if own is not None and (self.problem.kind == KERNELBENCH or own.passed is not True):
            return
        result: tuple[bool | None, str]
        try:
            if support(self.implementation, oracle.case, oracle.device):
                result = self._own_check(oracle)
            else:
                result = None, "the case cannot be run here"
        except (SandboxDied, WorkerError) as error:
            result = False, getattr(error, "reason", str(error))
        except WeftError:
            raise
        except Exception as error:  # noqa: BLE001 - the file's own check may raise anything
            result = False, f"it raised {error_line(error, 200)}"
        self.judgement.own = OwnCheck(passed=result[0], detail=result[1], rule=self.problem.own_rule)

    def _own_check(self, oracle: Oracle) -> tuple[bool, str]:
        problem = self.problem
        assert problem.own_check is not None
        caller = self.worker.make_caller(self.implementation, oracle.call_spec, NAN)
        caller.load(problem.own_seed)
        call = caller.call(False)
        if not call.outputs:
            return False, call.violations.get("returns") or call.violations.get("type") or "no output"
        # The file's check runs here, on the outputs that the worker sent: the candidate cannot reach it. The
        # worker's own tensors are released before, since the check computes another reference.
        output = call.outputs[0] if len(call.outputs) == 1 else call.outputs
        caller.close()
        return problem.own_check(oracle.case, problem.own_seed, output)

    def _observe_kernels(self, case: Case) -> None:
        """Name the kernels that ran, and compare them with the candidate's backend."""
        judgement, worker = self.judgement, self.worker
        observed = observe_in_worker(
            worker.source, self.implementation, case, self.options.device, limits=worker.limits
        )
        self.observed[self.implementation.name, case.name] = observed
        judgement.kernels = list(observed.kernels)
        if observed.note:
            judgement.flags.append(f"kernels {observed.note}")
        # "observed" passes only if both observations could be made; a note says that one could not.
        for name in ("provenance", "observed"):
            if name in self.options.without:
                continue
            if name in observed.violations:
                judgement.refuse(name, observed.violations[name])
            elif observed.kernels and not (name == "observed" and observed.note):
                judgement.checks.append(Finding(check=name, status=PASS))

    def _time(self, cases: Sequence[Case]) -> None:
        """Time the candidate against the reference at the bench cases."""
        judgement, device, problem = self.judgement, self.options.device, self.problem
        if not self.options.time:
            judgement.flags.append("not timed: left out")
            return
        if problem.constant:
            # An answer to constant inputs can be stored in the candidate: its time says nothing.
            names = ", ".join(problem.constant)
            judgement.flags.append(f"not timed: the same at every seed, and cannot be varied: {names}")
            return
        if layout := next(filter(None, map(_other_layout, self.passed.values())), ""):
            # The next operator would have to convert it, outside of the time.
            judgement.flags.append(
                f"not timed: an output has {layout}: its time would leave out a conversion; "
                "return .contiguous() to be timed"
            )
            return
        answer = support(self.implementation, cases[0], device)
        if not answer.timed:
            judgement.flags.append(f"not timed: {answer.reason}")
            return
        # The check may run beside other judgements; only the timing must be alone.
        self.options.wait("time", 0)
        timed = _bench_cases(cases, device)
        # Checked a moment ago at these cases; the reference is the oracle's own function.
        reference = {
            (problem.baseline.name, c.name): _passed(problem, c) for c in timed if self._was_checked(c)
        }
        try:
            with judgement.step("timing"):
                for records in self._timed_records(timed, self.passed | reference, 1.0):
                    judgement.add_records(records, self.implementation.name)
            shown = [c for c in timed if judgement.shows_difference(c.name)]
            if judgement.correct and shown:
                with judgement.step("timing again"):
                    self._confirm(shown, self.passed | reference)
        except (SandboxDied, WorkerError) as error:  # run_points reports those of the candidate
            judgement.flags.append(f"not timed: the reference's process: {error}")
        except Exception as error:
            if not is_shortage(error):
                raise
            # The check has passed: the verdict stands without a time.
            judgement.flags.append(f"not timed: {_shortage(judgement, self.options).reason}")
        if _digest(problem) != self.digest:  # the candidate could write another, slower one
            judgement.refuse("conditions", "a file of the reference was changed after it had been read")

    def _confirm(self, cases: Sequence[Case], verdicts: Mapping[tuple[str, str], Verdict]) -> None:
        """Time both again in new processes: in each a library may choose another algorithm."""
        why = ""
        try:
            self.worker.restart()
            for records in self._timed_records(cases, verdicts, CONFIRM_SHARE):
                self.judgement.confirm(records, self.implementation.name)
        except (SandboxDied, WorkerError) as error:
            why = str(error)
        except Exception as error:
            if not is_shortage(error):
                raise
            why = _shortage(self.judgement, self.options).reason
        if why:
            for case in cases:
                self.judgement.leave_out_time(case.name, why)

    def _timed_records(
        self, cases: Sequence[Case], verdicts: Mapping[tuple[str, str], Verdict], share: float
    ) -> Iterator[list[Record]]:
        """Time the candidate's process and a new one of the reference; yield the records of each case.

        A ``share`` of the seconds below 1 is for code that was judged: only its samples are taken, and
        where a case is checked again, its calls are not repeated.
        """
        device, problem = self.options.device, self.problem
        budget = CUDA_BUDGET if device == "cuda" else Budget.for_device(device, quick=True)
        without = self.options.without
        if share < 1.0:
            budget = replace(budget, seconds=share * budget.seconds, side_samples=1)
            without = {*without, *CHECKS, "provenance", "many"}
        with self._start_reference() as reference_worker:
            yield from run_points(
                [problem.operator],
                [problem.baseline, self.implementation],
                [c.name for c in cases],
                [FORWARD],
                device,
                budget=budget,
                ceilings=None if device == "cuda" else NO_CEILINGS,
                workers={
                    self.implementation.name: self.worker,
                    problem.baseline.name: reference_worker,
                },
                trusted=(problem.baseline.name,),
                baselines={problem.operator.name: problem.baseline},
                verdicts=verdicts,
                judges=self.output_judges,
                observed=self.observed,
                without=without,
                on_event=self.log,
            )

    def _start_reference(self) -> WorkerProcess:
        """Start the worker in which the reference is timed; raise what :class:`WorkerProcess` raises."""
        # No process of the candidate runs while another's conditions are set.
        self.worker.pause()
        path = str(self.problem.path.resolve())
        source = Source(
            kind=self.judgement.format,
            path=path,
            reference=path,
            is_reference=True,
            extra={**self.problem.extra, "parameters": list(self.worker.parameters)},
        )
        return WorkerProcess(source, self.options.limits)

    def _was_checked(self, case: Case) -> bool:
        return (self.implementation.name, case.name) in self.passed


def _passed(problem: Problem, case: Case) -> Verdict:
    return Verdict(
        operator=problem.operator.name,
        implementation=problem.baseline.name,
        case=case.name,
        direction=FORWARD,
        status=PASS,
    )


def _other_layout(verdict: Verdict) -> str:
    """Return the strides of an output that differ from the reference's, '' if none do."""
    return next((f.detail for f in verdict.findings if f.check == "layout" and f.status == PASS), "")


def _digest(problem: Problem) -> str:
    """Return a hash of the reference's files, which is read again to be timed."""
    return Pair(name="", reference=problem.path, candidate=None).digest()


def _compute_reference(oracle: Oracle) -> None:
    """Compute the expected outputs; an error is a mistake in the reference, so in the request."""
    try:
        _ = oracle.bounds
    except WeftError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise  # a reason of the verdict, not a mistake in the request
        got = error_line(error, 200)
        raise WeftError(f"the reference at {oracle.case.name}", got=got) from error


def _bench_cases(cases: Sequence[Case], device: str) -> list[Case]:
    """Return the cases tagged for timing, else the largest: weights do not change the time."""
    bench = [c for c in cases if "bench" in c.tags]
    if device == "cpu":
        bench = [c for c in bench if sum(i.numel for i in c.inputs) <= MAX_CPU_ELEMENTS]
    if bench:
        return bench
    return [max(cases, key=lambda c: (sum(i.numel for i in c.inputs), c.name))]
