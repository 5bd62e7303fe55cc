"""Tests of activations and dropout beyond conformance: dropout's bits, strided inputs, invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import BACKWARD, FORWARD, registry
from weft.core.record import PASS
from weft.ops._common import philox, philox_dropout
from weft.workbench.calls import inputs as drawing
from weft.workbench.check import reference
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle

ONES = torch.ones(3, 8)


def _philox_in_python(seed: int, counter: int) -> list[int]:
    """Compute Philox 4x32-10 in Python integers, after the paper's figure."""
    mask = 2**32
    words, key = [counter % mask, counter >> 32, 0, 0], [seed % mask, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ key[0],
            second % mask,
            (first >> 32) ^ words[3] ^ key[1],
            first % mask,
        ]
        key = [(key[0] + 0x9E3779B9) % mask, (key[1] + 0xBB67AE85) % mask]
    return words


def test_philox_matches_the_published_vector() -> None:
    """Compare with the first entry of the authors' list of known answers: counter 0, key 0."""
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _philox_in_python(0, 0) == known
    assert [int(w) for w in philox.philox(0, torch.tensor([0]))] == known


@pytest.mark.parametrize("seed", [1, 2**32 - 1, 2**62 + 12345, 2**63 - 1])
def test_philox_in_torch_matches_plain_integers(seed: int) -> None:
    counters = [0, 1, 2**31, 2**32 - 1, 2**32, 2**60 + 7]
    philox_words = philox.philox(seed, torch.tensor(counters))
    assert torch.stack(philox_words, -1).tolist() == [_philox_in_python(seed, c) for c in counters]


def test_eight_elements_share_a_block_of_words() -> None:
    seed, n = 2**62 + 12345, 29
    words = [w for c in range(4) for w in _philox_in_python(seed, c)]
    halves = [h for w in words for h in (w & 0xFFFF, w >> 16)][:n]
    assert philox_dropout.random_uint16(seed, n, torch.device("cpu")).tolist() == halves
    is_nonzero = ops.dropout(torch.ones(n), p=0.3, seed=seed) > 0
    assert is_nonzero.tolist() == [h >= round(0.3 * 65536) for h in halves]


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.97])
def test_dropout_preserves_the_mean(p: float) -> None:
    """The share of nonzero elements is within five standard errors of 1 - p'; each is 1 / (1 - p')."""
    n = 1 << 18
    taken = round(p * 65536) / 65536
    y = ops.dropout(torch.ones(n), p=p, seed=77)
    nonzero = y[y != 0]
    assert abs(len(nonzero) / n - (1 - taken)) < 5 * (taken * (1 - taken) / n) ** 0.5
    assert torch.equal(nonzero, torch.full_like(nonzero, 1 / (1 - taken)))


def test_probability_below_the_resolution_is_zero() -> None:
    x = torch.randn(1 << 17)
    assert torch.equal(ops.dropout(x, p=2.0**-17, seed=5), x)
    few = ops.dropout(x, p=2.0**-13, seed=5) == 0
    assert 0 < int(few.sum()) < 50  # the expected number is 16
    assert int((ops.dropout(x, p=1 - 2.0**-18, seed=5) != 0).sum()) == 0


def test_dropout_depends_on_the_seed_and_not_on_strides() -> None:
    x = torch.randn(40, 60)
    here = ops.dropout(x, p=0.5, seed=3)
    assert torch.equal(here, ops.dropout(x.T.contiguous().T, p=0.5, seed=3, impl="triton"))
    assert not torch.equal(here, ops.dropout(x, p=0.5, seed=4))
    assert not torch.equal(here, ops.dropout(x, p=0.5, seed=3 + (1 << 32)))


def test_dropout_with_p_one_and_zero() -> None:
    x = torch.tensor([float("nan"), float("inf"), 1.0])
    for impl in ("eager", "triton"):
        assert torch.equal(ops.dropout(x, p=1.0, seed=0, impl=impl), torch.zeros(3))
        whole = ops.dropout(x, p=0.0, seed=0, impl=impl)
        assert torch.equal(whole[1:], x[1:]) and whole[0].isnan()
        assert whole.data_ptr() != x.data_ptr()


def test_fused_dropout_leaves_the_residual_at_dropped_elements() -> None:
    x, residual = torch.randn(5, 64), torch.randn(5, 64)
    more = (torch.ones(64), torch.zeros(64))
    _, s = ops.dropout_add_layer_norm(x, residual, *more, p=0.4, seed=9, impl="triton")
    is_nonzero = ops.dropout(torch.ones(5, 64), p=0.4, seed=9, impl="eager") > 0
    assert torch.equal(s == residual, ~is_nonzero) and 0 < int(is_nonzero.sum()) < is_nonzero.numel()


def test_gated_activations_read_halves_of_a_joint_projection() -> None:
    gate, up = torch.randn(6, 160).chunk(2, -1)
    for function in (ops.swiglu, ops.geglu):
        expected = function(gate.contiguous(), up.contiguous(), impl="eager")
        torch.testing.assert_close(function(gate, up, impl="triton"), expected)


BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("swiglu", (ONES, ONES[:2]), {}),
    ("swiglu", (ONES, ONES.half()), {}),
    ("geglu", (ONES, ONES[0]), {}),
    ("bias_gelu", (ONES, torch.ones(7)), {}),
    ("bias_gelu", (ONES, ONES), {}),
    ("bias_gelu", (torch.tensor(1.0), torch.ones(1)), {}),
    *(("dropout", (ONES,), {"p": p, "seed": 0}) for p in (-0.1, 1.1, float("nan"), "0.1", True)),
    *(("dropout", (ONES,), {"p": 0.1, "seed": s}) for s in (-1, 1 << 63, 1.5, None)),
    ("dropout_add_layer_norm", (ONES, ONES[:2], ONES[0], ONES[0]), {"p": 0.1, "seed": 0}),
    ("dropout_add_layer_norm", (ONES, ONES, ONES[0], ONES[0]), {"p": 2.0, "seed": 0}),
]


@pytest.mark.parametrize(("name", "arguments", "more"), BAD, ids=lambda v: None)
def test_invalid_arguments_raise_weft_error(
    name: str, arguments: tuple[Any, ...], more: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **more)
    assert caught.value.expected and caught.value.got


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_chunked_reference_matches_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of one shape are split into chunks together; the result equals that of one call."""
    operator = registry.operator(name)
    case = next(c for c in operator.cases if c.inputs[0].numel > 512 and len(c.inputs[0].shape) > 1)
    whole = Oracle(operator, case, FORWARD, "cpu", (5,)).answer(5)
    monkeypatch.setattr(reference, "PIECE", 64)
    assert reference._of_rows(operator, drawing.make(case, "cpu", 5), case) is not None
    pieces = Oracle(operator, case, FORWARD, "cpu", (5,)).answer(5)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=0.0, equal_nan=True)


def test_the_biass_gradient_may_be_wrong_by_what_cancels_in_the_inputs() -> None:
    """With one row the two gradients have the same values, so that they need the same tolerance."""
    operator, torch_s = registry.operator("bias_gelu"), registry.implementation("bias_gelu", "torch")
    seeds = (404343529, 277694074, 818736554, 970192716, 1125294413)
    oracle = Oracle(operator, operator.case("fp32-1x300"), BACKWARD, "cpu", seeds)
    inputs, bias = oracle.bounds
    assert bias.maximum == inputs.maximum and bias.scale == pytest.approx(inputs.scale)
    verdict = check(operator, torch_s, oracle.case, BACKWARD, "cpu", oracle=oracle)
    assert verdict.status == PASS, verdict.reason
