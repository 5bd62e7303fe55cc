"""The k largest elements: the CUDA kernel in an emulator, planted faults, and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.scan_emulator import COMPILER, EmulatorError, emulate
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
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


RADIX = partial(with_cuda.by_radix, threads=64)
LONG_RADIX = partial(with_cuda.by_radix, threads=with_cuda.LONG_ROW_THREADS)
# A warp for each row; a block for each row; rows of three parts, of which the last may be short.
LISTS = (
    partial(with_cuda.by_lists, threads=64),
    partial(with_cuda.by_lists, threads=64, parts=1),
    partial(with_cuda.by_lists, threads=64, parts=3),
)


def _is_right(select: Callable[..., Any], x: torch.Tensor, k: int, largest: bool) -> bool:
    values, indices = select(x, k, largest)
    _, expected = reference(x.double(), k=k, largest=largest)
    same = values.nan_to_num(7.0) == x.gather(-1, expected).nan_to_num(7.0)
    return torch.equal(indices, expected) and bool(same.all())


@NEEDS_COMPILER
def test_adversarial_rows_are_exact_by_radix_select(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path)
    for name, x in _rows().items():
        for k in (1, 8, x.shape[-1]):
            for largest in (True, False):
                assert _is_right(RADIX, x, k, largest), (name, k, largest)
    wide = torch.randn(3, 100)
    assert _is_right(RADIX, wide[:, :50], 5, True) and _is_right(RADIX, wide[:1].expand(3, -1), 5, True)
    # More equal keys at the border than are collected, and rows of whole vectors.
    many = torch.randint(0, 2, (2, 1600), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = torch.randn(2, 640, generator=torch.Generator().manual_seed(3)).to(dtype)
        assert _is_right(RADIX, many.to(dtype), 90, True) and _is_right(RADIX, rows, 70, False)


@NEEDS_COMPILER
def test_long_rows_are_exact_by_radix_select(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A block of 1024 threads has counters for each lane."""
    emulate(monkeypatch, tmp_path)
    generator = torch.Generator().manual_seed(4)
    for dtype, columns in ((torch.bfloat16, 16400), (torch.float32, 9001)):
        x = torch.randn(1, columns, generator=generator).to(dtype)
        assert _is_right(LONG_RADIX, x, 300, True) and _is_right(LONG_RADIX, x.abs().sqrt(), 7, False)


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("select", LISTS, ids=["warp", "block", "parts"])
def test_adversarial_rows_are_exact_by_lists(
    select: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate(monkeypatch, tmp_path)
    rows = _rows() | {"whole vectors": torch.randn(5, 160), "short": torch.randn(9, 7)}
    for name, x in rows.items():
        for k in sorted({1, 5, min(32, x.shape[-1])}):
            for largest in (True, False):
                assert _is_right(select, x, k, largest), (name, k, largest)
    wide = torch.randn(3, 100)
    assert _is_right(select, wide[:, :50], 5, True) and _is_right(select, wide[:1].expand(3, -1), 5, True)


def test_long_rows_are_cut_until_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the launches on a device of 132 SMs, without running them."""
    launches: list[tuple[str, int, tuple[Any, ...]]] = []

    def kernel(source: CudaSource, name: str) -> Callable[..., None]:
        return lambda blocks, threads, *arguments: launches.append((name, blocks, arguments[5:]))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    monkeypatch.setattr(with_cuda, "num_sms", lambda *_, **__: 132)
    for rows, columns, k in ((64, 128256, 8), (4096, 128256, 8), (640, 64, 8), (1, 50257, 4)):
        with_cuda.by_lists(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), k, True)
    assert [(name, blocks) for name, blocks, _ in launches] == [
        ("topk_lists", 320), ("topk_merge", 8), ("topk_lists", 4096), ("topk_lists", 80),
        ("topk_lists", 6), ("topk_merge", 1),
    ]  # fmt: skip
    parts, part_columns = launches[0][2][-2:]
    assert parts == 5 and part_columns % 8 == 0 and 4 * part_columns < 128256 <= 5 * part_columns


FAULTS = {
    "the lowest digit first": (
        "int shift = 24; shift >= LAST_SHIFT; shift -= 8",
        "int shift = LAST_SHIFT; shift <= 24; shift += 8",
    ),
    "no barrier before the counts are read": ("1u);\n    });\n    __syncthreads();", "1u);\n    });"),
    "no barrier after the collection": (
        "1u)] = i;\n    }\n  });\n  __syncthreads();",
        "1u)] = i;\n    }\n  });",
    ),
    "no barrier behind the ties": ("if (collects) __syncthreads();", ""),
    "what larger digits have is due again": ("(first - e), due - above, total}", "(first - e), due, total}"),
    "ties of the highest index": ("rank += ties[j] < ties[i]", "rank += ties[j] > ties[i]"),
    "a copy of the counters is left out": ("c < COPIES; ++c", "c < COPIES - 1; ++c"),
    "ties in any order": ("due == equal", "true"),
    "the order of equal keys is open": ("places[j] < places[i]", "j < i"),
    "a warp's earlier lanes are not counted": ("__popc(votes & ((1u << thread % 32) - 1))", "0"),
    "-0 below 0": ("if (v != 0.0f) memcpy", "memcpy"),
    "NaN by its bits": ("if (v != v) key = 0xffffffffu;", ""),
}


LIST_FAULTS = {
    "a list that is not sorted at first": ("    sort(list.key, list.place);\n", ""),
    "the limit is not raised": (
        "list.last_key = __shfl_sync(ALL, list.key, k - 1)",
        "list.last_key = list.key",
    ),
    "an element that others do not move for": ("if (lane > position) list.key", "if (false) list.key"),
    "the last warp's list is left out": ("w = 1; w < WARPS; ++w)", "w = 1; w < WARPS - 1; ++w)"),
    "equal keys by lane": ("(key == other_key && place < other_place)", "false"),
    "each part is the row's first": ("begin = part % parts * part_columns", "begin = 0"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*FAULTS, *LIST_FAULTS])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, (FAULTS | LIST_FAULTS)[fault])
    rows = _rows()
    rows["special"][0, ::14] = -torch.tensor(torch.nan)  # NaN of either sign
    if fault == "a warp's earlier lanes are not counted":  # more equal keys than are collected
        rows = {"many equal": torch.arange(1600.0)[None] % 2}
    if fault == "ties in any order":
        # Kept below MAX_K elements: the faulty kernel would write past its list.
        rows = {"few values": rows["few values"]}
    methods = LISTS[1:] if fault in LIST_FAULTS else (RADIX,)
    try:
        # A race shows in some schedules only.
        ok = all(
            _is_right(select, x, 20, True) for _ in range(3) for select in methods for x in rows.values()
        )
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


@pytest.mark.parametrize(
    ("k", "rows", "columns", "dtype", "lists"),
    [
        (8, 64, 128256, torch.bfloat16, True),
        (16, 64, 128256, torch.bfloat16, False),
        (8, 4096, 4096, torch.bfloat16, False),
        (32, 1, 128256, torch.bfloat16, True),
        (32, 64, 128256, torch.float32, True),
        (33, 64, 128256, torch.float32, False),
        (32, 65536, 64, torch.bfloat16, True),
        (1, 2, 2**32, torch.float32, False),
    ],
)
def test_the_faster_way_is_taken(k: int, rows: int, columns: int, dtype: torch.dtype, lists: bool) -> None:
    """As measured on an H200 (results/nvidia-h200/primitives-2026-11-27.txt); places have 32 bits."""
    assert with_cuda.suits_lists(k, rows, columns, dtype) is lists
