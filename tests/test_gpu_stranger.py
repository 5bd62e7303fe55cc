"""A stranger under the clock on a GPU: honest ones agree with ours, and cheats are suspect."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.core import Record, registry
from weft.core.implementation import BACKENDS
from weft.machine import driver
from weft.workbench import bench
from weft.workbench.bring import Source
from weft.workbench.clock import measure
from weft.workbench.hands import Guest
from weft.workbench.plan import Budget, Candidate, Outcome, check_of
from weft.workbench.slots import Slot

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Tensor = torch.Tensor
BUDGET = Budget(seconds=3.0, warmup=0.3)


def make_slot(seed: int) -> Slot:
    generator = torch.Generator("cuda").manual_seed(seed)
    return Slot([torch.randn(512, 512, generator=generator, device="cuda")])


def dear(x: Tensor) -> Tensor:
    for _ in range(24):
        x = torch.tanh(x) + x
    return x


def judge_of(slot: Slot) -> Callable[[object], str | None]:
    wanted = dear(slot.inputs[0])

    def judge(output: object) -> str | None:
        assert isinstance(output, Tensor)
        return None if torch.allclose(output, wanted, rtol=1e-3, atol=1e-3) else "off"

    return judge


def timed(forward: Callable[[Tensor], Tensor], **more: Any) -> Outcome:
    candidate = Candidate(name="it", bind=lambda slot: lambda: forward(slot.inputs[0]))
    found = measure(
        [candidate], make_slot, device="cuda", budget=BUDGET, make_judge=judge_of, **more
    )["it"]
    print(found.refusal or found.trouble, found.timing and (found.timing.cold, found.timing.flags))
    return found


def suspicions(found: Outcome) -> list[str]:
    flags = found.timing.flags if found.timing else ()
    return [check_of(f) for f in flags if f.startswith("suspect")] + [check_of(found.refusal)]


def test_honest_work_is_not_slower_on_contents_it_had_not_seen() -> None:
    found = timed(dear)
    assert found.timing is not None and suspicions(found) == [""], found
    print(f"fresh {found.timing.clocks['fresh']}")
    assert found.timing.clocks["fresh"] < 1.3


def test_an_answer_kept_by_its_first_bytes_on_the_host_is_suspect() -> None:
    kept: dict[bytes, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        key = x.flatten()[:16].cpu().numpy().tobytes()
        if key not in kept:
            kept[key] = dear(dear(x) * 0 + x)
        return kept[key].clone()

    assert "fresh" in suspicions(timed(forward))


KERNEL = '''
import triton
import triton.language as tl

@triton.jit
def kept(x, out, tags, table, entries, count, rounds, BLOCK: tl.constexpr):
    """Each program keeps its own block's answer by the bits of the input's first element."""
    here = tl.program_id(0)
    at = here * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(x).to(tl.int32, bitcast=True)
    entry = (key & 0x7FFFFFFF) % entries
    place = table + entry.to(tl.int64) * count + at
    tag = tags + entry * tl.num_programs(0) + here
    if tl.load(tag) == key:
        tl.store(out + at, tl.load(place, mask=at < count), mask=at < count)
    else:
        y = tl.load(x + at, mask=at < count, other=0.0)
        for _ in range(rounds):
            e = tl.exp(-2.0 * tl.abs(y))
            t = (1.0 - e) / (1.0 + e)
            y = tl.where(y < 0, -t, t) + y
        tl.store(place, y, mask=at < count)
        tl.store(out + at, y, mask=at < count)
        tl.debug_barrier()
        tl.store(tag, key)
'''


def test_an_answer_kept_on_the_device_is_suspect(tmp_path: Path) -> None:
    """Within one captured kernel, where no host can look: only its time tells."""
    import importlib.util

    path = tmp_path / "kept_kernel.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kept_kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entries, count, block = 4093, 512 * 512, 1024
    table = torch.empty(entries, count, device="cuda")
    tags = torch.zeros(entries, count // block, dtype=torch.int32, device="cuda")

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        grid = (count // block,)
        module.kept[grid](x, out, tags, table, entries, count, 2400, BLOCK=block)
        return out

    def judged(slot: Slot) -> Callable[[object], str | None]:
        return lambda output: None  # its answers are right; their time is what is asked

    candidate = Candidate(name="it", bind=lambda slot: lambda: forward(slot.inputs[0]))
    found = measure([candidate], make_slot, device="cuda", budget=BUDGET, make_judge=judged)["it"]
    print(found.refusal, found.timing and (found.timing.cold, found.timing.flags))
    assert found.timing is not None and "no-graph" not in found.timing.flags
    assert "fresh" in suspicions(found)


def test_work_left_out_of_the_graph_is_refused() -> None:
    last: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and last:
            return last[0].clone()
        last[:] = [dear(x)]
        return last[0].clone()

    assert suspicions(timed(forward))[-1] == "recheck"
    assert timed(forward, without=["recheck"]).refusal == ""


def test_cache_that_is_set_aside_is_suspect() -> None:
    library = driver.library()
    assert library is not None

    def forward(x: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            library.cuCtxSetLimit(6, ctypes.c_size_t(8 << 20))
        return dear(x)

    assert "cache" in suspicions(timed(forward))
    assert "cache" not in suspicions(timed(forward, without=["cache"]))
    assert "cache" not in suspicions(timed(dear)), "it was given back"


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


def benched(path: Path, **more: Any) -> dict[str, Record]:
    with Guest(Source(kind="file", path=str(path))) as guest:
        (records,) = bench.run_points(
            ["gelu"],
            ["torch", *guest.implementations],
            directions=["forward"],
            device="cuda",
            budget=BUDGET,
            guests={i.name: guest for i in guest.implementations},
            **more,
        )
    for r in records:
        print(r.implementation, r.verdict.reason, r.flags, r.timing and r.timing.cold)
        print(r.timing and r.timing.clocks.get("fresh"))
    return {r.implementation: r for r in records}


def suspect(record: Record) -> list[str]:
    return [check_of(f) for f in record.flags if f.startswith("suspect")]


def test_a_stranger_in_its_process_is_as_quick_as_ours(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    found = benched(path)
    theirs, ours = found["honest"], found["torch"]
    assert theirs.timing is not None and ours.timing is not None, theirs.verdict.reason
    assert suspect(theirs) == [] and suspect(ours) == []
    assert abs(theirs.timing.cold / ours.timing.cold - 1) < 0.03


def test_a_halved_event_is_refused_and_seen_by_the_judges_watch(tmp_path: Path) -> None:
    path = tmp_path / "halved.py"
    path.write_text(HALVED)
    assert benched(path)["honest"].verdict.status == "fail"
    found = benched(path, without=["replaced", "clocks"])["honest"]
    assert "wall" in suspect(found), found.flags


@pytest.mark.parametrize(
    ("backends", "directions"),
    [
        (("triton", "cuda"), ["forward"]),
        pytest.param(BACKENDS, None, marks=pytest.mark.exhaustive),
    ],
    ids=["kernels", "all"],
)
def test_built_in_operators_are_never_suspect(
    backends: tuple[str, ...], directions: list[str] | None
) -> None:
    alarms, count = [], 0
    names = registry.operator_names()
    ways = [i for n in names for i in registry.implementations(n) if not i.is_step]
    ways = [i for i in ways if i.backend in backends]
    for records in bench.run_points(names, ways, directions=directions, device="cuda", quick=True):
        for r in records:
            count += r.timing is not None
            alarms += [(r.operator, r.implementation, f) for f in suspect(r)]
    print(f"{count} timings, alarms: {alarms}")
    assert count >= len(names) and not alarms
