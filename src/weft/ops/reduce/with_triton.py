"""Reductions in Triton: a program reduces a tile's columns of one outer index over a part of n.

Where results are few, n is cut into parts, and a second launch of the same kernel reduces the parts' results.
Largest and smallest elements are compared as integer keys of the same order, in which NaN is above all, so
that no rule of a maximum about NaN matters. Argmax compares words of a key and the complement of an index.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import BACKWARD, FORWARD, YES, Case, Implementation, Support, WeftError, no
from weft.machine.device_limits import num_sms
from weft.ops.reduce.spec import backward, extents, kept_shape
from weft.ops.reduce.strided import Strided, strided

SUM, LARGEST, LOGSUMEXP, ARGUMENT = (tl.constexpr(i) for i in range(4))
KINDS = {"sum": SUM, "mean": SUM, "amax": LARGEST, "amin": LARGEST, "logsumexp": LOGSUMEXP,
         "argmax": ARGUMENT, "argmin": ARGUMENT}  # fmt: skip
TILE = 4096  # elements of a tile: 64 bytes of bfloat16 in each of 128 threads
MAX_INNER = 64  # columns of a tile, so that a row of it has at least 128 bytes
PROGRAMS, PART = 8, 4 * TILE  # programs for each SM, below which n is cut; elements of a part at least
MAX_N = 1 << 31  # of argmax: an index has 31 bits in a word
TOO_LONG = f"a word has room for the index of at most {MAX_N} elements"


@triton.jit
def key_of(x):
    """Return int32 keys in the order of the elements, of which NaN is the largest; -0 is 0."""
    if x.dtype == tl.int32:
        return x
    wide = x.to(tl.float32)
    bits = tl.where(wide == 0.0, 0.0, wide).to(tl.int32, bitcast=True)
    # Negative floats have their larger magnitudes above: the bits below the sign are inverted.
    return tl.where(wide != wide, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """Return the float32 element of a key: the inversion is its own inverse."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def reduce_tiles(
    x_ptr,
    y_ptr,
    n,
    inner,
    outer_stride,
    n_stride,
    inner_stride,
    part_n,
    parts,
    divisor,
    KIND: tl.constexpr,
    NEGATE: tl.constexpr,
    IS_WORD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # x: (outer, n, inner) by strides; y: (outer, inner, parts). ARGUMENT: y is int64 words, or indices if
    # parts is 1; x is words if IS_WORD. NEGATE: the smallest instead of the largest.
    part = tl.program_id(0) % parts
    tiles = tl.cdiv(inner, BLOCK_I)
    tile = tl.program_id(0) // parts % tiles
    outer = (tl.program_id(0) // parts // tiles).to(tl.int64)
    column = tile.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    begin = part.to(tl.int64) * part_n
    end = tl.minimum(begin + part_n, n)
    base = x_ptr + outer * outer_stride + column[None, :] * inner_stride
    if KIND == LARGEST:
        best = tl.full((BLOCK_N, BLOCK_I), -(2**31), tl.int32)
    elif KIND == ARGUMENT:
        best = tl.full((BLOCK_N, BLOCK_I), -(2**63), tl.int64)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_I), tl.float32)
        largest = tl.full((BLOCK_N, BLOCK_I), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (row[:, None] < end) & (column[None, :] < inner)
        x = tl.load(base + row[:, None] * n_stride, mask=inside, other=0)
        if KIND == SUM:
            total += x.to(tl.float32)
        elif KIND == LOGSUMEXP:
            wide = tl.where(inside, x.to(tl.float32), float("-inf"))
            above = tl.where((wide > largest) | (wide != wide), wide, largest)
            # Equal ones are 1 apart from subtraction: Inf - Inf would be NaN.
            total = total * tl.where(largest == above, 1.0, tl.exp(largest - above))
            total += tl.where(wide == above, 1.0, tl.exp(wide - above))
            largest = above
        elif KIND == LARGEST:
            key = key_of(-x if NEGATE else x)
            best = tl.maximum(best, tl.where(inside, key, -(2**31)))
        elif IS_WORD:
            best = tl.maximum(best, tl.where(inside, x, -(2**63)))
        else:
            if NEGATE and x.dtype == tl.int32:
                key = ~x  # -x of the least integer is not one
            else:
                key = key_of(-x if NEGATE else x)
            word = (key.to(tl.int64) << 32) + (0x7FFFFFFF - row[:, None])
            best = tl.maximum(best, tl.where(inside, word, -(2**63)))
    at = (outer * inner + column) * parts + part
    if KIND == SUM:
        y = tl.sum(total, 0) / divisor
    elif KIND == LOGSUMEXP:
        is_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
        top = tl.max(tl.where(largest != largest, float("-inf"), largest), 0)
        weight = tl.where(largest == top[None, :], 1.0, tl.exp(largest - top[None, :]))
        y = tl.log(tl.sum(tl.where(largest == float("-inf"), 0.0, total * weight), 0))
        y = tl.where(top == float("-inf"), top, y + top)
        y = tl.where(is_nan, float("nan"), y)
    elif KIND == LARGEST:
        y = value_of(tl.max(best, 0))
        y = -y if NEGATE else y
    else:
        y = tl.max(best, 0)
        if parts == 1:
            y = 0x7FFFFFFF - (y & 0x7FFFFFFF)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=column < inner)


def _launch(
    form: Strided, y: torch.Tensor, op: str, part_n: int, parts: int, divisor: float, tile: int
) -> None:
    by_rows = form.by_rows or form.inner == 1
    block_i = 1 if by_rows else min(MAX_INNER, triton.next_power_of_2(form.inner))
    block_n = max(16, min(tile // block_i, triton.next_power_of_2(form.n)))
    kind = KINDS[op]
    reduce_tiles[(form.outer * triton.cdiv(form.inner, block_i) * parts,)](
        form.x,
        y,
        form.n,
        form.inner,
        form.outer_stride,
        form.n_stride,
        1,
        part_n,
        parts,
        divisor,
        KIND=kind,
        NEGATE=op in ("amin", "argmin"),
        IS_WORD=form.x.dtype == torch.int64,
        BLOCK_N=block_n,
        BLOCK_I=block_i,
        num_warps=max(1, min(4, block_n * block_i // 512)),
    )


def run(x: torch.Tensor, op: str, first: int, last: int, tile: int = TILE, part: int = PART) -> torch.Tensor:
    """Compute a reduction with tiles of ``tile`` elements, and parts of n of at least ``part`` elements."""
    n = extents(x.shape, first, last)[1]
    is_index = KINDS[op] is ARGUMENT
    y = x.new_empty(kept_shape(x.shape, first, last), dtype=torch.int64 if is_index else x.dtype)
    if n == 0 and y.numel():
        return y.fill_({"sum": 0.0, "mean": torch.nan}.get(op, -torch.inf))
    if y.numel() == 0:
        return y
    form = strided(x, first, last)
    programs = form.outer * triton.cdiv(form.inner, 1 if form.by_rows else MAX_INNER)
    enough = triton.cdiv(PROGRAMS * num_sms(x.device, interpreted=2), programs)
    parts = max(1, min(enough, n * min(form.inner, MAX_INNER) // part))
    part_n = triton.cdiv(n, parts)
    parts = triton.cdiv(n, part_n)
    divisor = float(n) if op == "mean" else 1.0
    if parts == 1:
        _launch(form, y, op, n, 1, divisor, tile)
        return y
    # Of logsumexp a part's result is one number too: that of the parts is the log-sum-exp of these.
    kind = torch.int64 if is_index else torch.float32
    partial = torch.empty((form.results, parts), dtype=kind, device=x.device)
    _launch(form, partial, op, part_n, parts, 1.0, tile)
    rows = Strided(partial, form.results, parts, 1, parts, 1, by_rows=True)
    _launch(rows, y, op, parts, 1, divisor, tile)
    return y


def forward(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    return run(x, op, first, last)


def forward_index(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    n = extents(x.shape, first, last)[1]
    if n > MAX_N:
        raise WeftError("argreduce: n", expected=f"at most {MAX_N}", got=n, hint="use impl='cuda'")
    return run(x, op, first, last)


def _supports_index(case: Case, device: str) -> Support:
    first, last = int(str(case.params["first"])), int(str(case.params["last"]))
    n = extents(case.inputs[0].shape, first, last)[1]
    return no(f"{TOO_LONG}; use impl='cuda'") if n > MAX_N else YES


def _aot_kernels(ops: tuple[str, ...]) -> tuple[TritonAotKernel, ...]:
    kernels = []
    for op in ops:
        for dtype in ("fp32", "bf16", "fp16"):
            for form, block_i, stride in (("rows", 1, "i64:16"), ("columns", MAX_INNER, "i64:16")):
                index = KINDS[op] is ARGUMENT
                kernels.append(
                    TritonAotKernel(
                        label=f"{op}-{form}-{dtype}",
                        kernel=reduce_tiles,
                        signature={
                            "x_ptr": f"*{dtype}",
                            "y_ptr": "*i64" if index else f"*{dtype}",
                            "n": "i64:16",
                            "inner": 1 if block_i == 1 else "i64:16",
                            "outer_stride": stride,
                            "n_stride": 1 if block_i == 1 else stride,
                            "inner_stride": 1,
                            "part_n": "i64:16",
                            "parts": 1,
                            "divisor": "fp32",
                            "KIND": KINDS[op].value,
                            "NEGATE": op in ("amin", "argmin"),
                            "IS_WORD": False,
                            "BLOCK_N": TILE // block_i,
                            "BLOCK_I": block_i,
                        },
                        num_warps=4,
                    )
                )
    return tuple(kernels)


REDUCE = Implementation(
    operator="reduce",
    backend="triton",
    forward=forward,
    backward=backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=_aot_kernels(("sum", "amax", "logsumexp")),
    idea="a program a tile of columns and a part of n; a second launch for the parts",
)
ARGREDUCE = Implementation(
    operator="argreduce",
    backend="triton",
    forward=forward_index,
    directions=(FORWARD,),
    supports=_supports_index,
    aot_kernels=_aot_kernels(("argmax",)),
    idea="words of key and index, so that a maximum of integers is the first largest element",
)
