"""``weft.patch`` reports replaced and unchanged modules and recognises norms and MLPs by what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from helpers.model_families import FAMILIES, MLP, VOCABULARY, WIDTH, OnePlusRMSNorm, RMSNorm, family, wide
from helpers.nn_rule import answers, assert_within, in_float64

IDS = torch.arange(2 * 11).reshape(2, 11) * 7 % VOCABULARY
ATTENTION = "weft.ops.attention; calls with a mask by transformers' sdpa; weft.ops.rope"
OTHER_NORM = "its norm is not Llama's, the only one that add_rms_norm computes"
LOGITS = "kept because logits are returned; keep_logits=False fuses head and loss"
ROUTE = "no rule for this class; the modules inside it have rows of their own"
NO_MODULE = "Weft has no module or operator for this class"
MATMUL = "plain matmul, left to cuBLAS"
SUBCLASS = "subclass of torch.nn.Embedding with a forward of its own; only torch's own class has a rule"


def expected_kinds(name: str, activation: str) -> dict[str, tuple[int, int, str]]:
    """Return modules, replaced modules, and operator or reason of each kind of a family of two layers."""
    gemma = name == "Gemma"
    norms = 9 if name == "Qwen3" else 5
    embedding = {"GemmaTextScaledWordEmbedding": (1, 0, SUBCLASS)} if gemma else {}
    return {
        f"{name}RMSNorm": (norms, norms, "weft.ops.rms_norm"),
        f"{name}MLP": (2, 2, "weft.ops.geglu" if gemma else "weft.ops.swiglu"),
        activation: (2, 2, f"inside {name}MLP"),
        "Linear": (15, 0, MATMUL),
        f"{name}Attention": (2, 0, ROUTE),
        f"{name}DecoderLayer": (2, 0, ROUTE),
        f"{name}RotaryEmbedding": (1, 0, NO_MODULE),
        **(embedding or {"Embedding": (1, 1, "weft.ops.embedding")}),
    }


def found_kinds(report: Any) -> dict[str, tuple[int, int, str]]:
    return {k.name: (k.modules, k.replaced, "; ".join((*k.by, *k.reasons))) for k in report.kinds}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_reported_whole_and_equals_the_unpatched_in_both_directions(name: str) -> None:
    model = family(name)
    truth, own = answers(in_float64(model), lambda m: m(IDS)), answers(model, lambda m: m(IDS))
    with weft.patch(model) as report:
        activation = "GELU" if name == "Gemma" else "SiLU"
        assert found_kinds(report) == expected_kinds(name, activation)
        assert_within(answers(model, lambda m: m(IDS)), own, truth)
        lines = str(report).splitlines()
    count = 3 if name == "Gemma" else 4
    assert lines[0] == report.summary and report.summary in repr(report)
    norms = 9 if name == "Qwen3" else 5
    assert lines[0].startswith(
        f"replaced {count} of 8 kinds: {name}RMSNorm ({norms} modules), {name}MLP (2 modules)"
    )
    assert f"not replaced: Linear (15 modules): {MATMUL}" in lines
    assert len([line for line in lines if line.startswith("not replaced: ")]) == 8 - count
    # Each module without children has a row, or is inside a replaced one.
    listed = {row.path for row in (*report.rows, *report.covered)}
    leaves = {path for path, module in model.named_modules() if not list(module.children())}
    assert leaves <= listed and all(bool(row.by) != bool(row.reason) for row in report.rows)
    again = answers(model, lambda m: m(IDS))
    assert all(torch.equal(again[key], own[key]) for key in own)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_own_model_of_the_family(name: str) -> None:
    reason = "needs transformers: pip install 'weft[transformers]'; the models above stand in for it"
    transformers = pytest.importorskip("transformers", reason=reason)
    head = {"head_dim": 8} if name in ("Qwen3", "Gemma") else {}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.1,
        **head,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()

    def call(m: Any) -> torch.Tensor:
        return m(input_ids=IDS).logits  # type: ignore[no-any-return]

    expected = expected_kinds(name, "GELUTanh" if name == "Gemma" else "SiLUActivation") | {
        "Linear": (14, 0, MATMUL),
        f"{name}Attention": (2, 2, ATTENTION),
        f"{name}DecoderLayer": (2, 0, OTHER_NORM) if name == "Gemma" else (2, 2, "weft.ops.add_rms_norm"),
        "loss": (1, 1, "weft.ops.cross_entropy"),
        "head": (1, 0, LOGITS),
    }

    truth, own = answers(in_float64(model), call), answers(model, call)
    with weft.patch(model) as report:
        assert found_kinds(report) == expected
        assert_within(answers(model, call), own, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("kind", [RMSNorm, OnePlusRMSNorm])
def test_a_norm_alone_in_each_dtype(
    kind: type[nn.Module], weight_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    norm = kind(33).to(weight_dtype or dtype)
    x = torch.randn(5, 33).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    truth = answers(in_float64(norm), lambda m: m(x64), x64)
    own = answers(norm, lambda m: m(x), x)
    model = nn.Sequential(norm)
    with weft.patch(model):
        assert_within(answers(norm, lambda m: m(x), x), own, truth)


class EpsOutside(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Centred(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Squared(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight


class Doubled(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Raising(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            raise ValueError("two dimensions only")
        return super().forward(x)


class Swapped(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # type: ignore[no-any-return]


class Residual(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class WideResult(OnePlusRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(wide(x))


def hooked() -> nn.Module:
    norm = RMSNorm(WIDTH)
    norm.register_forward_hook(lambda *a: None)
    return norm


def with_other_forward() -> nn.Module:
    norm = RMSNorm(WIDTH)
    norm.forward = lambda x: x  # type: ignore[assignment, method-assign, misc]
    return norm


OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: EpsOutside(WIDTH, eps=0.01), "its trial call is not RMS norm's"),
    (lambda: Centred(WIDTH), "its trial call is not RMS norm's"),
    (lambda: Squared(WIDTH), "its trial call is not RMS norm's"),
    (lambda: Doubled(WIDTH), "its trial call is not RMS norm's"),
    (lambda: Raising(WIDTH), "a trial call raised ValueError; two dimensions only"),
    (lambda: WideResult(WIDTH), "its result has another dtype than its input"),
    (lambda: Swapped(nn.SiLU()), "its trial call is not down_proj"),
    (lambda: Residual(nn.GELU("tanh")), "its trial call is not down_proj"),
    (lambda: MLP(nn.ReLU()), "its activation is ReLU, not SiLU or GELU's tanh form"),
    (lambda: MLP(nn.GELU()), "its activation is GELU, not SiLU"),
    (hooked, "it has hooks"),
    (with_other_forward, "its forward has been replaced already"),
    (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "it has no weight"),
    (
        lambda: type("MyNorm", (nn.LayerNorm,), {})(WIDTH),
        "subclass of torch.nn.LayerNorm of the same forward",
    ),
    (lambda: nn.Embedding(WIDTH, WIDTH, padding_idx=0), "padding_idx is set"),
    (nn.Identity, "it computes nothing"),
    (nn.Tanh, NO_MODULE),
]


@pytest.mark.parametrize(("make", "reason"), OTHERS, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_a_module_that_computes_something_else_is_left_with_its_reason(
    make: Callable[[], nn.Module], reason: str
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.LayerNorm(WIDTH), make())
    before = dict(vars(model[1]))
    report = weft.patch(model)
    (row,) = [r for r in report.rows if r.path == "1"]
    assert row.reason.startswith(reason) and not row.by
    assert vars(model[1]) == before
    kind = next(k for k in report.kinds if k.name == row.class_name)
    assert row.reason in kind.reasons


def test_a_kind_that_is_replaced_in_part_says_so() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False))
    report = weft.patch(model)
    assert report.summary == "replaced 1 of 1 kinds: LayerNorm (2 of 3 modules)"
    assert report.kinds[0].reasons == ("it has no weight",)
    assert "not replaced: LayerNorm (1 of 3 modules): it has no weight" in str(report).splitlines()


def test_skipped_kinds_are_not_replaced_in_other_classes_either() -> None:
    report = weft.patch(family("Mistral"), skip=("norm",))
    assert found_kinds(report)["MistralRMSNorm"] == (5, 0, "skipped by skip=")
