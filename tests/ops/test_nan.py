"""NaN: each operator has a case that shows a lost one; attention's CUDA kernels keep it in its row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from ops.test_attention_decode import EMULATOR as DECODE_EMULATOR
from ops.test_attention_wgmma import EMULATOR, toy_map
from weft.core import registry
from weft.ops._common.hopper import tensor_map
from weft.ops.attention import attention_wgmma, attention_wgmma_backward, with_cuda
from weft.ops.attention.attention_wgmma import Config
from weft.ops.attention.spec import AttentionOptions, reference
from weft.ops.attention_decode import spec as decode
from weft.ops.attention_decode import with_cuda as decode_cuda
from weft.ops.attention_decode.cases import decode_case
from weft.workbench.check.check import check

MAX_ELEMENTS = 1 << 14  # of an input: a check takes some milliseconds
needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernels with"
)
NAN_QUERIES = (0, 5, 64, 129)
# What counts here is where NaN is. How exact the other numbers are, the kernels' own tests ask.
PLACES: dict[str, Any] = {"rtol": 0.05, "atol": 0.05, "equal_nan": True}


def zero_for_nan(x: Any) -> Any:
    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return torch.where(x.isnan(), torch.zeros_like(x), x) if is_float else x


@pytest.mark.parametrize("name", registry.operator_names())
def test_a_lost_nan_is_refused(name: str) -> None:
    """An implementation that takes 0 for each NaN of its inputs fails at one of the small cases."""
    operator, eager = registry.operator(name), registry.implementation(name, "eager")

    def forward(*tensors: Any, **params: Any) -> Any:
        return eager.forward(*map(zero_for_nan, tensors), **params)

    wrong = replace(eager, forward=forward)
    for case in operator.cases:
        if max(i.numel for i in case.inputs) > MAX_ELEMENTS or not eager.supports(case, "cpu"):
            continue
        verdict = check(operator, wrong, case, "forward", "cpu")
        if verdict.status == "fail":
            assert verdict.reason.startswith(("special: ", "error: ", "property: ")), verdict.reason
            assert check(operator, eager, case, "forward", "cpu", seeds=verdict.seeds).status == "pass"
            return
    raise AssertionError("no case shows it")


def inputs() -> list[torch.Tensor]:
    """Return q, k, v and a gradient (1, 2, 130 or 200, 8), with NaN in one number of some queries."""
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn((1, 2, 130, 8), generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn((1, 2, 200, 8), generator=generator).bfloat16() for _ in range(2))
    q[:, 0, NAN_QUERIES, 3] = torch.nan
    return [q, k, v, grad]


@needs_compiler
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["wgmma", "mma"])
def test_nan_stays_in_its_row(
    kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A query with NaN makes its own row NaN, and what is summed over all queries of its head: dk and dv."""
    q, k, v, grad = inputs()
    lengths = torch.zeros(1, dtype=torch.int32)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = reference(exact[0], exact[1], exact[2], lengths)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    if kernel == "wgmma":
        warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
        monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)
        monkeypatch.setattr(attention_wgmma, "num_sms", lambda device: 2)
        out, lse = attention_wgmma.forward_with(Config(keys=80, groups=2), q, k, v, None, AttentionOptions())
        saved = (q, k, v, None, out, lse)
        gradients = attention_wgmma_backward.backward(
            grad, saved, AttentionOptions(), tuple(map(torch.empty_like, (q, k, v)))
        )
    else:
        warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp())
        out, lse = with_cuda.forward(q, k, v, lengths)
        gradients = with_cuda.backward(grad, q, k, v, lengths, out, lse)
    assert torch.equal(lse[0, 0].isnan().nonzero().flatten(), torch.tensor(NAN_QUERIES))
    for answer, value in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert bool(value.isnan().any()) and not bool(value.isnan().all())
        torch.testing.assert_close(answer.double(), value, **PLACES)


@needs_compiler
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("page_size", [0, 16])
def test_nan_stays_in_its_head(
    page_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Heads that share keys share a tile, and only some of them have NaN."""
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), DECODE_EMULATOR)
    case = decode_case(2, 2, 4, 32, kv=(1, 80), page_size=page_size, dtype="bfloat16", values="nan")
    tensors = tuple(decode.draw(case, 0, "cpu"))
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    expected, paged = decode.reference(*wide, paged=page_size > 0), page_size > 0
    assert bool(expected[:, :, 0].isnan().all()) and not bool(expected[:, :, 1].isnan().any())
    answer = decode_cuda.forward(*tensors, paged=paged)
    torch.testing.assert_close(answer.double(), expected, **PLACES)
