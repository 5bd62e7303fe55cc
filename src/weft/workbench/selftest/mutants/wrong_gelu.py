"""GELU with faults: another function, an overflowing tanh, low precision, a lost unit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import after, honest, owned, plant

Compute = Callable[[torch.Tensor], torch.Tensor]
K = math.sqrt(2 / math.pi)


def _of(x: torch.Tensor, cubic: float = 0.044715) -> torch.Tensor:
    return K * (x + cubic * x * x * x)


def _skips_the_tail(x: torch.Tensor) -> torch.Tensor:
    """Compute whole vectors of eight, and skip the rest."""
    y, output = honest("gelu")(x), torch.empty_like(x)
    whole = x.numel() // 8 * 8 if x.numel() > 8 else x.numel()
    flat = output.as_strided((whole,), (1,)) if whole else output.view(-1)
    flat.copy_(y.as_strided((whole,), (1,)) if whole else y.reshape(-1))
    return output


def _one_element_off(y: torch.Tensor) -> torch.Tensor:
    output = owned(y)
    size = output.double().abs().nan_to_num(0, 0, 0)
    if y.numel() >= 1000:
        at = int((size - size.square().mean().sqrt()).abs().argmin())  # one as large as most
        output.view(-1)[at : at + 1].mul_(1 - 12 * torch.finfo(y.dtype).eps)
    return output


def _short(x: torch.Tensor) -> torch.Tensor:
    y = honest("gelu")(x.double())
    return (y * (1 - 1.6 * torch.finfo(x.dtype).eps)).to(x.dtype).contiguous()


def _above_the_ramp(y: torch.Tensor) -> torch.Tensor:
    """Now and then an element a step or two high: within the tolerance, but more than x.

    So few that no seed makes their RMS error too large: only the property may kill this one.
    """
    output = owned(y)
    some = output.view(-1)[::64]
    high = (some.double() * (1 + 1.3 * torch.finfo(y.dtype).eps)).to(y.dtype)
    some.copy_(torch.where(some.abs() < 3, some, high))
    return output


def _coarse(x: torch.Tensor) -> torch.Tensor:
    return honest("gelu")(x.to(torch.bfloat16).float()).to(x.dtype)  # type: ignore[no-any-return]


def _cubic(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (0.5 * wide * (1 + torch.tanh(_of(wide, 0.0447)))).to(x.dtype)


def _with_erf(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def _textbook_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    e = torch.exp(2 * _of(wide))
    return (0.5 * wide * (1 + (e - 1) / (e + 1))).to(x.dtype)


def _clamps(y: torch.Tensor) -> torch.Tensor:
    return y.clamp(max=torch.finfo(y.dtype).max)


def _clips_its_input(x: torch.Tensor) -> torch.Tensor:
    """Raise values far below 0 to -30 in the input itself; the output there is -0 anyway."""
    far = x.isfinite() & (x < -30)
    if 0 not in x.stride() and bool(far.any()):
        x.masked_fill_(far, -30.0)
    return honest("gelu")(x)  # type: ignore[no-any-return]


def _plant(row: str, what: str, title: str, killed_by: str, compute: Compute, only: str = "") -> Mutant:
    return plant(f"{row}/gelu/eager/{what}", title, killed_by, lambda: compute, only=only)


def _after(row: str, what: str, title: str, killed_by: str, change: Compute, only: str = "") -> Mutant:
    return plant(f"{row}/gelu/eager/{what}", title, killed_by, after("gelu", change), only=only)


MUTANTS = (
    _plant("W02", "a-constant", "0.28 everywhere", "error", lambda x: torch.full_like(x, 0.28)),
    _plant("W02", "relu", "max(x, 0)", "error drift", torch.relu),
    _plant("W03", "its-input", "returns its input", "alias", lambda x: x),
    _plant("W03", "a-view", "returns a view of its input", "alias", lambda x: x.view_as(x)),
    _plant("W03", "a-copy", "returns a copy of its input", "error property", torch.clone),
    _plant("W04", "no-tail", "skips the remainder after vectors of 8", "written", _skips_the_tail,
           "sizes"),
    _after("W04", "one-element", "one element a few units off", "error", _one_element_off, "error"),
    _plant("W08", "bf16-inside", "works in bf16", "error drift", _coarse),
    _plant("W08", "short", "each element a unit or two short", "drift", _short, "drift"),
    _plant("W10", "cubic", "0.0447 for 0.044715", "error drift", _cubic),
    _after("W10", "no-half", "the factor 1/2 dropped", "error property", lambda y: y * 2),
    _plant("W10", "erf", "the other GELU, with erf", "error drift", _with_erf),
    _after("W12", "no-nan", "0 for NaN", "special", torch.nan_to_num, "special"),
    _after("W12", "no-inf", "the largest number for Inf", "special", _clamps, "values"),
    _plant("W13", "textbook-tanh", "tanh as (e - 1) / (e + 1)", "special", _textbook_tanh,
           "values"),
    _plant("W20", "in-place", "clips its input in place", "inputs", _clips_its_input, "inputs"),
    _after("W10", "above-the-ramp", "steps above x", "property", _above_the_ramp, "property"),
)  # fmt: skip
