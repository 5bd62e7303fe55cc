"""The short way to a kernel: the same answers, and only where nobody hears of the long one."""

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

X = torch.linspace(-2.0, 2.0, 40).reshape(5, 8)


@contextmanager
def long_ways() -> Iterator[list[str]]:
    """The names of operators that the dispatcher is told of, whoever else is listening."""
    seen: list[str] = []
    kernels = {n: getattr(torch.ops.weft, n).default for n in ("gelu", "gelu_backward")}
    with torch.library._scoped_library("weft", "FRAGMENT") as told:
        for name, kernel in kernels.items():

            def run(keys: Any, *a: Any, name: str = name, kernel: Any = kernel) -> Any:
                seen.append(name)
                return kernel.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *a)

            told.impl(name, run, "ADInplaceOrView", with_keyset=True)
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


def test_where_nobody_listens_the_dispatcher_is_not_told_and_the_bits_are_the_same() -> None:
    with long_ways() as seen:
        short = gelu(X), gradient(X), gradient(torch.nn.Parameter(X))
        assert seen == []
        with Quiet():
            long = gelu(X), gradient(X), gradient(torch.nn.Parameter(X))
        assert seen == ["gelu", *["gelu", "gelu_backward"] * 2]
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


LISTENING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Quiet,
    "a function mode": QuietFunctions,
    "a default device": lambda: torch.device("cpu"),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward-mode gradients": forward_ad.dual_level,
}


@pytest.mark.parametrize("who", LISTENING)
def test_who_listens_is_told(who: str) -> None:
    with LISTENING[who]():
        assert not direct.can_skip_dispatcher([X])
    assert direct.can_skip_dispatcher([X, None, 3, "triton", torch.nn.Parameter(X)])


@pytest.mark.parametrize(
    "x", [X.as_subclass(Sub), torch.complex(X, X).conj().imag], ids=["subclass", "negated"]
)
def test_a_tensor_that_is_not_as_it_lies_takes_the_long_way(x: torch.Tensor) -> None:
    assert not direct.can_skip_dispatcher([x])
    wanted = gelu(torch.Tensor(x.detach().clone().resolve_neg()))
    assert torch.equal(gelu(x).as_subclass(torch.Tensor), wanted)


def test_transforms_and_traces_see_the_operator() -> None:
    with pytest.raises(RuntimeError, match="functorch transforms"):  # refused, and not passed by
        torch.func.grad(lambda x: gelu(x).sum())(X)
    traced = torch.jit.trace(gelu, (X,), check_trace=False)
    assert "weft::gelu" in str(traced.graph)


def test_a_profile_names_the_operator_both_ways() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        gradient(X)
    names = {e.key for e in seen.key_averages()}
    assert {"weft::gelu", "weft::gelu_backward"} <= names


@pytest.mark.parametrize("listening", [nullcontext, Quiet], ids=["short", "long"])
def test_a_checkpointed_call_is_computed_again(listening: Any) -> None:
    x = X.clone().requires_grad_()
    with listening():
        out = checkpoint(gelu, x, use_reentrant=False)
        (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, gradient(X))


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
    assert "add_layer_norm" in public._autograd_functions
