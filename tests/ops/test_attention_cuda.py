"""Attention's CUDA kernels in the CPU emulator: tensor cores, fragments and asynchronous copies.

g++ compiles the .cu files as they are, and the host code that a GPU uses launches them; see
warp_emulator.hpp. Results are compared with the float64 reference, forward and backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from weft.core import Case, Input
from weft.ops.attention import with_cuda
from weft.ops.attention.spec import reference

# Bounds relative to an output's largest value and to its root mean square. Rounding p, ds and the output to
# half types in an otherwise float64 computation gives 0.3 of the latter.
LARGEST, MEAN = 1.0, 0.6  # eps of the dtype

# name, dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, params. One program of each kernel for one row
# of these and the next that has its dtype, D and dropout.
POINTS: list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, int], Any, dict[str, Any]]] = [
    ("64", torch.bfloat16, (1, 4, 130, 64), (2, 70), None, {"causal": True}),
    ("64", torch.bfloat16, (3, 1, 20, 64), (1, 133), [0, 200, 125], {"scale": 0.125}),
    (
        "40",
        torch.float16,
        (2, 2, 70, 40),
        (1, 85),
        [85, 33],
        {"causal": True, "dropout_p": 0.3, "seed": 2**40 + 5},
    ),
    ("256", torch.bfloat16, (1, 1, 33, 256), (1, 70), None, {"causal": True}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ to compile the kernels with")
@pytest.mark.parametrize("name", ["64", "40", "256"])
def test_kernels_match_the_reference(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warp_emulator.emulate(monkeypatch, folder)
    generator = torch.Generator().manual_seed(0)
    for _, dtype, (b, h, tq, d), (kv_heads, tk), key_lengths, options in (p for p in POINTS if p[0] == name):
        # All heads of a token in one row, as in a model; and an additional row, which no kernel may read.
        packed = torch.full((b, tq + 1, h, d), torch.nan, dtype=dtype)
        packed[:, :tq] = torch.randn((b, tq, h, d), generator=generator).to(dtype)
        q = packed[:, :tq].transpose(1, 2)
        k, v = (torch.randn((b, kv_heads, tk, d), generator=generator).to(dtype) for _ in range(2))
        grad = torch.randn((b, h, tq, d), generator=generator).to(dtype)
        if not options.get("causal"):  # scores rise by 2^11 in each tile: the earlier sums must vanish
            q[..., 0], k[..., 0] = 8, torch.linspace(-16, 0, tk)
        lengths = torch.tensor(key_lengths or [0] * b, dtype=torch.int32)
        params = {**options, "padded": key_lengths is not None}
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = reference(exact[0], exact[1], exact[2], lengths, **params)
        for one, length in enumerate(key_lengths or []):  # keys past a length may hold any values
            k[one, :, length:], v[one, :, length:] = torch.nan, torch.inf
        out, lse = with_cuda.forward(q, k, v, lengths, **params)
        assert out.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=3e-6)
        # Gradients are written into the key_lengths memory, and nothing between their rows is touched.
        buffers = [torch.full((b, x.shape[2], x.shape[1], 2, d), torch.nan) for x in (q, k, v)]
        buffers = [x.to(dtype) for x in buffers]
        into = (second_line(buffers[0]), second_line(buffers[1]), second_line(buffers[2]))
        gradients = with_cuda.backward(grad, q, k, v, lengths, out, lse, into=into, **params)
        assert all(x[:, :, :, 0].isnan().all() for x in buffers)
        exact_gradients = torch.autograd.grad(expected, exact, grad.double())
        for answer, exact_value in zip((out, *gradients), (expected.detach(), *exact_gradients), strict=True):
            error = (answer.double() - exact_value).abs() / torch.finfo(dtype).eps
            assert float(error.amax()) <= LARGEST * float(exact_value.abs().amax())
            assert float(error.square().mean()) <= (MEAN * float(exact_value.square().mean().sqrt())) ** 2


def second_line(x: torch.Tensor) -> torch.Tensor:
    """Return (B, H, T, D): the second of two lines of each head in each row."""
    return x[:, :, :, 1].transpose(1, 2)


def test_float32_is_refused_with_an_alternative() -> None:
    inputs = tuple(Input(name=n, shape=(1, 1, 8, 64), dtype="float32") for n in "qkv")
    answer = with_cuda.supports(Case(name="call", inputs=inputs), "cuda")
    assert not answer and "triton" in answer.reason
