"""The command that times attention: a line has its figures, and wrong results show. No clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weft.lab import attention
from weft.ops.attention import attention_wgmma

sdpa = torch.nn.functional.scaled_dot_product_attention


def expected_output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return sdpa(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the kernels by SDPA on the CPU, one of them wrong, and the clock by fixed times."""
    counts: list[int] = []

    def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Any]:
        return {
            "cudnn": lambda: expected_output(q, k, v, causal),
            "128x128": lambda: expected_output(q, k, v, causal),
            "128x160": lambda: expected_output(q, k, v, causal) * torch.nan,
        }

    def times(calls: Sequence[Callable[[int], Any]], count: int) -> list[float]:
        counts.append(count)
        pairs = zip(calls[0](0), calls[1](count - 1), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)
        return [2.0, 1.0]

    monkeypatch.setattr(attention, "contenders", contenders)
    monkeypatch.setattr(attention, "graph_times", times)
    monkeypatch.setattr(attention, "event_times", times)
    return counts


def test_a_line_has_the_rates_and_names_what_is_wrong(timed: list[int]) -> None:
    text, wrong = attention.line(((1, 4, 64, 16), 2, True), "cpu")
    # 4 x 4 x 64 x 64 x 16 / 2 = 524288 operations in 2 and in 1 us.
    chosen = attention_wgmma.choose(16, 64, 64, True).label
    assert text == f"1x4x64x16-2-causal chosen {chosen} {{'cudnn': 0, '128x128': 1}} WRONG: 128x160"
    assert wrong == ["128x160"] and timed == [100]


def test_a_part_has_its_shapes(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.PARTS, "d64", (((1, 1, 40, 8), 1, False), ((2, 1, 30, 8), 1, True)))
    names = [text.split()[0] for text, _ in attention.lines(["d64"], "cpu")]
    assert names == ["1x1x40x8", "2x1x30x8-causal"]


def test_a_backward_has_its_own_contenders(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def contenders(*arguments: Any) -> dict[str, Any]:
        q, k, v, grad, causal = arguments
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        y = expected_output(leaves[0], leaves[1], leaves[2], causal)
        call = lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)  # noqa: E731
        return {"flash": call, "wgmma": call, "cudnn": lambda: [x * 2 for x in call()]}

    monkeypatch.setattr(attention, "backward_contenders", contenders)
    text, wrong = attention.line(((1, 4, 64, 16), 2, True), "cpu", backward=True)
    assert text == "1x4x64x16-2-causal backward {'flash': 1, 'wgmma': 1} WRONG: cudnn"
    assert wrong == ["cudnn"]


def test_every_configuration_of_a_head_size_is_timed() -> None:
    q = torch.zeros(1, 2, 8, 64)
    names = list(attention.contenders(q, q, q, True))
    assert names == ["cudnn", "flash", "triton", *(c.label for c in attention_wgmma.candidates(64))]


def test_errors_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(attention.machine, "has_gpu", lambda: False)
    assert attention.main([]) == 2
    assert attention.main(["d65"]) == 2
    message = capsys.readouterr().err
    assert "an NVIDIA GPU" in message and "d128, d64, padded, backward" in message
