"""The k largest elements in Triton: a program for each row, which it holds as words of element and index.

The words are those of with_eager.py. Each of k rounds takes the largest word and removes it.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import BACKWARD, YES, Case, Implementation, Support, WeftError, no
from weft.ops._common.layout import view_2d
from weft.ops.topk.spec import backward

MIN_BLOCK, MAX_BLOCK = 64, 4096  # elements of a row in a program's registers
TOO_LONG = f"a program holds rows of at most {MAX_BLOCK} elements"


@triton.jit
def topk_rows(x_ptr, values_ptr, indices_ptr, columns, stride, k, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    # x: (programs, columns), rows at `stride` elements; values, indices: (programs, k) contiguous.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # Negative floats have their larger magnitudes above: the bits below the sign are inverted.
    keys = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    if not LARGEST:
        keys = ~keys
    words = (keys.to(tl.int64) << 32) + (BLOCK - 1 - at).to(tl.int64)
    none_left = tl.full((BLOCK,), -(2**63), tl.int64)  # below every word: those end in BLOCK - 1 at most
    words = tl.where(at < columns, words, none_left)
    for i in range(k):
        top = tl.max(words, 0)
        index = BLOCK - 1 - (top & 0xFFFFFFFF)
        tl.store(indices_ptr + row * k + i, index)
        tl.store(values_ptr + row * k + i, tl.load(x_ptr + row * stride + index))
        words = tl.where(at == index, none_left, words)


def forward(x: torch.Tensor, *, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    if columns > MAX_BLOCK:
        hint = "use impl='cuda'"
        raise WeftError("topk: columns", expected=f"at most {MAX_BLOCK}", got=columns, hint=hint)
    values = x.new_empty((*x.shape[:-1], k))
    indices = torch.empty(values.shape, dtype=torch.int64, device=x.device)
    if values.numel():
        x2d = view_2d(x)
        rows = x2d.shape[0]
        stride = x2d.stride(0) if rows > 1 else columns
        block = max(MIN_BLOCK, triton.next_power_of_2(columns))
        topk_rows[(rows,)](
            x2d, values, indices, columns, stride, k, LARGEST=largest, BLOCK=block, num_warps=_warps(block)
        )
    return values, indices


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def _supports(case: Case, device: str) -> Support:
    shape = case.inputs[0].shape
    return no(f"{TOO_LONG}; use impl='cuda'") if shape and shape[-1] > MAX_BLOCK else YES


IMPLEMENTATION = Implementation(
    operator="topk",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=_supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=tuple(
        TritonAotKernel(
            label=f"topk_rows-{dtype}",
            kernel=topk_rows,
            signature={
                "x_ptr": f"*{dtype}",
                "values_ptr": f"*{dtype}",
                "indices_ptr": "*i64",
                "columns": "i64",
                "stride": "i64",
                "k": "i64",
                "LARGEST": True,
                "BLOCK": 1024,
            },
            num_warps=_warps(1024),
        )
        for dtype in ("fp32", "bf16", "fp16")
    ),
    idea="k rounds of the maximum, a program a row in registers",
)
