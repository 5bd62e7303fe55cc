"""Attention's CUDA kernels, executed: tensor cores, fragments and copies as a CPU means them.

Compiled by g++ from the very .cu files and launched by the host code that a GPU's user runs; see
warp_emulator.hpp. Held against the float64 reference, forward and backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import warp_emulator
from weft.core import Case, Input
from weft.ops.attention import with_cuda
from weft.ops.attention.spec import reference

# Of one answer's largest value, and of its root mean square: rounding p, ds and the answer to half
# types gives 0.3 of the latter, in float64 otherwise.
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


@pytest.mark.slow
@pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ to compile the kernels with")
@pytest.mark.parametrize("name", ["64", "40", "256"])
def test_the_kernels_compute_the_reference(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warp_emulator.emulate(monkeypatch, folder)
    generator = torch.Generator().manual_seed(0)
    for _, dtype, (b, h, tq, d), (few, tk), given, more in (p for p in POINTS if p[0] == name):
        # Heads that lie in one row, as a model's do; and a row more, which nothing may read.
        packed = torch.full((b, tq + 1, h, d), torch.nan, dtype=dtype)
        packed[:, :tq] = torch.randn((b, tq, h, d), generator=generator).to(dtype)
        q = packed[:, :tq].transpose(1, 2)
        k, v = (torch.randn((b, few, tk, d), generator=generator).to(dtype) for _ in range(2))
        grad = torch.randn((b, h, tq, d), generator=generator).to(dtype)
        if not more.get("causal"):  # scores that rise by 2^11 a tile: all that was summed must fade
            q[..., 0], k[..., 0] = 8, torch.linspace(-16, 0, tk)
        lengths = torch.tensor(given or [0] * b, dtype=torch.int32)
        params = {**more, "padded": given is not None}
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        wanted, wanted_lse = reference(exact[0], exact[1], exact[2], lengths, **params)
        for one, length in enumerate(given or []):  # past a length anything may stand
            k[one, :, length:], v[one, :, length:] = torch.nan, torch.inf
        out, lse = with_cuda.forward(q, k, v, lengths, **params)
        assert out.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=3e-6)
        # Gradients go where they are told to, and between their rows nothing is touched.
        room = [torch.full((b, x.shape[2], x.shape[1], 2, d), torch.nan) for x in (q, k, v)]
        room = [x.to(dtype) for x in room]
        into = (lies(room[0]), lies(room[1]), lies(room[2]))
        found = with_cuda.backward(grad, q, k, v, lengths, out, lse, into=into, **params)
        assert all(x[:, :, :, 0].isnan().all() for x in room)
        gradients = torch.autograd.grad(wanted, exact, grad.double())
        for answer, right in zip((out, *found), (wanted.detach(), *gradients), strict=True):
            error = (answer.double() - right).abs() / torch.finfo(dtype).eps
            assert float(error.amax()) <= LARGEST * float(right.abs().amax())
            assert float(error.square().mean()) <= (MEAN * float(right.square().mean().sqrt())) ** 2


def lies(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D): the second of two lines of each head in each row."""
    return x[:, :, :, 1].transpose(1, 2)


def test_float32_is_refused_with_a_way_out() -> None:
    inputs = tuple(Input(name=n, shape=(1, 1, 8, 64), dtype="float32") for n in "qkv")
    answer = with_cuda.supports(Case(name="call", inputs=inputs), "cuda")
    assert not answer and "triton" in answer.reason
