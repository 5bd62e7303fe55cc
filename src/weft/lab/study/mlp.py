"""The MLP study: time it over steps, layers, width and batch, fit the times, and compare with the roofline.

The result is plain data, a record: every table, sentence and plot is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from weft import machine
from weft.core import Ceilings, Interrupted, Log
from weft.lab.study import fit, measure, workload
from weft.lab.study.measure import Bench, PointTiming
from weft.lab.study.workload import Point, Sizes
from weft.workbench.records import MARGIN
from weft.workbench.timing.ceilings import ceilings as measured_ceilings

FORMAT = 1
SECONDS = {"cuda": 10.0, "cpu": 50.0}  # of sampling
QUICK_SECONDS = 1.5
# Expected seconds of a whole study with warm-up, fits and profile.
EXPECTED_SECONDS = {"cuda": 40.0, "cpu": 100.0}
EXPECTED_QUICK_SECONDS = 8.0
AXES: dict[str, Callable[[Point], float]] = {
    "steps": lambda p: p.steps,
    "layers": lambda p: p.shape.depth,
    "width": lambda p: p.shape.width,
    "batch": lambda p: p.shape.batch,
}
FITS: dict[str, Callable[[Sequence[float], Sequence[float]], Any]] = {
    "steps": fit.line,
    "layers": fit.line,
    "width": fit.power,
    "batch": fit.broken_power,
}
FASTER = "faster than the matrix ceiling"  # flag of a point
Timings = Mapping[Point, PointTiming]


def run(device: str, sizes: Sizes, *, quick: bool, log: Log) -> dict[str, Any]:
    """Measure, fit and profile; return the study as a record. ``log`` gets a line for each stage.

    Raises :class:`WeftError` if the sizes need too much memory, or if the device has no measured
    ceiling for the dtype's rate. Raises :class:`Interrupted` for a ``KeyboardInterrupt``, with the study
    of the rounds so far, without a profile, if there are enough.
    """
    # A quick run takes the saved ceilings as they are; else doubtful ones are measured again.
    ceilings = measured_ceilings(device, measure=False) if quick else None
    ceilings = ceilings or measured_ceilings(device, progress=log)
    assert ceilings is not None  # without saved ones they were just measured
    if ceilings.doubt:
        log(f"note: {ceilings.doubt}: a rate above these ceilings is reported, and is no error")
    workload.floor(sizes.base, "step", ceilings)  # raises for an unmeasured rate before minutes are spent
    with measure.timing_context(device) as backend:
        measure.require_memory(sizes, backend, device)
        bench = Bench(sizes, device)
        seconds = QUICK_SECONDS if quick else SECONDS[device]
        interrupt, measured, profiles = None, None, []
        try:
            measured = measure.time_points(bench, sizes.points(), backend, seconds, log)
            log("profiling with torch.profiler")
            profiles = _profiles(bench, sizes)
        except KeyboardInterrupt as error:
            measured = measured or getattr(error, "partial", None)
            if measured is None:
                raise
            interrupt = error
        timings, clocks = measured
        flops = _flops(bench, sizes)
    study = {
        "study": "mlp",
        "format": FORMAT,
        "quick": quick,
        "device": device,
        "sizes": asdict(sizes),
        "base": asdict(sizes.base),
        "ceilings": asdict(ceilings),
        "doubt": ceilings.doubt,
        "cache_bytes": backend.cache_bytes,
        "points": {
            name: [point_row(p, timings[p], ceilings, device) for p in points]
            for name, points in sizes.sweeps().items()
        },
        "fits": fits(sizes, timings, ceilings),
        "turn": transitions(sizes, timings, ceilings),
        "profile": profiles,
        "flops": flops,
        "clocks": clocks,
        "machine": machine.fingerprint(device),
    }
    study |= {"wrong": faults(study)}
    if interrupt is not None:
        raise Interrupted(study) from interrupt
    return study


def point_row(point: Point, timing: PointTiming, ceilings: Ceilings, device: str) -> dict[str, Any]:
    """Return a point as plain data; times are in us of the whole call, all its steps together."""
    shape, cost = point.shape, workload.total_cost(point.shape, point.phase)
    memory, compute = workload.memory_and_compute_time(shape, point.phase, ceilings)
    floor = workload.floor(shape, point.phase, ceilings)
    low, high = timing.summary.interval
    flags = set(timing.flags)
    # The ceiling is a measurement too: only a rate above it by more than the margin is flagged.
    if compute * point.steps * 1e6 > timing.summary.median * (1 + MARGIN[device]):
        flags.add(FASTER)
    return {
        "phase": point.phase,
        "steps": point.steps,
        **asdict(shape),
        "us": timing.summary.median,
        "interval": [low, high],
        "samples": timing.summary.n,
        "flops": cost.flops * point.steps,
        "bytes": cost.nbytes * point.steps,
        "memory_us": memory * point.steps * 1e6,
        "compute_us": compute * point.steps * 1e6,
        "floor_us": floor * point.steps * 1e6,
        "cold": timing.cold,
        "loss": timing.loss,
        "flags": sorted(flags),
    }


def fits(sizes: Sizes, timings: Timings, ceilings: Ceilings) -> dict[str, Any]:
    """Fit each sweep and phase, in us, over the points whose weights outgrow the cache.

    All points are used if there are too few such points (``cold`` false). ``model`` is the same fit of
    the roofline's times.
    """
    by_sweep: dict[str, Any] = {}
    for name, points in sizes.sweeps().items():
        by_sweep[name] = {}
        for phase in dict.fromkeys(p.phase for p in points):
            candidates = [p for p in points if p.phase == phase]
            cold = [p for p in candidates if timings[p].cold]
            # As many points as each fit needs.
            enough = len(cold) >= (5 if name == "batch" else 3)
            used = cold if enough else candidates
            floors = [workload.floor(p.shape, phase, ceilings) * 1e6 * p.steps for p in used]
            xs, us = [AXES[name](p) for p in used], [timings[p].summary.median for p in used]
            by_sweep[name][phase] = {
                **_fit_json(FITS[name](xs, us)),
                "model": _fit_json(FITS[name](xs, floors)),
                "points": len(used),
                "cold": enough,
            }
    return by_sweep


def _fit_json(result: Any) -> dict[str, Any]:
    # The record format calls a break's significance "turns".
    return {"turns" if key == "significant" else key: value for key, value in asdict(result).items()}


def transitions(sizes: Sizes, timings: Timings, ceilings: Ceilings) -> dict[str, Any]:
    """Return for each phase the batch of its transition from memory-bound to compute-bound.

    ``predicted`` is where FLOPs / rate = bytes / bandwidth; ``measured`` is where the slope of time over
    the batch changes. Either is None if there is no transition.
    """
    by_phase = {}
    for phase in workload.PHASES:
        points = [p for p in sizes.sweeps()["batch"] if p.phase == phase]
        bend = fit.broken_power([p.shape.batch for p in points], [timings[p].summary.median for p in points])
        by_phase[phase] = {
            "predicted": workload.transition_batch(sizes.base, phase, ceilings),
            "measured": bend.at if bend.significant else None,
            "interval": list(bend.interval),
            "below": bend.below,
            "above": bend.above,
        }
    return by_phase


def _profiles(bench: Bench, sizes: Sizes) -> list[dict[str, Any]]:
    """Profile a step at the smallest batch, the base and the largest."""
    profiles = []
    for batch in dict.fromkeys((sizes.batches[0], sizes.base.batch, sizes.batches[-1])):
        shape = replace(sizes.base, batch=batch)
        profile = measure.profile(bench.call(Point(shape, "step")), shape.depth, bench.device)
        profiles.append({"batch": batch, **asdict(profile)})
    return profiles


def _flops(bench: Bench, sizes: Sizes) -> dict[str, float]:
    """Count the FLOPs of the base's step by this module's formula and by torch."""
    shape = sizes.base
    x, target = measure.random_batch(shape.batch, shape.width, shape.dtype, bench.device)
    with FlopCounterMode(display=False) as counter:
        bench.trainers[shape.width].gradients(x, target, shape.depth)
    return {"ours": workload.total_cost(shape, "step").flops, "torch": float(counter.get_total_flops())}


def faults(study: Mapping[str, Any]) -> list[str]:
    """List the faults that invalidate a study; empty if it is sound.

    They are a loss that is not finite, FLOPs that torch counts differently, a suspect timing, and a rate
    over the ceiling, unless the ceilings are doubtful: then the ceiling is too low, not the time.
    """
    lines = []
    flops = study["flops"]
    if flops["ours"] != flops["torch"]:
        lines.append(
            f"a step has {flops['ours']:g} FLOPs by Weft's formula, {flops['torch']:g} by torch's count"
        )
    rows: Sequence[dict[str, Any]] = [r for rows in study["points"].values() for r in rows]
    for row in rows:
        point = f"{row['phase']} x {row['steps']}, batch {row['batch']}, "
        point += f"{row['depth']} layers of {row['width']}"
        if not abs(row["loss"]) < float("inf"):  # also true for NaN
            lines.append(f"the loss is {row['loss']} at {point}")
        wrong = ("suspect",) if study["doubt"] else ("suspect", FASTER)
        lines += [f"{f} at {point}" for f in row["flags"] if f.startswith(wrong)]
    return list(dict.fromkeys(lines))
