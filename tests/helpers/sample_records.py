"""Synthetic but plausible records in the format of bench, for tests of the report, compare and docs."""

from __future__ import annotations

import random
import zlib
from typing import Any

from weft.core.record import Finding, Record, Timing, Verdict

GPU = {
    "device": "Example GPU 9000",
    "kind": "cuda",
    "arch": "sm_90",
    "driver": "580.65",
    "date": "2026-01-02T03:04:05Z",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "versions": {"weft": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0"},
    "os": "Linux 6.8",
    "ceilings": {
        "copy": 4.17e12,
        "read": 4.49e12,
        "fill": 4.2e12,
        "matrix": {"bf16": 7.1e14, "fp16": 7.0e14, "tf32": 3.6e14, "fp32": 5.1e13},
    },
}
CPU = {
    "device": "Example CPU, 2 cores",
    "kind": "cpu",
    "date": "2026-01-02T04:00:00Z",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": True,
    "versions": {"weft": "0.1.0", "torch": "2.13.0+cpu"},
    "ceilings": {"copy": 1.6e10, "read": 2.1e10, "fill": 1.5e10, "matrix": {"fp32": 1.1e11}},
}
LADDER = {
    "cuda/01-atomics": "every thread adds to one global sum",
    "cuda/02-shared-tree": "a tree in shared memory per block",
    "cuda/03-dynamic-shared": "block size chosen at launch",
    "cuda/04-warp-shuffle": "registers exchanged within a warp",
    "cuda/05-vectorised": "16-byte loads, grid-stride loop",
}
# Share of the limit that each implementation reaches.
SHARES = {
    "eager": 0.31,
    "torch": 0.85,
    "compile": 0.88,
    "triton": 0.955,
    "cuda": 0.97,
    "numba": 0.8,
}
# operator, case, bytes, FLOPs, rate, directions, {implementation: share of the limit}
POINTS: list[tuple[str, str, int, float, str | None, tuple[str, ...], dict[str, float]]] = [
    ("gelu", "bf16-16384x16384", 2**30, 0.0, None, ("forward", "backward"), SHARES),
    ("gelu", "fp32-16384x16384", 2**31, 0.0, None, ("forward", "backward"), SHARES),
    ("softmax", "bf16-32768x1024", 2**27, 0.0, None, ("forward", "backward"), SHARES),
    ("softmax", "bf16-4096x65536", 2**30, 5.0 * 2**28, None, ("forward",), SHARES),
    (
        "sum",
        "fp32-268435456",
        2**30,
        0.0,
        None,
        ("forward",),
        SHARES | dict(zip(LADDER, (0.004, 0.22, 0.31, 0.62, 0.985), strict=True)),
    ),
    (
        "matmul",
        "bf16-8192x8192-8192x8192",
        3 * 2**27,
        2.0 * 8192**3,
        "bf16",
        ("forward",),
        {"eager": 0.93, "torch": 0.94, "compile": 0.94, "triton": 0.83, "cuda": 0.12},
    ),
    (
        "matmul",
        "fp32-4096x4096-4096x4096",
        3 * 2**26,
        2.0 * 4096**3,
        "fp32",
        ("forward",),
        {"eager": 0.9, "torch": 0.9, "compile": 0.9, "triton": 0.61, "cuda": 0.66},
    ),
]


def record(**changes: Any) -> Record:
    """Return a record that passed and was timed; ``verdict`` takes a mapping of changes."""
    cold = changes.pop("cold", 100.0)
    point = {k: changes.get(k, v) for k, v in _POINT.items()}
    verdict = {**point, "status": "pass", "tolerance_used": 0.42, "seeds": (1, 2, 3, 4, 5)}
    verdict |= {"findings": (Finding(check="error", status="pass"),), **changes.pop("verdict", {})}
    timing = None
    if cold is not None:
        timing = Timing(
            cold=cold,
            warm=cold * 0.9,
            host=cold + 6,
            first=cold + 4e5,
            interval=(cold * 0.996, cold * 1.004),
            p10=cold * 0.99,
            p90=cold * 1.02,
            minimum=cold * 0.985,
            samples=tuple(cold * (1 + i / 1000) for i in range(20)),
            calls_per_sample=4,
        )
    base: dict[str, Any] = {
        **point,
        "backend": str(point["implementation"]).split("/")[0],
        "nbytes": 2**20,
        "flops": 2.0**21,
        "rate": None,
        "floor": 50.0,
        "gbps": 10.0,
        "tflops": 0.02,
        "efficiency": 0.5,
        "flags": (),
        "machine": GPU,
    }
    return Record(**{**base, "timing": timing, **changes, "verdict": Verdict(**verdict)})


_POINT = {"operator": "gelu", "implementation": "triton", "case": "c", "direction": "forward"}


def bench(machine: dict[str, Any] = GPU) -> list[Record]:
    """Return the records of a whole run: ladders, backward passes, a failure, unsupported points, flags."""
    records = []
    for operator, case, nbytes, flops, rate, directions, shares in POINTS:
        for direction in directions:
            factor = 1.5 if direction == "backward" else 1.0
            for name, share in shares.items():
                point = {"operator": operator, "case": case, "direction": direction}
                work = (nbytes * factor, flops * factor, rate)
                records.append(_timed(machine, point, name, share, work))
    return records + _without_times(machine)


def _timed(
    machine: dict[str, Any],
    point: dict[str, str],
    name: str,
    share: float,
    work: tuple[float, float, str | None],
) -> Record:
    nbytes, flops, rate = work
    ceilings = machine["ceilings"]
    bandwidth = ceilings["read"] if point["operator"] == "sum" else ceilings["copy"]
    floor: float | None = nbytes / bandwidth * 1e6
    if rate is not None:
        peak = ceilings["matrix"].get(rate)
        floor = max(floor or 0, flops / peak * 1e6) if peak else None
    generator = random.Random(zlib.crc32(repr((point, name)).encode()))
    share *= generator.uniform(0.93, 1.0)
    cold = (floor or flops / 5e10 * 1e6) / share
    return record(
        **point,
        implementation=name,
        cold=cold,
        nbytes=int(nbytes),
        flops=flops,
        rate=rate,
        floor=floor,
        gbps=nbytes / cold / 1e3,
        tflops=flops / cold / 1e6,
        efficiency=floor / cold if floor else None,
        flags=("noisy",) if generator.random() < 0.04 else (),
        idea=LADDER.get(name, ""),
        machine=machine,
        verdict={"tolerance_used": generator.uniform(0.05, 0.9)},
    )


def _without_times(machine: dict[str, Any]) -> list[Record]:
    empty = {"cold": None, "gbps": None, "tflops": None, "efficiency": None, "machine": machine}
    matmul = {"operator": "matmul", "case": "bf16-8192x8192-8192x8192", "floor": None}
    reason = "numba has no bf16: use the fp32 case, or triton or cuda"
    checked = {"status": "pass", "reason": "runs in the interpreter here: checked, not timed"}
    wrong = {
        "status": "fail",
        "reason": "3 elements of 17 are outside the tolerance",
        "tolerance_used": 41.0,
        "findings": (
            Finding(check="error", status="fail", detail="worst at [3]: 0.5, expected 0.25"),
            Finding(check="twice", status="pass"),
        ),
    }
    refused = {"status": "unsupported", "reason": reason}
    gelu = {**empty, "operator": "gelu"}
    return [
        record(**matmul, **empty, implementation="numba", verdict=refused),
        record(**gelu, case="fp32-17", implementation="numba", verdict=wrong),
        record(**gelu, case="fp16-64x64", implementation="triton", verdict=checked),
    ]
