"""``mlp_gelu`` beyond conformance: what is stored; the fused backward in the emulator, with faults."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.operator_calls import Call, assert_refused
from helpers.paths import SRC, TESTS
from ops.test_matmul_wgmma import toy_map
from weft import ops
from weft.core import registry
from weft.ops._common.hopper import tensor_map
from weft.ops._common.products import wgmma, wgmma_fused
from weft.ops.linear import with_cuda as linear_cuda
from weft.ops.linear.mlp import with_cuda
from weft.ops.linear.spec import make_case
from weft.workbench.calls.inputs import make as make_inputs
from weft.workbench.explain.inspect.dry_run import dry_run

X, FC, B1, PROJ, B2 = torch.ones(3, 4), torch.ones(6, 4), torch.ones(6), torch.ones(5, 6), torch.ones(5)
BAD_CALLS: list[Call] = [
    ("mlp_gelu", (X, FC.t(), B1, PROJ, B2), {}),
    ("mlp_gelu", (X, FC, B1[:4], PROJ, B2), {}),
    ("mlp_gelu", (X, FC, B1, PROJ.t(), B2), {}),
    ("mlp_gelu", (X, FC, B1, PROJ, B1), {}),
    ("mlp_gelu", (X, FC, B1, PROJ.half(), B2), {}),
    ("mlp_gelu", (X, FC[0], None, PROJ, None), {}),
    ("mlp_gelu", (X, FC, B1, PROJ[0], None), {}),
    ("mlp_gelu", (X, FC, B1, PROJ, B2), {"impl": "numba"}),
]


LARGE = (("linear_gelu", "fp32-19x40x24-large"), ("mlp_gelu", "fp32-19x24x40x16-large"))


@pytest.mark.parametrize(("name", "case_name"), LARGE)
def test_the_pre_activation_of_a_large_case_is_exact_in_any_order(name: str, case_name: str) -> None:
    case = registry.operator(name).case(case_name)
    near_zero = 0
    for seed in range(20):
        x, weight, bias = make_inputs(case, "cpu", seed)[:3]
        exact = x.double() @ weight.double().t() + bias.double()
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
        partial = bias.expand(x.shape[0], -1)
        for k in order.tolist():
            partial = partial + x[:, k, None] * weight[:, k]
        assert partial.dtype == torch.float32 and torch.equal(partial.double(), exact)
        near_zero += int((exact.abs() < 3).sum())
    assert exact.abs().mean() > 5e3 and near_zero > 0  # GELU's slope is neither 0 nor 1 near 0


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda v: None)
def test_bad_arguments_raise_one_clear_error(call: Call) -> None:
    assert_refused(call)


def values(*lead: int, sizes: tuple[int, int, int] = (16, 24, 8)) -> list[torch.Tensor]:
    """Return x (lead, K), W1 (F, K), b1, W2 (N, F) and b2 for the sizes K, F and N; sums are near 1."""
    generator = torch.Generator().manual_seed(0)
    k, f, n = sizes
    shapes = ((*lead, k), (f, k), (f,), (n, f), (n,))
    x, fc, b1, proj, b2 = (torch.randn(s, generator=generator) for s in shapes)
    return [x, fc * k**-0.5, b1, proj * f**-0.5, b2]


def exact(inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Return y and all gradients in float64."""
    leaves = [t.double().requires_grad_() for t in inputs]
    pre = torch.nn.functional.linear(*leaves[:3])
    y = torch.nn.functional.linear(torch.nn.functional.gelu(pre, approximate="tanh"), *leaves[3:])
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


@pytest.mark.parametrize("impl", ["eager", "torch", "triton", None])
def test_with_and_without_a_gradient_it_is_two_linear_layers(impl: str | None) -> None:
    inputs = values(2, 5)
    expected, *gradients = exact(inputs, torch.ones(2, 5, 8))
    leaves = [t.requires_grad_() for t in inputs]
    y = ops.mlp_gelu(*leaves, impl=impl)
    with torch.no_grad():
        without = ops.mlp_gelu(*leaves, impl=impl)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(without.double(), expected, rtol=1e-5, atol=1e-5)
    for got, right in zip(torch.autograd.grad(y.sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


def test_a_missing_bias_counts_as_zeros() -> None:
    x, fc, b1, proj, b2 = values(5)
    for grad in (False, True):
        x.requires_grad_(grad)
        expected = ops.mlp_gelu(x, fc, torch.zeros_like(b1), proj, torch.zeros_like(b2))
        assert torch.equal(ops.mlp_gelu(x, fc, None, proj), expected)


def test_autograd_keeps_x_both_weights_and_both_activations() -> None:
    leaves = [t.requires_grad_() for t in values(5)]
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        ops.mlp_gelu(*leaves, impl="triton")
    assert sorted(saved) == sorted([(5, 16), (24, 16), (8, 24), (5, 24), (5, 24)])


def test_without_a_gradient_the_pre_activation_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the forward that stores pre was called")

    implementation = registry.implementation("mlp_gelu", "triton")
    monkeypatch.setitem(implementation.__dict__, "forward", refuse)
    ops.mlp_gelu(*values(5), impl="triton")


def test_autocast_lowers_all_five_and_returns_gradients_of_the_leaves_dtype() -> None:
    leaves = [t.requires_grad_() for t in values(5)]
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.mlp_gelu(*leaves, impl="torch")
        with torch.no_grad():
            assert ops.mlp_gelu(*leaves, impl="torch").dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), leaves)
    assert all(g.dtype == torch.float32 for g in gradients)


# ---- The fused backward, in the emulator


def sums_of_columns(mode: int, grad: torch.Tensor, pre: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Stand in for linear.cu, whose assembly the emulator does not have; refuse the pass with the slope."""
    assert mode == linear_cuda.SUM, "a pass over the gradient of pre was called"
    return grad.float().sum(0).to(grad.dtype), None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the CUDA implementation run its products on an emulated Hopper GPU of two SMs."""
    header = TESTS / "helpers" / "hopper_emulator.hpp"
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), header)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 2)
    monkeypatch.setattr(linear_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(linear_cuda, "column_sums", sums_of_columns)


def emulated_errors(module: Any, dtype: torch.dtype) -> list[float]:
    """Return the largest errors of y and of the gradients, in units of what rounding in ``dtype`` costs."""
    inputs = [t.to(dtype) for t in values(2, 70, sizes=(72, 136, 40))]
    grad = torch.randn(2, 70, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    y, hidden, pre = module.forward(*inputs)
    gradients = module.backward(grad, inputs[0], inputs[1], inputs[3], hidden, pre)
    errors = []
    for got, right in zip((y, *gradients), exact(inputs, grad), strict=True):
        assert got.shape == right.shape and got.dtype == dtype
        unit = torch.finfo(dtype).eps * (right.abs() + right.square().mean().sqrt())
        errors.append(float(((got.double() - right).abs() / unit).nan_to_num(1e9).max()))
    return errors


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_backward_has_no_pass_and_is_right(dtype: torch.dtype, hopper: None) -> None:
    assert max(emulated_errors(with_cuda, dtype)) < 1.5


@needs_compiler
def test_the_fused_backward_gives_the_same_bits_twice(hopper: None) -> None:
    inputs = [t.bfloat16() for t in values(140, sizes=(72, 136, 40))]
    grad = torch.randn(140, 40).bfloat16()
    saved = (inputs[0], inputs[1], inputs[3], *with_cuda.forward(*inputs)[1:])
    first, second = (with_cuda.backward(grad, *saved) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The text that is replaced in with_cuda.py, and by what.
FAULTS = {
    "the slope at the output of GELU": (
        "slope(grad2d, proj_weight, pre2d)",
        "slope(grad2d, proj_weight, pre2d.abs())",
    ),
    "pre in the product for the second weight": (
        "to_2d(hidden)), dproj_bias\n\n\ndef forward",
        "to_2d(pre)), dproj_bias\n\n\ndef forward",
    ),
    "no gradient of the first bias": (
        "return dx, dfc_weight, dfc_bias,",
        "return dx, dfc_weight, dfc_bias * 0,",
    ),
    "the slope is a pass": ("if is_fused(grad2d", "if grad2d.is_cuda and is_fused(grad2d"),
}


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, hopper: None) -> None:
    """A copy of the module with one fault gives a wrong result, or calls the pass."""
    old, new = FAULTS[fault]
    text = (SRC / "weft/ops/linear/mlp/with_cuda.py").read_text()
    assert old in text, "the text of the fault is not in the file"
    module = ModuleType("faulty_mlp_gelu")
    exec(compile(text.replace(old, new), "faulty_mlp_gelu", "exec"), module.__dict__)
    module.has_wgmma = lambda device: True  # type: ignore[attr-defined]
    try:
        largest = max(emulated_errors(module, torch.bfloat16))
    except AssertionError:
        return
    assert largest > 3


@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(64, 40, torch.bfloat16), (140, 36, torch.bfloat16), (140, 40, torch.float32)]
)
def test_few_rows_odd_sizes_and_float32_take_the_pass(
    rows: int, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    grad, proj, pre = torch.ones(rows, n, dtype=dtype), torch.ones(n, 136, dtype=dtype), torch.ones(rows, 136)
    assert not with_cuda.is_fused(grad, proj, pre.to(dtype))
    assert with_cuda.is_fused(
        torch.ones(140, 40).half(), torch.ones(40, 136).half(), torch.ones(140, 136).half()
    )


def test_a_gradient_that_the_copy_engine_cannot_read_takes_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements of an expanded gradient are at a distance of 0; a shifted one begins between 16 bytes."""
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    proj, pre = torch.ones(40, 136).bfloat16(), torch.ones(140, 136).bfloat16()
    makers: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.ones(1).bfloat16().expand(140, 40),
        lambda: torch.ones(140 * 40 + 1).bfloat16()[1:].view(140, 40),
    )
    for make in makers:
        assert not with_cuda.is_fused(make(), proj, pre)


def test_the_backward_launches_fewer_kernels_than_that_of_two_operators() -> None:
    """A dry run at GPT-2's sizes: no pass over M F elements is left, and the sums are a second output."""
    points = {
        "mlp_gelu": registry.operator("mlp_gelu").case("bf16-65536x768x3072x768"),
        "linear_gelu": make_case(65536, 3072, 768, "bfloat16"),
        "linear": make_case(65536, 768, 3072, "bfloat16"),
    }
    launched: dict[str, list[str]] = {}
    for name, case in points.items():
        operator, cuda = registry.operator(name), registry.implementation(name, "cuda")
        launched[name] = [launch.kernel for launch in dry_run(operator, cuda, case, "backward", 90)]
    # In both, one pass adds up the gradient of y.
    assert launched["mlp_gelu"].count("linear_columns") == launched["linear"].count("linear_columns") == 1
    assert launched["linear_gelu"].count("linear_columns") == 1
    assert launched["mlp_gelu"].count("matmul_wgmma") == 4 and "add_column_sums" in launched["mlp_gelu"]
    assert len(launched["mlp_gelu"]) == len(launched["linear_gelu"]) + len(launched["linear"]) - 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(768, 3072, 768), (136, 1032, 264)], ids=str)
def test_the_fused_backward_on_a_gpu(
    sizes: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with float64, compare two runs, and assert that the slope's kernel ran."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    calls: list[int] = []
    slope = wgmma_fused.slope

    def counted(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return slope(*arguments)

    monkeypatch.setattr(wgmma_fused, "slope", counted)
    inputs = [t.to("cuda", dtype).requires_grad_() for t in values(4, 1000, sizes=sizes)]
    grad = torch.randn(4, 1000, sizes[2], device="cuda").to(dtype)
    runs = []
    for _ in range(2):
        y = ops.mlp_gelu(*inputs, impl="cuda")
        runs.append([y.detach(), *torch.autograd.grad(y, inputs, grad)])
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    y = ops.mlp_gelu(*inputs, impl="torch")
    library = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
    for got, by_torch, right in zip(runs[0], library, exact([t.detach() for t in inputs], grad), strict=True):
        # As in the check: twice the library's error, and half a unit. Both round the gradient of pre once.
        unit = torch.finfo(dtype).eps * (right.abs() + right.square().mean().sqrt())
        error, of_torch = (((t.double() - right).abs() / unit).max() for t in (got, by_torch))
        assert error < 2 * of_torch + 0.5
