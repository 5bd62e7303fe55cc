"""The command that times products: each call is right, and a line has its figures. No clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.backends.nvrtc import CudaSource
from weft.lab import products
from weft.ops._common.products import wgmma
from weft.ops.scaled_matmul.spec import widened

Calls = Sequence[Callable[[int], Any]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run each call once, as if the first contender took 2 us and the others 1 us; record the counts."""
    counts: list[int] = []

    def times(calls: Calls, count: int) -> list[float]:
        counts.append(count)
        outputs = [call(count - 1) for call in calls]
        assert all(torch.equal(y, outputs[0]) for y in outputs)
        return [2.0, *[1.0] * (len(calls) - 1)]

    monkeypatch.setattr(products, "graph_times", times)
    monkeypatch.setattr(wgmma, "forward_with", lambda config, a, b, splits=1: torch.mm(a, b))
    monkeypatch.setattr(products.skinny, "forward", torch.mm)
    return counts


def test_wide_products_have_all_configurations_in_a_line(counted: list[int]) -> None:
    (line,) = products.wide_lines("cpu", [(64, 128, 2048, False, True)])
    assert line.startswith("64 128 2048 chosen ")
    for name in ("torch", "256c1", "256c2", "128c2", "64c1", "128c1s8"):
        assert f"'{name}': " in line
    assert "TFLOP/s: torch 17, 256c2 34" in line
    assert counted == [100]


def test_weights_beyond_the_cache_are_rotated(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LLAMA_8B", ((64, 128),))
    lines = list(products.few_rows_lines("cpu", [(64, 128), (32, 32)], (1, 5), l2_bytes=16384))
    assert lines[1] == "64 128 1: 2.0 1.0 1.0 0.50 0.01"
    assert [line.split(":")[0] for line in lines[2:-1]] == ["64 128 5", "32 32 1", "32 32 5"]
    assert lines[-1].endswith("products: 0.500")
    assert counted[:2] == [102, 102]  # three weights of 16 KiB, a multiple of them in a graph


def test_the_programs_of_tf32_products_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, str]] = []
    monkeypatch.setattr(CudaSource, "compile", lambda self, arch: compiled.append((self.label, arch)))
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    sizes = [(16, 8, 8, "kk"), (16, 8, 8, "mn"), (128, 8, 4096, "kk")]
    # All orders of storage have one program, and a long K has another.
    assert products.compile_programs(sizes, "cpu") == 2
    assert {arch for _, arch in compiled} == {"sm_90a"}
    assert sorted("split" in label for label, _ in compiled) == [False, True]


def test_tf32_products_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[tuple[int, ...]]] = []

    def times(calls: Calls, count: int) -> list[float]:
        shapes.append([tuple(call(0).shape) for call in calls])
        return [2.0, 3.0]

    def by_tensor_cores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(*((x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)))

    monkeypatch.setattr(products, "graph_times", times)
    monkeypatch.setattr(wgmma, "forward", by_tensor_cores)
    assert list(products.tf32_lines("cpu", [(16, 8, 8, "kk")]))[1] == "tf32 16 8 8 kk: 2.0 3.0 1.500 0"
    assert shapes == [[(16, 8), (16, 8)]]
    monkeypatch.setattr(wgmma, "forward", lambda a, b: by_tensor_cores(a, b).roll(1, 0))
    (_, line) = products.tf32_lines("cpu", [(16, 8, 8, "mn")])
    assert "wrong" in line and "not timed" in line and len(shapes) == 1


def test_batch_invariant_products_have_means_of_few_and_of_many_rows(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products.invariant, "forward", torch.mm)
    lines = list(products.invariant_lines("cpu", [(64, 128)], (5, 80), l2_bytes=16384))
    assert lines[1:3] == ["64 128 5: 2.0 1.0 0.50", "64 128 80: 2.0 1.0 0.50"]
    assert lines[3].endswith("at most 64 rows: 0.500") and lines[4].endswith("more than 64 rows: 0.500")


def test_linear_layers_have_all_configurations_for_each_epilogue(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward_with(
        config: Any, x: Any, w: Any, splits: int, epilogue: Any, bias: Any, residual: Any
    ) -> Any:
        y = products.EPILOGUES[epilogue](torch.nn.functional.linear(x, w.t(), bias), residual)
        return y

    monkeypatch.setattr(wgmma, "forward_with", forward_with)
    lines = list(products.linear_lines("cpu", [(64, 128, 192)]))
    assert [line.split(" chosen ")[0] for line in lines] == [
        "64 128 192 bias",
        "64 128 192 gelu_pre",
        "64 128 192 residual",
    ]
    assert all("'256c2': 1.0" in line and "'192c1p': 1.0" in line for line in lines)


def test_fp8_products_have_all_configurations_for_each_kind_of_scales(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(*operands: torch.Tensor, **_: Any) -> torch.Tensor:
        a, b = widened(*operands[:4])
        return (a.double() @ b.double()).bfloat16()

    monkeypatch.setattr(products.scaled, "forward_with", lambda config, *operands: exact(*operands))
    monkeypatch.setattr(torch, "_scaled_mm", exact)
    lines = list(products.fp8_lines("cpu", [(64, 128, 256)]))
    assert [line.split(" chosen ")[0] for line in lines] == [
        f"64 128 256 {k}" for k in ("tensor", "row", "1x128")
    ]
    assert all("'torch-fast': 1.0" in line and "'192c1': 1.0" in line for line in lines[:2])
    assert "torch-fast" not in lines[2] and "'192c1'" not in lines[2]
    assert all("'192x128c2a': 1.0" in line and "'128c2d': 1.0" in line for line in lines)


def test_a_table_has_the_figures_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "RESULTS", tmp_path)
    (tmp_path / "r.txt").write_text("1x2 chosen 64c1 {'torch': 5, '64c1': 7, '128c1': 9} TFLOP/s: torch 5\n")
    columns = {"torch": "cuBLAS", "chosen": "Weft"}
    text = products.recorded_table("r.txt", ["1x2"], columns, unit="M N", largest=True)
    assert text.splitlines()[0] == "| M N | cuBLAS | Weft |" and "| 1x2 | 5 | **7** |" in text
    assert "| **5** | 7 |" in products.recorded_table("r.txt", ["1x2"], columns, unit="M N")


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["few-rows", "narrow"]) == 2
    assert "got narrow" in capsys.readouterr().err.replace(":", "")


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products.machine, "has_gpu", lambda: False)
    assert products.main([]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err.replace(":", "")
