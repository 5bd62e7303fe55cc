"""Gated activations in Triton: y = f(gate) up and its gradients, one fused pass each way.

gate and up are taken as rows, so that the halves of a joint projection are read where they lie;
contiguous tensors are one long row.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import KINDS, SHIPPED, Config
from weft.ops._shared.rows import as_rows


@triton.jit
def gated_forward(
    gate_ptr, up_ptr, y_ptr, columns, blocks, gate_stride, up_stride, F: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # gate, up: (rows, columns), rows a stride apart; y: contiguous. `blocks` programs a row. Bytes
    # moved: 2n read + n written.
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    at = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside).to(tl.float32)
    value, _ = F(gate)
    y = (value * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + at, y, mask=inside)


@triton.jit
def gated_backward(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, blocks, grad_stride, gate_stride,
    up_stride, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # grad, gate, up: (rows, columns), rows a stride apart; dgate, dup: contiguous. Bytes moved: 3n
    # read + 2n written.
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    at = (pid % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=inside).to(tl.float32)
    value, slope = F(gate)
    out = row * columns + at
    tl.store(dgate_ptr + out, (grad * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + out, (grad * value).to(dup_ptr.dtype.element_ty), mask=inside)


def _rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if all(t.is_contiguous() for t in tensors):
        return tuple(t.view(1, -1) for t in tensors)
    return tuple(as_rows(t) for t in tensors)


def _run(
    kernel: Any,
    function: Any,
    config: Config,
    ins: tuple[torch.Tensor, ...],
    outs: tuple[torch.Tensor, ...],
) -> None:
    lines = _rows(*ins)
    rows, columns = lines[0].shape
    blocks = triton.cdiv(columns, config.block)
    kernel[(rows * blocks,)](
        *lines,
        *outs,
        columns,
        blocks,
        *(t.stride(0) for t in lines),
        F=function,
        BLOCK=config.block,
        num_warps=config.warps,
    )


def _specimens(name: str, function: Any) -> tuple[TritonSpecimen, ...]:
    found = []
    for kernel, ins, outs in (
        (gated_forward, ("gate", "up"), ("y",)),
        (gated_backward, ("grad", "gate", "up"), ("dgate", "dup")),
    ):
        for kind, size in KINDS.items():
            signature: dict[str, Any] = {f"{p}_ptr": f"*{kind}" for p in (*ins, *outs)}
            signature |= {"columns": "i32:16", "blocks": "i32"}
            signature |= {f"{p}_stride": "i32:16" for p in ins}
            signature |= {"F": function, "BLOCK": SHIPPED[size].block}
            found.append(
                TritonSpecimen(
                    label=f"{name}_{kernel.__name__.removeprefix('gated_')}-{kind}",
                    kernel=kernel,
                    signature=signature,
                    num_warps=SHIPPED[size].warps,
                )
            )
    return tuple(found)


def implementation(operator: str, function: Any) -> Implementation:
    """An operator's way in Triton; ``function`` gives an activation's value and slope."""

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = contiguous_like(gate)
        if y.numel():
            _run(gated_forward, function, SHIPPED[y.element_size()], (gate, up), (y,))
        return y

    def backward(
        grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = contiguous_like(gate), contiguous_like(up)
        if grad.numel():
            _run(gated_backward, function, SHIPPED[grad.element_size()], (grad, gate, up), both)
        return both

    return Implementation(
        operator=operator,
        name="triton",
        backend="triton",
        forward=forward,
        backward=backward,
        specimens=_specimens(operator, function),
        idea="one fused pass each way",
    )
