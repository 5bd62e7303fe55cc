"""Epilogues of the wgmma product for backwards and losses, in the emulator; planted faults are seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC
from helpers.warp_emulator import EmulatorError, copy_with_fault
from ops.test_matmul_wgmma import emulated  # noqa: F401
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.products import wgmma, wgmma_fused
from weft.ops._common.products.wgmma_model import CANDIDATES, CHOSEN_FROM, Config, Epilogue, spills

BF16, FP16 = torch.bfloat16, torch.float16
PAIR, WIDE, ODD, MIDDLE, NARROW, MIDDLE_PAIR = CANDIDATES[:6]
PINGPONG, PINGPONG_PAIR, PINGPONG_WIDE = CANDIDATES[7:10]
# name, sizes, configuration, and the number of products or parts of K.
Point = tuple[str, tuple[int, int, int], Config, int]
POINTS: list[Point] = [
    ("slope", (300, 264, 200), WIDE, 1),
    ("slope", (136, 200, 72), ODD, 1),
    ("slope", (392, 264, 264), PINGPONG, 1),
    ("slope", (520, 136, 200), PINGPONG_PAIR, 1),
    ("exponentials", (300, 267, 200), MIDDLE, 1),
    ("exponentials", (136, 387, 72), ODD, 1),
    ("exponentials", (392, 267, 136), PINGPONG_PAIR, 1),
    ("scaled rows", (300, 264, 200), PAIR, 1),
    ("scaled rows", (72, 136, 712), MIDDLE, 3),
    ("scaled rows", (264, 136, 200), PINGPONG, 1),
    ("sum", (264, 264, 136), PINGPONG_PAIR, 3),
    ("sum", (392, 200, 72), PINGPONG_WIDE, 3),
    ("sum", (261, 136, 72), MIDDLE, 4),
    ("sum", (300, 328, 72), WIDE, 2),
]
# name: file, the text that is replaced, by what, and the point that shows it
FAULTS: dict[str, tuple[str, str, str, Point]] = {
    "a lane adds the wrong half": (
        "epilogue.cuh",
        "is_upper ? values[i + HALF]",
        "!is_upper ? values[i + HALF]",
        POINTS[0],
    ),
    "a pre-activation's rows are swapped": (
        "output.cuh",
        "sum = word % 2 ? sum + two[j] : two[j];",
        "sum = two[j];",
        POINTS[2],
    ),
    "columns beyond the last count": (
        "output.cuh",
        ">= arguments.columns) sums[i] = ",
        ">= 999999) sums[i] = ",
        POINTS[4],
    ),
    "a row that does not count is computed": (
        "output.cuh",
        "reference == infinity() ? 0.0f : power",
        "power",
        POINTS[5],
    ),
    "a row has the number of another": (
        "output.cuh",
        "own_row < arguments.rows ? arguments.row_values[own_row] : 0.0f",
        "arguments.row_values[row]",
        POINTS[9],
    ),
    "the sum of parts of K is not scaled": (
        "output.cuh",
        "two[0] *= arguments.row_values[row]",
        "two[0] *= 1.0f",
        POINTS[8],
    ),
    "the first product adds what is in memory": (
        "output.cuh",
        "arguments.phase & ADDS",
        "true",
        POINTS[10],
    ),
    "lower bytes are not loaded": ("output.cuh", "low >> shift & 0xffff}", "0}", POINTS[12]),
    "lower bytes are another part's": ("output.cuh", " + first / WIDTH;", ";", POINTS[13]),
    "the last product does not round": (
        "output.cuh",
        "phase & ROUNDS ? rounded(two)",
        "phase & 8 ? rounded(two)",
        POINTS[10],
    ),
}
needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def units(y: torch.Tensor, exact: torch.Tensor, k: int) -> float:
    """Return the largest error in units of the dtype's rounding."""
    least = torch.finfo(y.dtype).eps * 1e-3 * k**0.5 if y.device.type == "cpu" else 2**-20 * k
    unit = torch.finfo(y.dtype).eps * exact.abs() + least
    return float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max())


def errors(point: Point, seed: int, device: str = "cpu") -> list[float]:
    """Return the largest errors of a product's outputs, in units of the rounding of each dtype."""
    name, (m, n, k), config, count = point
    compute = {"slope": slope_errors, "exponentials": exponential_errors, "scaled rows": scaled_errors}
    if name == "sum":
        return sum_errors(m, n, k, config, count, seed, device)
    return compute[name](m, n, k, config, count, seed, device)


def slope_errors(m: int, n: int, k: int, config: Config, count: int, seed: int, device: str) -> list[float]:
    dtype = FP16 if seed % 2 else BF16
    dy, w, pre = (normal(*s, seed=seed).to(device, dtype) for s in ((m, k), (k, n), (m, n)))
    dpre, sums = wgmma_fused.slope_with(config, dy, w, pre)
    leaf = pre.double().requires_grad_()
    torch.nn.functional.gelu(leaf, approximate="tanh").backward(dy.double() @ w.double())
    assert leaf.grad is not None
    # The sums cancel: their error is that of the float32 terms.
    scale = leaf.grad.abs().sum(0) * 2**-20 + torch.finfo(dtype).eps * leaf.grad.sum(0).abs()
    return [
        units(dpre, leaf.grad, k),
        float(((sums.double() - leaf.grad.sum(0)).abs() / scale).nan_to_num(1e9).max()),
    ]


def exponential_errors(
    m: int, n: int, k: int, config: Config, count: int, seed: int, device: str
) -> list[float]:
    a, b = normal(m, k, seed=seed).to(device, BF16), (normal(n, k, seed=seed + 9) * k**-0.5).to(device, BF16)
    references = normal(m, seed=seed + 1).to(device)
    a[1], references[1] = torch.nan, torch.inf  # a row that does not count
    buffer = torch.full((m, -(-n // 64) * 64), 7.0, dtype=BF16, device=device)
    sums = torch.empty(m, wgmma_fused.column_tiles(config, n), 2, device=device)
    out = wgmma_fused.Exponentials(buffer[:, :n], sums)
    wgmma_fused.exponentials(config, a, b.t(), references, out)
    # The copy engine writes whole 16 bytes: on an H200 the row's last ones become 0 behind column n.
    whole = -(-n // 8) * 8
    assert (buffer[:, whole:] == 7).all() and (buffer[1, :n] == 0).all()
    assert ((buffer[:, n:whole] == 7) | (buffer[:, n:whole] == 0)).all()
    counts = torch.arange(m, device=device) != 1
    logits = (a.double() @ b.double().t())[counts]
    exact = torch.exp(logits - references.double()[counts, None])
    largest, totals = sums[counts, :, 0].amax(1), sums[counts, :, 1].sum(1)
    return [
        units(out.values[counts], exact, 1),
        float((largest - logits.amax(1)).abs().max()) * 1e5,
        float((totals / exact.sum(1) - 1).abs().max()) * 1e5,
    ]


def scaled_errors(m: int, n: int, k: int, config: Config, count: int, seed: int, device: str) -> list[float]:
    a, b = normal(m, k, seed=seed).to(device, BF16), normal(k, n, seed=seed + 1).to(device, BF16)
    # Parts of K are of tiles that do not fill all SMs.
    assert device == "cuda" or wgmma.num_sms(a.device) != 2 or count == 1
    factors = normal(m, seed=seed).to(device)
    out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
    wgmma_fused.scaled_rows_with(config, count, a, b, factors, out)
    return [units(out, a.double() @ b.double() * factors.double()[:, None], k)]


def sum_errors(m: int, n: int, k: int, config: Config, count: int, seed: int, device: str) -> list[float]:
    """Both operands are contiguous across K, as in the gradient of a weight; the memory is NaN before."""
    out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
    total, exact = wgmma_fused.ProductSum(config, out), torch.zeros(m, n, dtype=torch.float64, device=device)
    total.low.fill_(255)
    pitch = -(-m // 8) * 8
    for i in range(count):
        a = normal(k, pitch, seed=seed + i).to(device, BF16)[:, :m].t()
        b = normal(k, n, seed=seed + i + 99).to(device, BF16)
        total.add(a, b, is_last=i == count - 1)
        exact += a.double() @ b.double()
    # Near 0 the terms cancel: each call cuts its sum, of up to about sqrt(k count), to 2^-15 of it.
    cut = 2**-15 * count * (k * count) ** 0.5
    return [
        float(
            ((out.double() - exact).abs() / (torch.finfo(BF16).eps * exact.abs() + cut)).nan_to_num(1e9).max()
        )
    ]


@needs_compiler
@pytest.mark.sampled(1, each=lambda point: point[0])
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}-{p[1]}-{p[2].label}-{p[3]}")
def test_results_are_right_in_any_schedule(
    point: Point,
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if point[0] == "scaled rows" and point[3] > 1:
        monkeypatch.setattr(wgmma, "num_sms", lambda device: 3)
    for seed in range(2):
        assert max(errors(point, seed)) < 0.6


@needs_compiler
def test_a_condition_of_0_writes_nothing(emulated: None) -> None:  # noqa: F811
    a, b, references = normal(72, 72, seed=0).to(BF16), normal(72, 64, seed=1).to(BF16), torch.zeros(72)
    out = wgmma_fused.Exponentials(torch.full((72, 64), 7.0, dtype=BF16), torch.full((72, 1, 2), 7.0))
    for number in (0, 1):
        condition = torch.tensor([number], dtype=torch.int32)
        wgmma_fused.exponentials(NARROW, a, b, references, out, condition)
        assert [bool((x == 7).all()) for x in out] == [number == 0] * 2


@needs_compiler
def test_a_sum_far_above_its_reference_is_reported(emulated: None) -> None:  # noqa: F811
    a, b, references = normal(72, 72, seed=0).to(BF16), normal(72, 64, seed=1).to(BF16), torch.zeros(72)
    out = wgmma_fused.Exponentials(torch.empty(72, 64, dtype=BF16), torch.empty(72, 1, 2))
    distance = float((a.double() @ b.double()).max())
    for farthest, expected in ((distance * 1.01, 0), (distance * 0.99, 1)):
        condition = torch.zeros(1, dtype=torch.int32)
        wgmma_fused.exponentials(NARROW, a, b, references, out, condition, farthest)
        assert int(condition) == expected
    condition = torch.zeros(1, dtype=torch.int32)
    references.fill_(torch.inf)  # rows that do not count
    wgmma_fused.exponentials(NARROW, a, b, references, out, condition, 1.0)
    assert int(condition) == 0


@needs_compiler
def test_column_sums_have_the_same_bits_in_each_schedule(emulated: None) -> None:  # noqa: F811
    dy, w, pre = (normal(*s, seed=3).to(BF16) for s in ((136, 72), (72, 72), (136, 72)))
    runs = [wgmma_fused.slope_with(NARROW, dy, w, pre)[1] for _ in range(3)]
    assert all(torch.equal(sums, runs[0]) for sums in runs)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str,
    emulated: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of the kernel with one fault gives a wrong result or breaks the emulator's rules."""
    name, old, new, point = FAULTS[fault]
    if point[0] == "scaled rows" and point[3] > 1:
        monkeypatch.setattr(wgmma, "num_sms", lambda device: 3)
    copy_with_fault(tmp_path, SRC / "weft/ops/_common/products", name, old, new, times=None)
    real = wgmma.source

    def source(*arguments: Any) -> CudaSource:
        return replace(real(*arguments), file=tmp_path / "wgmma.cu")

    monkeypatch.setattr(wgmma, "source", source)
    try:
        largest = max(errors(point, 0))
    except (EmulatorError, AssertionError):  # or a row that does not count is not 0
        return
    assert largest > 0.75  # a right result has at most 0.6


@pytest.mark.sampled(1)  # the programs of an epilogue are compiled for five seconds
@pytest.mark.parametrize(
    ("epilogue", "majors"),
    [
        (Epilogue.SLOPE, (True, False)),
        (Epilogue.EXPONENTIAL, (True, True)),
        (Epilogue.ROW_SCALE, (True, False)),
        (Epilogue.ACCUMULATE, (False, False)),
    ],
)
def test_no_program_that_is_chosen_spills_registers(epilogue: Epilogue, majors: tuple[bool, bool]) -> None:
    for config in CHOSEN_FROM:
        if spills(config, epilogue):
            continue
        sass = disassemble.sass(wgmma.source(BF16, config, *majors, False, epilogue).compile("sm_90a"))
        assert "HGMMA" in sass and not re.search(r"\b(STL|LDL)\b", sass), (epilogue, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CHOSEN_FROM, ids=lambda c: c.label)
def test_results_are_right_on_a_gpu(config: Config) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((136, 136, 72), (1000, 1032, 264), (2056, 3080, 520)):
        for name, count in (
            ("slope", 1),
            ("scaled rows", 1),
            ("scaled rows", 3),
            ("sum", 4),
            ("exponentials", 1),
        ):
            if config.pingpong and name == "scaled rows" and count > 1:
                continue
            size = (m, n + 3, k) if name == "exponentials" else (m, n, k)
            assert max(errors((name, size, config, count), 0, "cuda")) < 1.0, (name, size, count)
