"""Altered inputs: few elements change, equally in every process, and none on which others depend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.timing.altered_inputs import LEAST_ELEMENTS, SPARSENESS, alter, altered, choose


def random_inputs(seed: int, dtype: torch.dtype = torch.float32) -> InputBuffers:
    torch.manual_seed(seed)
    shapes = ((64, 128), (3, 50, 40), (LEAST_ELEMENTS - 1,))
    return InputBuffers([torch.randn(shape).to(dtype) for shape in shapes])


def changed(before: InputBuffers, after: InputBuffers) -> list[int]:
    pairs = zip(before.all_tensors, after.all_tensors, strict=True)
    return [int((a.double() != b.double()).sum()) for a, b in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("many", [False, True])
def test_few_elements_change_and_come_back(dtype: torch.dtype, many: bool) -> None:
    before, buffers, other = (random_inputs(s, dtype) for s in (1, 1, 2))
    with altered(buffers, choose(other, 5, many)):
        most = 1 + 64 * 128 // SPARSENESS if many else 1
        first, second, small = changed(before, buffers)
        assert 1 <= first <= most and 1 <= second <= most and small == 0
        # Every element is equal to one of the two inputs at the same position.
        for a, b, c in zip(before.inputs, buffers.inputs, other.inputs, strict=True):
            assert bool(((b.double() == a.double()) | (b.double() == c.double())).all())
    assert changed(before, buffers) == [0, 0, 0]


def test_every_process_alters_the_same_elements_in_any_layout_and_another_seed_alters_others() -> None:
    seen = []
    for seed in range(8):
        plain, strided = random_inputs(1), random_inputs(1)
        strided = InputBuffers([x.transpose(0, -1).contiguous().transpose(0, -1) for x in strided.inputs])
        for buffers in (plain, strided):
            alter(buffers, choose(random_inputs(2), seed, many=True))
        assert changed(plain, strided) == [0, 0, 0]
        seen.append((plain.inputs[0] != random_inputs(1).inputs[0]).nonzero().tolist())
    assert len({str(s) for s in seen}) > 6


def test_a_sum_in_low_precision_shows_many_changes() -> None:
    torch.manual_seed(0)
    before, other = torch.randn(1 << 20).bfloat16(), torch.randn(1 << 20).bfloat16()
    after = before.clone()
    alter(InputBuffers([after]), choose(InputBuffers([other]), 3, many=True))
    assert (after.double().sum() - before.double().sum()).item() > 300


def test_only_the_gradient_changes_in_a_backward() -> None:
    buffers, other = random_inputs(1), random_inputs(2)
    grad = torch.zeros(32, 32)
    backward = InputBuffers(buffers.inputs, grad + torch.randn(32, 32))
    alter(backward, choose(InputBuffers(other.inputs, torch.randn(32, 32)), 1, many=False))
    assert changed(buffers, InputBuffers(backward.inputs)) == [0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x + x.T,
        lambda x: x.flatten().sort().values,
        lambda x: (100 * x).long(),
        lambda x: torch.zeros_like(x),
    ],
)
def test_inputs_whose_elements_depend_on_each_other_stay(make: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    first, second = (make(torch.randn(64, 64)) for _ in range(2))
    before = first.clone()
    alter(InputBuffers([first]), choose(InputBuffers([second]), 1, many=True))
    assert torch.equal(first, before)
