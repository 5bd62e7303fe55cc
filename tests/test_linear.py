"""The linear operators: what conformance does not see. Bad arguments, keep=False, every tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.ops._shared.linear_configs import BIAS, GELU, GELU_KEEP, RESIDUAL, Config, worth_timing
from weft.ops._shared.linear_triton import product

X, W, B = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("linear", (X, W.t(), B), {}),
    ("linear", (X, W, B[:4]), {}),
    ("linear", (X, W[0], B), {}),
    ("linear", (X, W.half(), B), {}),
    ("linear", (X, W, B.half()), {}),
    ("linear_gelu", (X, W, B), {"keep": 1}),
    ("linear_residual", (X, W, B, torch.ones(3, 4)), {}),
    ("linear_residual", (X, W, B, torch.ones(3, 5).half()), {}),
]


@pytest.mark.parametrize(("name", "arguments", "more"), BAD, ids=lambda v: None)
def test_what_does_not_go_together_is_refused(
    name: str, arguments: tuple[Any, ...], more: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **more)
    assert caught.value.expected and caught.value.got


def _configs() -> Iterator[Config]:
    """The forms of the descriptor kernel, with tiles small enough for an interpreter."""
    small = Config(bm=32, bn=64, bk=32, warps=4, stages=2)
    for parts, flatten in ((1, True), (2, False), (4, True)):
        yield replace(small, parts=parts, flatten=flatten, aside=parts == 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here for Triton's interpreter")
@pytest.mark.parametrize("config", _configs(), ids=str)
@pytest.mark.parametrize("epilogue", [BIAS, GELU_KEEP, RESIDUAL])
def test_each_form_of_the_kernel_gives_one_answer(config: Config, epilogue: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 40), torch.randn(72, 40), torch.randn(72)
    residual = torch.randn(40, 72) if epilogue == RESIDUAL else None
    y, pre = product(epilogue, x, weight, bias, residual, config=config)
    wanted = torch.nn.functional.linear(x, weight, bias)
    if epilogue == GELU_KEEP:
        torch.testing.assert_close(pre, wanted, rtol=1e-5, atol=1e-4)
        wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
    if residual is not None:
        wanted = wanted + residual
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-4)


def test_a_residual_s_tile_leaves_room_on_every_multiprocessor() -> None:
    """Stages and the two tiles that pass through shared memory, of the 227 KiB of a block."""
    for epilogue in (BIAS, GELU_KEEP, RESIDUAL):
        for config in worth_timing(epilogue, torch.bfloat16):
            tile = config.bm * config.bn // config.parts * (2 if epilogue == RESIDUAL else 1)
            tile *= 4 if config.turns else 1  # two buffers for each of two groups
            held = 2 * (config.stages * config.bk * (config.bm + config.bn) + tile)
            if config.descriptors:
                assert held * config.resident < 227 * 1024, config


def test_without_keep_pre_is_neither_returned_nor_needed() -> None:
    torch.manual_seed(0)
    leaves = [t.requires_grad_() for t in (torch.randn(5, 16), torch.randn(24, 16), torch.ones(24))]
    found = []
    for impl, keep in (("torch", True), ("torch", False), ("triton", False)):
        out = ops.linear_gelu(*leaves, keep=keep, impl=impl)
        y = out[0] if keep else out
        assert isinstance(y, torch.Tensor)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_no_gradient_flows_through_what_is_kept() -> None:
    weight = torch.randn(24, 16, requires_grad=True)
    for impl in ("eager", "torch", "triton"):
        _, pre = ops.linear_gelu(torch.randn(5, 16), weight, torch.zeros(24), impl=impl)
        assert not pre.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [BIAS, GELU, GELU_KEEP])
@pytest.mark.parametrize("size", [(300, 200, 136), (5000, 1544, 776), (4100, 136, 40)], ids=str)
def test_turns_answer_at_sizes_that_no_tile_divides(
    epilogue: int, size: tuple[int, int, int]
) -> None:
    """Few tiles and many, one step of K and a part of one; into memory that was NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel's instructions are compute capability 9.0's alone")
    m, n, k = size
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, device="cuda").bfloat16() for s in ((m, k), (n, k), (n,)))
    config = next(c for c in worth_timing(epilogue, torch.bfloat16) if c.turns)
    poison = [torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    del poison
    y, pre = product(epilogue, x, weight, bias, config=config)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    rounding = 2**-8 * 1.01
    if pre is not None:
        torch.testing.assert_close(pre.double(), wanted, rtol=rounding, atol=2e-3)
    if epilogue != BIAS:
        wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
    torch.testing.assert_close(y.double(), wanted, rtol=rounding, atol=4e-3)
