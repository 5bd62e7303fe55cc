"""How kernels are launched, as far as that shows without a GPU: those that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from weft.backends import cubin, nvrtc
from weft.backends.nvrtc import CudaSource
from weft.ops.activations import with_cuda as activations
from weft.ops.embedding import with_cuda as embedding
from weft.ops.embedding.plan import FUSED


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((9, 0), True)])
def test_a_launch_overlaps_where_it_is_asked_to_and_the_device_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for asked in (False, True):
        config = nvrtc._launch_config(3, 64, 16, asked)
        assert config.programmatic_stream_serialization == (asked and able)


def chains(overlap: bool) -> Iterator[list[tuple[CudaSource, str]]]:
    """The kernels of a call that follow each other, of those that ship."""
    sums = activations.bias_gelu_backward_source(
        torch.bfloat16, replace(activations.BACKWARD_CONFIG, overlap=overlap)
    )
    yield [(sums, "bias_gelu_backward_wide"), (sums, "bias_gelu_sum_partials")]
    plan = replace(FUSED, overlap=overlap)
    yield [
        (embedding.partition_source(plan), "embedding_buckets"),
        (embedding.sort_source(torch.bfloat16, 8, plan), "embedding_order"),
        (embedding.backward_source(torch.bfloat16, 8, plan), "embedding_together"),
    ]


def entry(source: CudaSource, name: str, arch: str) -> str:
    every = cubin.ptx(source.compile(arch)).split(".entry ")
    return next(text for text in every if text.startswith(name))


def test_a_kernel_that_overlaps_waits_before_it_reads() -> None:
    """Nor does it read as constant (``nc``) what the kernel in front of it may still write, but
    what the call was given: the gradient in the order, ids in the walk."""
    pytest.importorskip("cuda.bindings")
    assert activations.BACKWARD_CONFIG.overlap and FUSED.overlap
    given = {"embedding_order": {".v4.u32"}, "embedding_together": {".u64"}}
    for first, *others in chains(True):
        assert "griddepcontrol.wait" not in entry(*first, "sm_90")
        for before in (first, *others[:-1]):
            assert "griddepcontrol.launch_dependents" in entry(*before, "sm_90")
        for source, name in others:
            text = entry(source, name, "sm_90")
            assert text.index("griddepcontrol.wait") < text.index("ld.global")
            constant = {width.split()[0] for width in text.split("ld.global.nc")[1:]}
            assert constant == given.get(name, set())
        # The next call's first kernel is an ordinary launch, but another's might not be.
        assert "griddepcontrol.launch_dependents" not in entry(*others[-1], "sm_90")


@pytest.mark.parametrize(("overlap", "arch"), [(True, "sm_80"), (False, "sm_90")])
def test_a_kernel_says_nothing_where_it_does_not_overlap(overlap: bool, arch: str) -> None:
    pytest.importorskip("cuda.bindings")
    for source, name in next(chains(overlap)):
        assert "griddepcontrol" not in entry(source, name, arch)
