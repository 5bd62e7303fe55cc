"""Input buffers: overwritten in place, poisoned, and compared for shared memory."""

from __future__ import annotations

import pytest
import torch

from weft.core import Input, case, registry
from weft.workbench.calls import inputs as case_inputs
from weft.workbench.calls.buffers import (
    InputBuffers,
    allocate_buffers,
    allocate_empty,
    changing_tensors,
    distinct_elements,
    drop_values,
    has_poison,
    overwrite,
    overwrite_buffers,
    poison,
    regenerate,
    shares_memory,
    storages,
    values_equal,
)


def make_buffers(seed: int) -> InputBuffers:
    generator = torch.Generator().manual_seed(seed)
    return InputBuffers([torch.randn(16, 16, generator=generator)])


def test_overwriting_preserves_addresses_versions_and_strides() -> None:
    row = torch.randn(5)
    for target in (torch.zeros(4, 5).t(), row.expand(4, 5), torch.zeros(4, 10)[:, ::2]):
        source = torch.randn(5).expand(target.shape) if target.shape[-1] == 5 else torch.randn(5, 4)
        address, version = target.data_ptr(), target._version
        overwrite(target, source)
        assert torch.equal(target, source)
        assert (target.data_ptr(), target._version) == (address, version)


def test_poison_leaves_an_inputs_memory_alone() -> None:
    buffers, out = make_buffers(0), torch.ones(3)
    poison((out, buffers.inputs[0]), storages([buffers]))
    assert bool(out.isnan().all()) and has_poison(out) and not has_poison(buffers.inputs[0])
    assert not has_poison(torch.full((3,), float("nan"))), "a NaN that a kernel computed is no poison"
    whole, flags, pairs = (
        torch.ones(3, dtype=torch.int32),
        torch.zeros(3) > 1,
        torch.ones(2, 2) * 1j,
    )
    for each in (whole, flags, pairs, torch.ones(2, 3, dtype=torch.bfloat16).t()):
        poison(each)
    assert int(whole[0]) == torch.iinfo(torch.int32).max and bool(flags.all())
    assert bool(pairs.isnan().all())


def test_shared_memory_is_detected_except_of_empty_results() -> None:
    x, none = torch.ones(2), torch.empty(0)
    assert shares_memory([x, x]) and not shares_memory([x, x.clone()])
    assert not shares_memory([none, none])


def test_buffers_have_the_inputs_of_a_check_at_the_same_seed() -> None:
    one = case(Input(name="x", shape=(5, 7), layout="sliced"), Input(name="w", shape=(7,)))
    buffers = allocate_buffers(one, "cpu", ((5, 7), torch.float16), 12)
    for mine, expected in zip(buffers.inputs, case_inputs.make(one, "cpu", 12), strict=True):
        assert torch.equal(mine, expected) and mine.stride() == expected.stride()
    like = case_inputs.gradient_like(torch.empty(5, 7, dtype=torch.float16), 12)
    assert buffers.grad is not None and torch.equal(buffers.grad, like) and buffers.seed == 12


def test_in_a_backward_only_the_gradient_is_overwritten() -> None:
    one = case(Input(name="x", shape=(5, 7)))
    buffers, other = (allocate_buffers(one, "cpu", ((5, 7), torch.float32), seed) for seed in (1, 2))
    before = buffers.inputs[0].clone()
    overwrite_buffers(buffers, other)
    assert buffers.grad is not None and other.grad is not None
    assert torch.equal(buffers.inputs[0], before) and torch.equal(buffers.grad, other.grad)


@pytest.mark.parametrize("operator", registry.operator_names())
def test_contents_arrive_in_buffers_that_were_allocated_without_values(operator: str) -> None:
    """Overwrite buffers of every layout over a channel without strides, as a worker gets its inputs."""
    seen: set[tuple[str, ...]] = set()
    for point in registry.operator(operator).select("check", "cpu"):
        layouts = tuple(i.layout for i in point.inputs)
        if layouts in seen or sum(i.numel for i in point.inputs) > 1 << 18:
            continue
        seen.add(layouts)
        grad = (5, 3), torch.bfloat16
        expected = allocate_buffers(point, "cpu", grad, 7)
        buffers = allocate_empty(point, "cpu", grad)
        sent = [distinct_elements(t) for t in expected.all_tensors]
        for target, source in zip(buffers.all_tensors, sent, strict=True):
            overwrite(target, source.contiguous().clone())
        for ours, theirs in zip(expected.all_tensors, buffers.all_tensors, strict=True):
            assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)
            assert values_equal(ours, theirs)
        assert changing_tensors(buffers) == [len(point.inputs)]
        generated = allocate_empty(point, "cpu", grad)
        regenerate(generated, point, 7, range(len(point.inputs) + 1))
        for ours, theirs in zip(expected.all_tensors, generated.all_tensors, strict=True):
            assert values_equal(ours, theirs), "the same contents, generated in place"
    assert seen


def test_buffers_that_a_worker_generates_have_a_form_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    point = case(Input(name="x", shape=(4, 6), layout="transposed"), Input(name="y", shape=(3,)))
    buffers = allocate_buffers(point, "cpu", ((5, 3), torch.bfloat16), 7)
    monkeypatch.setattr("weft.workbench.calls.buffers.MAX_SENT_BYTES", buffers.nbytes)
    assert drop_values(buffers, "cuda") is buffers
    monkeypatch.setattr("weft.workbench.calls.buffers.MAX_SENT_BYTES", buffers.nbytes - 1)
    assert drop_values(buffers, "cpu") is buffers
    empty = drop_values(buffers, "cuda")
    assert (empty.nbytes, empty.seed) == (buffers.nbytes, 7)
    for ours, theirs in zip(empty.all_tensors, buffers.all_tensors, strict=True):
        assert ours.is_meta
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
