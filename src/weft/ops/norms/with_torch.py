"""The norms by PyTorch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import YES, Case, Implementation, Support, no
from weft.core.implementation import with_invariant
from weft.ops._common.invariant_rows import supports_unsplit_sums
from weft.ops.norms import spec


def supports(case: Case, device: str) -> Support:
    if any(i.values == "offset" for i in case.inputs):
        return no("F.layer_norm's backward is 1.2 times past the tolerance far from zero")
    if device == "cuda" and any(i.values == "special" for i in case.inputs):
        return no("F.rms_norm on a GPU answers NaN all over a row that holds an Inf")
    return YES


def _implementation(norm: spec.NormVariant) -> Implementation:
    def forward(*inputs: torch.Tensor, eps: float) -> Any:
        x, residual, weight, bias = norm.unpack_inputs(inputs)
        s = x if residual is None else (x + residual).contiguous()
        dtype = x.dtype
        rows = s if weight.dtype == dtype else s.float()  # the functions take one dtype only
        columns = x.shape[-1:]
        if norm.centred:
            y = torch.layer_norm(rows, columns, weight, bias, eps)
        else:
            y = torch.rms_norm(rows, columns, weight, eps)
        # Each question costs the host less than a call that has nothing to do.
        if y.dtype != dtype:
            y = y.to(dtype)
        if not y.is_contiguous():
            y = y.contiguous()
        return (y, s) if norm.residual else y

    def like(inputs: tuple[torch.Tensor, ...], params: dict[str, float]) -> Callable[..., Any] | None:
        """Return PyTorch's function for inputs whose result needs no cast and no copy."""
        eps, columns = params["eps"], inputs[0].shape[-1:]
        if not inputs[0].is_contiguous() or any(x.dtype != inputs[0].dtype for x in inputs):
            return None
        if norm.residual and not inputs[1].is_contiguous():
            return None
        if norm.residual and norm.centred:

            def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
                s = x + residual
                return torch.layer_norm(s, columns, weight, bias, eps), s

            return add_layer_norm
        if norm.residual:

            def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
                s = x + residual
                return torch.rms_norm(s, columns, weight, eps), s

            return add_rms_norm
        if norm.centred:
            return lambda x, weight, bias: torch.layer_norm(x, columns, weight, bias, eps)
        return lambda x, weight: torch.rms_norm(x, columns, weight, eps)

    forward.like = like  # type: ignore[attr-defined]
    function = "F.layer_norm" if norm.centred else "F.rms_norm"
    implementation = Implementation(
        operator=norm.name,
        backend="torch",
        forward=forward,
        supports=supports,
        idea=f"x + residual, {function}" if norm.residual else function,
    )
    # On a CPU a row is computed by itself; F.rms_norm takes the mean of squares by a plain reduction.
    row_supports = supports if norm.centred else supports_unsplit_sums
    return with_invariant(implementation, devices=("cpu",), supports=row_supports)


LAYER_NORM = _implementation(spec.LAYER_NORM_VARIANT)
RMS_NORM = _implementation(spec.RMS_NORM_VARIANT)
ADD_LAYER_NORM = _implementation(spec.ADD_LAYER_NORM_VARIANT)
ADD_RMS_NORM = _implementation(spec.ADD_RMS_NORM_VARIANT)
