"""Inputs of a case with its own generator: copied only if other code may use them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft.core import Case, Input
from weft.workbench.calls.inputs import make, thinned_seed

STORED = torch.rand(4, 5)
ARRAY = np.zeros((4, 5), dtype=np.float32)
RETURNED: list[torch.Tensor] = []


def returned(tensor: torch.Tensor) -> torch.Tensor:
    RETURNED.append(tensor)
    return tensor


@pytest.mark.parametrize(
    ("draw", "is_copied"),
    [
        (lambda: torch.rand(4, 5), False),
        (lambda: STORED, True),
        (lambda: STORED.view(4, 5), True),
        (lambda: torch.from_numpy(ARRAY), True),
        (lambda: returned(torch.rand(4, 5)), True),
        (lambda: returned(torch.rand(20)).view(4, 5), True),
        (lambda: torch.rand(5, 4).t(), True),
        (lambda: torch.rand(8, 5)[:4], True),
        (lambda: torch.rand(4, 5).requires_grad_(), True),
        (lambda: torch.rand(4, 5, dtype=torch.float64), True),
    ],
    ids=[
        *("new", "stored", "a view of it", "an array's", "stored when made", "a view of one stored"),
        *("transposed", "a part", "with a gradient", "of another dtype"),
    ],
)
def test_what_a_generator_returns_is_copied_unless_it_is_new(
    draw: Callable[[], torch.Tensor], is_copied: bool
) -> None:
    addresses = []

    def draw_all(seed: int, device: str) -> list[torch.Tensor]:
        with torch.no_grad():
            value = draw()
        addresses.append(value.data_ptr())
        return [value]

    case = Case(name="case", inputs=(Input(name="x", shape=(4, 5)),), draw=draw_all)
    (x,) = make(case, "cpu", seed=1)
    assert (x.data_ptr() != addresses[0]) == is_copied
    assert x.is_contiguous() and x.dtype is torch.float32


def test_one_tensor_for_two_inputs_gives_two_in_memory_of_their_own() -> None:
    def draw(seed: int, device: str) -> list[torch.Tensor]:
        return [torch.rand(4, 5)] * 2

    case = Case(name="case", inputs=tuple(Input(name=n, shape=(4, 5)) for n in "xy"), draw=draw)
    x, y = make(case, "cpu", seed=1)
    assert x.equal(y) and x.data_ptr() != y.data_ptr()


def test_a_part_of_new_inputs_is_zeros_at_a_thinned_seed() -> None:
    def draw(seed: int, device: str) -> list[torch.Tensor]:
        return [torch.full((16, 2), float(seed))]

    case = Case(name="case", inputs=(Input(name="x", shape=(16, 2)),), draw=draw)
    (x,) = make(case, "cpu", thinned_seed(3, 0, 0))
    assert x[:2].eq(3).all() and x[2:].eq(0).all()
