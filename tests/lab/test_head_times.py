"""The command that times the kernels of the LM head's loss. No clock runs."""

from __future__ import annotations

import pytest
import torch

from weft.core import WeftError
from weft.lab import head_times
from weft.lab.head_times import Launch
from weft.lab.product_choices import Timing


def call(offset: float) -> list[Launch]:
    """Return the launches of a call with two chunks."""
    names = ["fill", "head_references"]
    names += ["matmul_wgmma", "head_finish", "matmul_wgmma(MatmulArguments)"] * 2 + ["reduce"]
    return [Launch(name, 100 * i + offset, 80.0) for i, name in enumerate(names)]


def test_launches_are_averaged_by_their_place_in_a_chunk() -> None:
    lines = list(head_times.chunk_lines([call(0), call(7)], 2, 8e9))
    assert lines[1:4] == [
        "  1 matmul_wgmma          80.0  20.0   100",
        "  2 head_finish           80.0  20.0",
        "  3 matmul_wgmma          80.0  20.0   100",
    ]
    assert lines[4:] == ["all chunks: 600 us"]


def test_launches_that_do_not_divide_into_chunks_are_an_error() -> None:
    with pytest.raises(WeftError, match="multiple of 4"):
        list(head_times.chunk_lines([call(0)], 4, 8e9))


def test_both_implementations_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def times(calls: list[object], count: int, device: str) -> list[Timing]:
        for contender in calls:
            shapes.append([tuple(y.shape) for y in contender()])  # type: ignore[operator]
        return [Timing(float(i), 0.0) for i in range(len(calls))]

    def forward(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(()), torch.zeros(4, 8), torch.zeros(16, 8)

    def backward(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[1:]

    monkeypatch.setattr(head_times, "timings", times)
    for module in (head_times.with_cuda, head_times.with_triton):
        monkeypatch.setattr(module, "linear_cross_entropy_forward", forward)
        monkeypatch.setattr(module, "linear_cross_entropy_backward", backward)
    lines = list(head_times.whole_lines((4, 8, 16), "cpu"))
    assert [line.partition(":")[0] for line in lines] == ["cuda", "triton"]
    assert lines[1].endswith("together 5")
    assert shapes == [[(), (4, 8), (16, 8)], [(4, 8), (16, 8)]] * 2
