"""Dispatch: the choices of a table, and their use by eager calls, traced calls and unmeasured shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import WeftError
from weft.core import registry
from weft.core.json_files import read_json
from weft.dispatch import choice as dispatch
from weft.dispatch import host_limits, keys
from weft.dispatch.choice import Kind, Point
from weft.dispatch.operator import clear_caches
from weft.dispatch.plan_cache import memoized
from weft.workbench import tune

Times = dict[str, tuple[float, float]]
GPU = "Example GPU 9000"
SM = "sm_70"
DEVICE = (GPU, SM)
ALIGNED = (("aligned", True),)
TORCH = {"torch": (100.0, 9.0), "eager": (200.0, 20.0)}


def point(forward: Times, backward: Times | None = None, **more: Any) -> Point:
    known = {"operator": "softmax", "case": "c", "dtype": "float32", "elements": 1 << 20, "last": 1024}
    known |= {"sizes": (1024, 1024), "flags": ALIGNED}
    return Point(**{**known, "forward": forward, "backward": backward or {}, **more})


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (TORCH, "torch"),
        ({**TORCH, "triton": (80.0, 15.0)}, "triton"),
        ({**TORCH, "triton": (99.5, 15.0)}, "torch"),  # within noise
        ({**TORCH, "triton": (80.0, 15.0), "cuda": (70.0, 15.0)}, "cuda"),
        ({**TORCH, "triton": (80.0, 150.0)}, "torch"),  # the host time would be visible
        ({"torch": (5.0, 6.0), "eager": (9.0, 20.0), "triton": (4.0, 15.0)}, "torch"),
        ({"eager": (50.0, 9.0), "torch": (100.0, 9.0), "triton": (60.0, 9.0)}, "eager"),
        ({"eager": (99.0, 9.0), "torch": (100.0, 9.0)}, "torch"),  # equal times: torch's own
        ({"triton": (1.0, 1.0)}, "torch"),  # nothing to compare with
    ],
)
def test_ours_only_where_it_was_measured_to_be_faster(forward: Times, expected: str) -> None:
    assert dispatch.best(point(forward), grad=False) == expected


def test_in_training_ours_may_lose_in_no_direction() -> None:
    forward, lost = {**TORCH, "triton": (50.0, 9.0)}, {**TORCH, "triton": (103.0, 9.0)}
    assert dispatch.best(point(forward, lost), grad=True) == "torch"
    assert dispatch.best(point(forward, lost), grad=False) == "triton"
    assert dispatch.best(point(forward, {**TORCH, "triton": (101.0, 9.0)}), grad=True) == "triton"
    assert dispatch.best(point(forward, TORCH), grad=True) == "torch"  # it has no backward


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the shipped tables and the user's tables into temporary folders, on a simulated GPU."""
    monkeypatch.setattr(dispatch, "SHIPPED", tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(dispatch, "device_name", lambda index: GPU)
    monkeypatch.setattr(dispatch, "architecture", lambda index: SM)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    clear_caches()
    yield tmp_path
    clear_caches()


FASTER = {**TORCH, "triton": (80.0, 9.0)}
PRODUCT = (("aligned", True), ("precision", "tf32"))
POINTS = [
    point(TORCH, case="small", sizes=(1024, 16)),
    point(FASTER, case="large", sizes=(1024, 1024)),
    point(FASTER, case="wide", sizes=(65536, 64)),
    point(FASTER, case="switched", operator="matmul", sizes=(1024, 1024, 1024), flags=PRODUCT),
]


def chosen(*sizes: int, operator: str = "softmax", **changes: Any) -> str:
    known: dict[str, Any] = {"dtype": "float32", "flags": ALIGNED, "grad": False, "captured": True}
    kind = Kind(operator, DEVICE, **{**known, **changes})
    cells = [keys.band_value(n, b) for n, b in zip(sizes, dispatch.size_grid(kind), strict=True)]
    impl, reason = dispatch.decide(kind, tuple(cells))
    # A trace compares the last size with merged borders: the choice must be the same.
    assert keys.band_value(sizes[-1], dispatch.bands(kind, tuple(cells[:-1]))) == impl, reason
    return impl


def test_a_call_gets_the_nearest_measured_size(tables: Path) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    for columns, rows, expected in (
        (1024, 1024, "triton"),
        (1024, 16, "torch"),
        (1024, 80, "torch"),  # nearer to 16 on a logarithmic scale
        (1024, 2048, "triton"),
        (1024, 1 << 16, "triton"),  # more rows only fill the device
        (1024, 1, "torch"),
        (1400, 1024, "triton"),
        (65536, 100, "triton"),  # of the wide ones
        (65536, 1, "torch"),  # far smaller than any wide one
        (64, 1024, "torch"),  # unlike any: 16 times narrower
        (3, 3, "torch"),
        (1 << 20, 64, "torch"),
    ):
        assert chosen(columns, rows) == expected, (columns, rows)
    assert chosen(1024, 1024, dtype="float16") == "torch"
    assert chosen(1024, 1024, grad=True) == "torch"
    assert chosen(1024, 1024, 1024, operator="matmul", flags=PRODUCT) == "triton"
    ieee = (("aligned", True), ("precision", "ieee"))
    assert chosen(1024, 1024, 1024, operator="matmul", flags=ieee) == "torch"


@pytest.mark.parametrize("first", [0, 1])
def test_of_points_of_the_same_sizes_the_worst_decides(tables: Path, first: int) -> None:
    """They differ in what no call tells, as the lengths of segments do."""
    known: dict[str, Any] = {"operator": "segmented_sum", "sizes": (1 << 28,), "flags": ()}
    faster, slower = point(FASTER, case="even", **known), point(TORCH, case="huge", **known)
    for points, expected in (([faster, slower], "torch"), ([faster, faster], "triton")):
        (tables / "example-gpu-9000.json").unlink(missing_ok=True)
        tune.write(tables / "example-gpu-9000.json", GPU, points[:: 1 - 2 * first], "here")
        assert chosen(1 << 28, operator="segmented_sum", flags=()) == expected


def test_products_are_looked_up_by_all_three_sizes(tables: Path) -> None:
    square = point(FASTER, operator="matmul", sizes=(4096, 4096, 4096), flags=PRODUCT)
    tune.write(tables / "example-gpu-9000.json", GPU, [square], "here")
    for n, k, m, expected in (
        (4096, 4096, 4096, "triton"),
        (4096, 4096, 16384, "triton"),
        (4096, 4096, 16, "torch"),  # skinny: a tile of 128 rows would be nearly empty
        (4096, 64, 262144, "torch"),
        (4224, 4096, 4096, "triton"),
    ):
        assert chosen(n, k, m, operator="matmul", flags=PRODUCT) == expected, (n, k, m)


def test_the_margin_grows_with_the_distance(tables: Path) -> None:
    """A gain of 10 % is enough at its own point and not two octaves away; one of 60 % is."""
    for ours, expected in ((90.0, "torch"), (40.0, "triton")):
        (tables / "example-gpu-9000.json").unlink(missing_ok=True)
        at = point({**TORCH, "triton": (ours, 9.0)}, sizes=(1024, 8192))
        tune.write(tables / "example-gpu-9000.json", GPU, [at], "here")
        assert chosen(1024, 8192) == "triton"
        assert chosen(1024, 2048) == expected


def test_rows_that_are_not_aligned_count_as_slower(tables: Path) -> None:
    odd = (("aligned", False),)
    for ours, expected in ((60.0, "torch"), (20.0, "triton")):
        at = point({**TORCH, "triton": (ours, 9.0)}, sizes=(1024, 8192))
        tune.write(tables / "example-gpu-9000.json", GPU, [at], "here")
        assert chosen(1024, 8192) == "triton"
        assert chosen(1023, 8192, flags=odd) == expected
    # A measured point of odd rows applies to odd rows only, not to aligned ones.
    tune.write(tables / "example-gpu-9000.json", GPU, [point(FASTER, sizes=(1023, 8192), flags=odd)], "here")
    assert chosen(1023, 8192, flags=odd) == "triton"
    assert chosen(1024, 8192) == "torch"


def test_the_host_counts_in_eager_calls_and_not_in_a_graph(tables: Path) -> None:
    slow_host = point({**TORCH, "triton": (80.0, 150.0)})
    tune.write(tables / "example-gpu-9000.json", GPU, [slow_host], "here")
    assert chosen(1024, 1024, captured=True) == "triton"
    assert chosen(1024, 1024, captured=False) == "torch"
    # With fewer rows only the host's time remains.
    quick_host = point({**TORCH, "triton": (50.0, 15.0)}, sizes=(1024, 8192))
    tune.write(tables / "example-gpu-9000.json", GPU, [quick_host], "here")
    assert chosen(1024, 8192, captured=False) == "triton"
    assert chosen(1024, 600, captured=False) == "torch"
    assert chosen(1024, 600, captured=True) == "triton"


def test_a_plan_made_in_a_capture_leaves_the_host_out(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, [point({**TORCH, "triton": (80.0, 150.0)})], "here")
    monkeypatch.setattr(dispatch, "support", lambda one, *rest: True)
    for captured, expected in ((False, "torch"), (True, "triton")):
        monkeypatch.setattr(dispatch, "is_capturing", lambda captured=captured: captured)
        assert dispatch.choose("softmax", (OnGpu(1024, 1024),), {}) == expected


@pytest.mark.parametrize(
    ("name", "shapes", "params", "sizes", "flags"),
    [
        ("softmax", [(2, 3, 8)], {}, (8, 6), {"aligned": True}),
        ("layer_norm", [(6, 7), (7,), (7,)], {"eps": 1e-5}, (7, 6), {"aligned": False}),
        ("gelu", [(2, 3, 8)], {}, (48,), {}),
        ("matmul", [(5, 8), (8, 16)], {}, (16, 8, 5), {"aligned": True, "precision": "ieee"}),
        ("linear", [(2, 3, 8), (9, 8), (9,)], {}, (9, 8, 6), {"aligned": True}),
        ("linear_gelu", [(3, 7), (9, 7)], {"keep": False}, (9, 7, 3), {"aligned": False, "keep": False}),
        ("embedding", [(11, 8), (2, 3), (0, 8)], {}, (8, 11, 6), {"aligned": True, "positions": False}),
        (
            "attention",
            [(2, 4, 5, 16), (2, 2, 6, 16), (2, 2, 6, 16), (2,)],
            {"causal": True, "seed": 0},
            (16, 8, 5, 6),
            {"causal": True, "padded": False, "grouped": True},
        ),
        (
            "attention_decode",
            [(3, 1, 4, 16), (9, 2, 8, 16), (9, 2, 8, 16), (3,), (3, 5)],
            {"scale": None, "paged": True},
            (16, 40, 6),
            {"aligned": True, "paged": True},
        ),
        ("sum", [()], {}, (1,), {}),
        ("cumsum", [(3, 8)], {"exclusive": True, "reverse": False}, (8, 3), {"aligned": True}),
        (
            "reduce",
            [(2, 3, 8)],
            {"op": "mean", "first": 1, "last": 2},
            (8, 6),
            {"adjacent": True, "aligned": True, "op": "sum"},
        ),
        (
            "argreduce",
            [(2, 3, 8)],
            {"op": "argmin", "first": 1, "last": 1},
            (8, 6),
            {"adjacent": False, "aligned": True, "op": "argmax"},
        ),
        ("topk", [(2, 8)], {"k": 16, "largest": True}, (8, 2), {"aligned": True, "short": False}),
        ("histogram", [(9,)], {"bins": 4096, "low": 0.0, "high": 1.0}, (9,), {"shared": True}),
        (
            "block_sparse_linear",
            [(2, 3, 64), (5, 16, 16), (5,), (5,), (0,), (64,)],
            {},
            (20, 64, 6),
            {"aligned": True, "side": 16},
        ),
        (
            "conv2d",
            [(3, 2, 9, 8), (4, 2, 3, 3)],
            {"padding": 1},
            (4, 18, 216),
            {"aligned": True, "few_channels": True, "window": "3x3"},
        ),
    ],
)
def test_the_sizes_and_flags_of_calls(name: str, shapes: Any, params: Any, sizes: Any, flags: Any) -> None:
    assert keys.sizes_of(name, shapes) == sizes
    assert dict(keys.flags_of(name, shapes, 2, params)) == flags


def test_a_grid_has_the_measured_sizes_and_steps_between() -> None:
    columns, rows = keys.grid("softmax", [(1024, 64), (8192, 64)])
    assert [v for _, v in columns][:15] == [2**i for i in range(15)]
    assert [v for _, v in rows][:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert keys.band_value(0, columns) == 1 and keys.band_value(1 << 60, rows) == keys.MAX_SIZE
    assert keys.band_value(1400, columns) == 1024 and keys.band_value(1500, columns) == 2048


def test_the_model_keeps_a_launch_and_charges_ours_for_waves(tables: Path) -> None:
    at = point({"torch": (103.0, 9.0), "triton": (53.0, 9.0)}, sizes=(1024, 1280))
    kind = Kind("softmax", DEVICE, "float32", ALIGNED, False)
    tune.write(tables / "example-gpu-9000.json", GPU, [at], "here", {"units": 128})
    assert dispatch.predict(at, kind, at.sizes) is at
    half = dispatch.predict(at, kind, (1024, 640)).forward
    assert half["torch"] == (53.0, 9.0) and half["triton"] == (28.0, 9.0)
    few = dispatch.predict(at, kind, (1024, 64)).forward  # half a wave takes as long as a whole one
    assert few["torch"][0] == pytest.approx(8.0) and few["triton"][0] == pytest.approx(8.0)


def test_the_host_time_of_chunks_follows_the_rows() -> None:
    at = (50304, 768, 16384)
    assert keys.host_ratio("linear_cross_entropy", (50304, 768, 8192), at) == 0.5
    assert keys.host_ratio("linear_cross_entropy", (50304, 768, 16), at) == 0.25
    assert keys.host_ratio("linear_cross_entropy", (50304, 768, 65536), at) == 1.0
    assert keys.host_ratio("linear", (50304, 768, 16), at) == 1.0


def test_what_was_measured_here_goes_over_what_is_shipped(tables: Path) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    assert chosen(1024, 1024) == "triton"
    tune.store(GPU, [point(TORCH, case="large", sizes=(1024, 1024))])
    tune.store(GPU, [point(FASTER, case="small", sizes=(1024, 16))])
    assert chosen(1024, 1024) == "torch"
    assert chosen(1024, 16) == "triton"
    assert {p.case: p for p in dispatch.points(GPU)}["wide"] == POINTS[2]


def test_a_device_without_a_table_borrows_one_of_its_architecture(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bandwidths = {"Other GPU": 2e12}
    monkeypatch.setattr(dispatch, "copy_bandwidth", bandwidths.get)
    facts = {"arch": SM, "units": 100, "copy": 4e12}
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here", facts)
    tune.write(tables / "far.json", "Far GPU", [], "here", {**facts, "copy": 4e13})
    borrowed = dispatch.table(("Other GPU", SM))
    assert GPU in borrowed.borrowed and "2.00" in borrowed.borrowed and borrowed.units == 100
    by_case = {p.case: p for p in borrowed.points}
    assert by_case["large"].forward["triton"] == (160.0, 9.0)
    assert by_case["switched"].forward["triton"] == (80.0, 9.0)  # of a product: not bound by memory
    assert dispatch.table(("Other GPU", "sm_71")).points == ()
    assert dispatch.table(DEVICE).borrowed == ""
    # Points that were measured on this GPU take precedence over borrowed ones.
    tune.store("Other GPU", [point(TORCH, case="large", sizes=(1024, 1024))])
    own = {p.case: p for p in dispatch.table(("Other GPU", SM)).points}
    assert own["large"].forward["torch"] == (100.0, 9.0) and own["wide"].forward["torch"] == (200.0, 9.0)


def test_a_kind_of_call_without_a_point_borrows_from_another_device(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "copy_bandwidth", {GPU: 4e12}.get)
    facts = {"arch": SM, "units": 100, "copy": 4e12}
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS[:1], "here", facts)
    there = point(FASTER, case="there", sizes=(1024, 1024))
    product = replace(POINTS[3], case="product there")
    tune.write(tables / "other.json", "Other GPU", [there, product], "there", facts)
    assert chosen(1024, 1024, 1024, operator="matmul", flags=PRODUCT) == "triton"
    kind = Kind("matmul", DEVICE, "float32", PRODUCT, grad=False)
    assert dispatch.decide(kind, (1024, 1024, 1024))[1] == "point product there, of another device"
    # A kind that was measured on this device counts alone; only its own points are listed.
    assert chosen(1024, 1024) == "torch"
    assert dispatch.points(*DEVICE) == tuple(POINTS[:1])


def test_a_user_s_table_of_an_older_format_is_not_used_and_says_so(tables: Path) -> None:
    path = dispatch.own_table(GPU)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "device": "x", "points": [{"operator": "gelu"}]}')
    with pytest.warns(UserWarning, match="format 1 and is not used.*weft tune"):
        assert dispatch.points(GPU) == ()
    with pytest.warns(UserWarning, match="format 1"):
        tune.store(GPU, [POINTS[1]])
    assert dispatch.points(GPU) == (POINTS[1],)


def test_a_table_that_is_none_says_so(tables: Path) -> None:
    for text in ("{", "[]", '{"format": 1}', '{"format": 0, "points": []}'):
        (tables / "example-gpu-9000.json").write_text(text)
        clear_caches()
        with pytest.raises(WeftError, match=r"table|format"):
            dispatch.points(GPU)


class OnGpu:
    """Attributes of a GPU tensor that dispatch reads, on a machine without a GPU."""

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
    assert dispatch.choose("softmax", (x,), {}) == "triton"
    assert dispatch.choose("softmax", (OnGpu(16, 1024),), {}) == "torch"
    assert dispatch.choose("softmax", (OnGpu(1024, 1024, grad=True),), {}) == "torch"
    with torch.no_grad():
        assert dispatch.choose("softmax", (OnGpu(1024, 1024, grad=True),), {}) == "triton"


def test_a_choice_is_observed_with_its_reason(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")
    monkeypatch.setattr(dispatch, "support", lambda one, *rest: True)
    decisions: list[dispatch.Decision] = []
    with dispatch.observed(decisions.append):
        for rows in (1024, 1200, 400):
            dispatch.choose("softmax", (OnGpu(rows, 1024),), {})
        dispatch.choose("softmax", (OnGpu(4, 4),), {})
    dispatch.choose("softmax", (OnGpu(2, 64),), {})
    reasons = [d.reason for d in decisions]
    assert reasons[:2] == ["point large"] * 2 and "octaves from point large" in reasons[2]
    assert "nothing measured" in reasons[3] and len(reasons) == 4


def test_like_calls_are_decided_once_and_then_looked_up(tables: Path) -> None:
    decisions: list[Any] = []

    def decide(x: Any, impl: str | None = None, **params: Any) -> int:
        return memoized(("gelu", impl), (x, None), params, lambda: decisions.append(x) or len(decisions))

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
    assert decide(x, seed=-4) == 8  # but a negative seed is not: no check has accepted it
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
    assert dispatch.choose("softmax", (OnGpu(1024, 1024),), {}) == "eager"


def test_on_a_cpu_torch_s_own() -> None:
    for name in registry.operator_names():
        expected = "torch" if "torch" in registry.implementation_names(name) else "eager"
        assert dispatch.fallback(name) == expected
    assert dispatch.choose("gelu", (torch.ones(3, 4),), {}) == "torch"


def test_traced_whole_with_sizes_static_or_symbolic(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is not used for CPU tensors, so the test makes dispatch use it."""
    tune.write(tables / "example-gpu-9000.json", GPU, POINTS, "here")

    traces: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        traces.append(len(inputs))
        return graph.forward

    def compute(x: torch.Tensor) -> torch.Tensor:
        flags = keys.flags_of("softmax", [x.shape], 4, {})
        sizes = keys.sizes_of("softmax", [x.shape])
        ours = dispatch._look_up_traced("softmax", 0, x.dtype, flags, False, sizes) == "triton"
        plain = dispatch.choose("softmax", (x,), {})
        return x * 3 if ours and plain == "torch" else x + 1

    for dynamic, limit in ((False, 6), (True, 2)):
        torch._dynamo.reset()
        traces.clear()
        traced = torch.compile(compute, fullgraph=True, dynamic=dynamic, backend=count)
        for rows, expected in ((16, 2.0), (17, 2.0), (20, 2.0), (1024, 3.0), (900, 3.0), (4096, 3.0)):
            assert float(traced(torch.ones(rows, 1024))[0, 0]) == expected
        # One trace serves all numbers of rows between two borders at which the choice changes.
        assert len(traces) <= limit


@pytest.mark.parametrize(
    ("name", "shapes", "params"),
    [
        ("gelu", [(6, 8)], {}),
        ("layer_norm", [(6, 7), (7,), (7,)], {"eps": 1e-5}),
        ("matmul", [(6, 8), (8, 16)], {"precision": "ieee"}),
        ("linear", [(2, 6, 8), (16, 8), (16,)], {}),
        ("embedding", [(11, 8), (2, 6), (0, 8)], {}),
        ("attention", [(2, 4, 6, 16), (2, 2, 7, 16), (2, 2, 7, 16)], {"causal": True, "padded": False}),
        ("attention_decode", [(2, 1, 4, 16), *2 * [(2, 2, 6, 16)], (2,), (2, 1)], {"paged": False}),
    ],
)
def test_every_family_is_traced_with_symbolic_sizes(
    tables: Path, name: str, shapes: Any, params: Any
) -> None:
    flags = keys.flags_of(name, shapes, 4, params)
    at = point(FASTER, operator=name, sizes=keys.sizes_of(name, shapes), flags=flags)
    tune.write(tables / "example-gpu-9000.json", GPU, [at], "here")

    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        shapes = [x.shape for x in inputs]
        sizes, flags = keys.sizes_of(name, shapes), keys.flags_of(name, shapes, 4, params)
        impl = dispatch._look_up_traced(name, 0, inputs[0].dtype, flags, False, sizes)
        return inputs[0] + (1 if impl == "triton" else 2)

    torch._dynamo.reset()
    traced = torch.compile(compute, fullgraph=True, dynamic=True, backend="eager")
    assert float(traced(*map(torch.zeros, shapes)).flatten()[0]) == 1.0


def test_the_shipped_tables_can_be_read_and_never_lose() -> None:
    """At each measured case, the choice is within 2 % of the better of eager and torch."""
    for path in dispatch.SHIPPED.glob("*.json"):
        for p in dispatch.read(path):
            assert p.operator in registry.operator_names()
            least = min(p.forward[b][0] for b in dispatch.BASELINES if b in p.forward)
            assert p.forward[dispatch.best(p, False)][0] <= dispatch.MAY_LOSE * least


def test_a_call_of_a_shipped_point_s_case_gets_the_best_of_that_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "architecture", lambda index: SM)
    monkeypatch.setattr(dispatch, "support", lambda one, *rest: True)
    for path in dispatch.SHIPPED.glob("*.json"):
        name = read_json(path)["device"]
        monkeypatch.setattr(dispatch, "device_name", lambda index, name=name: name)
        for p in dispatch.read(path):
            case = tune.case_named(p.operator, p.case)
            assert case is not None, p.case
            for grad in (False, True) if p.backward else (False,):
                inputs = [OnGpu(*i.shape, dtype=getattr(torch, i.dtype)) for i in case.inputs]
                inputs[0].requires_grad = grad
                if p.operator == "adamw":  # it takes lists and dispatches by their size
                    sizes = (p.elements, p.last)
                    chosen = dispatch.choose_by_size("adamw", inputs[0].device, inputs[0].dtype, *sizes)
                else:
                    chosen = dispatch.choose(p.operator, inputs, case.params)
                # Of points that no call tells apart, one where ours loses decides for all.
                key = (p.operator, p.dtype, p.sizes, p.flags)
                tied = [q for q in dispatch.read(path) if (q.operator, q.dtype, q.sizes, q.flags) == key]
                host = host_limits.of_calls(dispatch.table((name, SM)).host, p.operator, p.dtype, grad)
                choices = [dispatch.best(q, grad, host=host) for q in tied if q.backward or not grad]
                expected = next((c for c in choices if c in dispatch.BASELINES), choices[0])
                assert chosen == expected, (p.operator, p.case, grad)


def test_without_a_shipped_point_its_neighbours_never_choose_a_loser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave each shipped point out: the others' choice there reaches 0.95 of torch's measured speed."""
    original = dispatch.table
    for path in dispatch.SHIPPED.glob("*.json"):
        device = (read_json(path)["device"], None)
        whole = original(device)
        for p in whole.points:
            rest = replace(whole, points=tuple(q for q in whole.points if q is not p))
            monkeypatch.setattr(dispatch, "table", lambda _, rest=rest: rest)
            for cached in (dispatch.matching, dispatch.size_grid, dispatch.decide, dispatch.bands):
                cached.cache_clear()
            for grad, captured in product((False, True), repeat=2):
                kind = Kind(p.operator, device, p.dtype, p.flags, grad, captured)
                pairs = zip(p.sizes, dispatch.size_grid(kind), strict=True)
                impl, reason = dispatch.decide(kind, tuple(keys.band_value(n, b) for n, b in pairs))
                directions = [p.forward, p.backward] if grad else [p.forward]
                if all("torch" in t and impl in t for t in directions):
                    ours, torchs = (sum(t[name][0] for t in directions) for name in (impl, "torch"))
                    assert ours <= torchs / 0.95, (p.operator, p.case, grad, captured, impl, reason)
    monkeypatch.undo()
    clear_caches()


def test_importing_the_operators_imports_no_compiler() -> None:
    program = "import sys, weft.ops; print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stdout + done.stderr


CAPTURE = """
import sys, torch
from weft import ops
impl = sys.argv[1]
x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
grad = torch.ones_like(x)
torch.autograd.grad(torch.softmax(x, -1), x, grad)  # starts the engine's threads and streams
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = ops.softmax(x, impl=impl)
    (dx,) = torch.autograd.grad(y, x, grad)
graph.replay()
torch.testing.assert_close(y, torch.softmax(x, -1))
print("captured")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_a_kernel_may_be_compiled_while_a_graph_is_captured(impl: str, tmp_path: Path) -> None:
    """In a capture dispatch may choose an implementation that no eager call has compiled before."""
    environment = {**os.environ, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
    environment |= {"WEFT_CACHE_DIR": str(tmp_path / "weft"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", CAPTURE, impl]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "captured\n", done.stderr
