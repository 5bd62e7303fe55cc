"""A new operator with its reference, cases and cost: y = max(a, 0) b, a gate for language models.

    weft check --with examples/mine/reglu.py
    weft bench --with examples/mine/reglu.py

Source: Shazeer, "GLU variants improve transformer" (arXiv:2002.05202).
"""

import torch
import triton
import triton.language as tl

import weft

BLOCK = 1024  # elements per program
SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def case(*shape: int, tags: str = "check", devices: tuple = ("cpu", "cuda"), **options: str):
    inputs = [weft.Input(name=name, shape=shape, **options) for name in ("a", "b")]
    return weft.case(*inputs, tags=tags, devices=devices)


def cost(case: weft.Case, direction: str) -> weft.Cost:
    # Forward reads a and b and writes y; backward also reads the gradient and writes two gradients.
    output = case.inputs[0].numel * SIZE[case.dtype]
    read = sum(i.nbytes for i in case.inputs)
    if direction == "forward":
        return weft.Cost(read=read, written=output)
    return weft.Cost(read=read + output, written=2 * output)


@weft.operator(
    "reglu",
    cases=[
        *(case(7, 129, dtype=d) for d in SIZE),
        case(64, 64, values="large"),
        *(case(*s, tags="edge") for s in ((0,), (1,), (5, 0, 3))),
        *(case(33, 65, tags="edge", layout=k) for k in ("transposed", "sliced", "expanded")),
        case(16384, 8192, dtype="bfloat16", tags="bench", devices=("cuda",)),
        case(1024, 1024, tags="bench", devices=("cpu",)),
    ],
    cost=cost,
    differentiable=("a", "b"),
    formula="y = max(a, 0) b",
)
def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The ReGLU gate."""
    return torch.relu(a) * b


@triton.jit
def gate(a_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
    # a, b, y: n elements, contiguous. Bytes: 2n read, n written, the minimum.
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + index, mask=index < n).to(tl.float32)
    b = tl.load(b_ptr + index, mask=index < n).to(tl.float32)
    y = tl.maximum(a, 0.0) * b
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=index < n)


@weft.implementation("reglu", backend="triton", name="triton/fused", idea="one pass")
def fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    if n := a.numel():
        gate[(triton.cdiv(n, BLOCK),)](a, b, y, n, BLOCK=BLOCK)
    return y
