"""How kernels are launched, as far as that shows without a GPU: those that overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft.backends import cubin, nvrtc
from weft.ops.bias_gelu import with_cuda


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((9, 0), True)])
def test_a_launch_overlaps_where_it_is_asked_to_and_the_device_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for asked in (False, True):
        config = nvrtc._launch_config(3, 64, 16, asked)
        assert config.programmatic_stream_serialization == (asked and able)


def test_a_kernel_that_overlaps_waits_before_it_reads() -> None:
    pytest.importorskip("cuda.bindings")
    for overlap, arch in ((True, "sm_90"), (True, "sm_80"), (False, "sm_90")):
        source = with_cuda.source(torch.float32, replace(with_cuda.SHIPPED, overlap=overlap))
        text = cubin.ptx(source.compile(arch)).split(".entry ")
        first = next(t for t in text if t.startswith("bias_gelu_backward_wide"))
        second = next(t for t in text if t.startswith("bias_gelu_sum_partials"))
        waits = overlap and arch == "sm_90"
        assert ("griddepcontrol.launch_dependents" in first) == waits
        assert ("griddepcontrol.wait" in second) == waits
        if waits:
            assert second.index("griddepcontrol.wait") < second.index("ld.global")
