"""Softmax in CUDA C++: rows in registers or shared memory, read once; see softmax*.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.ops.softmax.launch import Config, configure
from weft.ops.softmax.rows import as_rows, width

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
FILES = {name: f"softmax_{name}.cu" for name in ("shared", "long")}
LONG = (
    "softmax_long",
    "softmax_statistics",
    "softmax_write",
    "softmax_backward_long",
    "softmax_dots",
    "softmax_backward_write",
)
CHIP = {"shared": 90}  # where a strategy needs a chip's own instructions


@cache
def source(config: Config, dtype: torch.dtype, access: int, backward: bool) -> CudaSource:
    """The program for one configuration; ``access`` elements move at a time."""
    strategy = config.strategy
    macros = {"WEFT_T": TYPES[dtype], "THREADS": config.threads}
    if strategy != "long" and backward:
        macros["BACKWARD"] = 1
    if strategy in CHIP:
        macros |= {"RESIDENT": config.blocks, "CLUSTER": config.cluster}
        if dtype == torch.bfloat16:
            macros["PAIRS"] = 1
    else:
        macros["ACCESS"] = access
    if strategy in ("warp", "block"):
        macros["VECTORS"] = config.vectors
    if strategy == "warp":
        macros["LANES"] = config.lanes
    name = f"softmax_backward_{strategy}" if backward else f"softmax_{strategy}"
    return CudaSource(
        file=HERE / FILES.get(strategy, "softmax.cu"),
        kernels=LONG if strategy == "long" else (name,),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"{name}-{str(dtype).removeprefix('torch.')}-{config.label}-{access}",
        min_arch=CHIP.get(strategy, 80),
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def forward(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _forward(None, x)


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The forward by one configuration that suits the rows of ``x``, which has elements."""
    return _forward(config, x)


def _forward(config: Config | None, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    lines = as_rows(x)
    columns = lines.shape[1]
    access = width(columns, lines)
    if config is None:
        config = configure(columns, x.dtype, access, _clusters(x.device), False)
    _launch(source(config, x.dtype, access, False), config, access, lines, (y,))
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    if y.numel() == 0:
        return (torch.empty_like(y, memory_format=torch.contiguous_format),)
    return _backward(None, grad, y)


def backward_with(config: Config, grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """The backward by one configuration, from the forward's output ``y``, which has elements."""
    return _backward(config, grad, y)


def _backward(config: Config | None, grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    y = y.contiguous()
    dx = torch.empty_like(y)
    lines = as_rows(grad)
    columns = lines.shape[1]
    access = width(columns, lines, y.view(-1, columns))
    if config is None:
        config = configure(columns, y.dtype, access, _clusters(y.device), True)
    _launch(source(config, y.dtype, access, True), config, access, lines, (y, dx))
    return (dx,)


def _launch(
    program: CudaSource,
    config: Config,
    access: int,
    lines: torch.Tensor,
    others: tuple[torch.Tensor, ...],
) -> None:
    """Launch over ``lines`` (x or the gradient) and the contiguous tensors that follow it."""
    rows, columns = lines.shape
    stride, threads = lines.stride(0), config.threads
    if config.strategy == "long":
        _launch_long(program, threads, columns // access, lines, others)
        return
    kernel = program[program.kernels[0]]
    if config.strategy != "warp":
        held = 0
        if config.strategy == "shared":
            held = -(-columns // access // config.cluster) * 16 * len(others)
        kernel(rows * config.cluster, threads, lines, *others, columns, stride, shared=held)
        return
    grid = -(-rows // (threads // config.lanes))
    kernel(min(grid, 2**31 - 1), threads, lines, *others, rows, columns, stride)


def _launch_long(
    program: CudaSource,
    threads: int,
    accesses: int,
    lines: torch.Tensor,
    others: tuple[torch.Tensor, ...],
) -> None:
    """One block a row, or where rows are few several: each has eight accesses a thread at least."""
    rows, columns = lines.shape
    stride = lines.stride(0)
    first, whole, last = LONG[1], LONG[0], LONG[2]
    if len(others) == 2:
        whole, first, last = LONG[3:]
    wanted = -(-2 * _multiprocessors(lines.device) // rows)
    parts = min(wanted, 32, accesses // (8 * threads))
    if parts <= 1:
        program[whole](rows, threads, lines, *others, columns, stride)
        return
    held = torch.empty(2 * rows * parts, dtype=torch.float32, device=lines.device)
    read = others[:-1]
    program[first](rows * parts, threads, lines, *read, held, columns, stride, parts)
    program[last](rows * parts, threads, lines, *others, held, columns, stride, parts)


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape and case.inputs[0].shape[-1] >= 2**31 - 2**20:
        return no("rows of 2^31 elements and more are not for these kernels; use impl='torch'")
    return YES


def _specimens() -> tuple[CudaSource, ...]:
    found = []
    for dtype in TYPES:
        widest = 16 // dtype.itemsize
        for columns in (100, 1024, 4096, 16384, 65536, 1 << 20):
            for back in (False, True):
                for chip in (False, True):
                    config = configure(columns, dtype, widest, chip, back)
                    found.append(source(config, dtype, widest, back))
        found.append(source(configure(1001, dtype, 1, False, False), dtype, 1, False))
        shared = Config(strategy="shared", threads=256, cluster=4, blocks=5)
        found += [source(shared, dtype, widest, back) for back in (False, True)]
    return tuple(dict.fromkeys(found))


IMPLEMENTATION = Implementation(
    operator="softmax",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=_specimens(),
    idea="rows in registers, read once, 16 bytes at a time",
)
