"""Histogram in Triton: programs count blocks by ``tl.histogram``, and add their counts in memory."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import FORWARD, Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import dense, flat
from weft.ops.histogram.spec import float_range

BLOCK, WARPS = 2048, 4
PROGRAMS = 8  # for each SM
MIN_BINS, MAX_BINS = 32, 2048  # of tl.histogram: a lane for each bin; counters of a program


@triton.jit
def bins_of(x, bins, low, high, scale, inside, FLOATS: tl.constexpr):
    """Return the bin of each element, and whether it is counted; spec.py has the definition."""
    if FLOATS:
        wide = x.to(tl.float32)
        inside = inside & (wide >= low) & (wide <= high)
        # A value that is not counted may have no integer.
        product = tl.where(inside, (wide - low) * scale, 0.0)
        number = tl.minimum(product.to(tl.int32), bins - 1)
    else:
        number = x.to(tl.int32)
        inside = inside & (number >= 0) & (number < bins)
    return tl.where(inside, number, 0), inside


@triton.jit
def count_blocks(
    x_ptr,
    counts_ptr,
    n,
    bins,
    low,
    high,
    scale,
    FLOATS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x: (n,); counts: (bins,) int64, zeros before the launch. Bytes: x read once, BINS counts a program.
    totals = tl.zeros((BINS,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0)
        number, inside = bins_of(x, bins, low, high, scale, at < n, FLOATS)
        totals += tl.histogram(number, BINS, mask=inside)
    bin = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + bin, totals.to(tl.int64), mask=(bin < bins) & (totals > 0))


@triton.jit
def count_in_memory(x_ptr, counts_ptr, n, bins, low, high, scale, FLOATS: tl.constexpr, BLOCK: tl.constexpr):
    # As above, for more bins than a program has counters: an atomic addition in memory for each element.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    number, inside = bins_of(x, bins, low, high, scale, at < n, FLOATS)
    tl.atomic_add(counts_ptr + number, tl.full((BLOCK,), 1, tl.int64), mask=inside)


def forward(
    x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    n = x.numel()
    if n == 0:
        return counts
    elements = flat(dense(x))
    floats = x.is_floating_point()
    limits = float_range(bins, low, high) if low is not None and high is not None else (0.0, 0.0, 0.0)
    blocks = triton.cdiv(n, BLOCK)
    if bins > MAX_BINS:
        count_in_memory[(blocks,)](
            elements, counts, n, bins, *limits, FLOATS=floats, BLOCK=BLOCK, num_warps=WARPS
        )
        return counts
    programs = min(blocks, PROGRAMS * num_sms(x.device))
    count_blocks[(programs,)](
        elements,
        counts,
        n,
        bins,
        *limits,
        FLOATS=floats,
        BINS=max(MIN_BINS, triton.next_power_of_2(bins)),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return counts


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for kind in ("fp32", "fp16", "bf16", "i32", "u8"):
        options = {"FLOATS": kind not in ("i32", "u8"), "BLOCK": BLOCK}
        scalars = {"n": "i64:16", "bins": "i32:16", "low": "fp32", "high": "fp32", "scale": "fp32"}
        signature = {"x_ptr": f"*{kind}", "counts_ptr": "*i64", **scalars}
        kernels += [
            TritonAotKernel(
                label=f"count_blocks-{kind}",
                kernel=count_blocks,
                signature={**signature, **options, "BINS": 256},
                num_warps=WARPS,
            ),
            TritonAotKernel(
                label=f"count_in_memory-{kind}",
                kernel=count_in_memory,
                signature={**signature, **options},
                num_warps=WARPS,
            ),
        ]
    return tuple(kernels)


IMPLEMENTATION = Implementation(
    operator="histogram",
    backend="triton",
    forward=forward,
    directions=(FORWARD,),
    aot_kernels=_aot_kernels(),
    idea="tl.histogram of blocks, then atomic additions of a program's counts",
)
