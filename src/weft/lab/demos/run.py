"""Run one demonstration: verify both variants, time them, and compute their ratio, as plain data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from weft import machine
from weft.core.errors import WeftError
from weft.core.log import Log
from weft.lab.demos.demo import BAD, GOOD, SIDES, Demo, Measurement

if TYPE_CHECKING:
    import torch

    from weft.workbench.calls.buffers import InputBuffers

ARCH = "sm_90"  # target of the static evidence without a GPU
SHOWN, NOT_SHOWN, WRONG, NOT_TIMED = "shown", "not shown", "wrong", "not timed"
SEED = 20260101
SECONDS = 3.0  # of sampling, both variants together
SPIN_CYCLES = 200_000  # the GPU spins this long, so that the call is queued before the first event
MAX_SPIN_CYCLES = 40_000_000


def default_arch() -> str:
    """Return this GPU's target; ``ARCH`` without a GPU."""
    return machine.query("cuda").arch if machine.has_gpu() else ARCH


def run(demo: Demo, log: Log, *, arch: str | None = None, counts: bool = True) -> dict[str, Any]:
    """Run a demonstration: its static evidence, and on a GPU both outputs, times and the counter.

    ``status`` is ``shown`` if the bad variant takes at least ``at_least`` times as long, ``not shown``
    if it does not, ``wrong`` if an output is wrong, and ``not timed`` with its ``reason`` if it cannot
    be timed here. ``arch`` is the target that the evidence is compiled for. Without ``counts`` no hardware
    counter is read, which takes ncu seconds.
    """
    result = description(demo) | _static_evidence(demo, arch or default_arch())
    if demo.chain is not None:
        result["traffic"] = demo.chain.prediction()
    if not machine.has_gpu():
        reason = f"timing needs a GPU: {machine.gpu_reason()}"
        return result | {"status": NOT_TIMED, "reason": reason}
    log(f"{demo.name}: compiling and checking both outputs")
    try:
        result |= compare(demo, measure(demo, log))
        if demo.sweep is not None:
            result["sweep"] = asdict(demo.sweep(log))
    except WeftError as error:
        return result | {"status": NOT_TIMED, "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - a fault on the GPU; other demos' results are kept
        return result | {"status": WRONG, "reason": f"{type(error).__name__}: {error}"}
    if not counts:
        return result
    try:
        result |= _count(demo, log, result)
    except WeftError as error:
        result["not_counted"] = str(error).partition("; hint: ")[0]
        result["hint"] = error.hint
    return result


def _count(demo: Demo, log: Log, result: Mapping[str, Any]) -> dict[str, Any]:
    """Read the demo's hardware counters; return the fields of the result that they change."""
    changes: dict[str, Any] = {}
    if demo.counter is not None:
        from weft.lab.demos.evidence import count_with_ncu

        log(f"{demo.name}: counting")
        changes["evidence"] = [*result["evidence"], count_with_ncu(demo).to_json()]
    if demo.chain is not None:
        from weft.lab.demos import traffic

        changes["traffic"] = traffic.count(demo, log)
        if (reasons := traffic.deviations(changes["traffic"])) and result["status"] == SHOWN:
            changes |= {"status": NOT_SHOWN, "reason": "; ".join(reasons)}
    return changes


def description(demo: Demo) -> dict[str, Any]:
    """Return the fields of a demonstration that are known before it runs."""
    fields = ("name", "sentence", "expected", "because", "at_least", "see", "clock", "tolerance")
    variants = {s: {"kernel": demo.variant(s).kernel, "how": demo.variant(s).how} for s in SIDES}
    return {name: getattr(demo, name) for name in fields} | {"ways": variants, "code": demo.code}


def _static_evidence(demo: Demo, arch: str) -> dict[str, Any]:
    try:
        return {"arch": arch, "evidence": [fact.to_json() for fact in demo.facts(arch)]}
    except WeftError as error:  # no compiler, no disassembler, or an unknown target
        return {"arch": arch, "evidence": [], "no_evidence": str(error)}


def compare(demo: Demo, measurements: Mapping[str, Measurement]) -> dict[str, Any]:
    """Return times, their ratio with its interval, and the status.

    The ratio's interval runs from the least that both medians' intervals allow to the most.
    """
    wrong = next((m.wrong for m in measurements.values() if m.wrong), "")
    if wrong:
        return {"status": WRONG, "reason": wrong}
    from weft.workbench.timing.stats import summarise

    summaries = {side: summarise(m.samples) for side, m in measurements.items()}
    times = {
        side: {
            "us": summaries[side].median,
            "interval": list(summaries[side].interval),
            "warm_us": measurements[side].warm,
            "samples": list(measurements[side].samples),
            "flags": list(measurements[side].flags),
        }
        for side in measurements
    }
    ratio = summaries[BAD].median / summaries[GOOD].median
    suspicions = [f for side in SIDES for f in measurements[side].flags if f.startswith("suspect")]
    too_small = [f"under {demo.at_least:g} times as long"] if ratio < demo.at_least else []
    low = summaries[BAD].interval[0] / summaries[GOOD].interval[1]
    high = summaries[BAD].interval[1] / summaries[GOOD].interval[0]
    return {
        "status": NOT_SHOWN if too_small or suspicions else SHOWN,
        "reason": "; ".join([*too_small, *suspicions]),
        "times": times,
        "ratio": ratio,
        "ratio_interval": [low, high],
    }


def measure(demo: Demo, log: Log, device: str = "cuda") -> Mapping[str, Measurement]:
    """Verify and time both variants; a wrong output has no time. ``device`` is the timing backend's."""
    if demo.measure is not None:
        return demo.measure(log)
    from weft.workbench.calls.buffers import InputBuffers
    from weft.workbench.timing.measure import measure as time_candidates
    from weft.workbench.timing.plan import Budget, Candidate

    assert demo.inputs is not None
    make_inputs = demo.inputs
    buffers = InputBuffers(make_inputs(SEED), seed=SEED)
    judge = make_judge(demo, buffers)
    for side in SIDES:
        if wrong := judge(_bind(demo, side, buffers)()):
            return {side: Measurement(wrong=f"{demo.variant(side).kernel}: {wrong}")}
    del buffers, judge  # frees their memory for the timing's own buffers
    log(f"{demo.name}: both outputs are correct; timing")
    outcomes = time_candidates(
        [Candidate(name=side, bind=partial(_bind, demo, side)) for side in SIDES],
        lambda seed: InputBuffers(make_inputs(seed), seed=seed),
        device=device,
        budget=Budget(seconds=SECONDS, warmup=SECONDS / 6),
        make_judge=partial(make_judge, demo),
    )
    return {side: _measurement(outcome) for side, outcome in outcomes.items()}


def _bind(demo: Demo, side: str, buffers: InputBuffers) -> Callable[[], Any]:
    call = demo.variant(side).call
    assert call is not None
    return partial(call, *buffers.inputs)


def _measurement(outcome: Any) -> Measurement:
    timing = outcome.timing
    if timing is None:
        return Measurement(wrong=outcome.refusal or outcome.trouble)
    return Measurement(samples=timing.samples, warm=timing.warm, flags=timing.flags)


def make_judge(demo: Demo, buffers: InputBuffers) -> Callable[[Any], str | None]:
    """Return a function that compares an output with the float64 reference on these inputs."""
    assert demo.reference is not None
    expected = demo.reference(*buffers.inputs)
    return lambda output: mismatch(output, expected, demo.tolerance)


def mismatch(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """Return why an output is not within ``tolerance`` (absolute) of the float64 reference, or None."""
    if output.shape != expected.shape:
        return f"its shape is {tuple(output.shape)}, not {tuple(expected.shape)}"
    error = (output.double() - expected).abs().max().item()
    if error <= tolerance:  # false for NaN
        return None
    return f"it is off by {error:.3g}, where {tolerance:.3g} is allowed"


def interleaved(names: Sequence[str], sample: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    """Take ``rounds`` samples of each name in an order shuffled every round, after a discarded round."""
    order = random.Random(SEED)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in order.sample(list(names), len(names)):
            us = sample(name)
            if number > 0:
                samples[name].append(us)
    return samples


def event_timer() -> Callable[[Callable[[], object]], float]:
    """Return a function that times one call in microseconds with two CUDA events.

    The call is queued while the GPU spins; the cost of the events is subtracted.
    """
    from weft.workbench.timing.cuda import CudaTimingBackend

    backend = CudaTimingBackend()

    def sample(call: Callable[[], object]) -> float:
        spin = SPIN_CYCLES
        while spin <= MAX_SPIN_CYCLES:
            us = backend.timed(lambda: None, call, spin)
            if us >= 0:  # negative: the spin ended before the call was queued
                return max(0.0, us - backend.plain_overhead)
            spin *= 2
        return abs(us)

    return sample
