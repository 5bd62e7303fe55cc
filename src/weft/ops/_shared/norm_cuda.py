"""Host side of the norms in CUDA C++: which kernel takes which rows, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import YES, Case, Support, no
from weft.ops._shared.rows import as_rows, width

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
Pair = tuple[torch.Tensor, torch.Tensor]
EACH = 16  # columns a thread of the backward has, with two sums in registers for each


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a program is compiled for: types, elements an access, and which of the norms."""

    x: torch.dtype
    w: torch.dtype
    access: int
    centred: bool
    add: bool

    @property
    def macros(self) -> dict[str, object]:
        return {
            "WEFT_T": TYPES[self.x],
            "WEFT_W": TYPES[self.w],
            "CENTRED": int(self.centred),
            "ADD": int(self.add),
        }

    @property
    def label(self) -> str:
        words = [str(self.x).removeprefix("torch."), str(self.w).removeprefix("torch.")]
        return "-".join([*words, f"{int(self.centred)}{int(self.add)}"])


@dataclass(frozen=True, kw_only=True)
class Forward:
    """``vectors`` accesses a thread hold a row; 0: the row is walked three times."""

    threads: int
    vectors: int


@dataclass(frozen=True, kw_only=True)
class Backward:
    """``cluster`` blocks a row, ``resident`` of which a multiprocessor holds, ``stages`` rows under
    way in each; 0: rows of any length and alignment, in three kernels."""

    threads: int
    cluster: int = 0
    resident: int = 1
    stages: int = 0


@cache
def configure(columns: int, itemsize: int, access: int) -> Forward:
    """Two accesses a thread for short rows, four for long ones."""
    accesses = columns // access
    for vectors, most in ((2, 128), (4, 1024)):
        threads = -(-accesses // (32 * vectors)) * 32
        if threads <= most:
            return Forward(threads=threads, vectors=vectors)
    return Forward(threads=512, vectors=0)


@cache
def configure_backward(columns: int, kind: Kind, clusters: bool) -> Backward:
    """16 columns a thread, so that 16 to 24 warps of 80 to 128 registers fill a multiprocessor. A
    row of more than 256 threads goes to a cluster of smaller blocks, more of which are in turn."""
    itemsize, cluster = kind.x.itemsize, 1
    while columns > 256 * EACH and -(-columns // cluster) > 128 * EACH and cluster < 8:
        cluster *= 2
    slice_ = -(-columns // (cluster * kind.access)) * kind.access
    threads = -(-slice_ // (32 * EACH)) * 32
    if not clusters or kind.access * itemsize != 16 or threads > 512:
        return Backward(threads=256)
    room = 512
    if itemsize == 2 and kind.w == kind.x and not kind.add:
        room = 512 if kind.centred else 768
    resident = max(1, min(16, room // threads))
    held = (3 if kind.add else 2) * slice_ * itemsize
    stages = min(4, (200 << 10) // (resident * held))
    return Backward(threads=threads, cluster=cluster, resident=resident, stages=stages)


@cache
def forward_source(kind: Kind, config: Forward) -> CudaSource:
    name = "norm_block" if config.vectors else "norm_long"
    macros = {**kind.macros, "ACCESS": kind.access, "THREADS": config.threads}
    if config.vectors:
        macros["VECTORS"] = config.vectors
    return CudaSource(
        file=HERE / "norm_forward.cu",
        kernels=("norm_block", "norm_long"),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"{name}-{kind.label}-{config.threads}x{config.vectors}-{kind.access}",
    )


@cache
def backward_source(kind: Kind, config: Backward) -> CudaSource:
    macros = {
        **kind.macros,
        "THREADS": config.threads,
        "CLUSTER": config.cluster,
        "RESIDENT": config.resident,
        "STAGES": config.stages,
        "VECTORS": EACH // kind.access,
    }
    layout = f"{config.threads}-{config.cluster}-{config.resident}-{config.stages}"
    return CudaSource(
        file=HERE / "norm_backward.cu",
        kernels=("norm_backward",),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"norm_backward-{kind.label}-{layout}",
        min_arch=90,
    )


@cache
def any_source(kind: Kind) -> CudaSource:
    """For any row: the three kernels of norm_backward_any.cu, the last of which always runs."""
    macros = {**kind.macros, "ACCESS": kind.access, "THREADS": 256}
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
def _clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


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
    config: Forward | None = None,
) -> Pair:
    """(y, s): without a ``residual`` s is x; without a ``bias`` nothing is centred."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if residual is not None else x
    if x.numel() == 0:
        return y, s
    lines = as_rows(x)
    others = lines if residual is None else as_rows(residual)
    rows, columns = lines.shape
    access = width(columns, lines, others)
    kind = Kind(
        x=x.dtype, w=weight.dtype, access=access, centred=bias is not None, add=residual is not None
    )
    config = config or configure(columns, x.element_size(), access)
    w = _vector(weight)
    b = w if bias is None else _vector(bias)
    kernel = forward_source(kind, config)["norm_block" if config.vectors else "norm_long"]
    strides = (lines.stride(0), others.stride(0))
    kernel(rows, config.threads, lines, others, w, b, y, s, columns, *strides, float(eps))
    return y, s


def backward(
    grad: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool,
    config: Backward | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dresidual, dweight, dbias): see ``norm_triton.backward``."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dr = torch.empty_like(dx) if more is not None else dx
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = torch.empty_like(dw) if centred else dw
    if x.numel() == 0:
        return dx, dr, dw.zero_(), db.zero_()
    lines, grads = as_rows(x), as_rows(grad)
    mores = grads if more is None else as_rows(more)
    rows, columns = lines.shape
    access = width(columns, lines, grads, mores)
    kind = Kind(x=x.dtype, w=weight.dtype, access=access, centred=centred, add=more is not None)
    config = config or configure_backward(columns, kind, _clusters(x.device))
    strides = (grads.stride(0), mores.stride(0), lines.stride(0))
    tensors = (grads, mores, lines, _vector(weight), dx, dr)
    units, others = _units(x.device), any_source(kind)
    if config.cluster:
        # Of clusters of several blocks a device holds fewer: its parts have odd sizes.
        blocks = config.resident * (units if config.cluster == 1 else units * 7 // 8)
        parts = min(rows, blocks // config.cluster)
        part = _floats((1 + centred) * parts * columns, x.device)
        held = -(-columns // access // config.cluster) * 16 * (2 + kind.add) * config.stages
        kernel = backward_source(kind, config)["norm_backward"]
        grid = parts * config.cluster
        kernel(
            grid, config.threads, *tensors, part, rows, columns, *strides, float(eps), shared=held
        )
    else:
        kept = _floats(3 * rows, x.device)
        others["norm_rows"](rows, 256, *tensors, kept, columns, *strides, float(eps))
        blocks = -(-columns // 256)
        parts = min(-(-rows // 16), max(1, 8 * units // blocks), 65535)
        part = _floats((1 + centred) * parts * columns, x.device)
        inner = (rows, columns, strides[0], strides[2])
        others["norm_columns"]((blocks, parts), 256, grads, lines, kept, part, *inner)
    others["norm_sum"]((-(-columns // 32), 1 + centred), 256, part, dw, db, parts, columns)
    return dx, dr, dw, db


def _floats(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape and case.inputs[0].shape[-1] >= 2**31 - 2**20:
        return no("rows of 2^31 elements and more are not for these kernels; use impl='torch'")
    return YES


def specimens(centred: bool, add: bool) -> tuple[CudaSource, ...]:
    """What ships for rows of 4096 and 16384 in bf16, and of 4096 in fp32."""
    found = []
    for dtype, columns in ((torch.bfloat16, 4096), (torch.bfloat16, 16384), (torch.float32, 4096)):
        size = dtype.itemsize
        kind = Kind(x=dtype, w=dtype, access=16 // size, centred=centred, add=add)
        found.append(forward_source(kind, configure(columns, size, 16 // size)))
        found.append(backward_source(kind, configure_backward(columns, kind, True)))
    return (*found, any_source(kind))
