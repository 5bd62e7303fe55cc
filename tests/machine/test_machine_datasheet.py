"""The datasheet table: each card by one row, and no guess at a name it does not know."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.machine import datasheet

KNOWN = {
    "Tesla V100-SXM2-32GB": 900,
    "Tesla V100-PCIE-16GB": 900,
    "Tesla V100S-PCIE-32GB": 1134,
    "Tesla T4": None,
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100-PCIE-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA A30": 933,
    "NVIDIA A10": 600,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 PCIe": 2000,
    "NVIDIA H100 NVL": 3900,
    "NVIDIA H200": 4800,
    "NVIDIA H200 NVL": 4800,
    "NVIDIA B200": None,
    "NVIDIA L4": 300,
    "NVIDIA A40": 696,
    "NVIDIA L40": 864,
    "NVIDIA GH200 480GB": 4000,
    "NVIDIA L40S": 864,
    "NVIDIA GeForce RTX 3090": 936,
    "NVIDIA GeForce RTX 4090": 1008,
    "NVIDIA GeForce RTX 5090": 1792,
}
NEAR = (
    "NVIDIA H100",
    "NVIDIA H800",
    "NVIDIA H20",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA A10G",
    "NVIDIA A100",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA L40G",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "AMD Instinct MI300X",
    "",
)


@pytest.mark.parametrize("name", KNOWN)
def test_datasheet_knows_each_card_by_one_row(name: str) -> None:
    rows = [peaks for pattern, peaks in datasheet.TABLE if pattern.fullmatch(name)]
    assert len(rows) == 1
    peaks = datasheet.look_up(name)
    assert peaks is rows[0] and peaks.source
    gbs = KNOWN[name]
    assert peaks.bandwidth == (None if gbs is None else pytest.approx(gbs * 1e9))
    rates = peaks.matrix
    assert set(rates) <= {"fp8", "bf16", "fp16", "tf32", "fp32", "fp64"}
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    order = [rates[r] for r in ("fp8", "fp16", "tf32", "fp32") if r in rates]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("name", NEAR)
def test_datasheet_does_not_guess_a_near_name(name: str) -> None:
    assert datasheet.look_up(name) is None


@given(
    st.one_of(
        st.text(max_size=30),
        st.tuples(st.sampled_from(sorted(KNOWN)), st.text(min_size=1, max_size=12)).map("".join),
        st.tuples(st.text(min_size=1, max_size=12), st.sampled_from(sorted(KNOWN))).map("".join),
    )
)
@example("NVIDIA H200\n")
@example("NVIDIA NVIDIA H200")
def test_datasheet_answers_whole_names_only(name: str) -> None:
    bare = {known.removeprefix("NVIDIA ") for known in KNOWN}
    bare |= {"T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB"}
    if datasheet.look_up(name) is not None:
        assert name.strip().removeprefix("NVIDIA ") in bare
