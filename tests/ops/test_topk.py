"""The k largest elements: the CUDA kernel in an emulator, planted faults, and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.scan_emulator import COMPILER, EmulatorError, emulate
from weft import WeftError, ops
from weft.ops.topk import with_cuda
from weft.ops.topk.spec import reference

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def _rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    special = torch.randn(3, 200, generator=generator)
    special[0, ::7], special[1, ::5], special[1, 3::5] = torch.nan, torch.inf, -torch.inf
    special[2] = torch.tensor([0.0, -0.0]).repeat(100)
    return {
        "normal": torch.randn(3, 333, generator=generator),
        "few values": torch.randint(-3, 4, (3, 333), generator=generator).float(),
        "all equal": torch.full((2, 130), 1.5),
        "sorted": torch.arange(300.0)[None],
        "reversed": torch.arange(300.0).flip(0)[None],
        "special": special,
        "half": torch.randn(2, 97, generator=generator).half(),
    }


def _is_right(x: torch.Tensor, k: int, largest: bool) -> bool:
    values, indices = with_cuda.select(x, k, largest, threads=64)
    _, expected = reference(x.double(), k=k, largest=largest)
    same = values.nan_to_num(7.0) == x.gather(-1, expected).nan_to_num(7.0)
    return torch.equal(indices, expected) and bool(same.all())


@NEEDS_COMPILER
def test_adversarial_rows_are_exact_in_the_emulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path)
    for name, x in _rows().items():
        for k in (1, 8, x.shape[-1]):
            for largest in (True, False):
                assert _is_right(x, k, largest), (name, k, largest)
    wide = torch.randn(3, 100)
    assert _is_right(wide[:, :50], 5, True) and _is_right(wide[:1].expand(3, -1), 5, True)


FAULTS = {
    "the lowest digit first": (
        "int shift = 24; shift >= 0; shift -= 8",
        "int shift = 0; shift <= 24; shift += 8",
    ),
    "no barrier before the counts are read": ("1ull);\n    }\n    __syncthreads();", "1ull);\n    }"),
    "no barrier after the collection": (
        "places[slot] = i;\n    }\n  }\n  __syncthreads();",
        "places[slot] = i;\n    }\n  }",
    ),
    "ties in any order": ("due == equal", "true"),
    "the order of equal keys is open": ("places[j] < places[i]", "j < i"),
    "a warp's earlier lanes are not counted": ("__popc(votes & ((1u << thread % 32) - 1))", "0"),
    "-0 below 0": ("if (v != 0.0f) memcpy", "memcpy"),
    "NaN by its bits": ("if (v != v) key = 0xffffffffu;", ""),
}


@NEEDS_COMPILER
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, FAULTS[fault])
    rows = _rows()
    rows["special"][0, ::14] = -torch.tensor(torch.nan)  # NaN of either sign
    if fault == "ties in any order":
        # Kept below MAX_K elements: the faulty kernel would write past its list.
        rows = {"few values": rows["few values"]}
    try:
        # A race shows in some schedules only.
        ok = all(_is_right(x, 20, True) for _ in range(3) for x in rows.values())
    except (EmulatorError, IndexError, RuntimeError):
        return
    assert not ok


def test_implementations_agree_and_differentiate_alike() -> None:
    x, grad = torch.randint(-3, 4, (2, 40)).float(), torch.randn(2, 6)
    gradients: list[torch.Tensor] = []
    for impl in ("eager", "torch"):
        leaf = x.clone().requires_grad_()
        values, indices = ops.topk(leaf, 6, impl=impl)
        assert torch.equal(indices, reference(x, k=6)[1]) and not indices.requires_grad
        gradients += torch.autograd.grad(values, leaf, grad)
    expected = torch.zeros_like(x).scatter(-1, reference(x, k=6)[1], grad)
    assert all(torch.equal(g, expected) for g in gradients)


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    ones = torch.ones(3)
    for x, k, options in ((torch.tensor(1.0), 1, {}), (ones, 4, {}), (ones, -1, {}), (ones, True, {}),
                          (ones, 1, {"largest": 1})):  # fmt: skip
        with pytest.raises(WeftError, match="topk") as caught:
            ops.topk(x, k, **options)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
