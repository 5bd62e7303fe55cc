"""Choices of small eager calls, whose time is the host's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import ops
from weft.dispatch import choice as dispatch
from weft.dispatch import keys
from weft.dispatch.choice import Kind, Point
from weft.dispatch.operator import clear_caches
from weft.dispatch.plans import Plan, plan_by_mode
from weft.workbench import tune

GPU, SM = "Example GPU 9000", "sm_70"
TORCH = {"torch": (100.0, 9.0), "eager": (200.0, 20.0)}
Times = dict[str, tuple[float, float]]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the shipped tables and the user's into temporary folders."""
    monkeypatch.setattr(dispatch, "SHIPPED", tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "own"))
    clear_caches()
    yield tmp_path
    clear_caches()


def point(forward: Times, sizes: tuple[int, ...], operator: str = "softmax", dtype: str = "float32") -> Point:
    fields: dict[str, Any] = {"operator": operator, "case": "c", "dtype": dtype, "elements": 1, "last": 1024}
    return Point(**fields, sizes=sizes, flags=(("aligned", True),), forward=forward, backward={})


def chosen(*sizes: int, operator: str = "softmax", dtype: str = "float32", **options: Any) -> str:
    kind = Kind(operator, (GPU, SM), dtype, (("aligned", True),), **{"grad": False, **options})
    cells = [keys.band_value(n, b) for n, b in zip(sizes, dispatch.size_grid(kind), strict=True)]
    return dispatch.decide(kind, tuple(cells))[0]


def test_a_small_call_takes_what_the_host_calls_in_the_least_time(tables: Path) -> None:
    # Far fewer rows than the only point has: the device's time is short, whoever computes.
    far = point({**TORCH, "triton": (99.5, 90.0), "cuda": (300.0, 90.0)}, sizes=(1024, 1 << 20))
    host = {"float32": {"softmax": {"torch": [20.0, 30.0, 60.0], "triton": [15.0, 60.0, 70.0]}}}

    def write(**times: list[float]) -> None:
        by_name = host["float32"]["softmax"] | times
        header = {"host": {"float32": {"softmax": by_name}}}
        tune.write(tables / "example-gpu-9000.json", GPU, [far], "here", header)

    def eager(rows: int, **changes: Any) -> str:
        return chosen(1024, rows, **changes)

    write()
    assert eager(8) == "triton"
    assert chosen(1024, 8, captured=True) == "torch"
    assert eager(8, grad=True) == "torch"  # no point has a backward
    assert eager(1 << 20) == "torch"  # the device's 98 us can be seen
    assert eager(8, dtype="bfloat16") == "torch"  # no host time of this dtype
    write(cuda=[10.0, 60.0, 70.0])
    assert eager(8) == "cuda"
    assert eager(1 << 14) == "triton"  # the device takes 7.6 us by cuda, and 4.5 by triton
    write(triton=[19.0, 60.0, 70.0])
    assert eager(8) == "torch"  # 5 % are noise


def test_a_skinny_product_is_charged_for_its_waves_once(tables: Path) -> None:
    # 8 tiles are one wave of 128 SMs, and the point has 8 waves.
    assert keys.waves_ratio("linear", (1024, 1024, 7), (1024, 1024, 128 * 128), 128) == 1 / 8
    times = {"torch": (95.0, 30.0), "cuda": (99.0, 30.0)}
    far = point(times, operator="linear", dtype="bfloat16", sizes=(1024, 1024, 128 * 128))
    header = {"host": {"bfloat16": {"linear": {"torch": [40.0, 0.0, 0.0], "cuda": [31.0, 0.0, 0.0]}}}}
    tune.write(tables / "example-gpu-9000.json", GPU, [far], "here", header)
    options: dict[str, Any] = {"operator": "linear", "dtype": "bfloat16"}
    assert chosen(1024, 1024, 7, **options) == "cuda"  # 15 us of the device, 31 of the host
    assert chosen(1024, 4096, 7, **options) == "torch"


def test_host_times_replace_those_of_a_point(tables: Path) -> None:
    slow_host = point({**TORCH, "triton": (80.0, 150.0)}, (1024, 1024))
    header = {"host": {"float32": {"softmax": {"torch": [9.0, 9.0, 9.0], "triton": [70.0, 9.0, 9.0]}}}}
    tune.write(tables / "example-gpu-9000.json", GPU, [slow_host], "here")
    assert chosen(1024, 1024) == "torch"
    tune.write(tables / "example-gpu-9000.json", GPU, [slow_host], "here", header)
    assert chosen(1024, 1024) == "triton"


def test_a_capture_after_eager_calls_takes_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    monkeypatch.setattr(dispatch, "choose", lambda *call: "triton")
    monkeypatch.setattr(dispatch, "choose_in_graph", lambda *call: "torch")
    expected = {False: "weft_softmaxBackward", True: "SoftmaxBackward0"}
    for call in range(12):
        is_captured = call % 2 == 1
        monkeypatch.setattr(dispatch, "is_capturing", lambda captured=is_captured: captured)
        y = ops.softmax(torch.randn(4, 16, requires_grad=True))
        assert type(y.grad_fn).__name__ == expected[is_captured], call
    clear_caches()


def test_a_choice_in_a_capture_is_not_remembered_for_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    monkeypatch.setattr(dispatch, "choose", lambda *call: "triton" if dispatch.is_capturing() else "torch")
    for captured, node in ((True, "weft_softmaxBackward"), (False, "SoftmaxBackward0")):
        monkeypatch.setattr(dispatch, "is_capturing", lambda captured=captured: captured)
        y = ops.softmax(torch.randn(4, 16, requires_grad=True))
        assert type(y.grad_fn).__name__ == node
    clear_caches()


def test_the_function_of_a_repeated_call_asks_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    eager = Plan("cuda", lambda x, scalars: "run", None, lambda x, scalars: lambda *tensors: "repeated")
    plan = plan_by_mode(eager, Plan("torch", lambda x, scalars: (*x, scalars)), -1)
    assert plan.impl == "cuda" and plan.run_plain is None and plan.repeat is not None
    function = plan.repeat((x,), {"scale": 2.0})
    assert function is not None and function(x) == "repeated" and plan.run((x,), {}) == "run"
    monkeypatch.setattr(dispatch, "is_capturing", lambda: True)
    assert function(x) == (x, {"scale": 2.0}) and plan.run((x,), {}) == (x, {})
    nothing = plan_by_mode(Plan("cuda", eager.run, None, lambda x, scalars: None), eager, -1)
    assert nothing.repeat is not None and nothing.repeat((x,), {}) is None


def test_cublas_is_set_up_before_a_capture_may_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    current = [0]

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: handles.append(current[-1]))
    ours, torchs = (Plan(impl, lambda x, scalars: None) for impl in ("cuda", "torch"))
    plan_by_mode(ours, torchs, 1)
    plan_by_mode(ours, Plan("triton", ours.run), 1)
    assert handles == [1]


def test_what_the_host_decided_is_decided_again_for_a_graph(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eager choice counts the host's time, and the choice beside it that of the device alone."""
    far = point({**TORCH, "triton": (99.5, 90.0)}, sizes=(1024, 1 << 20))
    times = {"torch": [20.0, 30.0, 60.0], "triton": [15.0, 60.0, 70.0]}
    tune.write(
        tables / "example-gpu-9000.json", GPU, [far], "here", {"host": {"float32": {"softmax": times}}}
    )
    monkeypatch.setattr(dispatch, "device_key", lambda index: (GPU, SM))
    monkeypatch.setattr(dispatch, "support", lambda implementation, *rest: True)
    x: Any = SimpleNamespace(
        shape=(8, 1024), dtype=torch.float32, device=torch.device("cuda:0"), requires_grad=False
    )
    seen: list[dispatch.Decision] = []
    with dispatch.observed(seen.append):
        assert dispatch.choose("softmax", (x,), {}) == "triton"
        assert dispatch.choose_in_graph("softmax", (x,), {}, "triton") == "torch"
        assert dispatch.choose_in_graph("softmax", (x,), {}, "torch") == "torch"
    assert [(d.impl, d.in_graph) for d in seen] == [("triton", False), ("torch", True)]


def test_a_heads_loss_is_ours_where_passes_over_its_logits_cost_more_than_its_products(tables: Path) -> None:
    near = point(
        {"torch": (16_000.0, 400.0), "cuda": (6_500.0, 400.0)},
        (50304, 768, 16384),
        "linear_cross_entropy",
        "bfloat16",
    )
    tune.write(tables / "example-gpu-9000.json", GPU, [replace(near, backward=near.forward)], "here")
    options: dict[str, Any] = {"operator": "linear_cross_entropy", "dtype": "bfloat16", "grad": True}
    assert chosen(50304, 768, 16384, **options) == "cuda"
    assert chosen(50304, 768, 32768, **options) == "cuda"
    assert chosen(128256, 4096, 2048, **options) == "torch"  # its products are most of the time
    assert chosen(50304, 768, 16, **options) == "torch"
    assert chosen(151936, 1024, 32768, **options) == "cuda"  # logits of 10 GB


def test_the_model_of_a_heads_loss_is_that_of_its_products_and_passes() -> None:
    """Calls of PyTorch's are charged for fewer passes than those of the implementation that was measured."""
    size = (50304, 768, 16384)
    ours, library = keys.head_ratios(size, size)
    (_, large), (least, price) = keys.HEAD_MEMORY_PRICES
    assert size[0] * size[2] >= least and ours == 1.0 and 0.45 < library / price < 0.6
    narrow, wide = keys.head_ratios((50304, 64, 16384), size), keys.head_ratios((50304, 4096, 16384), size)
    assert narrow[0] / narrow[1] < ours / library < wide[0] / wide[1]
    # Logits that take much memory are dearer by PyTorch's products.
    by_rows = {m: keys.head_ratios((50304, 768, m), size)[1] for m in (4096, 65536)}
    assert by_rows[65536] == pytest.approx(4 * library * large / price, rel=0.05)
    assert by_rows[4096] == pytest.approx(library / 4 / price, rel=0.05)


def test_few_rows_of_a_cross_entropy_leave_sms_idle_on_both_sides(tables: Path) -> None:
    times = {"torch": (2700.0, 30.0), "triton": (190.0, 30.0)}
    points = [point(times, (50304, 8192), name, "bfloat16") for name in ("cross_entropy", "softmax")]
    tune.write(tables / "example-gpu-9000.json", GPU, points, "here")
    options: dict[str, Any] = {"dtype": "bfloat16", "captured": True}
    assert chosen(50304, 8, operator="cross_entropy", **options) == "triton"
    assert chosen(50304, 8, operator="softmax", **options) == "torch"
