"""Inputs have each layout and kind of values, lie between guards, and are equal for equal seeds."""

from __future__ import annotations

import pytest
import torch

from weft.core import Input, case
from weft.core.cases import FLOAT8, LAYOUTS, VALUES
from weft.workbench.calls import inputs
from weft.workbench.calls.guarded_memory import Arena, bits

SHAPES = [(7, 13), (1,), (), (0,), (3, 0), (0, 5), (2, 3, 5), (1, 1), (33,)]


def _one(shape, dtype="float32", layout="contiguous", values="normal"):
    return case(Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_at_every_shape(shape, layout, guarded):
    arena = Arena("cpu") if guarded else None
    (x,) = inputs.make(_one(shape, layout=layout), "cpu", 1, arena)
    (plain,) = inputs.make(_one(shape), "cpu", 1)
    assert x.shape == shape
    assert type(x) is torch.Tensor
    assert not x.isnan().any()
    if layout != "expanded" or len(shape) < 2:
        assert torch.equal(x, plain), "one seed gives the same values in every layout"
    if guarded:
        assert not x._is_view()
        assert arena.broken() == []
        (again,) = inputs.make(_one(shape, layout=layout), "cpu", 1)
        assert torch.equal(x, again)
        assert x.stride() == again.stride() or x.numel() <= 1


def test_each_layout_has_its_strides():
    tensors = {name: inputs.make(_one((6, 8), layout=name), "cpu", 3)[0] for name in LAYOUTS}
    assert tensors["contiguous"].stride() == (8, 1)
    assert tensors["transposed"].stride() == (1, 6)
    assert tensors["sliced"].stride() == (16, 2)
    assert tensors["expanded"].stride() == (0, 1)
    assert tensors["shifted"].data_ptr() % 16 == 4
    arena = Arena("cpu")
    (x,) = inputs.make(_one((6, 8), layout="shifted"), "cpu", 3, arena)
    assert x.data_ptr() % 256 == 4
    (x,) = inputs.make(_one((6, 8), "float16"), "cpu", 3, arena)
    assert x.data_ptr() % 256 == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("values", VALUES)
def test_values_differ_by_seed_and_not_by_memory(values, dtype):
    point = _one((64, 50), dtype, values=values)
    (a,), (b,) = (inputs.make(point, "cpu", seed) for seed in (1, 2))
    (c,) = inputs.make(point, "cpu", 1, Arena("cpu"))
    assert torch.equal(bits(a), bits(c))
    if values != "ones":
        assert not torch.equal(bits(a), bits(b))
    assert a.dtype == getattr(torch, dtype)


def test_two_inputs_differ():
    both = case(Input(name="a", shape=(50,)), Input(name="b", shape=(50,)))
    a, b = inputs.make(both, "cpu", 1)
    assert not torch.equal(a, b)


def test_each_kind_of_values_has_its_range():
    def draw(values, shape=(200, 100)):
        return inputs.make(_one(shape, values=values), "cpu", 5)[0]

    assert abs(draw("normal").std().item() - 1) < 0.05
    assert 5e3 < draw("large").std() < 2e4
    assert abs(draw("offset").mean().item() - 1e4) < 1
    rising, falling = draw("rising").mean(0), draw("falling").mean(0)
    assert rising[0] < -49 and rising[-1] > 49
    assert falling[0] > 49 and falling[-1] < -49
    assert len(draw("equal").unique()) == 1
    assert (draw("ones") == 1).all()
    sweep = draw("sweep")
    assert -60 <= sweep.min() < -59.9 and 59.9 < sweep.max() <= 60
    assert draw("outliers").abs().max() > 50
    special = draw("special")
    assert special.isnan().any() and special.isposinf().any() and special.isneginf().any()
    assert (special == 0).any()
    assert 0.2 < draw("neginf").isneginf().float().mean() < 0.3
    assert draw("tiny").abs().max() < 1e-3


def test_pieces_join_up(monkeypatch):
    whole = inputs.make(_one((10, 30), values="rising"), "cpu", 1)[0].mean(0)
    monkeypatch.setattr(inputs, "PIECE", 37)
    pieces = inputs.make(_one((10, 30), values="rising"), "cpu", 1)[0].mean(0)
    assert (whole - pieces).abs().max() < 3


def test_the_gaps_of_a_sliced_input_hold_poison():
    (x,) = inputs.make(_one((4, 6), layout="sliced"), "cpu", 1, Arena("cpu"))
    gaps = torch.empty(0).set_(x.untyped_storage(), x.storage_offset() + 1, (4, 5), (12, 2))
    assert gaps.isnan().all()


def test_a_gradient_is_like_its_output():
    output = torch.empty(4, 6, dtype=torch.bfloat16)
    grad = inputs.gradient_like(output, 3)
    assert (grad.shape, grad.dtype, grad.device) == (output.shape, output.dtype, output.device)
    assert torch.equal(grad, inputs.gradient_like(output, 3))
    assert inputs.gradient_like(torch.empty(()), 3).shape == ()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_fp8_has_every_kind_of_values_in_every_layout(dtype, values, layout):
    """As float32's, rounded: finite values saturate, and Inf stays where the dtype has one."""
    (x,) = inputs.make(_one((33, 40), dtype=dtype, layout=layout, values=values), "cpu", 1)
    (again,) = inputs.make(_one((33, 40), dtype=dtype, layout=layout, values=values), "cpu", 1, Arena("cpu"))
    assert torch.equal(bits(x), bits(again))
    (wide,) = inputs.make(_one((33, 40), layout=layout, values=values), "cpu", 1)
    info = torch.finfo(x.dtype)
    got, finite = x.float(), wide.isfinite()
    step = info.eps * wide.abs() / 2 + info.smallest_normal * info.eps
    gap = (got - wide.clamp(-info.max, info.max)).abs()
    assert bool((gap <= step)[finite].all())
    if dtype == "float8_e5m2":
        assert torch.equal(got[~finite].nan_to_num(7.0), wide[~finite].nan_to_num(7.0))
    else:
        assert bool(got[~finite].isnan().all())
