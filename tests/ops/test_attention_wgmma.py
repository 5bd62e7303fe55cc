"""Attention's wgmma forward in the emulator: sizes, masks, lengths and schedules; planted faults are seen."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops.attention import attention_wgmma, with_cuda
from weft.ops.attention.attention_wgmma import Config
from weft.ops.attention.spec import AttentionOptions, reference

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
KERNEL = SRC / "weft/ops/attention/attention_wgmma.cu"
BF16, FP16 = torch.bfloat16, torch.float16
THREE, TWO = attention_wgmma.candidates(64)[:2]
CAUSAL, FULL, SHARED = attention_wgmma.candidates(128)
SMALL = Config(keys=80, groups=2)
SMALL_SHARED = Config(keys=80, groups=2, out_in_q=True)
(WIDE,) = attention_wgmma.candidates(256)
(MIDDLE,) = attention_wgmma.candidates(192)
# dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, options, configuration.
Point = tuple[torch.dtype, tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any], Config]
POINTS: list[Point] = [
    (BF16, (1, 2, 200, 64), (2, 200), None, {"causal": True}, THREE),
    (FP16, (1, 2, 130, 64), (1, 333), None, {}, TWO),
    (BF16, (3, 1, 20, 64), (1, 300), [0, 400, 130], {"scale": 0.125}, TWO),
    (BF16, (2, 2, 150, 40), (1, 290), [290, 33], {"causal": True}, THREE),
    (FP16, (1, 3, 70, 8), (3, 19), None, {"causal": True}, THREE),
    (BF16, (1, 2, 129, 80), (2, 200), None, {"causal": True}, CAUSAL),
    (BF16, (1, 2, 70, 128), (2, 330), None, {}, FULL),
    (FP16, (1, 4, 140, 128), (2, 150), None, {"causal": True}, CAUSAL),
    (BF16, (2, 1, 130, 96), (1, 370), [177, 352], {}, SHARED),
    (FP16, (1, 1, 150, 72), (1, 40), None, {"causal": True}, SMALL),
    (BF16, (1, 1, 70, 192), (1, 130), None, {"causal": True}, MIDDLE),
    (BF16, (2, 1, 33, 256), (1, 170), [100, 161], {}, WIDE),
]
# Bounds relative to an output's largest value and to its root mean square, in eps of the dtype: those of
# test_attention_cuda.py.
LARGEST, MEAN = 1.0, 0.6


def toy_map(
    pointer: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    box = (tensor_map.SWIZZLE_BYTES // dtype.itemsize, box_rows)
    words = (pointer, *sizes[:2], strides[0], *box, dtype.itemsize, *sizes[2:], *strides[1:])
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)
    monkeypatch.setattr(attention_wgmma, "num_sms", lambda device: 2)


def rows_of_a_model(b: int, h: int, t: int, d: int, dtype: torch.dtype, generator: Any) -> torch.Tensor:
    """Return (B, H, T, D) with all heads of a token in one row, and NaN behind the tensor's last rows."""
    packed = torch.full((b, t + 1, h, d), torch.nan, dtype=dtype)
    packed[:, :t] = torch.randn((b, t, h, d), generator=generator).to(dtype)
    return packed[:, :t].transpose(1, 2)


def errors(point: Point, seed: int, device: str = "cpu") -> tuple[float, float, float]:
    """Return the errors of a call as shares of their bounds: largest, mean square, log-sum-exp."""
    dtype, (b, h, tq, d), (kv_heads, tk), key_lengths, options, config = point
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        rows_of_a_model(b, heads, t, d, dtype, generator)
        for heads, t in ((h, tq), (kv_heads, tk), (kv_heads, tk))
    )
    if not options.get("causal"):  # scores rise by 2^11 in each tile: the earlier sums must vanish
        q[..., 0], k[..., 0] = 8, torch.linspace(-16, 0, tk)
    lengths = torch.tensor(key_lengths or [0] * b, dtype=torch.int32)
    params = {**options, "padded": key_lengths is not None}
    expected, expected_lse = reference(q.double(), k.double(), v.double(), lengths, **params)
    for batch, length in enumerate(key_lengths or []):  # keys past a length may hold any values
        k[batch, :, length:], v[batch, :, length:] = torch.nan, torch.inf
    q, k, v, lengths = (x.to(device) if device != "cpu" else x for x in (q, k, v, lengths))
    arguments = AttentionOptions(**params)
    assert attention_wgmma.supports(q, k, v, arguments)
    out, lse = attention_wgmma.forward_with(
        config, q, k, v, lengths if params["padded"] else None, arguments
    )
    assert out.transpose(1, 2).is_contiguous()
    error = (out.cpu().double() - expected).abs() / torch.finfo(dtype).eps
    largest = float(error.amax() / (LARGEST * expected.abs().amax()))
    mean = float(error.square().mean() / (MEAN * expected.square().mean().sqrt()) ** 2)
    difference = torch.where(lse.cpu() == expected_lse, 0.0, (lse.cpu().double() - expected_lse).abs())
    lse_error = float((difference / (3e-6 + 1e-6 * expected_lse.abs())).nan_to_num(1e9).amax())
    return largest, mean, lse_error


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{'x'.join(map(str, p[1]))}-{p[2][1]}-{p[5].label}" + "-causal" * len(p[4])
)
def test_the_forward_matches_the_reference_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert max(errors(point, seed)) <= 1.0
