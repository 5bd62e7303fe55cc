"""Norms beyond the cases of the conformance test: rows far from zero, rows of one element, bad calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.ops.norms.spec import layer_norm64

ROWS, WEIGHT = torch.ones(3, 4), torch.ones(4)


def test_row_far_from_zero_keeps_its_digits() -> None:
    torch.manual_seed(0)
    x, weight, bias = 1e4 + torch.randn(4, 64), torch.randn(64), torch.randn(64)
    expected = layer_norm64(x.double(), weight.double(), bias.double(), 1e-5)
    y = ops.layer_norm(x, weight, bias, impl="triton")
    assert float((y - expected).abs().max()) < 1e-5  # the mean alone has a rounding error of 5e-4


def test_row_of_one_element_equals_the_bias() -> None:
    x, bias = torch.randn(3, 1), torch.randn(1)
    y = ops.layer_norm(x, torch.randn(1), bias, impl="triton")
    assert torch.equal(y, bias.expand(3, 1))


BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("layer_norm", (ROWS, WEIGHT[:3], WEIGHT), {}),
    ("layer_norm", (ROWS, WEIGHT, WEIGHT.half()), {}),
    ("layer_norm", (ROWS, WEIGHT, WEIGHT), {"eps": -1.0}),
    ("rms_norm", (ROWS, ROWS), {}),
    ("rms_norm", (ROWS, WEIGHT.half()), {}),
    ("add_layer_norm", (ROWS, ROWS[:2], WEIGHT, WEIGHT), {}),
    ("add_rms_norm", (ROWS, ROWS.half(), WEIGHT), {}),
]


@pytest.mark.parametrize(("name", "arguments", "params"), BAD_CALLS)
def test_arguments_that_do_not_match_raise_an_error_with_expected_and_got(
    name: str, arguments: tuple[Any, ...], params: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **params)
    assert caught.value.expected and caught.value.got
