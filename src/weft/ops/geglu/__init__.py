"""GEGLU, a gated activation; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.public import Schema, call, register
from weft.ops.geglu.spec import check_arguments

register(
    "geglu",
    Schema(
        inputs="Tensor gate, Tensor up",
        saved="Tensor gate, Tensor up",
        gradients=2,
        fake=lambda gate, up: contiguous_like(gate),
        fake_backward=lambda grad, gate, up: (contiguous_like(gate), contiguous_like(up)),
    ),
)


def geglu(gate: torch.Tensor, up: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """GEGLU, elementwise: gelu(gate) up, gelu in its tanh form.

    Args:
        gate: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        up: tensor of the same shape, dtype and device. The halves of a joint projection,
            ``x.chunk(2, -1)``, are read by Triton's kernels where they lie.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A contiguous tensor of the same shape, dtype and device. Arithmetic is in float32, rounded
        once (torch's own calls round f(gate) as well).

    Raises:
        WeftError: the two are no tensors of one shape, dtype and device, or of another dtype;
            ``impl`` is unknown or does not run here.

    Source: arXiv:2002.05202.
    """
    return call("geglu", (gate, up), {}, impl, lambda: check_arguments(gate, up))  # type: ignore[no-any-return]
