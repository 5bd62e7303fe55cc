"""Timing of the candidates of one case, side by side, in rounds of random order.

docs/trust/time.md says what a number means and what it cannot show. ``session`` has the steps that all
devices share; ``cuda`` and ``cpu`` take one sample; ``sandbox.remote_timing`` and
``sandbox.worker_timing`` take it in a worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from weft.machine.clocks import Sampler
from weft.machine.nvtx import annotate
from weft.workbench.calls import heap
from weft.workbench.calls.buffers import MakeBuffers
from weft.workbench.calls.part_times import part
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.integrity import ClockReplaced, replaced_functions, snapshot
from weft.workbench.timing.plan import Budget, Candidate, LocalTimingBackend, Outcome
from weft.workbench.timing.recheck import MakeJudge
from weft.workbench.timing.session import TimingSession


def timing_backend(device: str, without: Collection[str] = ()) -> LocalTimingBackend:
    """Return the timing backend of a device, 'cuda' or 'cpu', in this process."""
    if device == "cuda":
        from weft.workbench.timing.cuda import CudaTimingBackend

        return CudaTimingBackend(whole_cache="cache" not in without)
    from weft.workbench.timing.cpu import CpuTimingBackend

    return CpuTimingBackend()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    with annotate(name), part(name):
        yield


def measure(
    candidates: Sequence[Candidate],
    make_buffers: MakeBuffers,
    *,
    device: str,
    budget: Budget | None = None,
    make_judge: MakeJudge | None = None,
    seed: int | None = 0,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
    without: Collection[str] = (),
) -> dict[str, Outcome]:
    """Time candidates side by side at one case and direction; return an outcome for each name.

    ``make_buffers(seed)`` returns the inputs of one call; ``make_judge(buffers)`` returns what
    compares an output with the oracle at these contents (without it no output is re-checked, for
    tests of the clock alone). ``seed`` None takes every seed from the operating system, as external
    candidates require. ``on_round(round, medians)`` is called after each round. ``without`` names
    checks of the timing to leave out (``plan.CHECKS``).
    Raises :class:`ClockReplaced` where functions of the clock were replaced before it begins.
    """
    if "replaced" not in without and (names := replaced_functions()):
        raise ClockReplaced(f"replaced: {', '.join(names)}")
    # Without a candidate of this process there is nothing to time here, and a GPU's memory is the workers'.
    remote = [c.backend for c in candidates if c.backend is not None]
    backend = remote[0] if remote and len(remote) == len(candidates) else timing_backend(device, without)
    with backend.context(), ExitStack() as stack:
        if device == "cpu":  # a CPU's backends keep what calls free
            stack.callback(heap.stop_keeping)
        budget = budget or Budget.for_device(device)
        session = TimingSession(
            backend,
            candidates,
            make_buffers,
            budget,
            seed,
            device=device,
            without=without,
            make_judge=make_judge,
        )
        # Ranges are opened and closed here only, between the phases, so none is made while a clock runs.
        with _phase("timing: prepare"):
            session.prepare()
        readings = Readings(Sampler(device))
        with _phase("timing: sample"):
            session.sample(readings, on_round)
        with _phase("timing: finish audits"):
            session.finish_audits(readings)
        with _phase("timing: judge samples"):
            session.judge_samples()
        with _phase("timing: warm and host"):
            session.measure_side_times()
        with _phase("timing: sustain"):
            session.sustain(readings.sampler)
        with _phase("timing: unseen inputs"):
            session.audit()
        if make_judge is not None:
            with _phase("timing: recheck"):
                session.recheck(make_judge)
        return session.outcomes()


snapshot()
