"""Timing of external candidates on a GPU: honest ones agree with Weft's own, cheats are suspect."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import sampling
from weft.core import Record, registry
from weft.core.implementation import BACKENDS
from weft.machine import driver
from weft.workbench import bench
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.compare.verdict import AMBIGUOUS, SAME, compare
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sources.source import Source
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import Budget, Candidate, Outcome, timing_check_of

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Tensor = torch.Tensor
BUDGET = Budget(seconds=3.0, warmup=0.3)


def make_buffers(seed: int) -> InputBuffers:
    generator = torch.Generator("cuda").manual_seed(seed)
    return InputBuffers([torch.randn(512, 512, generator=generator, device="cuda")])


def work(x: Tensor) -> Tensor:
    for _ in range(24):
        x = torch.tanh(x) + x
    return x


def judge_of(buffers: InputBuffers) -> Callable[[object], str | None]:
    expected = work(buffers.inputs[0])

    def judge(output: object) -> str | None:
        assert isinstance(output, Tensor)
        return None if torch.allclose(output, expected, rtol=1e-3, atol=1e-3) else "off"

    return judge


def timed(forward: Callable[[Tensor], Tensor], **more: Any) -> Outcome:
    candidate = Candidate(name="it", bind=lambda buffers: lambda: forward(buffers.inputs[0]))
    outcome = measure([candidate], make_buffers, device="cuda", budget=BUDGET, make_judge=judge_of, **more)[
        "it"
    ]
    print(outcome.refusal or outcome.trouble, outcome.timing and (outcome.timing.cold, outcome.timing.flags))
    return outcome


def suspicions(outcome: Outcome) -> list[str]:
    flags = outcome.timing.flags if outcome.timing else ()
    return [timing_check_of(f) for f in flags if f.startswith("suspect")] + [timing_check_of(outcome.refusal)]


def test_honest_work_is_not_slower_on_unseen_inputs() -> None:
    outcome = timed(work)
    assert outcome.timing is not None and suspicions(outcome) == [""], outcome
    print(f"fresh {outcome.timing.clocks['fresh']}")


@pytest.mark.parametrize(("key_of", "check"), [("first bytes", "altered"), ("sum", "fresh")])
def test_a_cache_on_the_host_is_suspect(key_of: str, check: str) -> None:
    cache: dict[object, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        key = x.flatten()[:16].cpu().numpy().tobytes() if key_of == "first bytes" else float(x.double().sum())
        if key not in cache:
            cache[key] = work(work(x) * 0 + x)
        return cache[key].clone()

    assert check in suspicions(timed(forward))


KERNEL = '''
import triton
import triton.language as tl

@triton.jit
def cached(x, out, tags, table, entries, count, rounds, BLOCK: tl.constexpr):
    """Each program caches its own block's output by the bits of the input's first element."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(x).to(tl.int32, bitcast=True)
    entry = (key & 0x7FFFFFFF) % entries
    cached_output = table + entry.to(tl.int64) * count + at
    tag = tags + entry * tl.num_programs(0) + block
    if tl.load(tag) == key:
        tl.store(out + at, tl.load(cached_output, mask=at < count), mask=at < count)
    else:
        y = tl.load(x + at, mask=at < count, other=0.0)
        for _ in range(rounds):
            e = tl.exp(-2.0 * tl.abs(y))
            t = (1.0 - e) / (1.0 + e)
            y = tl.where(y < 0, -t, t) + y
        tl.store(cached_output, y, mask=at < count)
        tl.store(out + at, y, mask=at < count)
        tl.debug_barrier()
        tl.store(tag, key)
'''


def test_a_cache_on_the_device_is_suspect(tmp_path: Path) -> None:
    """The cache is inside one captured kernel, where no host can look: only its time shows it."""
    import importlib.util

    path = tmp_path / "caching_kernel.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("caching_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entries, count, block = 4093, 512 * 512, 1024
    table = torch.empty(entries, count, device="cuda")
    tags = torch.zeros(entries, count // block, dtype=torch.int32, device="cuda")

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        grid = (count // block,)
        module.cached[grid](x, out, tags, table, entries, count, 2400, BLOCK=block)
        return out

    def judged(buffers: InputBuffers) -> Callable[[object], str | None]:
        return lambda output: None  # its outputs are right; the test is about their time

    candidate = Candidate(name="it", bind=lambda buffers: lambda: forward(buffers.inputs[0]))
    outcome = measure([candidate], make_buffers, device="cuda", budget=BUDGET, make_judge=judged)["it"]
    print(outcome.refusal, outcome.timing and (outcome.timing.cold, outcome.timing.flags))
    assert outcome.timing is not None and "no-graph" not in outcome.timing.flags
    assert "fresh" in suspicions(outcome)


def test_work_left_out_of_the_graph_is_refused() -> None:
    last: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and last:
            return last[0].clone()
        last[:] = [work(x)]
        return last[0].clone()

    assert suspicions(timed(forward))[-1] == "recheck"
    assert timed(forward, without=["recheck"]).refusal == ""


def test_reserved_l2_cache_is_suspect() -> None:
    library = driver.library()
    assert library is not None

    def forward(x: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            library.cuCtxSetLimit(6, ctypes.c_size_t(8 << 20))
        return work(x)

    assert "cache" in suspicions(timed(forward))
    assert "cache" not in suspicions(timed(forward, without=["cache"]))
    assert "cache" not in suspicions(timed(work)), "the reserved part was released"


THEIRS = """
import torch, weft

@weft.implementation("gelu", backend="torch", name="honest")
def honest(x):
    return torch.nn.functional.gelu(x, approximate="tanh")
"""
HALVED = (
    THEIRS
    + """
real = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, end: 0.5 * real(self, end)
"""
)


def bench_file(path: Path, **more: Any) -> dict[str, Record]:
    with WorkerProcess(Source(kind="file", path=str(path))) as worker:
        (records,) = bench.run_points(
            ["gelu"],
            ["torch", *worker.implementations],
            directions=["forward"],
            device="cuda",
            budget=BUDGET,
            workers={i.name: worker for i in worker.implementations},
            **more,
        )
    for r in records:
        print(r.implementation, r.verdict.reason, r.flags, r.timing and r.timing.cold)
        print(r.timing and r.timing.clocks.get("fresh"))
    return {r.implementation: r for r in records}


def suspect(record: Record) -> list[str]:
    return [timing_check_of(f) for f in record.flags if f.startswith("suspect")]


def test_an_external_candidate_compares_like_the_same_built_in(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    outcome = bench_file(path)
    theirs, ours = outcome["honest"], outcome["torch"]
    assert theirs.timing is not None and ours.timing is not None, theirs.verdict.reason
    assert suspect(theirs) == [] and suspect(ours) == []
    # Requests between the processes are not in its time: the comparison of records sees no change.
    change = compare([ours], [replace(theirs, implementation=ours.implementation)])[0]
    print(change)
    assert change.verdict in (SAME, AMBIGUOUS)


def test_halved_event_times_are_refused_and_seen_by_the_parents_clock(tmp_path: Path) -> None:
    path = tmp_path / "halved.py"
    path.write_text(HALVED)
    assert bench_file(path)["honest"].verdict.status == "fail"
    outcome = bench_file(path, without=["replaced", "clocks"])["honest"]
    assert "wall" in suspect(outcome), outcome.flags


OPERATORS = registry.operator_names()
# Each takes seconds, and every record of the bench passes the same rules: a few for each run.
SAMPLED = random.Random(sampling.seed()).sample(OPERATORS, 15)


def suspicions_of(name: str, backends: Sequence[str], **options: Any) -> list[tuple[str, str, str]]:
    """Time an operator's implementations at its first case; return what is suspect, and print how many."""
    implementations = [i for i in registry.implementations(name) if i.backend in backends and not i.is_step]
    points = bench.run_points([name], implementations, device="cuda", quick=True, **options)
    records = [r for point in points for r in point]
    print(f"{sum(r.timing is not None for r in records)} timings")
    assert any(r.timing for r in records), records
    return [(r.implementation, r.direction, f) for r in records for f in suspect(r)]


@pytest.mark.parametrize("name", SAMPLED)
def test_the_kernels_of_an_operator_are_never_suspect(name: str) -> None:
    assert suspicions_of(name, ("triton", "cuda"), directions=["forward"]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPERATORS)
def test_no_implementation_of_an_operator_is_ever_suspect(name: str) -> None:
    assert suspicions_of(name, BACKENDS) == []
