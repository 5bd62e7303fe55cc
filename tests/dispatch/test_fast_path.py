"""The fast path to a kernel: the same results, and only while no mode, transform or tracer is active."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from weft import ops
from weft.core import WeftError
from weft.dispatch import operator as direct
from weft.dispatch import operator as public
from weft.dispatch import plan_cache

X = torch.linspace(-2.0, 2.0, 40).reshape(5, 8)


@contextmanager
def dispatched_calls() -> Iterator[list[str]]:
    """Record the names of Weft's operators that pass through PyTorch's dispatcher."""
    seen: list[str] = []
    kernels = {n: getattr(torch.ops.weft, n).default for n in ("gelu", "gelu_backward")}
    with torch.library._scoped_library("weft", "FRAGMENT") as fragment:
        for name, kernel in kernels.items():

            def run(keys: Any, *a: Any, name: str = name, kernel: Any = kernel) -> Any:
                seen.append(name)
                return kernel.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *a)

            fragment.impl(name, run, "ADInplaceOrView", with_keyset=True)
        yield seen


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class QuietFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def gelu(x: torch.Tensor) -> torch.Tensor:
    return ops.gelu(x, impl="triton")


def gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(gelu(x).sum(), x)[0]


def test_the_fast_path_skips_the_dispatcher_and_gives_the_same_bits() -> None:
    with dispatched_calls() as seen:
        short = gelu(X), gradient(X), gradient(torch.nn.Parameter(X))
        assert seen == []
        with Quiet():
            long = gelu(X), gradient(X), gradient(torch.nn.Parameter(X))
        assert seen == ["gelu", *["gelu", "gelu_backward"] * 2]
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


ACTIVE_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Quiet,
    "a function mode": QuietFunctions,
    "a default device": lambda: torch.device("cpu"),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward-mode gradients": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", ACTIVE_MODES)
def test_an_active_mode_disables_the_fast_path(mode: str) -> None:
    with ACTIVE_MODES[mode]():
        assert not direct.can_skip_dispatcher([X])
    assert direct.can_skip_dispatcher([X, None, 3, "triton", torch.nn.Parameter(X)])


@pytest.mark.parametrize(
    "x", [X.as_subclass(Sub), torch.complex(X, X).conj().imag], ids=["subclass", "negated"]
)
def test_a_subclass_or_negated_tensor_goes_through_the_dispatcher(x: torch.Tensor) -> None:
    assert not direct.can_skip_dispatcher([x])
    expected = gelu(torch.Tensor(x.detach().clone().resolve_neg()))
    assert torch.equal(gelu(x).as_subclass(torch.Tensor), expected)


def test_a_tensor_that_left_its_transform_takes_the_dispatcher() -> None:
    wrapped: list[torch.Tensor] = []
    torch.func.grad(lambda x: (wrapped.append(x), x.sum())[1])(X)
    assert not direct.can_skip_dispatcher(wrapped)  # its memory has no address
    assert torch.equal(gelu(wrapped[0]).detach(), gelu(X))


def test_transforms_and_traces_see_the_operator() -> None:
    with pytest.raises(RuntimeError, match="functorch transforms"):  # refused, not bypassed
        torch.func.grad(lambda x: gelu(x).sum())(X)
    traced = torch.jit.trace(gelu, (X,), check_trace=False)
    assert "weft::gelu" in str(traced.graph)


def test_a_profile_names_the_operator_on_both_paths() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        gradient(X)
    names = {e.key for e in seen.key_averages()}
    assert {"weft::gelu", "weft::gelu_backward"} <= names


@pytest.mark.parametrize("mode", [nullcontext, Quiet], ids=["short", "long"])
def test_a_checkpointed_call_is_computed_again(mode: Any) -> None:
    x = X.clone().requires_grad_()
    with mode():
        out = checkpoint(gelu, x, use_reentrant=False)
        (x_grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(x_grad, gradient(X))


def test_a_gradient_of_the_gradient_is_refused() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(WeftError, match=r"gelu's gradient.*create_graph=True.*impl='torch'"):
        torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    torch.autograd.grad(gelu(x).sum(), x)


def test_outputs_that_nothing_used_have_gradients_of_zeros_and_others_have_none() -> None:
    x, residual = X.clone().requires_grad_(), X.clone().requires_grad_()
    weight, bias = torch.ones(8), torch.zeros(8)
    y, total = ops.add_layer_norm(x, residual, weight, bias, impl="triton")
    (one,) = torch.autograd.grad(total.sum(), x)
    assert torch.equal(one, torch.ones_like(x)) and y.requires_grad
    with torch.no_grad():
        y, total = ops.add_layer_norm(x, residual, weight, bias, impl="triton")
    assert not y.requires_grad and not total.requires_grad
    assert ("add_layer_norm", "triton") in public._applies


def test_a_saved_tensor_passes_its_hooks_and_its_version_is_checked() -> None:
    packed: list[torch.Tensor] = []
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: 2 * t):
        y = gelu(x)
    (x_grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert len(packed) == 1 and torch.equal(packed[0], X)
    assert torch.equal(
        x_grad, torch.autograd.grad(gelu(doubled := (2 * X).requires_grad_()).sum(), doubled)[0]
    )
    y = gelu(product := x * 1)
    product.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = gelu(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_saved_tensor_that_comes_back_as_a_subclass_gives_the_same_gradient() -> None:
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.as_subclass(Sub)):
        y = gelu(x)
    (x_grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(x_grad.as_subclass(torch.Tensor), gradient(X))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_reach_the_inputs_that_need_them_and_no_other(needed: tuple[int, ...]) -> None:
    values = (X, torch.linspace(0.5, 1.5, 8), torch.linspace(-1.0, 1.0, 8))
    grads = {}
    for impl in ("triton", "torch"):
        inputs = [v.clone().requires_grad_(i in needed) for i, v in enumerate(values)]
        y = ops.layer_norm(*inputs, impl=impl)
        y.backward(X.t().contiguous().t())  # a gradient that is not contiguous
        assert [v.grad is not None for v in inputs] == [i in needed for i in range(3)]
        grads[impl] = [inputs[i].grad for i in needed]
    for a, b in zip(*grads.values(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_input_that_takes_no_gradient_may_come_first_and_a_parameter_may_differ_in_each_call() -> None:
    weight = torch.linspace(-1.0, 1.0, 24).reshape(6, 4).requires_grad_()
    ids = torch.tensor([[0, 3, 3], [5, 0, 1]])
    weight_grad = torch.autograd.grad(ops.embedding(ids, weight, impl="triton").sum(), weight)[0]
    assert torch.equal(weight_grad[:, 0], torch.tensor([2.0, 1.0, 0.0, 2.0, 0.0, 1.0]))
    x = X.clone().requires_grad_()
    masks = []
    for seed in (3, 4, 3):
        y = ops.dropout(x, p=0.5, seed=seed, impl="triton")
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx != 0, (y != 0) | ((dx != 0) & (X == 0)))
        masks.append(dx)
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])


def test_a_changed_registry_takes_effect_after_the_caches_are_cleared() -> None:
    gradient(X)
    assert ("gelu", "triton") in public._applies
    public.clear_caches()
    assert not public._applies and not plan_cache._memo and not plan_cache._recent
    assert gelu(X.clone().requires_grad_()).grad_fn.impl == "triton"  # type: ignore[union-attr]
