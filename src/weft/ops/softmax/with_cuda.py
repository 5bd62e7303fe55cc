"""Softmax in CUDA C++: rows in registers or shared memory, read once.

``configure`` chooses one of four strategies by the length of a row; ``source`` compiles its kernel for a
dtype and vector width; ``forward`` and ``backward`` launch it. softmax.cu has the kernels ``warp`` and
``block``, softmax_shared.cu ``shared``, softmax_long.cu ``long``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import Case, Implementation, Support, no
from weft.core.implementation import with_invariant
from weft.core.support import YES
from weft.machine.device_limits import num_sms
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.layout import (
    ALIGNED_ALIKE,
    CUDA_TYPES,
    FLOAT_DTYPES,
    SHIFTED,
    contiguous_like,
    dtype_name,
    max_vec_width,
    peel_of,
    view_2d,
)
from weft.ops._common.prepared import Launch, LaunchCache, are_repeatable

HERE = Path(__file__).parent
FILES = {
    "warp": "softmax.cu",
    "block": "softmax.cu",
    "shared": "softmax_shared.cu",
    "long": "softmax_long.cu",
}
LONG_FORWARD = ("softmax_long", "softmax_statistics", "softmax_write")
LONG_BACKWARD = ("softmax_backward_long", "softmax_dots", "softmax_backward_write")
CLUSTER_ARCH = 90  # the first architecture with clusters and bulk copies, which ``shared`` needs
ROW_WORDS = 32  # 4-byte registers of a thread for its part of a row, in a block of full size
# Threads of a block of ``warp``. An H200 starts 12 blocks a us on each SM: rows of 64, 128 and 200 columns
# all took as long as their blocks of 64 threads took to start. A block has to move 2.7 KB to be no limit, and
# 64 threads with one vector each read and write 2 KB (results/nvidia-h200/row-lengths.json).
SMALL_BLOCK = 64
MAX_SLICE_BYTES = 72 << 10  # a block's slice of a row in ``shared``: three such blocks fit on an SM
PEELED_COLUMNS = (321, 1001, 5003, 50257, 262143)  # odd rows, one or more for each strategy
MAX_PARTS = 32  # blocks that share a row in ``long``: one lane of a warp merges each part


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration.

    ``strategy`` says where a row is stored: ``warp`` (registers of ``lanes`` lanes) and ``block`` (registers
    of a block), with ``vecs_per_thread`` vectors in each thread; ``shared`` (shared memory of ``cluster``
    blocks, ``min_blocks`` of which must fit on an SM); ``long`` (not stored; two passes). With
    ``splits_rows`` several blocks share a row in ``long`` if there are few rows. ``peel`` is ``PEEL`` of
    row_view.cuh: how rows are moved that are not whole vectors at aligned addresses.
    """

    strategy: str
    threads: int
    vecs_per_thread: int = 1
    lanes: int = 32
    cluster: int = 1
    min_blocks: int = 1
    splits_rows: bool = True
    peel: int = 0

    def __post_init__(self) -> None:
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"threads is a multiple of 32 up to 1024, not {self.threads}")

    @property
    def label(self) -> str:
        """Text that differs for configurations that compile to different programs."""
        size = f"{self.threads}x{self.vecs_per_thread}-{self.lanes}-{self.cluster}-{self.min_blocks}"
        return f"{size}-peel{self.peel}" if self.peel else size


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@cache
def configure(
    columns: int, dtype: torch.dtype, vec_width: int, has_clusters: bool, is_backward: bool
) -> Config:
    """Return the configuration for rows of ``columns`` elements, read in vectors of ``vec_width``.

    ``has_clusters``: the device has thread-block clusters and bulk copies. The backward stores two rows
    where the forward stores one. The bounds were chosen on an H200 in bf16: docs/log.md, 2026-11-20, and for
    rows above 32 KiB results/nvidia-h200/sweep-long-rows-2026-11-22.ndjson.
    """
    # The order of the strategies is their speed for growing rows: warps need no barrier, blocks one, clusters
    # an exchange.
    vecs = columns // vec_width
    rows_stored = 2 if is_backward else 1
    words_per_vec = max(1, vec_width * dtype.itemsize // 4) * rows_stored
    max_vecs = max(1, ROW_WORDS // words_per_vec)
    # Up to four vectors for each lane: more registers for each thread leave fewer warps to hide the latency.
    if vecs <= 32 * min(4, max_vecs):
        lanes = min(32, _next_power_of_2(vecs))
        vecs_per_thread = _next_power_of_2(-(-vecs // lanes))
        threads = 128 if vecs_per_thread == 1 and not is_backward else SMALL_BLOCK
        return Config(strategy="warp", threads=threads, vecs_per_thread=vecs_per_thread, lanes=lanes)
    if vecs <= 64 * max_vecs and not is_backward:
        # 1 % faster than 128 threads with half as many vectors each.
        return Config(strategy="block", threads=64, vecs_per_thread=-(-vecs // 64))
    usual_vecs = max(1, max_vecs // 2)
    threads = -(-vecs // (32 * usual_vecs)) * 32
    # A bulk copy moves multiples of 16 bytes: narrower vectors mean that rows are not aligned.
    bulk_copies = has_clusters and vec_width * dtype.itemsize == 16
    if 512 < threads <= 1024 and bulk_copies and not is_backward:
        return Config(strategy="shared", threads=512, cluster=2, min_blocks=4)
    if threads <= 1024:
        return Config(strategy="block", threads=threads, vecs_per_thread=usual_vecs)
    if bulk_copies:
        # The smallest cluster whose blocks' slices fit.
        for cluster in (1, 2, 4, 8):
            if vecs * rows_stored * 16 // cluster <= MAX_SLICE_BYTES:
                threads = 128 if is_backward else 256
                return Config(strategy="shared", threads=threads, cluster=cluster, min_blocks=3)
    threads = -(-vecs // (32 * max_vecs)) * 32
    if threads <= 1024:
        return Config(strategy="block", threads=threads, vecs_per_thread=max_vecs)
    return Config(strategy="long", threads=512)


def candidates(columns: int, dtype: torch.dtype, is_backward: bool = False) -> list[Config]:
    """Return the configurations worth timing for rows of ``columns`` on a device with clusters.

    All of them use 16-byte vectors: ``columns`` is a multiple of one.
    """
    vecs = columns * dtype.itemsize // 16
    rows_stored = 2 if is_backward else 1
    max_vecs = 8 // rows_stored
    configs = [Config(strategy="long", threads=t) for t in (512, 1024)]
    for count in (1, 2, 4, 8):
        if vecs <= 32 * count <= 2 * vecs and count <= max_vecs:
            for threads in (32, 64, 128, 256):
                configs.append(Config(strategy="warp", threads=threads, vecs_per_thread=count))
        threads = -(-vecs // (32 * count)) * 32
        if threads <= 1024 and threads * count * rows_stored <= 8192 and count <= 2 * max_vecs:
            configs.append(Config(strategy="block", threads=threads, vecs_per_thread=count))
    for cluster in (1, 2, 4, 8):
        slice_bytes = 16 * vecs * rows_stored // cluster
        if not 8 << 10 <= slice_bytes <= MAX_SLICE_BYTES:
            continue
        # A block also has some static shared memory, and 1 KiB that the system reserves.
        max_blocks = (227 << 10) // (slice_bytes + 2560)
        for threads in (64, 128, 256, 512):
            blocks = min(max_blocks, 2048 // threads, 32)
            for min_blocks in sorted({blocks, max(1, 3 * blocks // 4)}):
                configs.append(
                    Config(strategy="shared", threads=threads, cluster=cluster, min_blocks=min_blocks)
                )
    return configs


@cache
def configure_rows(
    columns: int, dtype: torch.dtype, vec_width: int, has_clusters: bool, is_backward: bool, peel: int
) -> Config:
    """Return the configuration for rows that are moved as ``peel`` says; see :func:`configure`."""
    if not peel:
        return configure(columns, dtype, vec_width, has_clusters, is_backward)
    config = configure(columns, dtype, 16 // dtype.itemsize, has_clusters, is_backward)
    return replace(config, peel=peel)


@cache
def source(config: Config, dtype: torch.dtype, vec_width: int, is_backward: bool) -> CudaSource:
    """Return the program of one configuration, which moves ``vec_width`` elements at a time."""
    strategy = config.strategy
    macros = {"WEFT_T": CUDA_TYPES[dtype], "THREADS": config.threads}
    if config.peel:
        macros["PEEL"] = config.peel
    if strategy != "long" and is_backward:
        macros["BACKWARD"] = 1
    if strategy == "shared":
        macros |= {"MIN_BLOCKS": config.min_blocks, "CLUSTER": config.cluster}
        if dtype == torch.bfloat16:
            macros["PAIRS"] = 1
    else:
        macros["VEC_WIDTH"] = vec_width
    if strategy in ("warp", "block"):
        macros["VECS_PER_THREAD"] = config.vecs_per_thread
    if strategy == "warp":
        macros["LANES"] = config.lanes
    name = f"softmax_backward_{strategy}" if is_backward else f"softmax_{strategy}"
    return CudaSource(
        file=HERE / FILES[strategy],
        kernels=(*LONG_FORWARD, *LONG_BACKWARD) if strategy == "long" else (name,),
        defines=tuple((k, str(v)) for k, v in macros.items()),
        label=f"{name}-{dtype_name(dtype)}-{config.label}-{vec_width}",
        min_arch=CLUSTER_ARCH if strategy == "shared" else 80,
    )


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


LAUNCHES = LaunchCache()


def forward(x: torch.Tensor) -> torch.Tensor:
    launch = LAUNCHES.get(("forward", x.shape, x.dtype, x.get_device()))
    if launch is not None and x.is_contiguous() and not (address := x.data_ptr()) & 15:
        y = torch.empty_like(x)
        launch(address, y.data_ptr())
        return y
    if x.numel() == 0:
        return contiguous_like(x)
    return forward_with(None, x)


def forward_with(config: Config | None, x: torch.Tensor) -> torch.Tensor:
    """Compute the forward with a configuration that suits the rows of ``x``, which is not empty.

    None chooses the configuration.
    """
    y = contiguous_like(x)
    x2d = view_2d(x)
    columns = x2d.shape[1]
    vec_width = max_vec_width(columns, x2d)
    shipped = config is None
    if config is None:
        is_aligned = vec_width * x.element_size() == 16  # y is new, and aligned
        peel = 0 if is_aligned else peel_of(columns, y.view(-1, columns), x2d)
        config = configure_rows(columns, x.dtype, vec_width, _has_clusters(x.device), False, peel)
    launch = _launch(config, vec_width, x2d, (y,))
    if shipped and are_repeatable(x):
        LAUNCHES.store(("forward", x.shape, x.dtype, x.get_device()), launch)
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    launch = LAUNCHES.get(("backward", y.shape, y.dtype, y.get_device()))
    if launch is not None and are_repeatable(grad, y):
        dx = torch.empty_like(y)
        launch(grad.data_ptr(), y.data_ptr(), dx.data_ptr())
        return (dx,)
    if y.numel() == 0:
        return (contiguous_like(y),)
    return backward_with(None, grad, y)


def backward_with(config: Config | None, grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """Compute the backward from the forward's output ``y``, which is not empty; see forward_with."""
    y = y.contiguous()
    dx = torch.empty_like(y)
    grad2d = view_2d(grad)
    columns = grad2d.shape[1]
    vec_width = max_vec_width(columns, grad2d, y.view(-1, columns))
    shipped = config is None
    if config is None:
        is_aligned = vec_width * y.element_size() == 16  # dx is new, and aligned
        peel = 0 if is_aligned else peel_of(columns, dx.view(-1, columns), grad2d, y.view(-1, columns))
        config = configure_rows(columns, y.dtype, vec_width, _has_clusters(y.device), True, peel)
    launch = _launch(config, vec_width, grad2d, (y, dx))
    if shipped and are_repeatable(grad, y):
        LAUNCHES.store(("backward", y.shape, y.dtype, y.get_device()), launch)
    return (dx,)


# A row that several blocks share is added up in as many parts, whose number depends on the number of rows.


def forward_invariant(x: torch.Tensor) -> torch.Tensor:
    """Compute the forward so that the bits of a row do not depend on the batch."""
    if x.numel() == 0:
        return contiguous_like(x)
    x = aligned_rows(x)
    return forward_with(_configure_invariant(x, False), x)


def backward_invariant(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    if y.numel() == 0:
        return (contiguous_like(y),)
    y = aligned_rows(y)
    return backward_with(_configure_invariant(y, True), aligned_rows(grad), y)


def _configure_invariant(x: torch.Tensor, is_backward: bool) -> Config:
    columns = x.shape[-1]
    vec_width = max_vec_width(columns, x.view(-1, columns))
    config = configure(columns, x.dtype, vec_width, _has_clusters(x.device), is_backward)
    return replace(config, splits_rows=False)


def _launch(
    config: Config, vec_width: int, input2d: torch.Tensor, contiguous: tuple[torch.Tensor, ...]
) -> Launch | None:
    """Launch over ``input2d`` (x, or the gradient) and the contiguous tensors (y, or y and dx).

    Returns the same launch with other addresses; None for ``long``, which may be several launches.
    """
    is_backward = len(contiguous) == 2
    if config.peel:
        vec_width = 16 // input2d.element_size()
    program = source(config, input2d.dtype, vec_width, is_backward)
    rows, columns = input2d.shape
    stride, threads = input2d.stride(0), config.threads
    if config.strategy == "long":
        _launch_long(program, config, columns // vec_width, input2d, contiguous)
        return None
    kernel = program[program.kernels[0]]
    if config.strategy == "warp":
        blocks = -(-rows // (threads // config.lanes))  # the kernel strides if the grid has fewer
        grid = min(blocks, 2**31 - 1)
        return launch_and_prepare(kernel, grid, threads, input2d, *contiguous, rows, columns, stride)
    smem = 0
    if config.strategy == "shared":
        # The last vector of a shifted slice comes in two aligned ones.
        slice_vecs = -(-columns // vec_width // config.cluster) + (config.peel == SHIFTED)
        smem = slice_vecs * 16 * len(contiguous)
    grid = rows * config.cluster
    return launch_and_prepare(kernel, grid, threads, input2d, *contiguous, columns, stride, shared=smem)


def _launch_long(
    program: CudaSource,
    config: Config,
    vecs: int,
    input2d: torch.Tensor,
    contiguous: tuple[torch.Tensor, ...],
) -> None:
    """Launch one block a row, or several for few rows, each with at least eight vectors a thread."""
    rows, columns = input2d.shape
    stride, threads = input2d.stride(0), config.threads
    one_block, reduce_parts, write = LONG_BACKWARD if len(contiguous) == 2 else LONG_FORWARD
    # Two blocks on every SM keep enough loads in flight.
    parts = min(-(-2 * num_sms(input2d.device) // rows), MAX_PARTS, vecs // (8 * threads))
    if parts <= 1 or not config.splits_rows:
        program[one_block](rows, threads, input2d, *contiguous, columns, stride)
        return
    partial = torch.empty(2 * rows * parts, dtype=torch.float32, device=input2d.device)
    program[reduce_parts](rows * parts, threads, input2d, *contiguous, partial, columns, stride, parts)
    program[write](rows * parts, threads, input2d, *contiguous, partial, columns, stride, parts)


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape and case.inputs[0].shape[-1] >= 2**31 - 2**20:
        return no("these kernels take rows of up to 2^31 - 2^20 elements; use impl='torch'")
    return YES


def _aot_kernels() -> tuple[CudaSource, ...]:
    sources = []
    for dtype in FLOAT_DTYPES:
        widest = 16 // dtype.itemsize
        for columns in (100, 1024, 4096, 16384, 65536, 1 << 20):
            for is_backward in (False, True):
                for has_clusters in (False, True):
                    config = configure(columns, dtype, widest, has_clusters, is_backward)
                    sources.append(source(config, dtype, widest, is_backward))
        sources.append(source(configure(1001, dtype, 1, False, False), dtype, 1, False))
        for columns in PEELED_COLUMNS:
            for is_backward in (False, True):
                for peel in (ALIGNED_ALIKE, SHIFTED):
                    config = configure_rows(columns, dtype, widest, True, is_backward, peel)
                    sources.append(source(config, dtype, widest, is_backward))
        shared = Config(strategy="shared", threads=256, cluster=4, min_blocks=5)
        sources += [source(shared, dtype, widest, is_backward) for is_backward in (False, True)]
    return tuple(dict.fromkeys(sources))


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="softmax",
        backend="cuda",
        forward=forward,
        backward=backward,
        supports=supports,
        aot_kernels=_aot_kernels(),
        idea="rows in registers, read once, 16 bytes at a time",
    ),
    forward=forward_invariant,
    backward=backward_invariant,
)
