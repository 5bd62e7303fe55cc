"""Layer norm with faults in both directions: eps, count, scale, moments, unzeroed sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft.core.implementation import anywhere
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, honest, plant

Tensors = tuple[torch.Tensor, ...]


def gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> Tensors:
    """Compute the library's gradients through autograd."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        bias = torch.zeros_like(weight).requires_grad_()
        y = honest("layer_norm")(*leaves, bias, eps=eps)
    return torch.autograd.grad(y, [*leaves, bias], grad)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    wide = x.float()
    hat = (wide - wide.mean(-1, keepdim=True)) * scale
    return (hat * weight.float() + bias.float()).to(x.dtype).contiguous()


def _variance(x: torch.Tensor, less: int = 0) -> torch.Tensor:
    wide = x.float()
    left = (wide - wide.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
    return left / max(1, x.shape[-1] - less)


def _no_eps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> Any:
    return _normalised(x, weight, bias, torch.rsqrt(_variance(x)))


def _one_less(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> Any:
    return _normalised(x, weight, bias, torch.rsqrt(_variance(x, 1) + eps))


def _no_scale(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> Any:
    return _normalised(x, torch.ones_like(weight), bias, torch.rsqrt(_variance(x) + eps))


def _two_moments(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> Any:
    """Compute the variance as E[x^2] - E[x]^2, which loses all digits for 1e4 plus noise."""
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True) - wide.mean(-1, keepdim=True).square()
    return _normalised(x, weight, bias, torch.rsqrt(variance.clamp(min=0) + eps))


def _two_moments_back(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> Tensors:
    wide, g = x.float(), grad.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    scale = torch.rsqrt(variance.clamp(min=0) + eps)
    hat, gw = (wide - mean) * scale, g * weight.float()
    dx = (gw - gw.mean(-1, keepdim=True) - hat * (gw * hat).mean(-1, keepdim=True)) * scale
    _, dw, db = gradients(grad, x, weight, eps=eps)
    return dx.to(x.dtype).contiguous(), dw, db


def _sums_kept() -> Forward:
    """Add dweight and dbias to sums that are zero only at the first call."""
    buffers: dict[object, Tensors] = {}

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> Tensors:
        dx, dw, db = gradients(grad, x, weight, eps=eps)
        key = (x.shape, x.dtype, weight.dtype)
        sums = buffers.setdefault(key, (torch.zeros_like(dw), torch.zeros_like(db)))
        for total, one in zip(sums, (dw, db), strict=True):
            total.add_(one)
        return dx, sums[0].clone(), sums[1].clone()

    return backward


def _far_too(mutant: Mutant) -> Mutant:
    """Judge the mutant far from zero as well, where the library's own is not judged."""
    return replace(mutant, make=lambda: replace(mutant.make(), supports=anywhere))


def _forward(row: str, what: str, title: str, killed_by: str, compute: Forward) -> Mutant:
    return plant(f"{row}/layer_norm/eager/{what}", title, killed_by, lambda: compute)


def _backward(row: str, what: str, title: str, killed_by: str, make: Callable[[], Forward]) -> Mutant:
    identity = f"{row}/layer_norm/eager/{what}"
    return plant(identity, title, killed_by, lambda: honest("layer_norm"), backward=make)


MUTANTS = (
    _forward("W10", "no-eps", "no eps under the root", "error drift", _no_eps),
    _forward("W10", "one-less", "divides by N - 1", "error drift", _one_less),
    _forward("W10", "no-scale", "leaves the weight out", "error drift property", _no_scale),
    _far_too(_forward("W11", "two-moments", "E[x^2] - E[x]^2", "error drift", _two_moments)),
    _far_too(_backward("W11", "two-moments-back", "the same in the backward", "error drift",
                       lambda: _two_moments_back)),
    _backward("W15", "sums-kept", "dweight added to what was there", "error drift repeats",
              _sums_kept),
)  # fmt: skip
