"""Calls that ask for batch invariance: the implementation they get, and the bits of their rows."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from weft import WeftError, machine, ops
from weft.core import Case, Implementation, Operator, registry
from weft.core.operator import DIRECTIONS
from weft.dispatch import invariance
from weft.ops._common.invariant_rows import aligned_rows
from weft.workbench.check import batch_invariance
from weft.workbench.check.batch_invariance import compare_invariant_rows, compare_rows, default_cases
from weft.workbench.check.check import check

PRODUCTS = ("matmul", "linear", "linear_gelu", "linear_residual", "mlp_gelu")  # on a CPU and on Hopper
REFUSED = ("attention_decode", "cumsum", "linear_cross_entropy", "sparse_linear")
BY_POSITION = ("dropout", "dropout_add_layer_norm")
# Attention and products have tests of their own: their columns are not resized, and they take longer.
OWN_TESTS = (*PRODUCTS, "attention", *REFUSED)
ROWS = [n for n in registry.operator_names() if registry.operator(n).rows and n not in OWN_TESTS]
# The gradient of an embedding table has no rows of the batch, and the interpreter has no bfloat16.
NOT_RUN = ("returns nothing that has rows", "bf16 needs a GPU")
# One of each kind of kernel: the interpreter takes seconds for an operator.
INTERPRETED = (
    "softmax",
    "layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "gelu",
    "bias_gelu",
    "swiglu",
    "rope",
)


def resized(operator: Operator, case: Case, columns: int) -> Case:
    """Return the case with rows of ``columns`` elements (heads of twice as many for rope)."""
    inputs = []
    width = case.inputs[0].shape[-1]
    for i in case.inputs:
        if operator.name == "rope":
            shape = (*i.shape[:-1], 2 * columns if i.name == "x" else columns)
        elif i.name not in ("targets", "ids") and i.shape[-1:] == (width,):
            shape = (*i.shape[:-1], columns)
        else:
            shape = i.shape
        inputs.append(replace(i, shape=shape))
    return replace(case, inputs=tuple(inputs))


def cases(name: str, device: str, columns: tuple[int, ...]) -> list[Case]:
    """Return the default case of each dtype, and the same with other numbers of columns."""
    operator = registry.operator(name)
    base_cases = default_cases(operator, device)
    return [*base_cases, *(resized(operator, c, n) for c in base_cases for n in columns)]


def assert_invariant(
    name: str, impl: str | None, device: str, columns: tuple[int, ...], dtype: str = "", least: int = 1000
) -> None:
    """Compare over ``least`` rows, of all dtypes or of one."""
    operator = registry.operator(name)
    compared = 0
    for case in cases(name, device, columns):
        if dtype not in ("", case.dtype):
            continue
        for direction in operator.directions:
            verdict = compare_invariant_rows(operator, impl, case, direction, device, 5)
            assert not verdict.differing, verdict
            assert not verdict.reason or any(text in verdict.reason for text in NOT_RUN), verdict
            compared += verdict.compared
    assert compared > least


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ROWS)
def test_dispatched_rows_keep_their_bits_on_a_cpu(name: str) -> None:
    assert_invariant(name, None, "cpu", (1, 33) if name == "embedding" else (1, 33, 263))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", (*PRODUCTS, "attention"))
def test_rows_of_products_and_attention_keep_their_bits_on_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariance, "BATCH_ROWS", 70)
    assert_invariant(name, None, "cpu", (), least=2000)


@pytest.mark.pooled(1, "interpreted rows")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_rows_keep_their_bits(name: str, dtype: str) -> None:
    assert_invariant(name, "triton", "cpu", (33,) if name in ("softmax", "layer_norm") else (), dtype, 500)


@pytest.mark.pooled(1, "interpreted rows")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cross_entropy_by_columns_repairs_rows_that_differ_without_it(direction: str) -> None:
    operator = registry.operator("cross_entropy")
    triton = registry.implementation("cross_entropy", "triton")
    case = operator.case("fp32-3x263-3")
    # 263 columns of 4 bytes: the rows begin at other places between two 16-byte boundaries.
    assert compare_rows(operator, triton, case, "forward", "cpu", 5).differing
    verdict = compare_invariant_rows(operator, "triton", case, direction, "cpu", 5)
    assert verdict.is_invariant and verdict.implementation == "triton/invariant"


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "cuda", "triton"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_keep_their_bits_on_a_gpu(name: str, impl: str | None) -> None:
    # Odd rows, rows that 16 bytes do not divide, and the strategies of long rows. A row of rope has all heads
    # and positions, and a row of embedding all tokens of a sequence: wider ones would fill the memory.
    columns = {"rope": (1, 33, 80), "embedding": (1, 33)}.get(name, (1, 33, 263, 1000, 4098, 40000))
    assert_invariant(name, impl, "cuda", columns)


@pytest.mark.gpu
def test_a_million_columns_are_not_split_by_the_number_of_rows() -> None:
    x = torch.randn(400, 1 << 20, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = ops.softmax(x, batch_invariant=True)
    grad = torch.randn_like(y)
    (whole,) = torch.autograd.grad(y, x, grad)
    one = x.detach()[7:8].clone().requires_grad_()
    with weft.batch_invariant():
        alone = ops.softmax(one)
    (part,) = torch.autograd.grad(alone, one, grad[7:8].clone())
    assert torch.equal(alone, y[7:8]) and torch.equal(part, whole[7:8])


def rows_of_product(
    name: str, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output and the gradient of x of a batch-invariant product with a weight (N, K)."""
    x, bias = x.detach().requires_grad_(), w[:, 0].contiguous()
    arguments = {
        "matmul": (x, w.t()),
        "linear": (x, w, bias),
        "linear_gelu": (x, w, bias),
        "linear_residual": (x, w, bias, residual),
        "mlp_gelu": (x, w, bias, w @ w.t(), bias),  # from N to N columns
    }[name]
    with weft.batch_invariant():
        y = getattr(ops, name)(*arguments)
    (dx,) = torch.autograd.grad(y, x, residual)
    return [y.detach(), dx]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_products_keep_their_bits_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Compare rows of 4096 with the same rows in smaller batches, at several places and cut in three ways."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("batch-invariant products need wgmma, compute capability 9.0")
    for n, k in ((4096, 4096), (6144, 4096), (4096, 14336), (768, 3072), (2304, 768), (72, 136)):
        x = torch.randn(4096, k, device="cuda").to(dtype)
        w = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
        residual = torch.randn(4096, n, device="cuda").to(dtype)
        whole = rows_of_product(name, x, w, residual)
        for rows in (1, 2, 7, 8, 64, 1000):
            for first in (0, 1, 63, 777, 4096 - rows):
                part = slice(first, first + rows)
                shifted = torch.cat([x[:1, :1].flatten(), x[part].flatten()])[1:].view(rows, k)
                for cut in (x[part], x[part].clone(), shifted):
                    outputs = rows_of_product(name, cut, w, residual[part])
                    for y, expected in zip(outputs, whole, strict=True):
                        assert torch.equal(y, expected[part]), (n, k, rows, first)


def test_batch_invariant_products_name_their_limits() -> None:
    supports = registry.implementation("linear", "cuda/invariant").supports
    for case in registry.operator("linear").cases:
        answer = supports(case, "cpu")
        (n, k), dtype = case.inputs[1].shape, case.dtype
        fits = dtype != "float32" and 0 not in (n, k) and n % 8 == k % 8 == 0
        assert bool(answer) == fits, case.name
        if not answer:
            assert ("float16" if dtype == "float32" else "multiples of 8") in answer.reason


# ---- Which implementation a call gets


def variant_of(y: torch.Tensor) -> Any:
    """Return the implementation that the backward of ``y`` will take, of one of Weft's kernels."""
    return y.grad_fn.impl  # type: ignore[union-attr]


def test_a_block_counts_inside_of_it_in_its_thread_and_for_its_backward() -> None:
    x = torch.randn(3, 33, requires_grad=True)
    assert variant_of(ops.softmax(x, impl="triton")) == "triton"
    seen = {}

    def call_in_thread() -> None:
        seen["thread"] = variant_of(ops.softmax(x, impl="triton"))

    with weft.batch_invariant():
        with weft.batch_invariant():
            pass
        y = ops.softmax(x, impl="triton")
        thread = threading.Thread(target=call_in_thread)
        thread.start()
        thread.join()
    assert variant_of(y) == "triton/invariant" and seen == {"thread": "triton"}
    with pytest.raises(ZeroDivisionError), weft.batch_invariant():
        raise ZeroDivisionError
    assert not invariance.anywhere and variant_of(ops.softmax(x, impl="triton")) == "triton"
    assert variant_of(ops.softmax(x, impl="triton", batch_invariant=True)) == "triton/invariant"
    # After the block the backward still takes the variant.
    variant = registry.implementation("softmax", "triton/invariant")
    grad = torch.randn_like(y)
    (expected,) = variant.backward(grad, y.detach())  # type: ignore[misc]
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected)


def test_the_overwriting_cross_entropy_takes_the_variant_in_both_directions() -> None:
    logits = torch.randn(5, 263)
    targets = torch.tensor([0, 1, -100, 262, 7])
    gradients = []
    for overwrite in (False, True):
        x = logits.clone().requires_grad_()
        losses = ops.cross_entropy(
            x * 1, targets, impl="triton", overwrite=overwrite, reduction="none", batch_invariant=True
        )
        losses.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("name", (*REFUSED, *BY_POSITION))
@pytest.mark.parametrize("by_block", [True, False])
def test_operators_without_a_variant_refuse(name: str, by_block: bool) -> None:
    operator = registry.operator(name)
    case = next(c for c in operator.cases if "cpu" in c.devices and all(i.shape for i in c.inputs))
    from weft.workbench.calls import inputs as call_inputs

    tensors = call_inputs.make(case, "cpu", 5)
    named = dict(zip([i.name for i in case.inputs], tensors, strict=True))
    arguments = operator.public_arguments({**named, **case.params})
    with pytest.raises(WeftError, match="batch invariance") as caught:
        if by_block:
            with weft.batch_invariant():
                getattr(ops, name)(**arguments)
        else:
            getattr(ops, name)(**arguments, batch_invariant=True)
    error = caught.value
    assert error.expected and error.hint and "outside of" in error.hint
    assert ("position" in str(error.got)) == (name in BY_POSITION)
    assert not invariance.anywhere


def test_sums_are_no_rows_and_other_arguments_are_refused() -> None:
    x = torch.randn(4, 5)
    with weft.batch_invariant():
        assert torch.equal(ops.sum(x), x.sum())
    for arguments, message in (
        ({"impl": "torch"}, "leave impl out"),
        ({"impl": "cuda"}, "needs a GPU" if not machine.has_gpu() else "cuda"),
        ({"impl": "cudda"}, "did you mean cuda"),
    ):
        with pytest.raises(WeftError, match=message):
            ops.softmax(x, batch_invariant=True, **arguments)  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="True or False"):
        ops.softmax(x, batch_invariant=x)  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="splits the sum"):
        ops.rms_norm(torch.randn(2, 32768), torch.ones(32768), batch_invariant=True)
    packed = torch.randn(1, 4, 24)
    with pytest.raises(WeftError, match="by its position"):
        ops.attention_packed(packed, 1, dropout_p=0.5, batch_invariant=True)
    q = packed[None]
    with pytest.raises(WeftError, match="no sinks"):
        ops.attention(q, q, q, sinks=torch.zeros(1), batch_invariant=True)


def test_a_trace_refuses_what_it_would_compile_and_is_made_again_inside_of_a_block() -> None:
    x = torch.randn(4, 33)
    traced = torch.compile(lambda x: ops.softmax(x) + 1, backend="eager", fullgraph=True)
    expected = traced(x)
    with pytest.raises(Exception, match="which chooses how"), weft.batch_invariant():
        traced(x)
    assert torch.equal(traced(x), expected)
    named = torch.compile(lambda x: ops.softmax(x, impl="triton"), backend="aot_eager", fullgraph=True)
    outside = named(x)
    with weft.batch_invariant():
        assert torch.allclose(named(x), outside)


def variants() -> list[Implementation]:
    backends = ("torch", "eager", "triton")
    named = (*ROWS, *PRODUCTS, "attention")
    names = [(n, i) for n in named for i in backends if i in registry.implementation_names(n)]
    implementations = [registry.implementation(n, i) for n, i in names]
    return [i.invariant for i in implementations if i.invariant is not None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", variants(), ids=lambda v: f"{v.operator}-{v.name}")
def test_variants_pass_the_check(variant: Implementation) -> None:
    operator = registry.operator(variant.operator)
    assert registry.implementation(variant.operator, variant.name) is variant
    chosen = {c.dtype: c for c in reversed(operator.select("check", "cpu"))}
    for case in chosen.values():
        for direction in operator.directions:
            verdict = check(operator, variant, case, direction, "cpu")
            assert verdict.status in ("pass", "unsupported"), verdict
            assert verdict.status == "pass" or case.dtype == "bfloat16", verdict


# ---- Without the option: effects of the number of rows and of the address


def test_aligned_rows_depend_on_columns_alone() -> None:
    batch = torch.randn(8, 263)
    part = aligned_rows(batch[1:3])
    assert batch[1:3].data_ptr() % 16 and part.data_ptr() % 16 == 0 and torch.equal(part, batch[1:3])
    assert aligned_rows(batch).data_ptr() == batch.data_ptr()
    # One row of a wide tensor is contiguous, but keeps the stride of the wide tensor.
    single = torch.randn(8, 999)[3:4, :264]
    assert single.is_contiguous() and single.stride(0) == 999 and aligned_rows(single).stride(0) == 264
    assert aligned_rows(torch.empty(0, 5)).shape == (0, 5) and aligned_rows(None) is None


def test_the_norms_backward_takes_the_teams_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.ops.norms import with_cuda as norms

    monkeypatch.setattr(norms, "num_sms", lambda device: 132)
    monkeypatch.setattr(norms, "_loop_smem", lambda rows, device: norms.SM90_SMEM)
    bf16, device = torch.bfloat16, torch.device("cpu")
    variant = norms.KernelVariant(x_dtype=bf16, weight_dtype=bf16, vec_width=8, centred=True, residual=False)
    for columns in (264, 1024, 4096):
        plain = {norms._persistent(rows, columns, variant, device) for rows in (1, 64, 1000, 4096)}
        fixed = {norms._persistent(rows, columns, variant, device, True) for rows in (1, 64, 1000, 4096)}
        # Short rows have one configuration for any number of rows without the option, too.
        assert len(fixed) == 1 and (len(plain) > 1) == (columns > 264)
    with pytest.raises(WeftError, match="fewer than"):
        norms._refuse_too_many_rows(torch.empty(1).expand(1 << 30, 8))


def test_few_long_rows_of_softmax_are_split_only_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.ops.softmax import with_cuda as softmax

    launched: list[str] = []

    def program(config: Any, *rest: Any) -> Any:
        kernels = (*softmax.LONG_FORWARD, *softmax.LONG_BACKWARD)
        recorders = {k: lambda *a, name=k: launched.append(name) for k in kernels}
        return recorders

    monkeypatch.setattr(softmax, "num_sms", lambda device: 132)
    monkeypatch.setattr(softmax, "_has_clusters", lambda device: True)
    monkeypatch.setattr(softmax, "source", program)
    x = torch.zeros(2, 1 << 20)
    softmax.forward(x)
    softmax.backward(x, x)
    assert launched == ["softmax_statistics", "softmax_write", "softmax_dots", "softmax_backward_write"]
    launched.clear()
    softmax.forward_invariant(x)
    softmax.backward_invariant(x, x)
    assert launched == ["softmax_long", "softmax_backward_long"]
