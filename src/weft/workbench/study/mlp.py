"""The MLP study: timed over steps, layers, width and batch, fitted, profiled, held to the roofline.

The answer is plain data, a record: every table, sentence and picture is drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from weft import machine
from weft.core import Ceilings
from weft.machine.ceilings import load, path_for
from weft.workbench import limits
from weft.workbench.study import cost, fit, profiled, stopwatch
from weft.workbench.study.model import draw
from weft.workbench.study.sizes import Point, Sizes
from weft.workbench.study.stopwatch import Bench, Say, Timed

FORMAT = 1
SECONDS = {"cuda": 10.0, "cpu": 50.0}  # of sampling
QUICK = 1.5
MARGIN = {
    "cuda": 0.02,
    "cpu": 0.30,
}  # as workbench.recording: by how much a rate may beat a ceiling
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
    "batch": fit.turn,
}
Timings = Mapping[Point, Timed]


def run(device: str, sizes: Sizes, *, quick: bool, say: Say) -> dict[str, Any]:
    """Measure, fit and profile; the study as a record. ``say`` gets a line for each stage.

    Raises :class:`WeftError` where the sizes take too much memory, or where the dtype's rate is no
    measured ceiling of the device.
    """
    # In a hurry doubtful ones are not measured again.
    ceilings = limits.ceilings(device, measure=False) if quick else None
    ceilings = ceilings or limits.ceilings(device, progress=say)
    assert ceilings is not None  # measured where nothing was kept
    cost.floor(sizes.base, "step", ceilings)
    with stopwatch.ready(device) as stand:
        stopwatch.fits(sizes, stand, device)
        bench = Bench(sizes, device)
        seconds = QUICK if quick else SECONDS[device]
        timed, clocks = stopwatch.time_points(bench, sizes.points(), stand, seconds, say)
        say("profiled by torch.profiler")
        profiles = _profiles(bench, sizes)
        counted = _counted(bench, sizes)
    kept = load(path_for(machine.query(device)), say)
    study = {
        "study": "mlp",
        "format": FORMAT,
        "quick": quick,
        "device": device,
        "sizes": asdict(sizes),
        "base": asdict(sizes.base),
        "ceilings": asdict(ceilings),
        "doubt": kept.doubt if kept else "",
        "cache_bytes": stand.cache,
        "points": {
            name: [_row(p, timed[p], ceilings, device) for p in points]
            for name, points in sizes.sweeps().items()
        },
        "fits": fits(sizes, timed, ceilings),
        "turn": turns(sizes, timed, ceilings),
        "profile": profiles,
        "flops": counted,
        "clocks": clocks,
        "machine": machine.fingerprint(device),
    }
    return study | {"wrong": wrong(study)}


def _row(point: Point, timed: Timed, ceilings: Ceilings, device: str) -> dict[str, Any]:
    """A point as plain data; times in us of the whole call, all its steps together."""
    shape, whole = point.shape, cost.total(point.shape, point.phase)
    by_bytes, by_flops = cost.times(shape, point.phase, ceilings)
    floor = cost.floor(shape, point.phase, ceilings)
    low, high = timed.summary.interval
    flags = set(timed.flags)
    if by_flops * point.steps * 1e6 > timed.summary.median * (1 + MARGIN[device]):
        flags.add("faster than the matrix ceiling")
    return {
        "phase": point.phase,
        "steps": point.steps,
        **asdict(shape),
        "us": timed.summary.median,
        "interval": [low, high],
        "samples": timed.summary.n,
        "flops": whole.flops * point.steps,
        "bytes": whole.nbytes * point.steps,
        "memory_us": by_bytes * point.steps * 1e6,
        "compute_us": by_flops * point.steps * 1e6,
        "floor_us": floor * point.steps * 1e6,
        "cold": timed.cold,
        "loss": timed.loss,
        "flags": sorted(flags),
    }


def fits(sizes: Sizes, timed: Timings, ceilings: Ceilings) -> dict[str, Any]:
    """Of each sweep and phase the fit in us, over the points whose weights outgrow the cache, or
    over all where those are too few for it (``cold`` false)."""
    found: dict[str, Any] = {}
    for name, points in sizes.sweeps().items():
        found[name] = {}
        for phase in dict.fromkeys(p.phase for p in points):
            mine = [p for p in points if p.phase == phase]
            cold = [p for p in mine if timed[p].cold]
            enough = len(cold) >= (5 if name == "batch" else 3)
            used = cold if enough else mine
            floors = [cost.floor(p.shape, phase, ceilings) * 1e6 * p.steps for p in used]
            xs, us = [AXES[name](p) for p in used], [timed[p].summary.median for p in used]
            how = FITS[name]
            found[name][phase] = {
                **asdict(how(xs, us)),
                "model": asdict(how(xs, floors)),
                "points": len(used),
                "cold": enough,
            }
    return found


def turns(sizes: Sizes, timed: Timings, ceilings: Ceilings) -> dict[str, Any]:
    """Of each phase the batch where it turns from memory- to compute-bound: ``predicted`` where
    FLOPs / rate = bytes / bandwidth, ``measured`` where time's slope over the batch changes; None
    where it does not turn."""
    found = {}
    for phase in cost.PHASES:
        mine = [p for p in sizes.sweeps()["batch"] if p.phase == phase]
        seen = fit.turn([p.shape.batch for p in mine], [timed[p].summary.median for p in mine])
        found[phase] = {
            "predicted": cost.turning_batch(sizes.base, phase, ceilings),
            "measured": seen.at if seen.turns else None,
            "interval": list(seen.interval),
            "below": seen.below,
            "above": seen.above,
        }
    return found


def _profiles(bench: Bench, sizes: Sizes) -> list[dict[str, Any]]:
    """Where a step's time goes, at the smallest batch, the base and the largest."""
    found = []
    for batch in dict.fromkeys((sizes.batches[0], sizes.base.batch, sizes.batches[-1])):
        shape = replace(sizes.base, batch=batch)
        seen = profiled.profile(bench.call(Point(shape, "step")), shape.depth, bench.device)
        found.append({"batch": batch, **asdict(seen)})
    return found


def _counted(bench: Bench, sizes: Sizes) -> dict[str, float]:
    """The FLOPs of the base's step by our formula, and as torch counts them."""
    shape = sizes.base
    x, target = draw(shape.batch, shape.width, shape.dtype, bench.device)
    with FlopCounterMode(display=False) as counter:
        bench.trainers[shape.width].gradients(x, target, shape.depth)
    return {"ours": cost.total(shape, "step").flops, "torch": float(counter.get_total_flops())}


def wrong(study: Mapping[str, Any]) -> list[str]:
    """What makes the study no good: a loss that is not finite, FLOPs that torch counts otherwise, a
    suspect timing, a rate over the ceiling. Empty where all is well."""
    found = []
    flops = study["flops"]
    if flops["ours"] != flops["torch"]:
        found.append(f"a step has {flops['ours']:g} FLOPs by us, {flops['torch']:g} by torch")
    rows: Sequence[dict[str, Any]] = [r for rows in study["points"].values() for r in rows]
    for row in rows:
        where = f"{row['phase']} x {row['steps']}, batch {row['batch']}, "
        where += f"{row['depth']} layers of {row['width']}"
        if not abs(row["loss"]) < float("inf"):
            found.append(f"the loss is {row['loss']} at {where}")
        found += [f"{f} at {where}" for f in row["flags"] if f.startswith(("suspect", "faster"))]
    return list(dict.fromkeys(found))
