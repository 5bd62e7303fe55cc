"""Gated activations: SwiGLU and GEGLU; README.md has their implementations and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops._common.layout import contiguous_like
from weft.ops.gated.spec import check_arguments

for _name in ("swiglu", "geglu"):
    register(
        _name,
        Schema(
            repeats=True,
            inputs="Tensor gate, Tensor up",
            saved="Tensor gate, Tensor up",
            gradients=2,
            fake=lambda gate, up: contiguous_like(gate),
            fake_backward=lambda grad, gate, up: (contiguous_like(gate), contiguous_like(up)),
        ),
    )


@repeated(of_operator("swiglu"))
def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """SwiGLU, elementwise: silu(gate) up.

    Args:
        gate: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        up: tensor of the same shape, dtype and device. Triton's kernels read the halves of a joint
            projection, ``x.chunk(2, -1)``, without a copy.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A contiguous tensor of the same shape, dtype and device. Arithmetic is in float32, rounded once
        (torch's own calls also round silu(gate)).

    Raises:
        WeftError: the arguments are not two tensors of one shape, supported dtype and device; ``impl`` is
            unknown or cannot run here.

    Source: arXiv:2002.05202.
    """
    return call("swiglu", (gate, up), {}, impl, lambda: check_arguments("swiglu", gate, up), batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("geglu"))
def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """GEGLU, elementwise: gelu(gate) up, with GELU in its tanh form.

    Args:
        gate: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        up: tensor of the same shape, dtype and device. Triton's kernels read the halves of a joint
            projection, ``x.chunk(2, -1)``, without a copy.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A contiguous tensor of the same shape, dtype and device. Arithmetic is in float32, rounded once
        (torch's own calls also round gelu(gate)).

    Raises:
        WeftError: the arguments are not two tensors of one shape, supported dtype and device; ``impl`` is
            unknown or cannot run here.

    Source: arXiv:2002.05202.
    """
    return call("geglu", (gate, up), {}, impl, lambda: check_arguments("geglu", gate, up), batch_invariant)  # type: ignore[no-any-return]
