"""Embedding and rope beyond conformance: ids out of range, shapes that do not fit, strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import sampling, warp_emulator
from helpers.paths import HELPERS
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.core import registry
from weft.ops.embedding import with_cuda
from weft.ops.embedding.plan import COARSE, FUSED, WIDE

WEIGHT, PLACES = torch.randn(5, 8), torch.randn(4, 8)


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_id_out_of_range_raises_and_is_never_an_address(bad: int) -> None:
    ids = torch.tensor([[0, bad, 4], [4, 4, 1]])
    with pytest.raises(WeftError, match="at least 0 and below 5"):
        ops.embedding(ids, WEIGHT, PLACES)
    for name in ("eager", "triton"):
        y = registry.implementation("embedding", name).forward(WEIGHT, ids, PLACES)
        wrong = torch.zeros(2, 3, dtype=torch.bool)
        wrong[0, 1] = True
        assert y.isnan().equal(wrong[..., None].expand(y.shape))
    grad = torch.randn(2, 3, 8)
    backward = registry.implementation("embedding", "triton").backward
    assert backward is not None
    dweight, dplaces = backward(grad, ids, 5, 4)
    expected = torch.zeros(5, 8).index_add_(0, ids[~wrong], grad[~wrong])
    torch.testing.assert_close(dweight, expected)
    torch.testing.assert_close(dplaces[:3], grad.sum(0))
    assert not dplaces[3].any()


@pytest.mark.parametrize(
    ("ids", "weight", "positions"),
    [
        (torch.zeros(2, 3), WEIGHT, PLACES),
        (torch.zeros(2, 5, dtype=torch.int64), WEIGHT, PLACES),
        (torch.zeros(2, 3, dtype=torch.int64), WEIGHT, PLACES[:, :7]),
        (torch.zeros(2, 3, dtype=torch.int64), WEIGHT, PLACES.half()),
        (torch.zeros(2, 3, dtype=torch.int64), WEIGHT[0], PLACES),
        (torch.tensor(1), WEIGHT, PLACES),
    ],
)
def test_mismatched_arguments_raise(ids: Any, weight: Any, positions: Any) -> None:
    with pytest.raises(WeftError) as caught:
        ops.embedding(ids, weight, positions)
    assert caught.value.expected and caught.value.got


def test_ids_of_any_shape_and_no_positions() -> None:
    for shape in ((3,), (2, 3), (2, 0, 3), (2, 2, 3)):
        ids = torch.randint(5, shape)
        for impl in ("torch", "triton"):
            assert torch.equal(ops.embedding(ids, WEIGHT, impl=impl), WEIGHT[ids])


class Emulated(warp_emulator.Emulated):
    def __call__(
        self, grid: int, block: int, *arguments: Any, shared: int = 0, overlap: bool = False
    ) -> None:
        super().__call__((grid, 1, 1), block, *arguments, shared=shared)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run the CUDA kernels in the CPU emulator, with memory that is NaN before it is written."""

    def kernel(source: CudaSource, name: str) -> Emulated:
        text = source.file.read_text()
        for word, here in (
            ("extern __shared__ int dynamic_shared[];", "int* dynamic_shared = (int*)pool;"),
            ("  __shared__ ", "  static "),
            ("AT_ONCE = 256", "AT_ONCE = 4"),
            ('"row_access.cuh"', f'"{source.file.with_name("row_access.cuh")}"'),
            ('"sort.cuh"', f'"{source.file.with_name("sort.cuh")}"'),
        ):
            text = text.replace(word, here)
        words = HELPERS / "embedding_emulator.hpp"
        file = tmp_path / source.file.name
        file.write_text(f'#include "{words}"\n{text}')
        return Emulated(warp_emulator.build(replace(source, file=file), name, tmp_path))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    monkeypatch.setattr(with_cuda, "MIN_OWNERS_LESS_1", 4)
    torch.use_deterministic_algorithms(True)  # this fills allocated memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="needs g++")
def test_cuda_backward_matches_float64_in_the_emulator(emulated: None) -> None:
    """A random plan; --exhaustive runs all, and conformance runs them on a GPU.

    The plans cover: eight owners of rows, which is more than are counted at once; an owner of 1024 rows,
    whose upper row numbers use the last bits of an int; several slices; ids out of range; rows of many
    tokens, in one piece and in several; several runs; and sequences for one warp per position and for
    several."""
    torch.manual_seed(0)
    spread = torch.randint(600, (9, 37))
    spread[2] = 7
    spread[:, 5], spread[:, 9], spread[3, 30:] = -3, 2**40, 599
    deep = torch.randint(40, (70, 7))
    deep[:, 3], deep[33:60], deep[:2] = 11, 39, -1
    late = torch.full((3, 600), 4090)
    late[:, :200] = 2
    plans = [
        (replace(WIDE, owners=32), late, 4094, 264, 0),
        (WIDE, spread, 600, 264, 40),
        (COARSE, spread, 600, 264, 37),
        (FUSED, deep, 41, 136, 9),
        (replace(FUSED, piece_blocks=2), late, 4094, 24, 600),
    ]
    for plan, ids, vocabulary, columns, places in sampling.sample(plans, 1, "embedding's plans"):
        grad = torch.randn(*ids.shape, columns).bfloat16()
        got = with_cuda.backward_with(plan, grad, ids, vocabulary, places)
        wide, known = grad.double(), (ids >= 0) & (ids < vocabulary)
        dweight = torch.zeros(vocabulary, columns, dtype=torch.float64)
        dweight.index_put_((ids[known],), wide[known], accumulate=True)
        dplaces = torch.zeros(places, columns, dtype=torch.float64)
        dplaces[: ids.shape[1]] = wide.sum(0)[:places]
        for mine, exact in zip(got, (dweight, dplaces), strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_rope_reads_strided_heads(impl: str) -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    angle = torch.rand(5, 4)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    y = ops.rope(x, cos, sin, impl=impl)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_traced_rope_has_no_complex_numbers(interleaved: bool) -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4)
    cos, sin = angles.cos(), angles.sin()
    targets: list[str] = []

    def record(graph: Any, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def rope(x: torch.Tensor) -> torch.Tensor:
        return ops.rope(x, cos, sin, interleaved=interleaved)

    traced = torch.compile(rope, fullgraph=True, backend=record)
    expected = ops.rope(x, cos, sin, interleaved=interleaved, impl="torch")
    torch.testing.assert_close(traced(x), expected)
    assert targets and not [t for t in targets if "complex" in t or "real" in t]


def test_rope_refuses_odd_heads_and_mismatched_tables() -> None:
    x, table = torch.randn(1, 2, 5, 8), torch.randn(5, 4)
    for bad in ((x[..., :7], table, table), (x, table[:4], table), (x, table, table.half())):
        with pytest.raises(WeftError, match="rope"):
            ops.rope(*bad)
