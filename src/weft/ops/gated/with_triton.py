"""Gated activations in Triton: y = f(gate) up and its gradients, one fused pass in each direction.

gate and up are read as rows with a stride, so that the halves of a joint projection need no copy. Contiguous
tensors are one long row. The kernels take f as a constexpr, a function that returns its value and slope.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.elementwise_triton import AOT_DTYPES, ITEM_SIZES, SHIPPED, gelu, silu
from weft.ops._common.layout import contiguous_like, view_2d


@triton.jit
def gated_forward(
    gate_ptr, up_ptr, y_ptr, columns, blocks, gate_stride, up_stride, F: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # gate, up: (rows, columns), rows a stride apart; y: contiguous. `blocks` programs cover
    # a row. Bytes moved: 2n read + n written.
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)  # 64 bits: row * stride may pass 2^31
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
    # One evaluation: both share the sigmoid.
    value, slope = F(gate)
    out = row * columns + at
    tl.store(dgate_ptr + out, (grad * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + out, (grad * value).to(dup_ptr.dtype.element_ty), mask=inside)


def _view_2d(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if all(t.is_contiguous() for t in tensors):
        # One long row: only its last block is partly filled, not one in each row.
        return tuple(t.view(1, -1) for t in tensors)
    return tuple(view_2d(t) for t in tensors)


def _launch(
    kernel: Any, function: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]
) -> None:
    config = SHIPPED[outputs[0].element_size()]
    inputs2d = _view_2d(*inputs)
    rows, columns = inputs2d[0].shape
    blocks = triton.cdiv(columns, config.block)
    kernel[(rows * blocks,)](
        *inputs2d,
        *outputs,
        columns,
        blocks,
        *(t.stride(0) for t in inputs2d),
        F=function,
        BLOCK=config.block,
        num_warps=config.warps,
    )


def _aot_kernels(name: str, function: Any) -> tuple[TritonAotKernel, ...]:
    kernels = []
    for kernel, inputs, outputs in (
        (gated_forward, ("gate", "up"), ("y",)),
        (gated_backward, ("grad", "gate", "up"), ("dgate", "dup")),
    ):
        for dtype in AOT_DTYPES:
            config = SHIPPED[ITEM_SIZES[dtype]]
            signature: dict[str, Any] = {f"{p}_ptr": f"*{dtype}" for p in (*inputs, *outputs)}
            signature |= {"columns": "i32:16", "blocks": "i32"}
            signature |= {f"{p}_stride": "i32:16" for p in inputs}
            signature |= {"F": function, "BLOCK": config.block}
            kernels.append(
                TritonAotKernel(
                    label=f"{name}_{kernel.__name__.removeprefix('gated_')}-{dtype}",
                    kernel=kernel,
                    signature=signature,
                    num_warps=config.warps,
                )
            )
    return tuple(kernels)


def _implementation(name: str, function: Any) -> Implementation:
    """Return the implementation of one member; ``function`` gives an activation's value and slope."""

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = contiguous_like(gate)
        if y.numel():
            _launch(gated_forward, function, (gate, up), (y,))
        return y

    def backward(
        grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dgate, dup = contiguous_like(gate), contiguous_like(up)
        if grad.numel():
            _launch(gated_backward, function, (grad, gate, up), (dgate, dup))
        return dgate, dup

    return with_invariant(
        Implementation(
            operator=name,
            backend="triton",
            forward=forward,
            backward=backward,
            aot_kernels=_aot_kernels(name, function),
            idea="one fused pass each way",
        )
    )


SWIGLU = _implementation("swiglu", silu)
GEGLU = _implementation("geglu", gelu)
