"""The losses in CUDA C++: one block per row, 16 bytes at a time; see cross_entropy.cuh.

``linear_cross_entropy`` takes chunks of rows (chunks.py), between whose products a kernel works in place.
Rows that fit wait in shared memory between their loss and their gradient, and are then read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.layout import CUDA_TYPES, dtype_name, view_2d
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops.losses import head_wgmma
from weft.ops.losses.chunks import ChunkPlan, Tensors, chunked_forward, plan_chunks
from weft.ops.losses.spec import (
    LossOptions,
    gradient_like,
    launch_key,
    mean_key,
    supports_cross_entropy,
    supports_linear_cross_entropy,
)

ROW_KERNELS = ("cross_entropy_forward", "cross_entropy_backward")
FUSED_KERNELS = ("cross_entropy_fused", "scale_same_dtype", "scale_from_float32")
# Bytes of a row in shared memory: two blocks then fit in the 227 KiB of an SM.
MAX_SMEM_ROW = 110 << 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """One block of ``threads`` per row; each thread has ``unroll`` 16-byte loads in flight."""

    threads: int
    unroll: int = 2


@cache
def configure(columns: int, dtype: torch.dtype) -> Config:
    """Return the configuration for rows that are read once: about 4 vectors per thread, up to 256 threads."""
    vectors = columns * dtype.itemsize // 16
    # A short row takes a small block, so that no thread is without a vector.
    return Config(threads=next((t for t in (32, 64, 128) if vectors <= 4 * t), 256))


@cache
def configure_fused(columns: int, dtype: torch.dtype) -> Config:
    """Return the configuration for rows that are read and then written.

    A long row takes a block of 1024 threads: few rows are then in flight, and they stay in the L2 (or in
    shared memory) until they are written.
    """
    vectors = columns * dtype.itemsize // 16
    return Config(threads=next((t for t in (32, 64, 128, 256, 512) if vectors <= 4 * t), 1024))


def candidates() -> list[Config]:
    """Return the configurations worth timing for rows of a vocabulary."""
    return [Config(threads=t, unroll=u) for t in (128, 256, 512, 1024) for u in (1, 2, 4)]


@cache
def _source(
    file: str,
    kernels: tuple[str, ...],
    dtype: torch.dtype,
    config: Config,
    smooth: bool,
    min_arch: int = 80,
    by_column: bool = False,
) -> CudaSource:
    label = f"{file}-{dtype_name(dtype)}-{config.threads}x{config.unroll}{'-smooth' * smooth}"
    return CudaSource(
        file=Path(__file__).with_name(f"{file}.cu"),
        kernels=kernels,
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("THREADS", str(config.threads)),
            ("UNROLL", str(config.unroll)),
            ("SMOOTH", str(int(smooth))),
            *((("BY_COLUMN", "1"),) if by_column else ()),
        ),
        label=label + "-by-column" * by_column,
        min_arch=min_arch,
    )


def row_source(dtype: torch.dtype, config: Config, smooth: bool, by_column: bool = False) -> CudaSource:
    """Return forward and backward of ``cross_entropy``; ``smooth``: with label smoothing.

    ``by_column``: the bits of a row do not depend on its address.
    """
    return _source("cross_entropy", ROW_KERNELS, dtype, config, smooth, by_column=by_column)


def fused_source(dtype: torch.dtype, config: Config, smooth: bool, in_smem: bool = False) -> CudaSource:
    """Return the kernels between the products; ``in_smem``: the one that stores rows in shared memory."""
    if in_smem:
        kernels = ("cross_entropy_fused_smem",)
        return _source("cross_entropy_fused_smem", kernels, dtype, config, smooth, min_arch=90)
    return _source("cross_entropy_fused", FUSED_KERNELS, dtype, config, smooth)


LAUNCHES = LaunchCache()


def cross_entropy_forward(
    logits: Tensor, targets: Tensor, *, config: Config | None = None, by_column: bool = False, **params: Any
) -> tuple[Tensor, Tensor]:
    """``config`` None is the configuration shipped for rows of this length.

    ``by_column``: as in :func:`row_source`.
    """
    rows, columns = logits.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    key = launch_key(logits, targets, (by_column,), params) if config is None else None
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), lse.data_ptr())
    elif rows:
        options = LossOptions(**params)
        config = config or configure(columns, logits.dtype)
        x2d = view_2d(logits)
        smooth = options.label_smoothing != 0
        launch = launch_and_prepare(
            row_source(logits.dtype, config, smooth, by_column)["cross_entropy_forward"],
            rows,
            config.threads,
            x2d,
            targets.contiguous(),
            losses,
            lse,
            columns,
            x2d.stride(0),
            *options.kernel_arguments,
        )
        LAUNCHES.store(key, launch)
    return losses, lse


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, **params: Any
) -> tuple[Tensor]:
    """Return the gradient; each of its elements is computed by itself, whatever the row's address is."""
    return (cross_entropy_backward_into(gradient_like(logits), grad, logits, targets, lse, **params),)


def cross_entropy_backward_into(
    out: Tensor,
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    *,
    config: Config | None = None,
    by_column: bool = False,
    **params: Any,
) -> Tensor:
    """Write the gradient to ``out``, which has adjacent columns and may be ``logits`` itself."""
    rows, columns = logits.shape
    kind = (by_column, "backward", grad.stride(0), *out.stride())
    key = launch_key(logits, targets, kind, params) if config is None and are_repeatable(lse) else None
    # The gradient is one number for each row, or one for all of them.
    launch = LAUNCHES.get(key)
    if launch is not None and not (grad.data_ptr() | out.data_ptr()) & 15:
        addresses = (grad.data_ptr(), logits.data_ptr(), targets.data_ptr(), lse.data_ptr(), out.data_ptr())
        launch(*addresses)
    elif rows:
        options = LossOptions(**params)
        config = config or configure_fused(columns, logits.dtype)
        x2d = view_2d(logits)
        # Smoothing is an argument of this kernel; only the forward is compiled apart for it.
        launch = launch_and_prepare(
            row_source(logits.dtype, config, False, by_column)["cross_entropy_backward"],
            rows,
            config.threads,
            grad,
            x2d,
            targets.contiguous(),
            lse,
            out,
            columns,
            grad.stride(0),
            x2d.stride(0),
            out.stride(0),
            *options.kernel_arguments,
        )
        if not (grad.data_ptr() | out.data_ptr()) & 15:
            LAUNCHES.store(key, launch)
    return out


MEAN_SOURCE = CudaSource(
    file=Path(__file__).with_name("mean_of_rows.cu"),
    kernels=("mean_of_rows",),
    defines=(("WEFT_T", "float"), ("THREADS", "1024")),
    label="mean_of_rows",
)


def mean_of_rows(losses: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the losses whose target is not ``ignore_index``, and their count, in float32."""
    mean, count = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    rows = losses.shape[0]
    key = mean_key(losses, targets, ignore_index)
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(losses.data_ptr(), targets.data_ptr(), mean.data_ptr(), count.data_ptr())
    else:
        arguments = (losses, targets.contiguous(), mean, count, rows, ignore_index)
        LAUNCHES.store(key, launch_and_prepare(MEAN_SOURCE["mean_of_rows"], 1, 1024, *arguments))
    return mean, count


@cache
def fits_in_smem(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a row can wait in shared memory: the device has bulk copies, and two rows fit in an SM."""
    # cp.async.bulk exists from Hopper on.
    has_bulk_copies = torch.cuda.get_device_capability(device) >= (9, 0)
    return has_bulk_copies and columns * dtype.itemsize <= MAX_SMEM_ROW


def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    plan: ChunkPlan | None = None,
    config: Config | None = None,
    in_smem: bool | None = None,
    **params: Any,
) -> Tensors:
    """``plan``, ``config`` and ``in_smem`` of the chunks of logits are the shipped ones where they are None.

    Without any of them, products of Weft's own compute exponentials instead of logits (head_wgmma.py), where
    they can.
    """
    columns, options = weight.shape[0], LossOptions(**params)
    if (plan, config, in_smem) == (None, None, None) and head_wgmma.supports(x, weight, options):
        return head_wgmma.forward(x, weight, targets.contiguous(), options)
    plan = plan or plan_chunks(x.shape[0], x.shape[1], columns, x.element_size())
    config = config or configure_fused(columns, x.dtype)
    in_smem = fits_in_smem(columns, x.dtype, x.device) if in_smem is None else in_smem
    fused_rows = partial(_fused_rows, config, in_smem, options)
    return chunked_forward(fused_rows, plan, x, weight, targets.contiguous())


def _fused_rows(
    config: Config, in_smem: bool, options: LossOptions, logits: Tensor, targets: Tensor, losses: Tensor
) -> None:
    """Compute the losses of some rows, and write their gradient over their logits."""
    rows, columns = logits.shape
    smem_bytes = -(-columns * logits.element_size() // 16) * 16 if in_smem else 0
    source = fused_source(logits.dtype, config, options.label_smoothing != 0, in_smem)
    source[source.kernels[0]](
        rows,
        config.threads,
        logits,
        targets,
        losses,
        columns,
        logits.stride(0),
        *options.kernel_arguments,
        shared=smem_bytes,
    )


def linear_cross_entropy_backward(
    grad: Tensor, dx: Tensor, dweight: Tensor, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Multiply the forward's gradients by the incoming one, and round to the inputs' dtype."""
    scaled = torch.empty_like(dx), torch.empty_like(dweight, dtype=dx.dtype)
    config = Config(threads=256)
    source = fused_source(dx.dtype, config, False)
    # N of cross_entropy.cuh, the elements of one 16-byte vector of the output, for each thread.
    elements_per_block = config.threads * 16 // dx.element_size()
    for gradient, out in zip((dx, dweight), scaled, strict=True):
        kernel = "scale_same_dtype" if gradient.dtype == out.dtype else "scale_from_float32"
        if n := gradient.numel():
            source[kernel](-(-n // elements_per_block), config.threads, gradient, grad, out, n)
    return scaled


def _aot_row_kernels() -> tuple[CudaSource, ...]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shipped = ((bf16, 50304, False), (bf16, 50304, True), (fp16, 50304, False), (fp32, 4096, False))
    forward = [row_source(dtype, configure(n, dtype), smooth) for dtype, n, smooth in shipped]
    by_column = [row_source(bf16, configure(50257, bf16), smooth, True) for smooth in (False, True)]
    return (*forward, *by_column, row_source(bf16, configure_fused(50304, bf16), False), MEAN_SOURCE)


CROSS_ENTROPY = with_invariant(
    Implementation(
        operator="cross_entropy",
        backend="cuda",
        forward=cross_entropy_forward,
        backward=cross_entropy_backward,
        supports=supports_cross_entropy,
        aot_kernels=_aot_row_kernels(),
        idea="a block a row, 16 bytes at a time wherever it starts",
    ),
    forward=partial(cross_entropy_forward, by_column=True),
    backward=partial(cross_entropy_backward, by_column=True),
)

LINEAR_CROSS_ENTROPY = Implementation(
    operator="linear_cross_entropy",
    backend="cuda",
    forward=linear_cross_entropy_forward,
    backward=linear_cross_entropy_backward,
    supports=supports_linear_cross_entropy,
    aot_kernels=(
        fused_source(torch.bfloat16, configure_fused(50304, torch.bfloat16), False, True),
        fused_source(torch.bfloat16, configure_fused(50304, torch.bfloat16), True, True),
        fused_source(torch.bfloat16, configure_fused(131072, torch.bfloat16), False),
        fused_source(torch.bfloat16, Config(threads=256), False),
        fused_source(torch.float32, configure_fused(4096, torch.float32), False),
        *head_wgmma.aot_kernels(),
    ),
    wraps_library="cublas",
    idea="chunks of rows; on Hopper a product writes exponentials, and the row sums scale the next products; "
    "else a row waits in shared memory for its gradient",
)
