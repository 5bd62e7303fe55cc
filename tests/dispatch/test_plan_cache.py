"""Plans of recent calls: a plan is reused only if tensors, parameters and modes are the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from weft import ops
from weft.core import WeftError
from weft.dispatch import operator, plan_cache

from .test_fast_path import Quiet, QuietFunctions, Sub, dispatched_calls


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    plan_cache.clear()
    yield
    plan_cache.clear()


def values() -> torch.Tensor:
    return torch.linspace(-2.0, 2.0, 40).reshape(5, 8)


def recent(*inputs: Any, **params: Any) -> Any:
    return plan_cache.recent("gelu", None, inputs, params)


UNLIKE: dict[str, Callable[[], Any]] = {
    "rows": lambda: torch.zeros(6, 8),
    "columns": lambda: torch.zeros(5, 7),
    "dimensions": lambda: values()[None],
    "strides": lambda: torch.zeros(8, 5).t(),
    "dtype": lambda: values().half(),
    "device": lambda: torch.zeros(5, 8, device="meta"),
    "a gradient": lambda: values().requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(values()),
    "a subclass": lambda: values().as_subclass(Sub),
    "negated lazily": lambda: torch.complex(values(), values()).conj().imag.contiguous(),
    "sparse": lambda: values().to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([values()]),
    "compressed rows": lambda: values().to_sparse_csr(),
    "opaque": lambda: values().to_mkldnn(),
    "no tensor": lambda: None,
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_tensors_that_differ_in_any_property_are_not_alike(kind: str) -> None:
    plan_cache.store_recent("gelu", None, (values(),), {}, "a plan")
    assert recent(values()) == "a plan"
    x = UNLIKE[kind]()
    if kind == "negated lazily":
        x = torch.complex(values(), values()).conj().imag
        plan_cache.clear()
        plan_cache.store_recent("gelu", None, (x.resolve_neg().as_strided((5, 8), (8, 1)),), {}, "a plan")
        assert x.is_neg()
    assert recent(x) is None


def test_every_tensor_counts_and_so_do_parameters_names_and_the_grad_mode() -> None:
    x, y = values(), torch.zeros(8)
    plan_cache.store_recent("layer_norm", "cuda", (x, y), {"eps": 1e-5}, "a plan")

    def look_up(name: str, impl: str, second: torch.Tensor, eps: Any) -> Any:
        return plan_cache.recent(name, impl, (x, second), {"eps": eps})

    assert look_up("layer_norm", "cuda", y, 1e-5) == "a plan"
    assert look_up("layer_norm", "cuda", torch.zeros(9), 1e-5) is None
    assert look_up("layer_norm", "cuda", y, 1e-6) is None
    assert look_up("layer_norm", "cuda", y, torch.tensor(1e-5)) is None
    assert look_up("layer_norm", "cuda", y, [1e-5]) is None  # has no hash
    assert look_up("layer_norm", "triton", y, 1e-5) is None
    assert look_up("rms_norm", "cuda", y, 1e-5) is None
    with torch.no_grad():
        assert look_up("layer_norm", "cuda", y, 1e-5) is None


def test_what_has_a_seed_no_strides_or_is_absent_is_not_remembered() -> None:
    x = values()
    plan_cache.store_recent("gelu", None, (x,), {"seed": 3}, "a plan")
    plan_cache.store_recent("gelu", None, (x.to_sparse(),), {}, "a plan")
    plan_cache.store_recent("gelu", None, (x, None), {}, "a plan")
    assert not plan_cache._recent


def test_without_the_comparison_every_call_takes_the_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_cache.COMPARES
    monkeypatch.setattr(plan_cache, "COMPARES", False)
    assert torch.equal(ops.gelu(values(), impl="triton"), ops.gelu(values(), impl="triton"))
    assert not plan_cache._recent and len(plan_cache._memo) == 1


def store_rows(rows: int) -> None:
    plan_cache.store_recent("gelu", None, (torch.zeros(rows, 2),), {}, rows)


def recent_kinds() -> Any:
    ((_, kinds),) = plan_cache._recent.items()
    return kinds


def test_each_of_many_kinds_is_compared_with_one_entry() -> None:
    for rows in range(1, plan_cache.MAX_RECENT + 1):
        store_rows(rows)
    assert isinstance(recent_kinds(), tuple)
    for rows in range(plan_cache.MAX_RECENT + 1, 65):
        store_rows(rows)
    assert [recent(torch.zeros(rows, 2)) for rows in range(1, 66)] == [*range(1, 65), None]
    assert [len(entries) for entries in recent_kinds().values()] == [1] * 64


def test_many_shapes_are_bounded_and_a_late_one_is_remembered_too() -> None:
    for rows in range(1, plan_cache.MAX_SHAPES + 100):
        store_rows(rows)
    values = [entry.value for entries in recent_kinds().values() for entry in entries]
    assert len(values) == plan_cache.MAX_SHAPES and max(values) > plan_cache.MAX_SHAPES + 80


def test_many_kinds_of_one_shape_are_bounded_too() -> None:
    memory = torch.zeros(1000)
    strided = [memory.as_strided((2, 3), (10 * pitch, 1)) for pitch in range(1, 40)]
    for pitch, x in enumerate(strided):
        plan_cache.store_recent("gelu", None, (x,), {}, pitch)
    (entries,) = recent_kinds().values()
    assert len(entries) == plan_cache.MAX_RECENT and entries[-1].value > 20
    assert [recent(strided[entry.value]) for entry in entries] == [entry.value for entry in entries]


def pattern_of(tensors: tuple[Any, ...]) -> list[Any]:
    """Return for each position None or the first position that has the same tensor."""
    ids = [*map(id, tensors)]
    return [None if x is None else ids.index(id(x)) for x in tensors]


def test_calls_are_alike_if_the_same_positions_have_the_same_tensor_or_none() -> None:
    """All calls with up to four tensors, compared with each other."""
    a, b, c, d = (torch.zeros(2, 3) for _ in range(4))
    for count in (1, 2, 3, 4):
        calls = list(itertools.product((None, a, b, c, d)[: count + 1], repeat=count))
        calls = [tensors for tensors in calls if any(x is not None for x in tensors)]
        patterns = [pattern_of(tensors) for tensors in calls]
        for one, pattern in zip(calls, patterns, strict=True):
            is_alike = plan_cache._comparison(*one)
            assert [is_alike(*other) for other in calls] == [pattern == other for other in patterns]


def test_a_tensor_in_two_places_is_compared_in_all_properties() -> None:
    is_alike = plan_cache._comparison(values(), *[torch.zeros(3)] * 2)
    y = torch.zeros(3)
    assert is_alike(values(), y, y)
    others = [torch.zeros(4), torch.zeros(6)[::2], torch.zeros(3).half(), torch.zeros(3).requires_grad_()]
    assert not any(is_alike(values(), z, z) for z in others)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_alike(values(), y, y)
    with pytest.raises(TypeError):
        is_alike(values(), y)


# ---- Public calls

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Quiet,
    "a function mode": QuietFunctions,
    "a default device": lambda: torch.device("cpu"),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward-mode gradients": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_remembered_call_inside_of_a_mode_goes_through_the_dispatcher(mode: str) -> None:
    x = values()
    expected = ops.gelu(x, impl="triton")
    assert plan_cache.recent("gelu", "triton", (x,), {}) is not None
    with MODES[mode](), dispatched_calls() as seen:
        assert torch.equal(ops.gelu(x, impl="triton"), expected)
    assert seen == ["gelu"]


def test_nothing_is_remembered_inside_of_a_mode() -> None:
    x = values()
    for mode in MODES.values():
        with mode():
            ops.gelu(x, impl="triton")
    assert not plan_cache._recent


def test_transforms_traces_and_fake_tensors_get_no_remembered_plan() -> None:
    x = values()
    ops.gelu(x, impl="triton")
    seen: list[Any] = []

    def ask(y: torch.Tensor) -> torch.Tensor:
        seen.extend(plan_cache.recent("gelu", "triton", (t,), {}) for t in (x, y))
        return y.sum()

    torch.func.grad(ask)(x)
    torch.func.vmap(ask)(x)
    torch.jit.trace(ask, (x,), check_trace=False)
    with torch.inference_mode():
        ask(x)
    assert seen == [None] * 8
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert plan_cache.recent("gelu", "triton", (fake,), {}) is None
        assert type(ops.gelu(fake, impl="triton")) is type(fake)
    assert type(ops.gelu(x, impl="triton")) is torch.Tensor


def test_a_remembered_call_is_validated_by_what_its_plan_was_validated_for() -> None:
    x, weight = values(), torch.ones(8)
    ops.rms_norm(x, weight, impl="triton")
    with pytest.raises(WeftError, match="weight"):
        ops.rms_norm(x, torch.ones(7), impl="triton")
    with pytest.raises(WeftError, match="eps"):
        ops.rms_norm(x, weight, eps=torch.tensor(1e-6), impl="triton")  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="batch_invariant"):
        ops.rms_norm(x, weight, batch_invariant=1, impl="triton")  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="impl"):
        ops.rms_norm(x, weight, impl=["triton"])  # type: ignore[arg-type]


def test_a_plan_of_a_call_with_a_gradient_serves_no_call_without_one() -> None:
    x = values().requires_grad_()
    assert ops.gelu(x, impl="triton").grad_fn is not None
    with torch.no_grad():
        assert ops.gelu(x, impl="triton").grad_fn is None
    assert ops.gelu(x, impl="triton").grad_fn is not None
    assert ops.gelu(x.detach(), impl="triton").grad_fn is None
    operator.clear_caches()
    assert not plan_cache._recent and not plan_cache._memo


def test_threads_remember_and_ask_at_once() -> None:
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for i in range(200):
                x = torch.full((1 + (i * seed) % 12, 4), 1.0)
                assert ops.gelu(x, impl="torch").shape == x.shape
        except (RuntimeError, WeftError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
