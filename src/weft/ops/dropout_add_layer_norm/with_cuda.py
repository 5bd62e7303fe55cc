"""Dropout, residual and layer norm in CUDA C++, in two steps; see dropout_add.cu, _shared/norm*.cu.

Ten bytes an element forward where eight must move in bf16, fourteen backward where ten must.
"""

from __future__ import annotations

from pathlib import Path

import torch

from weft.core import Case, Implementation, Support, no
from weft.ops._shared import norm_cuda
from weft.ops._shared.elementwise import Walk, contiguous_like
from weft.ops._shared.philox_dropout import drops_all, rule

WALK = Walk(Path(__file__).with_name("dropout_add.cu"), "dropout_add", "dropout_back")


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    s = contiguous_like(x)
    if drops_all(p):
        s.copy_(residual)
    else:
        tensors = (x.contiguous(), residual.contiguous(), s)
        WALK.run("dropout_add", tensors, seed, rule(p))
    y, _ = norm_cuda.forward(s, None, weight, bias, eps)
    return y, s


def backward(
    grad: torch.Tensor,
    more: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    dx, dr, dw, db = norm_cuda.backward(grad, more, s, weight, eps, centred=True)
    if drops_all(p):
        dx.zero_()
    else:
        WALK.run("dropout_back", (dr, dx), seed, rule(p))
    return dx, dr, dw, db


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape[-1:] == (1,):
        return no("a row of one column: its backward drifts by 1.15 times what is allowed")
    return norm_cuda.supports(case, device)


IMPLEMENTATION = Implementation(
    operator="dropout_add_layer_norm",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=WALK.specimens,
    idea="two steps: dropout and residual, 16 bytes a thread, then the norm",
)
