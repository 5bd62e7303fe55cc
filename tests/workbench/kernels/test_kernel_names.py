"""Parsing of kernel names: real names as listed; truncated and mangled names without an error or a guess."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.paths import DATA
from weft.workbench.kernels import name_tables
from weft.workbench.kernels.names import decode, origin
from weft.workbench.kernels.other_names import operators

FIXTURE = DATA / "kernel_names.jsonl"
ROWS = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
NAMES = [row["name"] for row in ROWS]
MARKS = ("nvjet", "cublas", "cudnn", "cutlass", "triton", "numba", "cuda", "gemm", "fmha", "flash")
MARKS += ("mem", "at:", "c10", "cub", "thrust", "cunn", "cpp_", "nccl", "softmax", "multi", "conv")
MARKS += ("attention", "gemv")


@pytest.mark.parametrize("row", ROWS, ids=[n[:60] for n in NAMES])
def test_a_real_name_is_read_as_listed(row: dict) -> None:
    facts = decode(row["name"]).to_dict()
    assert facts.pop("short")
    assert facts == row["told"]
    assert row["source"]


def test_the_fixture_has_every_family() -> None:
    libraries = {row["told"]["library"] for row in ROWS}
    assert libraries >= {"cublas", "cutlass", "cudnn", "aten", "inductor", "cub", "memory"}
    assert libraries >= {"triton", "numba", "nccl", "flash-attn", "unknown"}
    assert len(set(NAMES)) == len(NAMES) > 80
    kinds = {row["told"].get("what") for row in ROWS}
    assert kinds >= {"gemm", "gemv", "conv", "attention", "softmax", "norm", "reduce", "scan"}
    assert kinds >= {"sort", "elementwise", "copy", "fill", "layout", None}


def test_nvjet_says_types_tile_stages_cluster_and_no_more() -> None:
    kernel = decode("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT")
    assert (kernel.tile, kernel.stages, kernel.cluster) == ((256, 128, 64), 4, (1, 2))
    assert (kernel.operands, kernel.accumulates, kernel.result) == (("fp16",), "fp32", "fp16")
    assert kernel.layout == "nn" and kernel.arch is None and kernel.split_k is None
    assert kernel.unread == ("h", "bz", "coopA", "..T")
    # A letter that no public source explains: the parser reads the types of sums and result, not of operands.
    assert decode("nvjet_qrtst_128x256_128x4_2x1_v_bz_TNT").operands is None
    assert decode("nvjet_qrtst_128x256_128x4_2x1_v_bz_TNT").result == "bf16"
    assert decode("nvjet_something_new").to_dict() == {
        "library": "cublas",
        "what": "gemm",
        "short": "nvjet_something_new",
    }


def test_fused_operators_are_told_apart_only_where_all_are_known() -> None:
    assert operators("_softmax__to_copy_masked_fill") == ("_softmax", "_to_copy", "masked_fill")
    assert operators("native_layer_norm_backward_mul") == ("native_layer_norm_backward", "mul")
    assert operators("add_my_op_mul") == ("add_my_op_mul",)


@given(st.text(max_size=80))
@example("")
@example("_Z")
@example("\udcff\x00")
@example("nvjet_")
@example("void cutlass::Kernel2<")
def test_any_text_is_read_without_an_error(text: str) -> None:
    kernel = decode(text)
    assert kernel.name == text and kernel.library
    if kernel.library == "unknown":
        assert set(kernel.to_dict()) <= {"library", "short"}


@given(st.sampled_from(NAMES), st.data())
def test_a_name_cut_or_altered_is_read_without_an_error(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name)))
    put = data.draw(st.sampled_from(["", "_", "<", ">", ",", "0x0", "(int)", "é", "::"]))
    drop = data.draw(st.integers(0, 3))
    for altered in (name[:at], name[at:], name[:at] + put + name[at + drop :]):
        kernel = decode(altered)
        json.dumps(kernel.to_dict())
        assert isinstance(kernel.summary(), str)


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,40}", fullmatch=True))
def test_a_name_of_no_known_mark_is_unknown(name: str) -> None:
    if not any(mark in name.lower() for mark in MARKS):
        assert decode(name).library == "unknown" == origin(name)


@pytest.mark.parametrize(
    "long",
    [
        "cub::" * 20_000,
        "a_" * 50_000,
        "sm80_xmma_gemm" + "_ab" * 30_000,
        "cutlass_80_simt_s" * 5_000,
        "cutlass_80_simt_sgemm" + "_a" * 40_000,
        "void at::native::reduce_kernel<" * 3_000,
    ],
    ids=lambda name: name[:20],
)
def test_a_very_long_name_takes_no_long_time(long: str) -> None:
    start = time.process_time()
    decode(long)
    assert time.process_time() - start < 5


def test_the_page_shows_what_records_name(tmp_path: Path) -> None:
    assert name_tables.recorded(tmp_path) == name_tables.NOT_YET
    (tmp_path / "some-gpu").mkdir()
    record = {"kernels": ["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", {"name": "a|b"}]}
    (tmp_path / "some-gpu" / "x.jsonl").write_text(json.dumps(record) + "\n" + "{}\n")
    shown = name_tables.recorded(tmp_path)
    assert "`some-gpu`:" in shown and "bf16(fp32)->bf16" in shown and "| `a\\|b` | - |" in shown
    assert name_tables.fixture(FIXTURE).count("\n") == len(ROWS) + 2  # the head, and an end


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "operand"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32")]
)
def test_a_product_on_this_gpu_tells_its_types_and_its_tile(dtype: str, operand: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(2048, 2048, device="cuda").to(getattr(torch, dtype))
    torch.mm(x, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.mm(x, x)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    names = [e.name for e in seen.events() if e.device_type == on_gpu]
    products = [k for k in map(decode, names) if k.what == "gemm"]
    assert products, names
    assert products[0].operands == (operand,), names
    assert products[0].tile is not None and products[0].result == operand, names
