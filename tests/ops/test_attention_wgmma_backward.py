"""Attention's wgmma backward in the emulator: sizes, masks, lengths and schedules; planted faults are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from ops.test_attention_wgmma import rows_of_a_model, toy_map
from weft.ops._common.hopper import tensor_map
from weft.ops.attention import attention_wgmma_backward
from weft.ops.attention.spec import AttentionOptions, reference

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
KERNEL = SRC / "weft/ops/attention/attention_wgmma_backward.cu"
BF16, FP16 = torch.bfloat16, torch.float16
# dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, options.
Point = tuple[torch.dtype, tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any]]
POINTS: list[Point] = [
    (BF16, (1, 2, 200, 64), (2, 200), None, {"causal": True}),
    (FP16, (1, 2, 130, 128), (1, 270), None, {}),
    (BF16, (2, 1, 150, 72), (1, 290), [260, 33], {"causal": True}),
    (BF16, (3, 2, 70, 40), (1, 150), [0, 400, 130], {"scale": 0.125}),
    (FP16, (1, 1, 300, 8), (1, 140), None, {"causal": True}),
    (BF16, (1, 1, 70, 128), (1, 300), None, {"causal": True}),
]
LARGEST, MEAN = 1.0, 0.6  # as in test_attention_cuda.py


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)


def errors(point: Point, seed: int, device: str = "cpu") -> list[float]:
    """Return the errors of dq, dk and dv as shares of their bounds: largest and mean square."""
    dtype, (b, h, tq, d), (kv_heads, tk), key_lengths, options = point
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        rows_of_a_model(b, heads, t, d, dtype, generator, device)
        for heads, t in ((h, tq), (kv_heads, tk), (kv_heads, tk), (h, tq))
    )
    lengths = torch.tensor(key_lengths or [0] * b, dtype=torch.int32, device=device)
    params = {**options, "padded": key_lengths is not None}
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference(exact[0], exact[1], exact[2], lengths, **params)
    expected = torch.autograd.grad(out, exact, grad.double())
    for batch, length in enumerate(key_lengths or []):
        k[batch, :, length:], v[batch, :, length:] = torch.nan, torch.inf
    arguments = AttentionOptions(**params)
    rounded = out.detach().to(dtype)
    assert attention_wgmma_backward.supports((q, k, v, grad, rounded), arguments)
    visible = lengths if params["padded"] else None
    saved = (q, k, v, visible, rounded, lse.detach().float())
    gradients = attention_wgmma_backward.backward(grad, saved, arguments)
    shares = []
    for answer, value in zip(gradients, expected, strict=True):
        error = (answer.double() - value).abs().nan_to_num(1e9) / torch.finfo(dtype).eps
        shares.append(float(error.amax() / (LARGEST * value.abs().amax())))
        shares.append(float(error.square().mean() / (MEAN * value.square().mean().sqrt()) ** 2))
    return shares


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{'x'.join(map(str, p[1]))}-{p[2][1]}-{''.join(p[4])}"
)
def test_gradients_match_the_reference_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(2):
        assert max(errors(point, seed)) <= 1.0
