"""Dispatch: what a table chooses, and that a call finds it: at once, traced, where not known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import WeftError
from weft.core import registry
from weft.dispatch import choice as dispatch
from weft.dispatch.choice import Bands, Point
from weft.dispatch.operator import clear_caches, memoized
from weft.workbench import tune

Times = dict[str, tuple[float, float]]
GPU = "Example GPU 9000"
TORCH = {"torch": (100.0, 9.0), "eager": (200.0, 20.0)}


def point(forward: Times, backward: Times | None = None, **more: Any) -> Point:
    known = {"operator": "gelu", "case": "c", "dtype": "float32", "elements": 1 << 20, "last": 1024}
    return Point(**{**known, "flags": (), "forward": forward, "backward": backward or {}, **more})


@pytest.mark.parametrize(
    ("forward", "wanted"),
    [
        (TORCH, "torch"),
        ({**TORCH, "triton": (80.0, 15.0)}, "triton"),
        ({**TORCH, "triton": (99.5, 15.0)}, "torch"),  # within noise
        ({**TORCH, "triton": (80.0, 15.0), "cuda": (70.0, 15.0)}, "cuda"),
        ({**TORCH, "triton": (80.0, 150.0)}, "torch"),  # the host would wait for it
        ({"torch": (5.0, 6.0), "eager": (9.0, 20.0), "triton": (4.0, 15.0)}, "torch"),
        ({"eager": (50.0, 9.0), "torch": (100.0, 9.0), "triton": (60.0, 9.0)}, "eager"),
        ({"eager": (99.0, 9.0), "torch": (100.0, 9.0)}, "torch"),  # the same: torch's own
        ({"triton": (1.0, 1.0)}, "torch"),  # nothing to compare with
    ],
)
def test_ours_only_where_it_was_measured_to_be_faster(forward: Times, wanted: str) -> None:
    assert dispatch.best(point(forward), grad=False) == wanted


def test_in_training_ours_may_lose_in_no_direction() -> None:
    forward, lost = {**TORCH, "triton": (50.0, 9.0)}, {**TORCH, "triton": (103.0, 9.0)}
    assert dispatch.best(point(forward, lost), grad=True) == "torch"
    assert dispatch.best(point(forward, lost), grad=False) == "triton"
    assert dispatch.best(point(forward, {**TORCH, "triton": (101.0, 9.0)}), grad=True) == "triton"
    assert dispatch.best(point(forward, TORCH), grad=True) == "torch"  # it has no backward


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shipped tables and the user's own in folders of their own, on a GPU of that name."""
    monkeypatch.setattr(dispatch, "SHIPPED", tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(dispatch, "device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    clear_caches()
    yield tmp_path
    clear_caches()


FASTER = {**TORCH, "triton": (80.0, 9.0)}
POINTS = [
    point(TORCH, case="small", elements=1 << 14),
    point(FASTER, case="large", elements=1 << 20),
    point(FASTER, case="wide", elements=1 << 20, last=65536),
    point(FASTER, case="switched", operator="matmul", flags=(("precision", "tf32"),)),
]


def _bands(name: str = "gelu", dtype: str = "float32", flags: Any = (), grad: bool = False) -> Bands:
    return dispatch.bands(name, GPU, dtype, flags, grad)


def test_a_call_gets_the_nearest_measured_size(tables: Path) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    table = _bands()
    for elements, last, wanted in (
        (1 << 20, 1024, "triton"),
        (1 << 14, 1024, "torch"),
        ((1 << 17) - 1, 1024, "torch"),  # nearer to 2^14 on a logarithmic scale
        ((1 << 17) + 1, 1024, "triton"),
        (1 << 40, 1024, "triton"),  # larger than any
        (1 << 9, 1024, "torch"),
        (1 << 17, 32768, "triton"),  # of the wide ones
        (1 << 15, 65536, "torch"),  # far smaller than any wide one
        (1 << 20, 64, "torch"),  # unlike any: 16 times narrower
        (1 << 20, 1 << 20, "torch"),
    ):
        assert dispatch.look_up(table, elements, last) == wanted, (elements, last)
    assert dispatch.look_up(_bands(dtype="float16"), 1 << 20, 1024) == "torch"
    assert dispatch.look_up(_bands(grad=True), 1 << 20, 1024) == "torch"
    tf32, ieee = ((("precision", p),) for p in ("tf32", "ieee"))
    assert dispatch.look_up(_bands("matmul", flags=tf32), 1 << 20, 1024) == "triton"
    assert dispatch.look_up(_bands("matmul", flags=ieee), 1 << 20, 1024) == "torch"


def test_what_was_measured_here_goes_over_what_is_shipped(tables: Path) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    assert dispatch.look_up(_bands(), 1 << 20, 1024) == "triton"
    tune.store(GPU, [point(TORCH, case="large")])
    tune.store(GPU, [point(FASTER, case="small", elements=1 << 14)])
    assert dispatch.look_up(_bands(), 1 << 20, 1024) == "torch"
    assert dispatch.look_up(_bands(), 1 << 14, 1024) == "triton"
    assert {p.case: p for p in dispatch.points(GPU)}["wide"] == POINTS[2]


def test_a_table_that_is_none_says_so(tables: Path) -> None:
    for text in ("{", "[]", '{"format": 1}', '{"format": 0, "points": []}'):
        (tables / "example-gpu-9000.json").write_text(text)
        clear_caches()
        with pytest.raises(WeftError, match=r"table|format"):
            dispatch.points(GPU)


class OnGpu:
    """What dispatch reads of a tensor on a GPU, where there is none."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> None:
        self.shape, self.dtype, self.requires_grad = torch.Size(shape), dtype, grad
        self.device, self.layout = torch.device("cuda", 0), torch.strided

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)


def test_a_call_is_decided_by_the_table(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    monkeypatch.setattr(torch, "Tensor", OnGpu)
    monkeypatch.setattr(dispatch, "support", lambda one, case, device, d: one.name != "triton"
                        or case.inputs[0].shape != (1024, 1024, 1))  # fmt: skip
    x = OnGpu(1024, 1024)
    assert dispatch.choose("gelu", (x,), {}) == "triton"
    assert dispatch.choose("gelu", (OnGpu(16, 1024),), {}) == "torch"
    assert dispatch.choose("gelu", (OnGpu(1024, 1024, grad=True),), {}) == "torch"
    with torch.no_grad():
        assert dispatch.choose("gelu", (OnGpu(1024, 1024, grad=True),), {}) == "triton"


def test_like_calls_are_decided_once_and_then_looked_up(tables: Path) -> None:
    made: list[Any] = []

    def decide(x: Any, impl: str | None = None, **params: Any) -> int:
        return memoized(("gelu", impl), (x, None), params, lambda: made.append(x) or len(made))

    x = OnGpu(1024, 1024)
    assert [decide(x), decide(x), decide(OnGpu(1024, 1024))] == [1, 1, 1]
    others = [
        decide(OnGpu(1024, 1024, grad=True)),
        decide(OnGpu(1024, 1025)),
        decide(OnGpu(1024, 1024, dtype=torch.float16)),
        decide(x, "eager"),
        decide(x, eps=1e-5),
        decide(x, seed=3),
    ]
    assert others == [2, 3, 4, 5, 6, 7]
    assert decide(x, seed=4) == 7  # another seed is another call of the same kind
    assert decide(x, seed=-4) == 8  # but one that no check has let pass is not
    with torch.no_grad():
        assert decide(OnGpu(1024, 1024, grad=True)) == 1
    assert [decide(3.0), decide(3.0)] == [9, 10]  # no tensor: looked at each time
    assert [decide(x, eps=[]), decide(x, eps=[])] == [11, 12]  # no key
    clear_caches()
    assert decide(x) == 13
    least = min(_seconds(lambda: decide(x)) for _ in range(20))
    assert least < 10e-6


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    for _ in range(100):
        call()
    return (time.perf_counter() - start) / 100


def test_what_does_not_take_the_call_is_not_chosen(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    monkeypatch.setattr(torch, "Tensor", OnGpu)
    monkeypatch.setattr(dispatch, "support", lambda one, *rest: one.name == "eager")
    assert dispatch.choose("gelu", (OnGpu(1024, 1024),), {}) == "eager"


def test_on_a_cpu_torch_s_own() -> None:
    for name in registry.operator_names():
        wanted = "torch" if "torch" in registry.implementation_names(name) else "eager"
        assert dispatch.fallback(name) == wanted
    assert dispatch.choose("gelu", (torch.ones(3, 4),), {}) == "torch"


def test_traced_whole_with_sizes_static_or_symbolic(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors the table is not asked; so here it is told to."""
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")

    def chosen(x: torch.Tensor) -> torch.Tensor:
        table = dispatch._traced_bands("gelu", 0, x.dtype, (), False)
        ours = dispatch.look_up(table, x.numel(), x.shape[-1]) == "triton"
        plain = dispatch.choose("gelu", (x,), {})
        return x * 3 if ours and plain == "torch" else x + 1

    for dynamic in (False, True):
        torch._dynamo.reset()
        traced = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
        for rows, wanted in ((16, 2.0), (17, 2.0), (1024, 3.0)):
            assert float(traced(torch.ones(rows, 1024))[0, 0]) == wanted


def test_the_shipped_tables_can_be_read_and_never_lose() -> None:
    """At each measured case, the choice is within 2 % of the better of eager and torch."""
    for path in dispatch.SHIPPED.glob("*.json"):
        for p in dispatch.read(path):
            assert p.operator in registry.operator_names()
            least = min(p.forward[b][0] for b in dispatch.BASELINES if b in p.forward)
            assert p.forward[dispatch.best(p, False)][0] <= dispatch.MAY_LOSE * least


def test_importing_the_operators_imports_no_compiler() -> None:
    told = "import sys, weft.ops; print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    found = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, env=found)
    assert done.stdout == "[]\n", done.stdout + done.stderr
