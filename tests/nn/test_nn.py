"""Weft's modules compared with torch's: state dicts, outputs and gradients by the rule of the check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft.nn
from helpers.nn_rule import Answers, answers, assert_within, in_float64
from weft import WeftError

WIDTH, HEADS = 24, 3


def sequence(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (2, 7, WIDTH)))


class TorchMLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gelu = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh")
        self.proj = nn.Linear(4 * WIDTH, WIDTH)


def attend(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.MultiheadAttention):
        blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return module(x, x, x, attn_mask=blocked, need_weights=False)[0]  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]


# Weft's module, torch's module, and a call of either. The test changes parameters from their ones and zeros.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[..., Any]]] = {
    "LayerNorm": (
        lambda: weft.nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda m, x: m(x),
    ),
    "LayerNorm without a bias": (
        lambda: weft.nn.LayerNorm(WIDTH, bias=False, eps=1e-3),
        lambda: nn.LayerNorm(WIDTH, bias=False, eps=1e-3),
        lambda m, x: m(x),
    ),
    "LayerNorm over two dimensions, no weight": (
        lambda: weft.nn.LayerNorm((7, WIDTH), elementwise_affine=False),
        lambda: nn.LayerNorm((7, WIDTH), elementwise_affine=False),
        lambda m, x: m(x),
    ),
    "RMSNorm": (
        lambda: weft.nn.RMSNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda m, x: m(x * 1e-3),
    ),
    "Linear": (
        lambda: weft.nn.Linear(WIDTH, 10),
        lambda: nn.Linear(WIDTH, 10),
        lambda m, x: m(x),
    ),
    "Linear without a bias": (
        lambda: weft.nn.Linear(WIDTH, 10, bias=False),
        lambda: nn.Linear(WIDTH, 10, bias=False),
        lambda m, x: m(x),
    ),
    "Linear, GELU": (
        lambda: weft.nn.Linear(WIDTH, 10, activation="gelu"),
        lambda: nn.Linear(WIDTH, 10),
        lambda m, x: m(x) if hasattr(m, "impl") else nn.functional.gelu(m(x), approximate="tanh"),
    ),
    "Linear, residual": (
        lambda: weft.nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda m, x: m(x, residual=x) if hasattr(m, "impl") else m(x) + x,
    ),
    "MLP": (lambda: weft.nn.MLP(WIDTH), TorchMLP, lambda m, x: m(x)),
    "MLP, residual": (
        lambda: weft.nn.MLP(WIDTH),
        TorchMLP,
        lambda m, x: m(x, residual=x) if hasattr(m, "impl") else m(x) + x,
    ),
    "SelfAttention": (
        lambda: weft.nn.SelfAttention(WIDTH, HEADS),
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        attend,
    ),
    "Embedding": (
        lambda: weft.nn.Embedding(11, WIDTH),
        lambda: nn.Embedding(11, WIDTH),
        lambda m, x: m(torch.arange(14).view(2, 7) % 5) * x,
    ),
    "LinearCrossEntropy": (
        lambda: weft.nn.LinearCrossEntropy(WIDTH, 13, label_smoothing=0.1),
        lambda: nn.Linear(WIDTH, 13, bias=False),
        lambda m, x: head(m, x),
    ),
}


def head(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    targets = (torch.arange(14) * 5 % 13).view(2, 7)
    targets[0, 3] = -100
    if isinstance(module, weft.nn.LinearCrossEntropy):
        return module(x, targets)  # type: ignore[no-any-return]
    return nn.functional.cross_entropy(module(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def moved(module: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return module


@pytest.mark.parametrize("name", PAIRS)
def test_module_equals_torch(name: str) -> None:
    ours, torchs, call = PAIRS[name]
    own, ours_module = moved(torchs()), ours()
    ours_module.load_state_dict(own.state_dict())
    assert list(ours_module.state_dict()) == list(own.state_dict())
    torchs().load_state_dict(ours_module.state_dict())

    def answers_of(module: nn.Module, x: torch.Tensor) -> Answers:
        x = x.requires_grad_()
        return answers(module, lambda m: call(m, x), x)

    truth = answers_of(in_float64(own), sequence().double())
    assert_within(answers_of(ours_module, sequence()), answers_of(own, sequence()), truth)


@pytest.mark.parametrize("name", PAIRS)
def test_device_and_dtype_arguments(name: str) -> None:
    with torch.device("meta"):
        module = PAIRS[name][0]()
    assert all(p.is_meta for p in module.parameters())
    like = {"LayerNorm": (WIDTH,), "RMSNorm": (WIDTH,), "MLP": (WIDTH,), "Embedding": (9, WIDTH)}
    kind = name.partition(",")[0].partition(" ")[0]
    arguments = like.get(kind, (WIDTH, HEADS))
    other = getattr(weft.nn, kind)(*arguments, device="cpu", dtype=torch.float64)
    assert {p.dtype for p in other.parameters()} == {torch.float64}


def by_hand(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention with rotary embeddings, in plain torch."""
    size = module.head_dim
    qkv = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    parts = qkv.split([4 * size, 2 * size, 2 * size], -1)
    q, k, v = (p.unflatten(-1, (-1, size)).transpose(1, 2) for p in parts)
    angle = torch.arange(x.shape[1])[:, None] * 1e3 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.double().cos().to(x.dtype), angle.double().sin().to(x.dtype)

    def turn(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    k, v = (t.repeat_interleave(2, 1) for t in (turn(k), v))
    scores = (turn(q) @ k.mT) / size**0.5
    blocked = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    y = scores.masked_fill(blocked, float("-inf")).softmax(-1) @ v
    return nn.functional.linear(y.transpose(1, 2).flatten(2), *module.out_proj.parameters())


def test_llama_attention() -> None:
    module = moved(weft.nn.SelfAttention(32, 4, num_kv_heads=2, rotary_base=1e3))

    def answers_of(call: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> Answers:
        x = x.requires_grad_()
        return answers(module, lambda m: call(m, x), x)

    x = sequence(2, 7, 32)
    truth = answers_of(by_hand, in_float64(module), x.detach().double())
    got = answers_of(lambda m, x: m(x), module, x.detach().clone())
    assert_within(got, answers_of(by_hand, module, x.detach().clone()), truth)
    shared = weft.nn.rotary_angles(7, 8, 1e3)
    assert torch.equal(module(x, rotary=shared), module(x))


def test_padding_is_ignored() -> None:
    module, x = weft.nn.SelfAttention(WIDTH, HEADS, is_causal=False), sequence()
    lengths = torch.tensor([7, 4])
    whole = module(x, key_lengths=lengths)
    torch.testing.assert_close(whole[1, :4], module(x[1:, :4])[0])
    torch.testing.assert_close(whole[0], module(x[:1])[0])


def test_position_embeddings() -> None:
    table = weft.nn.Embedding(11, WIDTH, max_positions=9)
    ids = torch.arange(14).view(2, 7) % 5
    want = table.weight[ids] + table.positions[:7]
    assert torch.equal(table(ids), want)
    assert table.state_dict().keys() == {"weight", "positions"}
    got = torch.autograd.grad(table(ids).square().sum(), [table.weight, table.positions])
    expected = torch.autograd.grad(want.square().sum(), [table.weight, table.positions])
    torch.testing.assert_close(got, expected)
    with pytest.raises(WeftError, match="at most 9 tokens"):
        table(torch.zeros(1, 10, dtype=torch.int64))


def test_reduction_sum() -> None:
    module = weft.nn.LinearCrossEntropy(WIDTH, 13, reduction="sum")
    targets = torch.arange(14).view(2, 7) % 13
    want = nn.functional.cross_entropy(
        (sequence() @ module.weight.T).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(module(sequence(), targets), want)


def test_dropout_repeats_with_the_seed_and_is_off_in_eval() -> None:
    module, x = weft.nn.MLP(WIDTH, dropout=0.5), sequence()

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return module(x)  # type: ignore[no-any-return]

    assert torch.equal(seeded(3), seeded(3))
    assert not torch.equal(seeded(3), seeded(4))
    assert 0.3 < (seeded(3) == 0).double().mean() < 0.7
    again = module(x, residual=x)
    assert ((again - x) == 0).any()
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("name", ["LayerNorm", "Linear", "MLP", "SelfAttention"])
def test_autocast_gives_torch_dtype(name: str) -> None:
    ours, torchs, call = PAIRS[name]
    mine, own = ours(), torchs()
    mine.load_state_dict(own.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        got, want = call(mine, sequence()), call(own, sequence())
        half = call(mine, sequence().bfloat16())
    assert got.dtype == want.dtype and half.dtype == call_dtype(own, call)
    torch.testing.assert_close(got.float(), want.float(), rtol=0.03, atol=0.03)


def call_dtype(own: nn.Module, call: Callable[..., Any]) -> torch.dtype:
    with torch.autocast("cpu", torch.bfloat16):
        return call(own, sequence().bfloat16()).dtype  # type: ignore[no-any-return]


@pytest.mark.slow
def test_block_compiles_without_graph_breaks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = weft.nn.LayerNorm(WIDTH), weft.nn.RMSNorm(WIDTH)
            self.attn, self.mlp = weft.nn.SelfAttention(WIDTH, HEADS), weft.nn.MLP(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attn(self.ln_1(x), residual=x)
            return self.mlp(self.ln_2(x), residual=x)  # type: ignore[no-any-return]

    block = moved(Block())
    traced = torch.compile(block, fullgraph=True, backend="eager")
    want = block(sequence())
    torch.testing.assert_close(traced(sequence()), want, rtol=1e-4, atol=1e-4)


# The optimizer --------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 5))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None) -> None:
    dtype = next(module.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        x = sequence(8, WIDTH).to(dtype) * (1 + step % 3)
        module(x).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()


OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}


def grouped(module: nn.Module, groups: int) -> Any:
    named = list(module.parameters())
    if groups == 1:
        return named
    return [{"params": named[:2], "weight_decay": 0.0}, {"params": named[2:], "lr": 1e-2}]


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("groups", [1, 2])
def test_adamw_equals_torch(groups: int, max_norm: float | None) -> None:
    ended: dict[str, Answers] = {}
    for name, kind, dtype in (
        ("truth", torch.optim.AdamW, torch.float64),
        ("own", torch.optim.AdamW, torch.float32),
        ("mine", weft.nn.AdamW, torch.float32),
    ):
        module = model().to(dtype)
        ours = {"max_norm": max_norm} if kind is weft.nn.AdamW else {}
        optimizer = kind(grouped(module, groups), **OPTIONS, **ours)
        train(module, optimizer, 30, max_norm if kind is torch.optim.AdamW else None)
        ended[name] = {n: p.detach() for n, p in module.named_parameters()}
    assert_within(ended["mine"], ended["own"], ended["truth"])


@pytest.mark.parametrize("first", [torch.optim.AdamW, weft.nn.AdamW])
def test_adamw_state_dict_is_torch_compatible(first: type) -> None:
    second = weft.nn.AdamW if first is torch.optim.AdamW else torch.optim.AdamW
    module = model()
    one = first(module.parameters(), **OPTIONS)
    train(module, one, 5)
    other = copy.deepcopy(module)
    two = second(other.parameters())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert two.state_dict().keys() == one.state_dict().keys()
    for key, group in zip(*(o.state_dict()["param_groups"] for o in (one, two)), strict=True):
        assert key.keys() == group.keys()
    train(module, one, 5)
    train(other, two, 5)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_adamw_skips_parameters_without_gradient() -> None:
    module = model()
    optimizer = weft.nn.AdamW(module.parameters(), max_norm=1.0)
    before = [p.detach().clone() for p in module.parameters()]
    next(module.parameters()).grad = torch.ones(16, WIDTH)
    assert optimizer.step(lambda: "the closure's answer") == "the closure's answer"
    same = [torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True)]
    assert same == [False, True, True, True]
    train(module, optimizer, 1)
    steps = [float(s["step"]) for s in optimizer.state_dict()["state"].values()]
    assert steps == [2.0, 1.0, 1.0, 1.0]


BAD: dict[str, Callable[[], Any]] = {
    "activation": lambda: weft.nn.Linear(3, 3, activation="relu"),
    "dropout": lambda: weft.nn.MLP(3, dropout=1.0),
    "num_heads": lambda: weft.nn.SelfAttention(WIDTH, 5),
    "num_kv_heads": lambda: weft.nn.SelfAttention(WIDTH, 3, num_kv_heads=2),
    "rotary_base": lambda: weft.nn.SelfAttention(9, 3, rotary_base=1e4),
    "padding_idx": lambda: weft.nn.Embedding(9, 3, padding_idx=0),
    "sparse": lambda: weft.nn.Embedding(9, 3, sparse=True),
    "reduction": lambda: weft.nn.LinearCrossEntropy(3, 3, reduction="none"),
    "amsgrad": lambda: weft.nn.AdamW(model().parameters(), amsgrad=True),
    "fused": lambda: weft.nn.AdamW(model().parameters(), fused=True),
    "max_norm": lambda: weft.nn.AdamW(model().parameters(), max_norm=0.0),
    "implementation": lambda: weft.nn.LayerNorm(3, impl="nobody's")(torch.ones(3)),
}


@pytest.mark.parametrize("option", BAD)
def test_unsupported_option_is_one_clear_error(option: str) -> None:
    with pytest.raises(WeftError, match=option) as caught:
        BAD[option]()
    assert caught.value.expected and caught.value.got


def test_a_state_dict_with_amsgrad_is_refused() -> None:
    state = torch.optim.AdamW(model().parameters(), amsgrad=True).state_dict()
    with pytest.raises(WeftError, match="amsgrad"):
        weft.nn.AdamW(model().parameters()).load_state_dict(state)
