"""Token and position embedding; README.md in this folder describes the kernels and has their figures."""

from __future__ import annotations

import torch

from weft.core import WeftError
from weft.dispatch import repeated_calls
from weft.dispatch.operator import Schema, call, register
from weft.dispatch.plan_cache import recent
from weft.dispatch.public_calls import Repeat, repeat_of, repeated
from weft.ops._common.offsets import can_read
from weft.ops._common.placeholder import placeholder
from weft.ops.embedding.spec import check_arguments, check_ids

register(
    "embedding",
    Schema(
        repeats=True,
        inputs="Tensor weight, Tensor ids, Tensor positions",
        saved="Tensor ids, SymInt vocabulary, SymInt places",
        gradients=2,
        fake=lambda weight, ids, positions: weight.new_empty((*ids.shape, weight.shape[1])),
        fake_backward=lambda grad, ids, vocabulary, places: (
            grad.new_empty((vocabulary, grad.shape[2])),
            grad.new_empty((places, grad.shape[2])),
        ),
    ),
)


def _repeat(
    ids: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None = None, *, impl: str | None = None
) -> Repeat | None:
    """Return what repeats a look-up without positions; on a CPU the ids are read in each call."""
    if positions is not None or (ids.is_cpu and not repeated_calls.records_on_cpu):
        return None
    flat = ids if ids.dim() == 2 else ids.reshape(-1, ids.shape[-1])
    inputs = (weight, flat, placeholder(weight, (0, weight.shape[1]), weight.dtype))
    known = recent("embedding", impl, inputs, {})
    if known is not None and known.impl == "torch" and weight.shape[1]:
        return Repeat(lambda ids, weight: torch.embedding(weight, ids), by_torch=True)
    repeat = repeat_of("embedding", impl, inputs, {}, 2) if flat is ids else None
    if repeat is None:
        return None
    function = repeat.function
    return Repeat(lambda ids, weight: function(weight, ids), repeat.by_torch)


@repeated(_repeat)
def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the rows of ``weight`` that ``ids`` name, plus a row of ``positions`` for each position.

    Args:
        ids: (..., T) int64, each at least 0 and below V.
        weight: (V, C); float32, float16 or bfloat16; CPU or CUDA.
        positions: (P, C) with P >= T, of the same dtype and device: position t gets row t. None adds
            nothing; neither does a table of no rows, (0, C).
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (..., T, C), contiguous, of ``weight``'s dtype and device; the sum is rounded once.
        Differentiable in ``weight`` and ``positions``: gradients are summed in float32 in a fixed
        order, and rows that no id names are zero.

    Raises:
        WeftError: shapes, dtypes or devices do not match; on a CPU, an id is out of range; ``impl`` is
            unknown or does not run here.

    On a GPU no call reads the ids on the host, which would wait for the device. ``triton`` and ``cuda`` never
    use an id out of range as an address: its output row is NaN, and its gradient is dropped; ``torch`` ends
    in a device-side assertion. ``weft.ops.embedding.spec.check_ids(ids, V)`` reads the ids and raises.
    """
    places = positions
    if places is None and _is_dense(weight) and weight.dim() == 2:
        places = placeholder(weight, (0, weight.shape[1]), weight.dtype)
    flat = ids
    if isinstance(ids, torch.Tensor) and ids.dim() not in (0, 2) and _is_dense(ids):
        flat = ids.reshape(-1, ids.shape[-1]) if ids.numel() else ids.new_empty((0, ids.shape[-1]))

    def check() -> None:
        check_arguments(weight, flat, places)

    if can_read(flat):
        check()
        check_ids(flat, weight.shape[0])
    try:
        y = call("embedding", (weight, flat, places), {}, impl, check, batch_invariant)
    except IndexError as error:  # torch's own, under a transform, where the ids were not read
        expected = f"at least 0 and below {weight.shape[0]}, the rows of weight"
        raise WeftError("embedding: ids", expected=expected, got=error) from error
    return y if ids.dim() == 2 else y.view(*ids.shape, weight.shape[1])  # type: ignore[no-any-return]


def _is_dense(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
