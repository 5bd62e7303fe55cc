"""Norm calls that repeat the launches of an earlier call of their kind, for the kernels of both backends.

These kernels take their tensors in one order. The forward: x, residual, weight, bias, y, s. The backward:
gradient of y, gradient of s, s, weight, dx, dresidual, partial sums; then a kernel that adds those up:
partial sums, dweight, dbias. An absent tensor is replaced by another one, which the kernel does not read.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from weft.ops._common.prepared import Launch, LaunchCache, are_repeatable

WEIGHT_ALIGNMENT = 32  # bytes; the widest load of a float32 weight


class RepeatedNorms:
    """Launches of one backend's norm kernels, by kind of call.

    The keys of the forward and of the backward are None for calls that no other may repeat.
    """

    def __init__(self) -> None:
        self._launches = LaunchCache()
        self._get = self._launches.get

    def forward_key(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Hashable:
        """Return the key of a forward whose tensors are contiguous and aligned."""
        if not are_repeatable(x, residual) or not are_repeatable(weight, bias, alignment=WEIGHT_ALIGNMENT):
            return None
        return (
            "forward",
            x.shape,
            x.dtype,
            weight.dtype,
            x.get_device(),
            residual is None,
            bias is None,
            eps,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return (y, s) by the launch of an earlier call, or None if there is none."""
        # One function: forward_key and are_repeatable as calls would cost the host more than a launch does.
        kind = (residual is None, bias is None, eps)
        launch = self._get(("forward", x.shape, x.dtype, weight.dtype, x.get_device(), *kind))
        if launch is None or not (x.is_contiguous() and weight.is_contiguous()):
            return None
        x_address = residual_address = x.data_ptr()
        weight_address = bias_address = weight.data_ptr()
        if residual is not None:
            if not residual.is_contiguous():
                return None
            residual_address = residual.data_ptr()
        if bias is not None:
            if not bias.is_contiguous():
                return None
            bias_address = bias.data_ptr()
        is_aligned = not (x_address | residual_address) & 15
        if not is_aligned or (weight_address | bias_address) & (WEIGHT_ALIGNMENT - 1):
            return None
        y = torch.empty_like(x)
        s = x if residual is None else torch.empty_like(x)
        launch(x_address, residual_address, weight_address, bias_address, y.data_ptr(), s.data_ptr())
        return y, s

    def store_forward(self, key: Hashable, launch: Launch | None) -> None:
        self._launches.store(key, launch)

    def backward_key(
        self,
        grad: Tensor,
        grad_s: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        centred: bool,
        shares: bool,
    ) -> Hashable:
        """Return the key of a backward whose tensors are contiguous and aligned."""
        if not are_repeatable(grad, grad_s, x) or not are_repeatable(weight, alignment=WEIGHT_ALIGNMENT):
            return None
        kind = (grad_s is None, centred, eps, shares)
        return ("backward", x.shape, x.dtype, weight.dtype, x.get_device(), *kind)

    def backward(
        self,
        key: Hashable,
        grad: Tensor,
        grad_s: Tensor | None,
        x: Tensor,
        weight: Tensor,
        centred: bool,
        shares: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return (dx, dresidual, dweight, dbias) by the launches of an earlier call, or None.

        dresidual ``shares`` the memory of dx: CUDA's kernels write the same bits there twice, Triton's once.
        """
        launches = self._get(key)
        if launches is None:
            return None
        rows_launch, sum_launch, count = launches
        # All tensors of a key are contiguous, and so is what is like them.
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        dr = dx if grad_s is None or shares else torch.empty_like(x)
        db = torch.empty_like(weight) if centred else dw
        partials = torch.empty(count, dtype=torch.float32, device=x.device).data_ptr()
        grad_address = grad.data_ptr()
        rows_launch(
            grad_address,
            grad_address if grad_s is None else grad_s.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            dx.data_ptr(),
            dr.data_ptr(),
            partials,
        )
        sum_launch(partials, dw.data_ptr(), db.data_ptr())
        return dx, dr, dw, db

    def store_backward(
        self, key: Hashable, rows_launch: Launch | None, sum_launch: Launch | None, partials: Tensor
    ) -> None:
        self._launches.store(key, (rows_launch, sum_launch, partials.numel()))
