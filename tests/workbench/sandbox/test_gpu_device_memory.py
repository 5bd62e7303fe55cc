"""Large tensors of a worker's GPU arrive without a way through the host."""

from __future__ import annotations

import pytest
import torch

from weft.workbench.sandbox import device_memory
from weft.workbench.sandbox.process import Limits, Sandbox

pytestmark = pytest.mark.gpu
LARGE = device_memory.LEAST_BYTES  # elements of four bytes


def request(worker: Sandbox, count: int, **more: object) -> list[torch.Tensor]:
    return worker.request("count_on_a_gpu", {"count": count, **more}, device="cuda").tensors


@pytest.mark.parametrize("count", [100, LARGE])
@pytest.mark.parametrize("how", ["copied", "expandable", "forged"])
def test_tensors_of_a_gpu_arrive(how: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def copy_into(target: torch.Tensor, exported: device_memory.ExportedMemory) -> None:
        copies.append(target.numel())
        offset = (1 << 40) if how == "forged" else exported.offset
        copy(target, device_memory.ExportedMemory(exported.handle, offset))

    copy = device_memory.copy_into
    monkeypatch.setattr(device_memory, "copy_into", copy_into)
    expected = torch.arange(count, device="cuda", dtype=torch.float32)
    with Sandbox("helpers.sandbox_handlers:handlers", limits=Limits(seconds=60)) as worker:
        for _ in range(2):
            whole, transposed, view = request(worker, count, expandable=how == "expandable")
            assert torch.equal(whole, expected) and torch.equal(transposed, expected.view(2, -1).T)
            assert torch.equal(view, expected[7:])
        exported = count == LARGE and how != "expandable"
        # What lies outside of the allocation is refused at the first tensor, and then everything is sent.
        assert copies == ([LARGE, LARGE, LARGE - 7] * 2 if how == "copied" else [LARGE]) * exported
        # The worker keeps nothing for this process once its tensors are copied.
        assert worker.request("allocated_on_a_gpu").payload == {"allocated": 0}


def test_a_broken_handle_is_refused() -> None:
    target = torch.empty(LARGE, device="cuda")
    with pytest.raises(device_memory.NotShared, match="cannot be opened"):
        device_memory.copy_into(target, device_memory.ExportedMemory(bytes(64), 0))
