"""The LM head and its loss by chunks, between whose products a CUDA kernel works in place."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.cross_entropy import supports_head
from weft.ops._shared.cross_entropy_cuda import Config, configure_fused, source
from weft.ops.linear_cross_entropy import chunks

FILE = Path(__file__).with_name("linear_cross_entropy.cu")
HELD = Path(__file__).with_name("linear_cross_entropy_held.cu")
KERNELS = ("cross_entropy_fused", "multiply_same", "multiply_wide")
ROOM = 110 << 10  # bytes of a row that a block holds: two blocks fit a multiprocessor of 227 KiB


def program(dtype: torch.dtype, config: Config, smooth: bool, hold: bool = False) -> CudaSource:
    """The kernels for one element type and configuration; ``hold``: the one that holds rows."""
    if hold:
        return source(HELD, ("cross_entropy_held",), dtype, config, smooth, min_arch=90)
    return source(FILE, KERNELS, dtype, config, smooth)


@cache
def holds(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row waits in shared memory: where the device has the bulk copy engine, and room."""
    chip = torch.cuda.get_device_capability(device) >= (9, 0)
    return chip and columns * dtype.itemsize <= ROOM


def fused(
    config: Config,
    hold: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """The losses of some rows; their gradient over their logits."""
    rows, columns = logits.shape
    bytes_held = -(-columns * logits.element_size() // 16) * 16 if hold else 0
    found = program(logits.dtype, config, label_smoothing != 0, hold)
    found[found.kernels[0]](
        rows,
        config.threads,
        logits,
        targets,
        losses,
        columns,
        logits.stride(0),
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        shared=bytes_held,
    )


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> chunks.Tensors:
    columns = weight.shape[0]
    plan = chunks.plan(x.shape[0], x.shape[1], columns, x.element_size())
    config, hold = configure_fused(columns, x.dtype), holds(columns, x.dtype, x.device)
    rest = (x, weight, targets, ignore_index, label_smoothing, z_loss)
    return forward_with(plan, config, hold, *rest)


def forward_with(
    plan: chunks.Plan,
    config: Config,
    hold: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> chunks.Tensors:
    """The forward by one plan and configuration; ``hold``: rows wait in shared memory."""
    kernel = partial(fused, config, hold, ignore_index, label_smoothing, z_loss)
    return chunks.forward(kernel, plan, x, weight, targets.contiguous())


def backward(
    grad: torch.Tensor,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.empty_like(dx), torch.empty_like(dweight, dtype=dx.dtype)
    config = Config(threads=256)
    kernels = program(dx.dtype, config, False)
    each = config.threads * 16 // dx.element_size()
    for x, out, name in zip((dx, dweight), found, KERNELS[1:], strict=True):
        if n := x.numel():
            kernels[name](-(-n // each), config.threads, x, grad, out, n)
    return found


IMPLEMENTATION = Implementation(
    operator="linear_cross_entropy",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports_head,
    specimens=(
        program(torch.bfloat16, configure_fused(50304, torch.bfloat16), False, True),
        program(torch.bfloat16, configure_fused(50304, torch.bfloat16), True, True),
        program(torch.bfloat16, configure_fused(131072, torch.bfloat16), False),
        program(torch.bfloat16, Config(threads=256), False),
        program(torch.float32, configure_fused(4096, torch.float32), False),
    ),
    around="cublas",
    idea="chunks of rows; a row waits in shared memory for its gradient",
)
