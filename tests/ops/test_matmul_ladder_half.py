"""The wgmma steps of the ladder of half products, in the emulator of Hopper: right in any schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import TESTS
from helpers.warp_emulator import COMPILER, EmulatorError
from ops.test_matmul_wgmma import toy_map
from weft.backends import disassemble
from weft.core.registry import implementation
from weft.ops._common.hopper import tensor_map
from weft.ops.matmul.ladder import half

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
STEPS = ("12-wgmma", "13-pipeline", "14-warp-roles", "15-two-consumers", "16-persistent")
# (M, N, K): less than a tile; and several tiles that none divides, with more steps of K than stages.
SIZES = ((1, 8, 8), (200, 328, 392))
# Text in a step's file, and what stands there instead. Each fault gives a wrong product or an error.
FAULTS = {
    "12-wgmma": ("    __syncthreads();  // all warps' products have read the tiles\n", ""),
    "13-pipeline": ("fill(step + STAGES - 1);", "fill(step + STAGES);"),
    "14-warp-roles": ("pipeline.init(4 * GROUPS)", "pipeline.init(1)"),
    "15-two-consumers": ("arguments, role - 1, pipeline", "arguments, 0, pipeline"),
    "16-persistent": ("tile.row * 128", "tile.row * 64"),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(half, "num_sms", lambda device: 2)


def _error(step: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the largest error of a product, in units of what rounding the exact one to the dtype costs."""
    m, n, k = sizes
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    exact = a.double() @ b.double()
    unit = torch.finfo(dtype).eps * (exact.abs() + 1e-3 * k**0.5)
    c = implementation("matmul", f"cuda/{step}").forward(a, b)
    return float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_right_in_any_schedule(step: str, emulated: None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for sizes in SIZES:
            assert _error(step, sizes, dtype) < 0.6, (dtype, sizes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEPS)
def test_a_planted_fault_is_seen(
    step: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"{step.replace('-', '_')}.cu"
    warp_emulator.emulate_edited(monkeypatch, tmp_path, file, *FAULTS[step], header=EMULATOR)
    errors = []
    for _ in range(6):  # each launch switches threads in another order
        try:
            errors.append(_error(step, SIZES[1], torch.bfloat16))
        except EmulatorError:
            return
    assert max(errors) > 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", STEPS)
def test_no_program_spills_registers(step: str) -> None:
    (source, _) = implementation("matmul", f"cuda/{step}").aot_kernels
    sass = disassemble.sass(source.compile("sm_90a"))
    assert "HGMMA" in sass and "STL" not in sass and "LDL" not in sass
