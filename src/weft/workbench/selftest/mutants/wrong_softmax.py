"""Softmax with faults: overflowing exponentials, low-precision sums, skipped or repeated rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, after, owned, past_the_end, plant

Compute = Callable[[torch.Tensor], torch.Tensor]


def on_rows(compute: Compute) -> Callable[[], Forward]:
    """Return a forward that applies ``compute`` unless the input is empty."""
    return lambda: lambda x: compute(x) if x.numel() else torch.empty(x.shape, dtype=x.dtype,
                                                                  device=x.device)  # fmt: skip


def exponentials(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.exp(wide - wide.amax(-1, keepdim=True))


def _constant(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, 1 / x.shape[-1], dtype=x.dtype, device=x.device)


def _copies_row_0(y: torch.Tensor) -> torch.Tensor:
    output = owned(y)
    if y.dim() > 1 and y.shape[0] > 1:
        output[-max(1, y.shape[0] // 100) :] = output[0]
    return output


def _one_element_off(y: torch.Tensor) -> torch.Tensor:
    output = owned(y)
    if y.numel() < 1000:
        return output
    size = output.double().nan_to_num()
    at = int((size - size.square().mean().sqrt()).abs().argmin())  # one as large as most
    output.view(-1)[at : at + 1].mul_(1 + (60 if y.dtype == torch.float32 else 8) * eps(y))
    return output


def eps(y: torch.Tensor) -> float:
    return torch.finfo(y.dtype).eps


def _reads_behind(x: torch.Tensor) -> torch.Tensor:
    wide = x.contiguous().float()
    top = torch.fmax(wide.amax(-1, keepdim=True), past_the_end(owned(x)).float())
    e = torch.exp(wide - top)
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def _half_sums(x: torch.Tensor) -> torch.Tensor:
    e = exponentials(x)
    part = torch.zeros_like(e[..., 0], dtype=torch.float16)
    for piece in e.half().split(max(1, x.shape[-1] // 8), -1):
        part = part + piece.sum(-1, dtype=torch.float16)
    return (e / part.float()[..., None]).to(x.dtype)


def _coarse(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.to(torch.bfloat16).float(), -1).to(x.dtype)


def _no_maximum(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x.float())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


def _no_rescale(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    sums = torch.zeros_like(wide[..., :1])
    top = torch.full_like(sums, -math.inf)
    for piece in wide.split(512, -1):
        top = torch.maximum(top, piece.amax(-1, keepdim=True))
        # Correct would be sums * exp(old top - new top) first.
        sums = sums + torch.exp(piece - top).sum(-1, keepdim=True)
    return (torch.exp(wide - top) / sums).to(x.dtype).contiguous()


def _with_eps(x: torch.Tensor) -> torch.Tensor:
    e = exponentials(x)
    return (e / (e.sum(-1, keepdim=True) + 1e-3)).to(x.dtype).contiguous()


def _through_the_logarithm(x: torch.Tensor) -> torch.Tensor:
    """Compute exp(x - logsumexp x): at x = 1e4 the logarithm of the sum has lost its digits."""
    wide = x.float()
    return torch.exp(wide - torch.logsumexp(wide, -1, keepdim=True)).to(x.dtype).contiguous()


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """Subtract the maximum in the input itself: every call returns the same output."""
    if x.dtype != torch.float32 or 0 in x.stride():
        return torch.softmax(x, -1)
    x.sub_(x.amax(-1, keepdim=True))
    return torch.softmax(x, -1)


def _small_elements_zero(y: torch.Tensor) -> torch.Tensor:
    """Write zeros for elements in float32 that are a millionth of a millionth of the largest."""
    if y.dtype != torch.float32 or not y.numel():
        return y
    return torch.where(y < 1e-12 * y.nan_to_num().amax(), 0.0, y)


def _rows_too_heavy(x: torch.Tensor) -> torch.Tensor:
    """In fp16 make each element slightly high: by less than its rounding, but all in one direction."""
    y = torch.softmax(x.double(), -1)
    if x.dtype == torch.float16:
        y = y + 0.7 * eps(x) * y.nan_to_num().square().mean().sqrt()
    return y.to(x.dtype).contiguous()


def _denominators_kept() -> Forward:
    buffers: dict[object, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        e = exponentials(x)
        sums = buffers.setdefault((x.shape, x.dtype), torch.zeros_like(e[..., :1]))
        sums += e.sum(-1, keepdim=True)
        return (e / sums).to(x.dtype).contiguous()

    return forward


def _plant(row: str, what: str, title: str, killed_by: str, compute: Compute, only: str = "") -> Mutant:
    return plant(f"{row}/softmax/eager/{what}", title, killed_by, on_rows(compute), only=only)


def _after(row: str, what: str, title: str, killed_by: str, change: Compute, only: str = "") -> Mutant:
    forward = after("softmax", change)
    return plant(f"{row}/softmax/eager/{what}", title, killed_by, forward, only=only)


MUTANTS = (
    _plant("W02", "a-constant", "1 / columns everywhere", "error", _constant),
    _plant("W03", "its-input", "returns its input", "alias", lambda x: x),
    _plant("W03", "a-view", "returns a view of its input", "alias", lambda x: x.view_as(x)),
    _plant("W03", "a-copy", "returns a copy of its input", "error", torch.clone),
    _after("W04", "copies-row-0", "row 0 again in the last rows", "error", _copies_row_0),
    _after("W04", "one-element", "one element a few units off", "error", _one_element_off, "error"),
    _plant("W05", "reads-behind", "a maximum over one too many", "special again", _reads_behind),
    _plant("W08", "half-sums", "sums in fp16", "error drift property", _half_sums),
    _plant("W08", "bf16-inside", "works in bf16", "error drift", _coarse),
    _plant("W09", "no-maximum", "does not subtract the maximum", "special error", _no_maximum, "values"),
    _plant("W09", "no-rescale", "online, without the rescale", "error drift", _no_rescale),
    _plant("W10", "an-eps", "divides by the sum + 1e-3", "error drift property", _with_eps),
    _plant("W11", "logsumexp", "goes through the logarithm of the sum", "error drift property",
           _through_the_logarithm, "values"),
    _after("W12", "no-nan", "0 for NaN", "special", torch.nan_to_num, "values"),
    plant("W15/softmax/eager/sums-kept", "adds to sums it does not zero", "error drift property",
          lambda: _denominators_kept()),
    _plant("W20", "in-place", "shifts its input in place", "inputs", _in_place, "inputs"),
    _plant("W10", "heavy-rows", "fp16 rows that sum to 1.001", "property local", _rows_too_heavy),
    _after("W25", "small-elements", "zeros for the elements that are small", "local",
           _small_elements_zero, "local"),
)  # fmt: skip
