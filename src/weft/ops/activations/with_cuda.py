"""Activations in CUDA C++: one 16-byte vector a thread, in many small blocks.

The kernels are in gelu.cu, relu.cu, relu_scalar.cu, bias_gelu.cu and bias_gelu_backward.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import or_
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.elementwise import ElementwiseKernels
from weft.ops._common.layout import (
    CUDA_TYPES,
    FLOAT_DTYPES,
    contiguous_like,
    dense,
    dtype_name,
    match_strides,
)
from weft.ops._common.prepared import LaunchCache, are_repeatable

HERE = Path(__file__).parent


@dataclass(frozen=True)
class GeluConfig:
    """``threads`` of a block; ``unroll`` 16-byte vectors a thread, all in flight at once."""

    threads: int
    unroll: int


GELU_CANDIDATES = tuple(GeluConfig(t, u) for t in (128, 256, 512) for u in (1, 2, 4))
# Four vectors a thread are slower than one (docs/log.md, 2026-11-20: 264 us against 257 in bf16): a full SM
# has enough bytes in flight, and more per thread only makes the grid coarser.
GELU_CONFIG = GeluConfig(threads=128, unroll=1)


@cache
def gelu_source(dtype: torch.dtype, config: GeluConfig = GELU_CONFIG) -> CudaSource:
    """Return gelu.cu for one element type and launch configuration."""
    return CudaSource(
        file=HERE / "gelu.cu",
        kernels=("gelu_forward_wide", "gelu_backward_wide", "gelu_forward_any", "gelu_backward_any"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("THREADS", str(config.threads)),
            ("UNROLL", str(config.unroll)),
        ),
        label=dtype_name(dtype),
    )


GELU_LAUNCHES = LaunchCache()


def _launch_gelu(config: GeluConfig | None, kernel: str, *tensors: torch.Tensor) -> None:
    """Launch a kernel over dense tensors of one size; ``config`` None is the shipped configuration."""
    first = tensors[0]
    n = first.numel()
    if n == 0:
        return
    addresses = [t.data_ptr() for t in tensors]
    aligned = not reduce(or_, addresses) & 15
    key = (kernel, n, first.dtype, first.get_device())
    launch = GELU_LAUNCHES.get(key) if aligned and config is None else None
    if launch is not None:
        launch(*addresses)
        return
    c = config or GELU_CONFIG
    source = gelu_source(first.dtype, c)
    if aligned:
        per_block = c.threads * c.unroll * (16 // first.element_size())
        launch = launch_and_prepare(source[f"{kernel}_wide"], -(-n // per_block), c.threads, *tensors, n)
        if config is None:
            GELU_LAUNCHES.store(key, launch)
    else:
        source[f"{kernel}_any"](-(-n // c.threads), c.threads, *tensors, n)


def forward_gelu_with(config: GeluConfig | None, x: torch.Tensor) -> torch.Tensor:
    """Compute the forward with one launch configuration; None is the shipped one."""
    x = dense(x)
    y = torch.empty_like(x)
    _launch_gelu(config, "gelu_forward", x, y)
    return y


def forward_gelu(x: torch.Tensor) -> torch.Tensor:
    launch = GELU_LAUNCHES.get(("gelu_forward", x.numel(), x.dtype, x.get_device()))
    if launch is not None and x.is_contiguous() and not (address := x.data_ptr()) & 15:
        y = torch.empty_like(x)
        launch(address, y.data_ptr())
        return y
    return forward_gelu_with(None, x)


def backward_gelu(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    launch = GELU_LAUNCHES.get(("gelu_backward", x.numel(), x.dtype, x.get_device()))
    if launch is not None and are_repeatable(grad, x):
        dx = torch.empty_like(x)
        launch(grad.data_ptr(), x.data_ptr(), dx.data_ptr())
        return (dx,)
    x = dense(x)
    dx = torch.empty_like(x)
    _launch_gelu(None, "gelu_backward", match_strides(grad, x), x, dx)
    return (dx,)


RELU_KERNELS = ElementwiseKernels(HERE / "relu.cu", "relu_forward", "relu_backward")


def forward_relu(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    RELU_KERNELS.launch("relu_forward", (x, y))
    return y


def backward_relu(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    RELU_KERNELS.launch("relu_backward", (match_strides(grad, y), y, dx))
    return (dx,)


SCALAR_THREADS = 256
# Step 1 of the ladder: kept as an implementation, so that it is checked and timed like the others.
RELU_SCALAR_SOURCES = {
    dtype: CudaSource(
        file=HERE / "relu_scalar.cu",
        kernels=("relu_forward_scalar", "relu_backward_scalar"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]),),
        label=f"01-scalar-{dtype_name(dtype)}",
    )
    for dtype in FLOAT_DTYPES
}


def _launch_relu_scalar(kernel: str, *tensors: torch.Tensor) -> None:
    if n := tensors[0].numel():
        blocks = -(-n // SCALAR_THREADS)
        RELU_SCALAR_SOURCES[tensors[0].dtype][kernel](blocks, SCALAR_THREADS, *tensors, n)


def forward_relu_scalar(x: torch.Tensor) -> torch.Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    _launch_relu_scalar("relu_forward_scalar", x, y)
    return y


def backward_relu_scalar(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = dense(y)
    dx = torch.empty_like(y)
    _launch_relu_scalar("relu_backward_scalar", match_strides(grad, y), y, dx)
    return (dx,)


BIAS_GELU_KERNELS = ElementwiseKernels(HERE / "bias_gelu.cu", "bias_gelu_forward")


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Block of the backward of bias_gelu: a chunk of ``rows`` rows, taken by ``warps`` warps.

    A warp covers 32 vectors of a row. ``groups`` warps share the same columns and take the rows in turn; the
    others are side by side. A warp loads ``rows_ahead`` of its rows in advance. ``min_blocks`` blocks must
    fit on an SM, which bounds the registers. ``overlap``: the kernel that adds the chunks' partial sums is
    launched before they are ready, and waits for them (programmatic dependent launch).
    """

    rows: int = 256
    warps: int = 16
    groups: int = 16
    rows_ahead: int = 2
    min_blocks: int = 2
    overlap: bool = True


# Chosen by results/nvidia-h200/sweep-embedding-bias_gelu-2026-11-22b.ndjson.
BACKWARD_CONFIG = BackwardConfig()


def backward_candidates() -> list[BackwardConfig]:
    """Return the configurations worth timing, the most promising first."""
    low = replace(BACKWARD_CONFIG, rows=128, warps=8, groups=8, min_blocks=4)
    side_by_side = replace(low, groups=4)  # two warps side by side: 1 KiB of a row in bf16
    small = replace(low, warps=4, groups=4, min_blocks=8)
    return [
        BACKWARD_CONFIG,
        replace(BACKWARD_CONFIG, overlap=False),
        replace(BACKWARD_CONFIG, rows=192, warps=12, groups=12, rows_ahead=3),
        replace(low, rows_ahead=3, min_blocks=3),
        low,
        side_by_side,
        replace(small, rows=64),
        small,
        replace(low, rows=64),
        replace(low, rows=256),
        replace(low, rows_ahead=1, min_blocks=5),
        replace(low, rows_ahead=1, min_blocks=5, rows=256),
        replace(side_by_side, rows_ahead=1, min_blocks=5),
        replace(low, groups=2, rows=64),
        replace(small, groups=1, rows=32),
    ]


@cache
def bias_gelu_backward_source(dtype: torch.dtype, config: BackwardConfig = BACKWARD_CONFIG) -> CudaSource:
    """Return bias_gelu_backward.cu for one element type and configuration."""
    c = config
    label = f"bias_gelu_backward-{dtype_name(dtype)}-{c.warps}-{c.groups}-{c.rows_ahead}-{c.min_blocks}"
    return CudaSource(
        file=HERE / "bias_gelu_backward.cu",
        kernels=("bias_gelu_backward_wide", "bias_gelu_backward_any", "bias_gelu_sum_partials"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
            ("BACK_WARPS", str(c.warps)),
            ("GROUPS", str(c.groups)),
            ("AHEAD", str(c.rows_ahead)),
            ("BLOCKS", str(c.min_blocks)),
            ("OVERLAP", str(int(c.overlap))),
        ),
        label=label + "-overlap" * c.overlap,
    )


def _fits_vectors(columns: int, *tensors: torch.Tensor) -> bool:
    """True if a row is a whole number of 16-byte vectors and every tensor is aligned to one."""
    size = tensors[0].element_size()
    return columns * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def forward_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    columns = x.shape[-1]
    # The column of an element follows from its index in memory: rows must be dense.
    x, bias = x.contiguous(), bias.contiguous()
    wide = _fits_vectors(columns, bias)
    BIAS_GELU_KERNELS.launch("bias_gelu_forward", (x, y), bias, columns, wide=wide)
    return y


def backward_bias_gelu(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return backward_bias_gelu_with(BACKWARD_CONFIG, grad, x, bias)


def backward_bias_gelu_with(
    config: BackwardConfig, grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the backward with one configuration: partial sums of chunks of rows, then their sum."""
    dx, dbias = contiguous_like(x), contiguous_like(bias)
    if not x.numel():
        return dx, dbias.zero_()
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    wide = _fits_vectors(columns, grad, x, bias, dx)
    vec_width = 16 // x.element_size() if wide else 1
    blocks_across = -(-columns // (32 * vec_width * (config.warps // config.groups)))
    chunks = -(-rows // config.rows)
    partial = torch.empty(chunks, columns, dtype=torch.float32, device=x.device)
    source = bias_gelu_backward_source(x.dtype, config)
    source["bias_gelu_backward_wide" if wide else "bias_gelu_backward_any"](
        *(blocks_across * chunks, 32 * config.warps, grad, x, bias, dx, partial),
        *(rows, columns, config.rows, blocks_across),
    )
    # 32 columns for each block, see bias_gelu_backward.cu.
    source["bias_gelu_sum_partials"](
        *(-(-columns // 32), 1024, partial, dbias, chunks, columns), overlap=config.overlap
    )
    return dx, dbias


# Elementwise: an element has the same bits wherever it is, so that each implementation is batch invariant.
GELU = with_invariant(
    Implementation(
        operator="gelu",
        backend="cuda",
        forward=forward_gelu,
        backward=backward_gelu,
        aot_kernels=tuple(gelu_source(dtype) for dtype in FLOAT_DTYPES),
        idea="one 16-byte vector a thread",
    )
)
RELU = with_invariant(
    Implementation(
        operator="relu",
        backend="cuda",
        forward=forward_relu,
        backward=backward_relu,
        aot_kernels=RELU_KERNELS.aot_kernels,
        idea="one 16-byte vector a thread",
    )
)
RELU_SCALAR = Implementation(
    operator="relu",
    name="cuda/01-scalar",
    backend="cuda",
    forward=forward_relu_scalar,
    backward=backward_relu_scalar,
    aot_kernels=tuple(RELU_SCALAR_SOURCES.values()),
    idea="one element a thread",
)
BIAS_GELU = with_invariant(
    Implementation(
        operator="bias_gelu",
        backend="cuda",
        forward=forward_bias_gelu,
        backward=backward_bias_gelu,
        aot_kernels=(
            *BIAS_GELU_KERNELS.aot_kernels,
            *(bias_gelu_backward_source(dtype) for dtype in FLOAT_DTYPES),
        ),
        idea="one 16-byte vector a thread; the bias's gradient by chunks of rows",
    )
)
