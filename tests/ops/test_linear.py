"""The linear family beyond conformance: bad arguments, the pre-activation's options, every configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.operator_calls import Call, assert_refused
from helpers.paths import TESTS
from ops.test_matmul_wgmma import toy_map
from weft import ops
from weft.ops._common.hopper import tensor_map
from weft.ops._common.products import wgmma
from weft.ops.linear import with_cuda
from weft.ops.linear.configs import BIAS, GELU, GELU_KEEP, RESIDUAL, Config, candidates
from weft.ops.linear.with_triton import product

X, W, B = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
BAD_CALLS: list[Call] = [
    ("linear", (X, W.t(), B), {}),
    ("linear", (X, W, B[:4]), {}),
    ("linear", (X, W[0], B), {}),
    ("linear", (X, W[0], None), {}),
    ("linear", (X, W.half(), B), {}),
    ("linear", (X, W, B.half()), {}),
    ("linear_gelu", (X, W, B), {"return_pre_activation": 1}),
    ("linear_gelu", (X, W, B), {"recompute_pre_activation": 1}),
    ("linear_gelu", (X, W, B), {"return_pre_activation": True, "recompute_pre_activation": True}),
    ("linear_residual", (X, W, B, torch.ones(3, 4)), {}),
    ("linear_residual", (X, W, B, torch.ones(3, 5).half()), {}),
]


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda v: None)
def test_bad_arguments_raise_one_clear_error(call: Call) -> None:
    assert_refused(call)


def _descriptor_configs() -> Iterator[Config]:
    """Variants of the descriptor kernel, with tiles small enough for an interpreter."""
    small = Config(bm=32, bn=64, bk=32, warps=4, stages=2)
    for parts, flatten in ((1, True), (2, False), (4, True)):
        yield replace(small, parts=parts, flatten=flatten, pre_by_pointers=parts == 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("config", _descriptor_configs(), ids=str)
@pytest.mark.parametrize("epilogue", [BIAS, GELU_KEEP, RESIDUAL])
def test_every_variant_of_the_kernel_gives_the_same_result(config: Config, epilogue: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 40), torch.randn(72, 40), torch.randn(72)
    residual = torch.randn(40, 72) if epilogue == RESIDUAL else None
    y, pre = product(epilogue, x, weight, bias, residual, config=config)
    expected = torch.nn.functional.linear(x, weight, bias)
    if epilogue == GELU_KEEP:
        torch.testing.assert_close(pre, expected, rtol=1e-5, atol=1e-4)
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    if residual is not None:
        expected = expected + residual
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


def test_every_candidate_fits_in_shared_memory() -> None:
    """Pipeline stages and the staged tiles of y and the residual, within the 227 KiB of a block."""
    for epilogue in (BIAS, GELU_KEEP, RESIDUAL):
        for config in candidates(epilogue, torch.bfloat16):
            staged = config.bm * config.bn // config.parts * (2 if epilogue == RESIDUAL else 1)
            staged *= 4 if config.pingpong else 1  # two buffers for each of two groups
            smem = 2 * (config.stages * config.bk * (config.bm + config.bn) + staged)
            if config.descriptors:
                assert smem * config.programs_per_sm < 227 * 1024, config


def _gelu_leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [t.requires_grad_() for t in (torch.randn(5, 16), torch.randn(24, 16), torch.ones(24))]


@pytest.mark.parametrize("impl", ["eager", "torch", "triton", None])
def test_linear_gelu_returns_y_and_the_pre_activation_on_request(impl: str | None) -> None:
    leaves = _gelu_leaves()
    y = ops.linear_gelu(*leaves, impl=impl)
    pair = ops.linear_gelu(*leaves, return_pre_activation=True, impl=impl)
    with torch.no_grad():
        without_gradient = ops.linear_gelu(*leaves, impl=impl)
    assert isinstance(y, torch.Tensor) and isinstance(pair, tuple) and y.requires_grad
    expected = torch.nn.functional.linear(*leaves)
    torch.testing.assert_close(pair[1], expected, rtol=1e-5, atol=1e-5)
    for got in (y, pair[0], without_gradient):
        torch.testing.assert_close(
            got, torch.nn.functional.gelu(expected, approximate="tanh"), rtol=1e-5, atol=1e-5
        )


def test_recomputing_the_pre_activation_gives_the_same_gradients() -> None:
    leaves = _gelu_leaves()
    results = []
    for impl, recompute in (("torch", False), ("torch", True), ("triton", True), ("triton", False)):
        y = ops.linear_gelu(*leaves, recompute_pre_activation=recompute, impl=impl)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_recomputing_saves_no_pre_activation() -> None:
    """The tensors that autograd holds on to: x, weight and bias, or with pre in place of the bias."""
    leaves = _gelu_leaves()
    for recompute, shape in ((False, (5, 24)), (True, (24,))):
        saved: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):  # noqa: B023
            ops.linear_gelu(*leaves, recompute_pre_activation=recompute, impl="triton")
        assert sorted(map(tuple, saved)) == sorted([(5, 16), (24, 16), shape])


def test_no_gradient_flows_through_the_pre_activation() -> None:
    weight = torch.randn(24, 16, requires_grad=True)
    for impl in ("eager", "torch", "triton"):
        _, pre = ops.linear_gelu(
            torch.randn(5, 16), weight, torch.zeros(24), return_pre_activation=True, impl=impl
        )
        assert not pre.requires_grad


def test_a_missing_bias_counts_as_zeros() -> None:
    x, weight, residual = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(ops.linear(x, weight), expected)
    torch.testing.assert_close(
        ops.linear_gelu(x, weight),
        torch.nn.functional.gelu(expected, approximate="tanh"),
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(ops.linear_residual(x, weight, None, residual), expected + residual)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [BIAS, GELU, GELU_KEEP])
@pytest.mark.parametrize("size", [(300, 200, 136), (5000, 1544, 776), (4100, 136, 40)], ids=str)
def test_pingpong_is_right_at_sizes_that_no_tile_divides(epilogue: int, size: tuple[int, int, int]) -> None:
    """Few tiles and many; one step of K, or less. The outputs' memory holds NaN before."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel's instructions exist on compute capability 9.0 alone")
    m, n, k = size
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, device="cuda").bfloat16() for s in ((m, k), (n, k), (n,)))
    config = next(c for c in candidates(epilogue, torch.bfloat16) if c.pingpong)
    poison = [torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    del poison
    y, pre = product(epilogue, x, weight, bias, config=config)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    rounding = 2**-8 * 1.01
    if pre is not None:
        torch.testing.assert_close(pre.double(), expected, rtol=rounding, atol=2e-3)
    if epilogue != BIAS:
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=4e-3)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the CUDA implementations run their products on an emulated Hopper GPU of two SMs."""
    header = TESTS / "helpers" / "hopper_emulator.hpp"
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), header)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 2)
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)


@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with")
def test_cuda_computes_a_product_and_its_epilogue_by_one_kernel(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x with three dimensions, a bias that is not aligned, a residual with gaps; no pass and no library."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a pass of its own was called")

    monkeypatch.setattr(with_cuda, "epilogue", refuse)
    monkeypatch.setattr(with_cuda, "library_linear", refuse)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 40, 72).bfloat16(), torch.randn(136, 72).bfloat16()
    bias, residual = torch.randn(137).bfloat16()[1:], torch.randn(2, 40, 144).bfloat16()[..., :136]
    sums = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    gelu = torch.nn.functional.gelu(sums, approximate="tanh")
    y, pre = with_cuda.linear_gelu_forward(x, weight, bias)
    for got, expected in (
        (with_cuda.linear_forward(x, weight, bias), sums),
        (with_cuda.linear_residual_forward(x, weight, bias, residual), sums + residual.double()),
        (with_cuda.linear_gelu_forward(x, weight, bias, keep=False), gelu),
        (y, gelu),
        (pre, sums),
    ):
        assert got.shape == (2, 40, 136) and got.is_contiguous()
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with")
def test_cuda_multiplies_a_gradient_with_both_factors_by_the_same_kernels(hopper: None) -> None:
    torch.manual_seed(0)
    grad, x, weight = (torch.randn(*s).bfloat16() for s in ((80, 136), (2, 40, 72), (136, 72)))
    dx, dweight = with_cuda.backward_products(grad, x, weight)
    assert dx.shape == x.shape and dweight.shape == weight.shape
    torch.testing.assert_close(
        dx.view(80, 72).double(), grad.double() @ weight.double(), rtol=2**-8, atol=1e-3
    )
    expected = grad.double().t() @ x.view(80, 72).double()
    torch.testing.assert_close(dweight.double(), expected, rtol=2**-8, atol=1e-3)


def test_a_linear_gelu_without_a_gradient_calls_its_kernel_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(32, 16), torch.randn(32)
    expected = ops.linear_gelu(x, weight, bias, impl="triton")

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the dispatcher was called")

    monkeypatch.setattr(torch.ops.weft, "linear_gelu_lean", refuse)
    assert torch.equal(ops.linear_gelu(x, weight, bias, impl="triton"), expected)
    with pytest.raises(AssertionError, match="the dispatcher"):
        ops.linear_gelu(x.requires_grad_(), weight, bias, recompute_pre_activation=True, impl="triton")
