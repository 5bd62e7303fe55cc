"""Matrix product with faults: low-precision factors or sums, missing parts of K or of the rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import Forward, after, owned, plant

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PARTIAL_SUMS = 16


def wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def _memory_of_a_factor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    m, n = a.shape[0], b.shape[1]
    for x in (a, b):
        if x.is_contiguous() and x.numel() >= m * n > 0:
            return x.view(-1)[: m * n].view(m, n)
    return wide(a, b)


def _copies_row_0(c: torch.Tensor) -> torch.Tensor:
    output = owned(c)
    if c.shape[0] > 1:
        output[-max(1, c.shape[0] // 100) :] = output[0]
    return output


def _skips_the_tail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute whole tiles of eight columns, and skip the rest."""
    output = a.new_empty(a.shape[0], b.shape[1])
    whole = b.shape[1] // 8 * 8
    output[:, :whole] = wide(a, b[:, :whole])
    return output


def _one_element_off(c: torch.Tensor) -> torch.Tensor:
    output = owned(c)
    if c.numel() < 1000:
        return output
    size = output.double().abs().nan_to_num(0, 0, 0)
    at = int((size - size.square().mean().sqrt()).abs().argmin())  # one as large as most
    units = 60 if c.dtype == torch.float32 else 14
    output.view(-1)[at : at + 1].mul_(1 + units * torch.finfo(c.dtype).eps)
    return output


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to ten bits of mantissa, as a tensor core reads it."""
    if x.dtype != torch.float32:
        return x
    # Clears 13 of the 23 bits of a float32's mantissa.
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _half_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    if a.dtype == torch.float32:
        total = total.half()
    for start in range(0, a.shape[1], 4):
        part = slice(start, start + 4)
        total = total + (a[:, part].double() @ b[part].double()).to(total.dtype)
    return total.to(a.dtype)


def _partial_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add up sixteen partial sums in bf16: each is right, and their total is within the drift bound."""
    if a.dtype != torch.bfloat16:
        return wide(a, b)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    step = max(1, -(-a.shape[1] // PARTIAL_SUMS))
    for start in range(0, a.shape[1], step):
        part = slice(start, start + step)
        total = total + wide(a[:, part], b[part])
    return total


def _winograd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Half the products (Winograd, 1968): (a1 + b2)(a2 + b1) - a1 a2 - b1 b2 cancels where the
    factors are of unlike size."""
    if a.shape[1] < 2:
        return wide(a, b)
    even = a.shape[1] // 2 * 2
    x, y = a.float(), b.float()
    a1, a2, b1, b2 = x[:, 0:even:2], x[:, 1:even:2], y[0:even:2], y[1:even:2]
    both = ((a1[:, :, None] + b2[None]) * (a2[:, :, None] + b1[None])).sum(1)
    c = both - (a1 * a2).sum(1)[:, None] - (b1 * b2).sum(0)[None]
    return (c + x[:, even:] @ y[even:]).to(a.dtype)


def _accumulates() -> Forward:
    buffers: dict[object, torch.Tensor] = {}

    def forward(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
        c = wide(a, b)
        buffer = buffers.setdefault((a.shape, b.shape, a.dtype), torch.zeros_like(c))
        return buffer.add_(c).clone()

    return forward


def _by_steps_of_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Store at the first step of K and add at the others: for K = 0 nothing is stored."""
    c = a.new_empty(a.shape[0], b.shape[1])
    return c.copy_(wide(a, b)) if a.shape[1] else c


def _leaning(c: torch.Tensor) -> torch.Tensor:
    """In half types make even columns slightly high and odd ones low, by less than two units each."""
    if c.dtype == torch.float32 or c.shape[1] < 100:
        return c
    size = c.double().square().mean().sqrt()
    direction = torch.ones(c.shape[1], dtype=torch.float64, device=c.device)
    direction[1::2] = -1
    return (c.double() + direction * size * torch.finfo(c.dtype).eps).to(c.dtype)


def _plant(row: str, what: str, title: str, killed_by: str, compute: Compute, only: str = "") -> Mutant:
    def forward(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
        return compute(a, b)

    return plant(f"{row}/matmul/eager/{what}", title, killed_by, lambda: forward, only=only)


def _after(
    row: str,
    what: str,
    title: str,
    killed_by: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    only: str = "",
) -> Mutant:
    forward = after("matmul", change)
    return plant(f"{row}/matmul/eager/{what}", title, killed_by, forward, only=only)


MUTANTS = (
    _plant("W03", "a-factor", "returns the memory of a factor", "alias", _memory_of_a_factor),
    _plant("W02", "columns-alike", "the first column everywhere", "error drift",
           lambda a, b: wide(a, b[:, :1].expand(b.shape))),
    _after("W04", "copies-row-0", "row 0 again in the last rows", "error", _copies_row_0),
    _plant("W04", "no-tail", "skips the columns after tiles of 8", "written", _skips_the_tail,
           "sizes"),
    _after("W04", "one-element", "one element a few units off", "error", _one_element_off, "error"),
    _plant("W08", "tf32", "cuts float32 factors to ten bits", "error drift property",
           lambda a, b: wide(_tf32(a), _tf32(b))),
    _plant("W08", "half-sums", "sums in the half type", "error drift property special", _half_sums),
    _plant("W08", "partial-sums", "adds up partial sums in bf16", "growth", _partial_sums, "growth"),
    _plant("W10", "one-less", "leaves out the last of K", "error drift",
           lambda a, b: wide(a[:, :-1], b[:-1]) if a.shape[1] else wide(a, b)),
    _after("W10", "a-scale", "scaled by 1.01", "error drift property", lambda c: c * 1.01),
    _plant("W11", "winograd", "Winograd's inner products", "error drift", _winograd, "values"),
    _after("W12", "no-nan", "0 for NaN", "special", torch.nan_to_num, "special"),
    plant("W15/matmul/eager/accumulates", "adds to a buffer it does not zero",
          "error drift property", lambda: _accumulates()),
    _plant("W18", "nothing-of-k", "stores nothing where K is 0", "written", _by_steps_of_k,
           "empties"),
    _after("W10", "leaning", "columns alternately too high and too low", "property local", _leaning),
)  # fmt: skip
