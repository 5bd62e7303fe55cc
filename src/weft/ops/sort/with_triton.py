"""Stable sorting of short rows in Triton: a program for each row, by a bitonic network.

A network is not stable. Elements and their indices therefore make words, of which no two of a row are equal:
the key above, the index below. The kernel reads bits and no floats.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import BACKWARD, FORWARD, YES, Case, Implementation, Support, WeftError, no
from weft.ops._common.layout import contiguous_like, view_2d
from weft.ops.sort.spec import BITS, backward

MIN_BLOCK, MAX_BLOCK = 16, 2048  # elements of a row in a program's registers
TOO_LONG = f"a program holds rows of at most {MAX_BLOCK} elements"
TOO_WIDE = "a word of 64 bits has no room for an int64 and its index"
# Bits of the largest finite number's successor, the infinity; 0 for integers.
INFINITY = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


@triton.jit
def ordered(bits, KEY_BITS: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr):
    """Return signed integers in the order of the output."""
    keys = bits
    if INFINITY:
        MOST: tl.constexpr = (1 << (KEY_BITS - 1)) - 1
        size = bits & MOST
        # Negative floats have their larger magnitudes above: the bits below the sign are inverted.
        keys = bits ^ ((bits >> (KEY_BITS - 1)) & MOST)
        keys = tl.where(size == 0, 0, keys)
        keys = tl.where(size > INFINITY, MOST, keys)
    if DESCENDING:
        keys = ~keys
    return keys.to(bits.dtype)


@triton.jit
def sort_rows(
    x_ptr,
    values_ptr,
    indices_ptr,
    columns,
    stride,
    KEY_BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x: (programs, columns) integers, rows at `stride` elements; values, indices: (programs, columns).
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=0)
    out = values_ptr + row * columns + at
    keys = ordered(x, KEY_BITS, INFINITY, DESCENDING)
    if INFINITY == 0 and not PAIRS:
        MOST: tl.constexpr = (1 << (KEY_BITS - 1)) - 1
        # What lies past the row's end is the largest key. Nothing tells equal integers apart.
        keys = tl.sort(tl.where(at < columns, keys, MOST).to(x.dtype))
        tl.store(out, ordered(keys, KEY_BITS, INFINITY, DESCENDING), mask=at < columns)
    else:
        WORD: tl.constexpr = tl.int32 if KEY_BITS == 16 else tl.int64
        LAST: tl.constexpr = (1 << (KEY_BITS - 1)) - 1  # key of what lies past the row's end
        keys = tl.where(at < columns, keys.to(WORD), LAST)
        words = tl.sort((keys << KEY_BITS) | at.to(WORD))
        index = (words & ((1 << KEY_BITS) - 1)).to(tl.int32)
        tl.store(out, tl.load(x_ptr + row * stride + index, mask=at < columns), mask=at < columns)
        if PAIRS:
            tl.store(indices_ptr + row * columns + at, index.to(tl.int64), mask=at < columns)


def _warps(block: int) -> int:
    return max(1, min(8, block // 128))


def launch(x: torch.Tensor, descending: bool, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted rows, and their indices or an empty tensor."""
    columns = x.shape[-1]
    if columns > MAX_BLOCK:
        hint = "use impl='cuda'"
        raise WeftError("sort: columns", expected=f"at most {MAX_BLOCK}", got=columns, hint=hint)
    values = contiguous_like(x)
    indices = torch.empty(x.shape if pairs else (0,), dtype=torch.int64, device=x.device)
    if values.numel():
        x2d = view_2d(x)
        rows = x2d.shape[0]
        block = max(MIN_BLOCK, triton.next_power_of_2(columns))
        bits = BITS[x.element_size()]
        sort_rows[(rows,)](
            x2d.view(bits),
            values.view(bits),
            indices,
            columns,
            x2d.stride(0) if rows > 1 else columns,
            KEY_BITS=8 * x.element_size(),
            INFINITY=INFINITY.get(x.dtype, 0),
            DESCENDING=descending,
            PAIRS=pairs,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return values, indices


def forward(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if x.element_size() == 8:
        raise WeftError("sort: x.dtype", expected="at most 32 bits", got="int64", hint="use impl='cuda'")
    return launch(x, descending, pairs=True)


def forward_keys(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return launch(x, descending, pairs=False)[0]


def _supports_keys(case: Case, device: str) -> Support:
    shape = case.inputs[0].shape
    return no(f"{TOO_LONG}; use impl='cuda'") if shape and shape[-1] > MAX_BLOCK else YES


def _supports(case: Case, device: str) -> Support:
    if case.dtype == "int64":
        return no(f"{TOO_WIDE}; use impl='cuda'")
    return _supports_keys(case, device)


def _aot_kernels(pairs: bool) -> tuple[TritonAotKernel, ...]:
    block = 1024
    return tuple(
        TritonAotKernel(
            label=f"sort_rows-{name}{'-pairs' if pairs else ''}",
            kernel=sort_rows,
            signature={
                "x_ptr": f"*i{bits}",
                "values_ptr": f"*i{bits}",
                "indices_ptr": "*i64",
                "columns": "i64",
                "stride": "i64",
                "KEY_BITS": bits,
                "INFINITY": infinity,
                "DESCENDING": False,
                "PAIRS": pairs,
                "BLOCK": block,
            },
            num_warps=_warps(block),
        )
        for name, bits, infinity in (
            ("fp32", 32, INFINITY[torch.float32]),
            ("bf16", 16, INFINITY[torch.bfloat16]),
            ("int64", 64, 0),
        )
        if not (pairs and bits == 64)
    )


SORT = Implementation(
    operator="sort",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=_supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_aot_kernels(pairs=True),
    idea="a bitonic network over words of key and index, a program a row",
)
SORT_KEYS = Implementation(
    operator="sort_keys",
    backend="triton",
    forward=forward_keys,
    directions=(FORWARD,),
    supports=_supports_keys,
    aot_kernels=_aot_kernels(pairs=False),
    idea="a bitonic network over words of key and index, a program a row",
)
