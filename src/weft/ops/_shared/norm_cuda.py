"""Host side of the norms in CUDA C++: which kernel takes which rows, and its launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import YES, Case, Support, no
from weft.ops._shared.norm_configs import (
    Block,
    Kind,
    Long,
    Stay,
    Walk,
    configure,
    configure_backward,
    shared,
)
from weft.ops._shared.rows import as_rows, width

HERE = Path(__file__).parent
Pair = tuple[torch.Tensor, torch.Tensor]
SM90 = 228 << 10  # bytes of shared memory that an sm_90's multiprocessor has for its blocks
MOST = 1 << 30  # rows that teams count in 32 bits
SUMMING = 512  # threads of a block of norm_sum


@cache
def forward_source(kind: Kind, config: Block | Walk | Long) -> CudaSource:
    if isinstance(config, Walk):
        return CudaSource(
            file=HERE / f"{config.kernel}.cu",
            kernels=(config.kernel,),
            defines=tuple((k, str(v)) for k, v in {**kind.macros, **config.macros}.items()),
            label=f"{config.kernel}-{kind.label}-{config.label}",
            min_arch=90,
        )
    name = "norm_block" if isinstance(config, Block) else "norm_long"
    macros = {**kind.macros, "ACCESS": kind.access, **config.macros}
    return CudaSource(
        file=HERE / "norm_forward.cu",
        kernels=("norm_block", "norm_long"),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"{name}-{kind.label}-{config.label}-{kind.access}",
        min_arch=90 if isinstance(config, Block) and config.cluster > 1 else 80,
    )


@cache
def backward_source(kind: Kind, config: Stay) -> CudaSource:
    macros = {**kind.macros, **config.macros}
    return CudaSource(
        file=HERE / "norm_backward.cu",
        kernels=("norm_backward",),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"norm_backward-{kind.label}-{config.label}",
        min_arch=90,
    )


@cache
def any_source(kind: Kind) -> CudaSource:
    """For any row: the three kernels of norm_backward_any.cu, the last of which always runs."""
    macros = {**kind.macros, "ACCESS": kind.access, "THREADS": 256, "SUMMING": SUMMING}
    return CudaSource(
        file=HERE / "norm_backward_any.cu",
        kernels=("norm_rows", "norm_columns", "norm_sum"),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"norm_backward_any-{kind.label}-{kind.access}",
    )


@cache
def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def room(device: torch.device) -> int:
    """Bytes of shared memory a multiprocessor has for its blocks; 0: it has no bulk copy engine."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _resident(config: Stay | Walk, units: int) -> int:
    """Blocks or clusters that are surely on the device at once. Multiprocessors come in groups of
    16 or 18, so that clusters of 4 and 8 leave some of them out."""
    fit = {1: units, 2: units // 2, 4: units * 15 // 16 // 4, 8: units * 7 // 8 // 8}
    return config.resident * max(1, fit[config.cluster])


def _grid(config: Stay, rows: int, units: int) -> int:
    """As many blocks or clusters as stay, or as rows give work to."""
    return min(-(-rows // config.teams), _resident(config, units))


def _walking(config: Walk, rows: int, units: int) -> int:
    """Clusters: as many as are surely on the device at once, and no fewer than take ``config.rows``
    each, so that what a late one begins with is hidden by others."""
    return min(rows, max(_resident(config, units), -(-rows // config.rows)))


def _vector(v: torch.Tensor) -> torch.Tensor:
    """``v`` contiguous, and on a boundary of 32 bytes, where any access to it may start."""
    v = v.contiguous()
    return v if v.data_ptr() % 32 == 0 else v.clone()


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: Block | Walk | Long | None = None,
    dropout: tuple[int, int] | None = None,
) -> Pair:
    """(y, s): without a ``residual`` s is x; without a ``bias`` nothing is centred. ``dropout``, a
    seed and a rule (philox_dropout.py), first leaves out some of x, where the configuration is a
    :class:`Block`."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if residual is not None else x
    if x.numel() == 0:
        return y, s
    lines = as_rows(x)
    others = lines if residual is None else as_rows(residual)
    rows, columns = lines.shape
    access, centred, add = width(columns, lines, others), bias is not None, residual is not None
    kind = Kind(
        x=x.dtype, w=weight.dtype, access=access, centred=centred, add=add, drop=bool(dropout)
    )
    config = config or configure(columns, kind, room(x.device) if rows < MOST else 0)
    w = _vector(weight)
    tensors = (lines, others, w, w if bias is None else _vector(bias), y, s)
    strides = (lines.stride(0), others.stride(0), float(eps))
    program = forward_source(kind, config)
    if isinstance(config, Block):
        blocks = -(-rows // config.rows) * config.cluster
        inner = (rows, columns, *strides, *(dropout or ()))
        program["norm_block"](blocks, config.threads, *tensors, *inner)
    elif isinstance(config, Walk):
        blocks = _walking(config, rows, _units(x.device)) * config.cluster
        inner, held = (rows, columns, *strides), config.shared(kind)
        program[config.kernel](blocks, config.threads, *tensors, *inner, shared=held)
    else:
        program["norm_long"](rows, config.threads, *tensors, columns, *strides)
    return y, s


def staying(rows: int, columns: int, kind: Kind, device: torch.device) -> Stay | None:
    """The backward's teams, or None where three kernels take rows of any length and alignment."""
    each = min(16, 1 << max(0, (rows // _units(device)).bit_length() - 1))
    return configure_backward(columns, kind, room(device) if rows < MOST else 0, each)


def backward(
    grad: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool,
    config: Stay | None = None,
    dropout: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dresidual, dweight, dbias): see ``norm_triton.backward``. With ``dropout``, as in
    :func:`forward`, dx is what it makes of the residual's gradient; there must be teams for it."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dr = torch.empty_like(dx) if more is not None else dx
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = torch.empty_like(dw) if centred else dw
    if x.numel() == 0:
        return dx, dr, dw.zero_(), db.zero_()
    lines, grads = as_rows(x), as_rows(grad)
    mores = grads if more is None else as_rows(more)
    rows, columns = lines.shape
    access, units = width(columns, lines, grads, mores), _units(x.device)
    add, drop = more is not None, dropout is not None
    kind = Kind(x=x.dtype, w=weight.dtype, access=access, centred=centred, add=add, drop=drop)
    config = config or staying(rows, columns, kind, x.device)
    strides = (grads.stride(0), mores.stride(0), lines.stride(0))
    tensors = (grads, mores, lines, _vector(weight), dx, dr)
    others = any_source(replace(kind, drop=False))
    if config:
        parts = _grid(config, rows, units)
        part = _floats((1 + centred) * parts * columns, x.device)
        held, blocks = shared(columns, kind, config), parts * config.cluster
        kernel = backward_source(kind, config)["norm_backward"]
        inner = (rows, columns, *strides, float(eps), *(dropout or ()))
        kernel(blocks, config.threads, *tensors, part, *inner, shared=held)
    else:
        kept = _floats(3 * rows, x.device)
        others["norm_rows"](rows, 256, *tensors, kept, columns, *strides, float(eps))
        blocks = -(-columns // 256)
        parts = min(-(-rows // 16), max(1, 8 * units // blocks), 65535)
        part = _floats((1 + centred) * parts * columns, x.device)
        inner = (rows, columns, strides[0], strides[2])
        others["norm_columns"]((blocks, parts), 256, grads, lines, kept, part, *inner)
    others["norm_sum"]((-(-columns // 32), 1 + centred), SUMMING, part, dw, db, parts, columns)
    return dx, dr, dw, db


def _floats(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape and case.inputs[0].shape[-1] >= 2**31 - 2**20:
        return no("rows of 2^31 elements and more are not for these kernels; use impl='torch'")
    return YES


def specimens(centred: bool, add: bool) -> tuple[CudaSource, ...]:
    """What ships for rows of 1024, 4096 and 16384 in bf16 (forward also of 65536), 4096 in fp32."""
    found = []
    bf16 = torch.bfloat16
    for dtype, columns in ((bf16, 4096), (bf16, 16384), (bf16, 1024), (torch.float32, 4096)):
        kind = Kind(x=dtype, w=dtype, access=16 // dtype.itemsize, centred=centred, add=add)
        found.append(forward_source(kind, configure(columns, kind, SM90)))
        back = configure_backward(columns, kind, SM90, 16)
        assert back is not None
        found.append(backward_source(kind, back))
    long = replace(kind, x=bf16, w=bf16, access=8)
    found += [forward_source(long, configure(65536, long, held)) for held in (SM90, 0)]
    return (*dict.fromkeys(found), any_source(kind))
