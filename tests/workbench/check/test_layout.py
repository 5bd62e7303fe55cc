"""The layout of an output: the baseline's strides or contiguous; any dense order where it is accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.core import FORWARD
from weft.workbench.calls.call import TensorLayout
from weft.workbench.check.rules import layout

SHAPE = (4, 3, 5)
DENSE = [(15, 5, 1), (1, 4, 12), (5, 20, 1), (15, 1, 3)]
# Overlapping, expanded, with gaps, and one that has as many elements as its span but not each once.
NOT_DENSE = [(1, 1, 1), (15, 0, 1), (30, 10, 2), (16, 5, 1), (0, 0, 0), (1, 4, 11)]


def violation(strides: tuple[int, ...], accepts: bool, shape: tuple[int, ...] = SHAPE) -> tuple[str, str]:
    """Return the rule's violation and its note, for a baseline with strides (15, 1, 3)."""
    form = SimpleNamespace(strides=(15, 1, 3)[: len(shape)])
    actual = TensorLayout(shape=shape, dtype="torch.float32", device="cpu", strides=strides)
    oracle = SimpleNamespace(direction=FORWARD, forms=[form], accepts_dense_layouts=accepts)
    call: Any = SimpleNamespace(oracle=oracle, result=SimpleNamespace(layouts=[actual]), notes={})
    return layout(call), call.notes.get("layout", "")


@pytest.mark.parametrize("strides", DENSE)
def test_a_dense_order_is_accepted_with_a_note_where_the_oracle_accepts_it(strides: tuple[int, ...]) -> None:
    is_due = strides in ((15, 5, 1), (15, 1, 3))
    why, note = violation(strides, accepts=True)
    assert not why and bool(note) is not is_due
    why, note = violation(strides, accepts=False)
    assert bool(why) is not is_due and not note
    assert is_due or "return .contiguous()" in why


@pytest.mark.parametrize("strides", NOT_DENSE)
def test_gaps_and_overlaps_are_refused_everywhere(strides: tuple[int, ...]) -> None:
    assert violation(strides, accepts=True)[0] and violation(strides, accepts=False)[0]


def test_the_stride_of_a_dimension_of_one_element_does_not_count() -> None:
    assert violation((1, 99, 4), accepts=True, shape=(4, 1, 5))[0] == ""
    assert violation((0, 0, 0), accepts=True, shape=(1, 1, 1)) == ("", "")
