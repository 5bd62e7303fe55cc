"""Attention's sinks, ALiBi and bias: gradients, tracing, refusals, bits, mutants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sampling import sample
from weft import WeftError, ops
from weft.backends.triton_jit import INTERPRETED
from weft.core import Case, registry
from weft.ops.attention import attention_packed, with_cuda
from weft.ops.attention.mask import BOTTOM_RIGHT
from weft.ops.attention.spec import reference
from weft.ops.attention.terms import Terms
from weft.ops.attention.with_eager import IMPLEMENTATION as EAGER
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.tolerance import measure
from weft.workbench.selftest.mutants.planting import plant

DEVICE = "cpu" if INTERPRETED else "cuda"
B, H, HKV, TQ, TK, D = 2, 4, 2, 21, 37, 16
BIASES = (
    (B, H, TQ, TK),
    (1, H, TQ, TK),
    (B, 1, TQ, TK),
    (1, 1, TQ, TK),
    (B, 1, 1, TK),
    (1, H, TQ, 1),
    (1,) * 4,
)


def tensors(bias: tuple[int, ...] = (1, H, TQ, TK), dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return q, k, v and the three terms by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, D)}
    shapes |= {"sinks": (H,), "alibi_slopes": (B, H), "bias": bias}
    inputs = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    inputs["alibi_slopes"] = inputs["alibi_slopes"].abs()
    return inputs


def leaves_of(inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the differentiable tensors, which want a gradient from now on."""
    return [x.requires_grad_() for name, x in inputs.items() if name != "alibi_slopes"]


def expected(inputs: dict[str, Tensor], lengths: Tensor | None, grad: Tensor, **params: Any) -> list[Tensor]:
    """Return the float64 output and gradients of the reference."""
    exact = {name: x.detach().double() for name, x in inputs.items()}
    leaves = leaves_of(exact)
    names = "+".join(name for name in exact if name not in "qkv")
    if lengths is None:
        lengths = torch.zeros(B, dtype=torch.int32)
    out, _ = reference(*list(exact.values())[:3], lengths, *list(exact.values())[3:], terms=names, **params)
    return [out, *torch.autograd.grad(out, leaves, grad.double())]


POINTS = [
    (bias, names, options, lengths, impl)
    for bias in BIASES
    for names in (("sinks",), ("alibi_slopes",), ("bias",), ("sinks", "alibi_slopes", "bias"))
    for options in (
        {},
        {"causal": True, "window": 7},
        {"causal": "bottom_right"},
        {"softcap": 1.5, "causal": True},
    )
    for lengths in (None, (0, TK), (TK - 5, 3))
    for impl in ("triton", "eager")
    if "bias" in names or bias == BIASES[0]
]


def test_gradients_agree_with_float64() -> None:
    """Every option alone and together, with every mask, by the public function; the same bits twice."""
    for bias, names, options, lengths, impl in sample(POINTS, 5, "points of attention's terms"):
        inputs = {name: x for name, x in tensors(bias).items() if name in ("q", "k", "v", *names)}
        key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        leaves = leaves_of(inputs)
        runs = []
        for _ in range(2):
            out = ops.attention(**inputs, **options, key_lengths=key_lengths, impl=impl)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
            runs.append([out, *torch.autograd.grad(out, leaves, grad)])
        for one, two in zip(*runs, strict=True):
            assert torch.equal(one, two), (bias, names, impl)
        causal = options.get("causal")
        params = {**options, "causal": bool(causal), "padded": lengths is not None}
        params["alignment"] = BOTTOM_RIGHT if causal == "bottom_right" else 0
        right = expected(inputs, key_lengths, grad, **params)
        for ours, exact in zip(runs[0], right, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=3e-5, atol=3e-5)


def test_terms_are_what_their_formulas_say() -> None:
    """A sink is a key with a value of 0; ALiBi is a bias; a bias of -inf is a mask."""
    inputs = tensors()
    q, k, v, sinks, slopes = (inputs[name] for name in ("q", "k", "v", "sinks", "alibi_slopes"))
    wide = [torch.cat([x, torch.zeros(B, HKV, 1, D, device=DEVICE)], 2) for x in (k, v)]
    column = sinks[None, :, None, None].expand(B, H, TQ, 1)
    bias = torch.cat([torch.zeros(B, H, TQ, TK, device=DEVICE), column], 3)
    by_key = ops.attention(q, *wide, bias=bias)
    torch.testing.assert_close(ops.attention(q, k, v, sinks=sinks, impl="triton"), by_key)
    i, j = torch.arange(TQ, device=DEVICE)[:, None], torch.arange(TK, device=DEVICE)
    for causal, shift in ((False, 0), (True, 0), ("bottom_right", TK - TQ)):
        distances = -slopes[:, :, None, None] * (i + shift - j).abs()
        by_bias = ops.attention(q, k, v, causal=causal, bias=distances)
        torch.testing.assert_close(
            ops.attention(q, k, v, causal=causal, alibi_slopes=slopes, impl="triton"), by_bias
        )
    hidden = torch.zeros(1, 1, TQ, TK, device=DEVICE).masked_fill(j > i, -math.inf)
    masked = ops.attention(q, k, v, bias=hidden, impl="triton")
    torch.testing.assert_close(masked, ops.attention(q, k, v, causal=True, impl="triton"))


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_traced_whole(impl: str) -> None:
    inputs = tensors()
    leaves = leaves_of(inputs)

    def compute(**arguments: Tensor) -> Tensor:
        return ops.attention(**arguments, causal=True, impl=impl)

    torch._dynamo.reset()
    traced = torch.compile(compute, fullgraph=True, backend="aot_eager")
    pairs = []
    for function in (traced, compute):
        out = function(**inputs)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, two in zip(*pairs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_registered_as_pytorch_asks() -> None:
    inputs = tensors()
    leaves_of(inputs)
    lengths, absent = torch.zeros(B, dtype=torch.int32, device=DEVICE), torch.empty(0, device=DEVICE)
    rest: tuple[Any, ...] = (True, None, 0.0, 0, False, 0, None, None)
    packet = torch.ops.weft.attention_biased.default
    q, k, v, *terms = inputs.values()
    for extras, has_gradient in ((terms, True), ((terms[0], absent, absent), False)):
        results = torch.library.opcheck(packet, (q, k, v, lengths, *extras, *rest, has_gradient, "triton"))
        assert set(results.values()) == {"SUCCESS"}


def test_autocast_lowers_the_products_and_no_terms() -> None:
    inputs = tensors()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = ops.attention(**inputs, impl="eager")
    assert out.dtype == torch.bfloat16
    exact = expected(inputs, None, torch.zeros(B, H, TQ, D, device=DEVICE))[0]
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.05)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sinks": torch.ones(H + 1)}, "one sink a head"),
    ({"sinks": torch.ones(1, H)}, "1 dimension,"),
    ({"sinks": torch.ones(H, dtype=torch.float16)}, "float32"),
    ({"sinks": torch.ones(H, device="meta")}, "device"),
    ({"sinks": 1.0}, "a tensor"),
    ({"alibi_slopes": torch.ones(B + 1, H)}, "one slope a head"),
    ({"alibi_slopes": torch.ones(H, dtype=torch.float64)}, "float32"),
    ({"alibi_slopes": torch.ones(H, requires_grad=True)}, "detach"),
    ({"bias": torch.ones(TQ, TK)}, "4 dimensions"),
    ({"bias": torch.ones(B, H, TQ, TK - 1)}, "or 1 in place"),
    ({"bias": torch.ones(B, H, TQ, TK, dtype=torch.bool)}, "float32"),
    ({"bias": torch.ones(B, H, TQ, TK).to_sparse()}, "dense"),
    ({"sinks": torch.ones(H), "impl": "torch"}, "no sinks"),
    ({"alibi_slopes": torch.ones(H), "impl": "triton/02-tiled"}, "no alibi_slopes"),
    ({"sinks": torch.ones(H), "impl": "triton", "batch_invariant": True}, "batch invariance"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda v: None)
def test_invalid_terms_raise(options: dict[str, Any], message: str) -> None:
    q, k = torch.ones(B, H, TQ, D, device=DEVICE), torch.ones(B, HKV, TK, D, device=DEVICE)
    on_device = {
        n: x.to(DEVICE) if isinstance(x, Tensor) and x.device.type == "cpu" and not x.requires_grad else x
        for n, x in options.items()
    }
    with pytest.raises(WeftError, match=message):
        ops.attention(q, k, k, **on_device)


def test_packed_and_cuda_refuse_terms() -> None:
    with pytest.raises(WeftError, match="attention_packed: sinks"):
        attention_packed(torch.ones(1, 4, 48), 1, sinks=torch.ones(1))  # type: ignore[arg-type]
    cases = [c for c in registry.operator("attention").cases if c.dtype == "bfloat16" and "terms" in c.params]
    for case in cases:
        answer = with_cuda.supports(case, "cuda")
        assert not answer and str(case.params["terms"]) in answer.reason and "triton" in answer.reason


# ---- Mutants: eager with one fault, judged as the selftest judges its own

SINK_CASE, ALIBI_CASE = "fp32-1x2x49x32-causal-sinks", "fp32-3x2x20x32-1x37-bottom-right-padded-alibi2d"
BIAS_CASE = "fp32-2x2x35x32-1x45-softcap2-bias2x1x1x45"


def _sinks_without_gradient_share(*inputs: Tensor, **params: Any) -> Any:
    """Leave the sink out of the denominator that gradients pass through."""
    _, lse = EAGER.forward(*inputs[:4], inputs[4].detach(), **params)
    plain, plain_lse = EAGER.forward(*inputs[:4], **{**params, "terms": ""})
    share = torch.exp(plain_lse - lse)[..., None]
    # The value of `out`; the gradient of attention without a sink, scaled as if `share` were constant.
    return (plain * share.detach() + (0 * inputs[4]).sum()).contiguous(), lse


def _top_left(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor, **params: Any) -> Any:
    """Align ALiBi at the top left whatever the mask is."""
    distances = Terms(alibi_slopes=slopes).added(q.shape[2], k.shape[2], 0)
    return EAGER.forward(q, k, v, lengths, distances, **{**params, "terms": "bias"})


class _FirstHeadOnly(torch.autograd.Function):
    """Expand a bias over the heads, with the gradient of the first head instead of the sum."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, heads: int) -> Tensor:
        return bias.expand(-1, heads, -1, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][:, :1], None


def _unsummed(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, bias: Tensor, **params: Any) -> Any:
    return EAGER.forward(q, k, v, lengths, _FirstHeadOnly.apply(bias, q.shape[1]), **params)


MUTANTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "the sink is missing in the gradient's denominator": (
        SINK_CASE, "backward", _sinks_without_gradient_share,
    ),
    "ALiBi aligned at the top left": (ALIBI_CASE, "forward", _top_left),
    "the bias's gradient is not summed over heads": (BIAS_CASE, "backward", _unsummed),
}  # fmt: skip


def _case(name: str) -> Case:
    return next(c for c in registry.operator("attention").cases if c.name == name)


@pytest.mark.parametrize("fault", MUTANTS)
def test_the_check_refuses_a_wrong_term(fault: str) -> None:
    case, direction, forward = MUTANTS[fault]
    planted = plant(f"W01/attention/eager/{fault.replace(' ', '-')}", fault, "error", lambda: forward).make()
    mutant = replace(planted, directions=("forward", "backward"), supports=EAGER.supports)
    verdict = check(registry.operator("attention"), mutant, _case(case), direction, "cpu", n_seeds=1)
    assert verdict.status == "fail" and re.search("times what is allowed", verdict.reason)
    if direction == "backward":  # its output is right: the gradient alone shows the fault
        honest = check(registry.operator("attention"), mutant, _case(case), "forward", "cpu", n_seeds=1)
        assert honest.status == "pass", honest.reason


# ---- The tolerance of a sink's gradient

# Each of these failed by chance: the gradients are few and of very different sizes, and so is eager's error.
LARGE_SINKS, SEEDS = (
    "fp16-1x2x35x32-1x45-bottom-right-window9-sinks-large",
    (827169285, 2144885418, 523437577, 1971606754),
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sinks_gradient_may_differ_as_much_as_the_rounded_output_makes_it(seed: int) -> None:
    case = _case(LARGE_SINKS)
    oracle = Oracle(registry.operator("attention"), case, "backward", "cpu", (seed,))
    inputs, grad = [x.double() for x in oracle.inputs(seed)], oracle.grad(seed)
    assert grad is not None and oracle.units == (torch.float16,) * 4
    out, lse = reference(*inputs, **case.params)
    share = torch.exp(inputs[4][:, None] - lse)
    terms = share[..., None] * out.half().double() * grad.double()
    gradient, allowed = -terms.sum((0, 2, 3)), oracle.bounds[3]
    assert allowed.share(measure(gradient, oracle.answer(seed)[3], allowed)) < 0.6
    # One of them 30 roundings of its terms off.
    gradient[1] += 30 * torch.finfo(torch.float16).eps * allowed.scale
    assert allowed.share(measure(gradient, oracle.answer(seed)[3], allowed)) > 1.0
