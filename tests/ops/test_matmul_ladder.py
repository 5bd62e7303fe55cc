"""The ladder of float32 products, executed on a CPU by the emulator and compared with float64.

In the emulator an asynchronous copy's target is NaN until its own thread has waited for it, and shared memory
is NaN at a block's start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.warp_emulator import COMPILER
from weft.core import WeftError
from weft.core.registry import REGISTRY, implementation
from weft.ops.matmul import with_cuda_dynamic

# The steps from 11 on multiply half types.
STEPS = tuple(name for name in REGISTRY["matmul"].implementations if "cuda/" < name < "cuda/10")
FIRST_WITH_VECTORS = 6
# (M, N, K): less than a tile, one tile, and several that none divides, with a K that no tile of K divides.
SIZES = ((1, 4, 4), (3, 20, 12), (130, 132, 36), (129, 260, 20))
ODD_SIZES = ((1, 1, 1), (33, 65, 7), (65, 131, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


def _product(name: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product by a step and by float64; all memory around the operands is NaN."""
    torch.manual_seed(m * n + k)
    pair = []
    for rows, columns in ((m, k), (k, n)):
        padded = torch.full((rows * columns + 64,), torch.nan)
        x = padded[32 : 32 + rows * columns].view(rows, columns)
        pair.append(x.copy_(torch.randn(rows, columns)))
    a, b = pair
    return implementation("matmul", name).forward(a, b), a.double() @ b.double()


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_matches_float64(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warp_emulator.emulate(monkeypatch, folder)
    scalar = int(name.split("/")[1][:2]) < FIRST_WITH_VECTORS
    for sizes in (*SIZES, *ODD_SIZES) if scalar else SIZES:
        c, expected = _product(name, *sizes)
        torch.testing.assert_close(
            c.double(), expected, rtol=0, atol=2e-5, msg=lambda m, s=sizes: f"{s}: {m}"
        )


@pytest.mark.sampled(2)
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("tile", [1, 5, 16, 32])  # also a block that is no whole number of warps
def test_a_tile_of_run_time_matches_float64(tile: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warp_emulator.emulate(monkeypatch, folder)
    for h, w, k in ((3, 20, 12), *ODD_SIZES):
        torch.manual_seed(tile)
        a, b = torch.randn(h, k), torch.randn(k, w)
        c = with_cuda_dynamic.product(a, b, tile)
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=2e-5)


def test_a_tile_has_at_most_a_block_of_threads() -> None:
    for tile in (0, 33):
        with pytest.raises(WeftError, match="1 to 32") as caught:
            with_cuda_dynamic.product(torch.zeros(2, 2), torch.zeros(2, 2), tile)
        assert caught.value.got == str(tile) and caught.value.hint


@pytest.mark.sampled(2)
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("step", "file", "right", "wrong"),
    [
        ("03-shared-tile", "03_shared_tile.cu", "first + x < k ?", "true ?"),
        ("05-register-square", "05_register_square.cu", "__syncthreads();\n  }", "}"),
        ("07-double-buffer", "copied_tiles.cuh", "copies_wait<0>();", "copies_wait<1>();"),
        ("07-double-buffer", "copied_tiles.cuh", "copy(first + BK, buffer ^ 1)", "copy(first + BK, buffer)"),
        ("08-conflict-free", "copied_tiles.cuh", "e * A_PITCH * 4", "e * SIDE * 4"),
        ("09-warp-tile", "09_warp_tile.cu", "Squares<32, 16>", "Squares<16, 32>"),
        ("dynamic-tile-16", "dynamic_tile.cu", "a_tile + tile * tile", "a_tile + tile"),
    ],
)
def test_the_emulator_sees_a_planted_fault(
    step: str,
    file: str,
    right: str,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warp_emulator.emulate_edited(monkeypatch, tmp_path, file, right, wrong)
    c, expected = _product(f"cuda/{step}", 129, 260, 20)
    assert not torch.allclose(c.double(), expected, rtol=0, atol=2e-5)
