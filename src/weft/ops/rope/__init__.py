"""Rotary position embedding; README.md has its implementations and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops.rope.spec import check_arguments


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


register(
    "rope",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor cos, Tensor sin, bool interleaved",
        saved="Tensor cos, Tensor sin, bool interleaved",
        gradients=1,
        fake=lambda x, cos, sin: _contiguous(x),
        fake_backward=lambda grad, cos, sin: (_contiguous(grad),),
        params=("interleaved",),
    ),
)


@repeated(of_operator("rope", interleaved=False))
def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Turn each pair of a head's elements by its position's angle: queries or keys of attention.

    Args:
        x: (B, H, T, D) with D even; float32, float16 or bfloat16; CPU or CUDA. Any strides: a
            (B, T, H, D) tensor with its middle dimensions swapped is read where it lies.
        cos: (T, D/2) float32, the cosine of the angle of position t and pair i.
        sin: (T, D/2) float32, its sine.
        interleaved: False pairs element i with i + D/2 (Llama, Hugging Face); True 2i with 2i + 1
            (GPT-J).
        impl: an implementation's name (``weft ops`` lists them); None chooses.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (B, H, T, D), contiguous, of ``x``'s dtype and device; arithmetic is in float32.
        Differentiable in ``x`` alone: the gradient is turned back by the same angles.

    Raises:
        WeftError: shapes, dtypes or devices that do not fit; ``impl`` is unknown or does not run
            here.

    Source: arXiv:2104.09864.
    """
    if type(interleaved) is not bool:  # 1 is like an earlier True
        check_arguments(x, cos, sin, interleaved=interleaved)
    inputs, params = (x, cos, sin), {"interleaved": interleaved}
    return call("rope", inputs, params, impl, lambda: check_arguments(*inputs, **params), batch_invariant)  # type: ignore[no-any-return]
