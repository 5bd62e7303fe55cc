"""The table of GPU specifications: each figure follows from the others where the inputs are there too."""

from __future__ import annotations

import json
import re

import pytest

from weft.core.cost import Cost
from weft.core.errors import WeftError
from weft.machine import datasheet, specs

GPUS = specs.all_specs()
KEYS = [gpu.key for gpu in GPUS]
# FLOP a clock and SM: of the vector units in fp32, and of the matrix units in fp16 with fp32 accumulation.
FP32 = {"sm_70": 128, "sm_75": 128, "sm_80": 128}
FP16 = {"sm_70": 1024, "sm_75": 1024, "sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096}
# Of these cards, the vendor halves the rate with fp32 accumulation.
HALF_RATE = ("rtx-3090", "rtx-4090", "rtx-5090", "l40")
MARGIN = 0.02  # datasheets give two or three digits


@pytest.mark.parametrize("key", KEYS)
def test_bandwidth_is_bus_width_times_data_rate(key: str) -> None:
    gpu = specs.one(key)
    if gpu.bus_bits is None or gpu.gbit_per_pin is None:
        # Every other row states both, so that the rule is not empty.
        assert key in ("h100-pcie", "h100-nvl", "h200-nvl", "gh200", "b200")
        return
    by_bus = gpu.bus_bits / 8 * gpu.gbit_per_pin
    assert by_bus == pytest.approx(gpu.bandwidth_gbps[1], rel=MARGIN)


@pytest.mark.parametrize("key", KEYS)
def test_rates_are_sms_times_flop_a_clock_times_clock(key: str) -> None:
    gpu = specs.one(key)
    if gpu.sm_count is None or gpu.boost_mhz is None:
        assert key == "b200"
        return
    vector = gpu.sm_count * FP32.get(gpu.arch, 256) * gpu.boost_mhz * 1e6 / 1e12
    assert vector == pytest.approx(gpu.tflops["fp32"], rel=MARGIN)
    if key in ("h100-nvl", "h200-nvl"):
        return  # their clock in products is not in the document
    per_clock = FP16.get(gpu.arch, 1024) / (2 if key in HALF_RATE else 1)
    matrix = gpu.sm_count * per_clock * (gpu.matrix_mhz or gpu.boost_mhz) * 1e6 / 1e12
    assert matrix == pytest.approx(gpu.tflops["fp16"], rel=MARGIN)


@pytest.mark.parametrize("key", KEYS)
def test_a_row_is_complete_and_ordered(key: str) -> None:
    gpu = specs.one(key)
    assert set(gpu.tflops) <= set(specs.RATES)
    assert gpu.tflops.get("bf16", gpu.tflops["fp16"]) == gpu.tflops["fp16"]
    order = [gpu.tflops[r] for r in ("fp4", "fp8", "fp16", "tf32", "fp32") if r in gpu.tflops]
    assert order == sorted(order, reverse=True)
    assert gpu.document.title and 2017 <= gpu.document.year <= 2026
    assert re.match(r"https://[\w.-]*nvidia\.com/", gpu.document.url)
    json.dumps(gpu.to_json())


def test_ridge_square_and_roof() -> None:
    gpu = specs.one("h100-sxm")
    assert gpu.ridge("bf16") == pytest.approx(989.5e12 / 3350e9)
    n = gpu.smallest_square("bf16")
    assert n is not None

    def product(side: int) -> Cost:
        return Cost(read=4 * side * side, written=2 * side * side, flops=2.0 * side**3, rate="bf16")

    below, at = gpu.roof(product(n - 1)), gpu.roof(product(n))
    assert below is not None and below.limit == "bytes"
    assert at is not None and at.limit == "FLOPs" and at.seconds == at.by_flops
    assert gpu.roof(Cost(read=10, written=0, flops=1.0, rate="int4")) is None
    assert gpu.ridge("fp4") is None and gpu.smallest_square("fp4") is None


def test_cached_bytes_do_not_count() -> None:
    gpu = specs.one("h200")
    cost = Cost(read=1 << 30, written=1 << 30)
    cold, warm = gpu.roof(cost), gpu.roof(cost, cached_bytes=1 << 30)
    assert cold is not None and warm is not None
    assert warm.seconds == pytest.approx(cold.seconds / 2)
    assert gpu.roof(cost, cached_bytes=1 << 40).seconds == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("A100", ["a100-sxm-40gb", "a100-pcie-40gb", "a100-sxm-80gb", "a100-pcie-80gb"]),
        ("a100 80 GB", ["a100-sxm-80gb", "a100-pcie-80gb"]),
        ("NVIDIA A100-SXM4-80GB", ["a100-sxm-80gb"]),
        ("NVIDIA H100 80GB HBM3", ["h100-sxm"]),
        ("h100 sxm5", ["h100-sxm"]),
        ("h200", ["h200"]),
        ("NVIDIA H200 NVL", ["h200-nvl"]),
        ("GeForce RTX 4090", ["rtx-4090"]),
        ("rtx5090", ["rtx-5090"]),
        ("L40", ["l40"]),
    ],
)
def test_a_name_finds_its_variants(name: str, keys: list[str]) -> None:
    assert [gpu.key for gpu in specs.find(name)] == keys


@pytest.mark.parametrize("name", ["", "  ", "80gb", "sxm", "pcie", "h1000", "MI300X", "a", "H100 40GB"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(WeftError):
        specs.find(name)


def test_one_of_several_variants_is_an_error() -> None:
    with pytest.raises(WeftError, match="a100-sxm-80gb"):
        specs.one("a100 80gb")


def test_disputed_bandwidth_is_a_range_and_no_share_is_shown() -> None:
    disputed = {gpu.key for gpu in GPUS if gpu.bandwidth_is_disputed}
    assert disputed == {"t4", "b200"}
    peaks = datasheet.look_up("Tesla T4")
    assert peaks is not None and peaks.bandwidth is None
    assert specs.one("t4").bandwidth == 320e9  # a bound uses the highest figure
