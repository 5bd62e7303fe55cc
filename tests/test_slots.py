"""Slots: refilled in place, poisoned, and looked at for memory that two answers share."""

from __future__ import annotations

import torch

from weft.core import Input, case
from weft.workbench import inputs as drawing
from weft.workbench.slots import (
    Slot,
    deal,
    poison,
    refill,
    refill_slot,
    shares_memory,
    storages,
    unwritten,
)


def make_slot(seed: int) -> Slot:
    generator = torch.Generator().manual_seed(seed)
    return Slot([torch.randn(16, 16, generator=generator)])


def test_refilling_keeps_addresses_versions_and_odd_strides() -> None:
    row = torch.randn(5)
    for target in (torch.zeros(4, 5).t(), row.expand(4, 5), torch.zeros(4, 10)[:, ::2]):
        source = torch.randn(5).expand(target.shape) if target.shape[-1] == 5 else torch.randn(5, 4)
        address, version = target.data_ptr(), target._version
        refill(target, source)
        assert torch.equal(target, source)
        assert (target.data_ptr(), target._version) == (address, version)


def test_poison_leaves_an_inputs_memory_alone() -> None:
    slot, out = make_slot(0), torch.ones(3)
    poison((out, slot.inputs[0]), storages([slot]))
    assert bool(out.isnan().all()) and unwritten(out) and not unwritten(slot.inputs[0])
    assert not unwritten(torch.full((3,), float("nan"))), (
        "a NaN that a kernel computed is no poison"
    )
    whole, flags, pairs = (
        torch.ones(3, dtype=torch.int32),
        torch.zeros(3) > 1,
        torch.ones(2, 2) * 1j,
    )
    for each in (whole, flags, pairs, torch.ones(2, 3, dtype=torch.bfloat16).t()):
        poison(each)
    assert int(whole[0]) == torch.iinfo(torch.int32).max and bool(flags.all())
    assert bool(pairs.isnan().all())


def test_shared_memory_is_seen_and_empty_results_are_not() -> None:
    x, none = torch.ones(2), torch.empty(0)
    assert shares_memory([x, x]) and not shares_memory([x, x.clone()])
    assert not shares_memory([none, none])


def test_what_is_dealt_is_what_is_drawn_for_a_check() -> None:
    one = case(Input(name="x", shape=(5, 7), layout="sliced"), Input(name="w", shape=(7,)))
    slot = deal(one, "cpu", ((5, 7), torch.float16), 12)
    for mine, drawn in zip(slot.inputs, drawing.make(one, "cpu", 12), strict=True):
        assert torch.equal(mine, drawn) and mine.stride() == drawn.stride()
    like = drawing.gradient_like(torch.empty(5, 7, dtype=torch.float16), 12)
    assert slot.grad is not None and torch.equal(slot.grad, like) and slot.seed == 12


def test_a_backwards_slot_gets_another_gradient_only() -> None:
    one = case(Input(name="x", shape=(5, 7)))
    slot, other = (deal(one, "cpu", ((5, 7), torch.float32), seed) for seed in (1, 2))
    before = slot.inputs[0].clone()
    refill_slot(slot, other)
    assert slot.grad is not None and other.grad is not None
    assert torch.equal(slot.inputs[0], before) and torch.equal(slot.grad, other.grad)
