"""The norms in CUDA C++: choice of the kernel, launch, and one implementation for each norm.

Forward: ``norm_warp`` (short rows), ``norm_block`` (a block or cluster holds a row), ``norm_pipelined``,
``norm_row_loop`` or ``norm_long`` (clusters loop over long rows), ``norm_multi_pass`` (any row). Backward:
``norm_backward_warp`` (short rows), ``norm_backward`` (persistent teams), ``norm_backward_long`` (clusters)
or three plain kernels for any row, and ``norm_sum_partials``. configs.py chooses among their configurations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource, Kernel, launch_and_prepare
from weft.core import YES, Case, Implementation, Support, WeftError, no
from weft.core.implementation import with_invariant
from weft.machine.device_limits import has_tma, num_sms, smem_per_sm
from weft.ops._common.elementwise import ElementwiseKernels
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.layout import (
    ALIGNED_ALIKE,
    SHIFTED,
    contiguous_like,
    max_vec_width,
    peel_of,
    view_2d,
)
from weft.ops._common.philox_dropout import drops_all, pack_threshold_and_scale
from weft.ops.norms import spec
from weft.ops.norms.configs import (
    BackwardConfig,
    BlockConfig,
    ForwardConfig,
    RowLoopConfig,
    choose_backward,
    choose_forward,
)
from weft.ops.norms.kernel_variant import KernelVariant
from weft.ops.norms.long_configs import LongConfig
from weft.ops.norms.repeated import RepeatedNorms
from weft.ops.norms.warp_configs import WarpBackwardConfig, WarpConfig

FOLDER = Path(__file__).parent
SM90_SMEM = 228 << 10  # shared memory of an sm_90's SM in bytes
MAX_LOOP_ROWS = 1 << 30  # kernels that loop over rows count them in 32 bits
MAX_TEAMS = 16  # that the backward's block may have, where each SM has as many rows
PORTABLE_CLUSTER = 8  # blocks of a cluster that every device with clusters can run
ROW_THREADS = 256  # threads of a block of the multi-pass backward
PEELED_COLUMNS = (65, 321, 1001, 5003, 50257, 262143)  # odd rows, one or more for each forward kernel
SUM_THREADS = 512  # threads of a block of norm_sum_partials
# Threads of a block of norm_sum_few_partials, the most partial rows that it takes, and the fewest columns: a
# column a thread, with which the loads of a thread are in flight together.
COLUMN_THREADS, FEW_PARTS, MANY_COLUMNS = 128, 72, 16384
# s = dropout(x) + residual and dx = dropout(ds), for rows that the norm kernels do not fuse with dropout.
DROPOUT_KERNELS = ElementwiseKernels(FOLDER / "dropout_add.cu", "dropout_add", "dropout_back")


def _source(file: str, kernels: tuple[str, ...], macros: dict[str, Any], label: str, arch: int) -> CudaSource:
    defines = tuple((name, str(value)) for name, value in macros.items())
    return CudaSource(file=FOLDER / file, kernels=kernels, defines=defines, label=label, min_arch=arch)


@cache
def forward_source(variant: KernelVariant, config: ForwardConfig) -> CudaSource:
    macros = {**variant.macros, **config.macros}
    if isinstance(config, RowLoopConfig):
        file = "forward_pipelined.cu" if config.stages else "forward_row_loop.cu"
        label = f"{config.kernel}-{variant.label}-{config.label}"
        return _source(file, (config.kernel,), macros, label, 90)
    if isinstance(config, LongConfig):
        label = f"{config.kernel}-{variant.label}-{config.label}"
        return _source("forward_long.cu", (config.kernel,), macros, label, 90)
    file, kernel, arch = "forward.cu", "norm_multi_pass", 80
    if isinstance(config, BlockConfig):
        kernel, arch = "norm_block", 90 if config.cluster > 1 else 80
    elif isinstance(config, WarpConfig):
        file, kernel = "forward_warp.cu", "norm_warp"
    label = f"{kernel}-{variant.label}-{config.label}-{variant.vec_width}"
    macros["VEC_WIDTH"] = variant.vec_width
    return _source(file, (kernel,), macros, label, arch)


@cache
def backward_source(variant: KernelVariant, config: BackwardConfig) -> CudaSource:
    macros = {**variant.macros, **config.macros}
    label = f"{config.kernel}-{variant.label}-{config.label}"
    if isinstance(config, WarpBackwardConfig):
        return _source("backward_warp.cu", (config.kernel,), macros, label, 80)
    file = "backward_long.cu" if isinstance(config, LongConfig) else "backward.cu"
    return _source(file, (config.kernel,), macros, label, 90)


@cache
def multi_pass_backward_source(variant: KernelVariant) -> CudaSource:
    """Return the kernels for any row; the last of them sums the partials of every backward."""
    sizes = {"VEC_WIDTH": variant.vec_width, "THREADS": ROW_THREADS}
    sizes |= {"SUM_THREADS": SUM_THREADS, "COLUMN_THREADS": COLUMN_THREADS}
    kernels = ("norm_backward_rows", "norm_backward_columns", "norm_sum_partials", "norm_sum_few_partials")
    label = f"norm_backward_multi_pass-{variant.label}-{variant.vec_width}"
    return _source("backward_multi_pass.cu", kernels, variant.macros | sizes, label, 80)


def _loop_smem(rows: int, device: torch.device) -> int:
    """Shared memory of an SM for kernels that loop over rows, in bytes; 0 if they cannot run."""
    return smem_per_sm(device) if rows < MAX_LOOP_ROWS and has_tma(device) else 0


def _resident_clusters(config: BackwardConfig | RowLoopConfig, sms: int) -> int:
    """Return a number of blocks or clusters that are certainly resident at once.

    SMs come in groups (GPCs) of 16 or 18, and a cluster lies inside one: clusters of 4 and more leave some
    SMs of a group unused.
    """
    fitting = {1: sms, 2: sms // 2, 4: sms * 15 // 16 // 4, 8: sms * 7 // 8 // 8, 16: sms * 7 // 8 // 16}
    return config.blocks_per_sm * max(1, fitting[config.cluster])


def _active_clusters(
    variant: KernelVariant, config: BackwardConfig, columns: int, device: torch.device
) -> int:
    """Return how many blocks or clusters of a persistent kernel run at once on the device; 0 if none can.

    Clusters beyond this number would start when the others have ended, and double the time.
    """
    is_forward = isinstance(config, LongConfig) and not config.backward
    kernel = (forward_source if is_forward else backward_source)(variant, config)[config.kernel]
    if config.cluster == 1 or not isinstance(kernel, Kernel):
        return _resident_clusters(config, num_sms(device))
    shared = config.dynamic_smem(columns, variant)
    return _max_clusters(kernel, config.block_threads, shared, config.cluster)


def _cycle(variant: KernelVariant, columns: int, *strides: int) -> int:
    """Return how many rows apart rows begin equally far behind a multiple of 16 bytes in all tensors."""
    return variant.vec_width // gcd(variant.vec_width, columns, *strides) if variant.peel else 1


@cache
def _max_clusters(kernel: Kernel, threads: int, shared: int, cluster: int) -> int:
    return kernel.max_active_clusters(threads, shared=shared, cluster=cluster)


def _aligned(v: torch.Tensor) -> torch.Tensor:
    """Return ``v`` contiguous and 32-byte aligned, as the widest load of a float32 weight needs it."""
    v = v.contiguous()
    return v if v.data_ptr() % 32 == 0 else v.clone()


REPEATED = RepeatedNorms()


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: ForwardConfig | None = None,
    dropout: tuple[int, int] | None = None,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s). Without ``residual`` s is x; without ``bias`` the norm is RMS norm.

    ``dropout``: a seed and ``pack_threshold_and_scale``; only a :class:`BlockConfig` takes it. ``invariant``:
    a row's address does not decide in which order it is added up.
    """
    key = None
    if config is None and dropout is None and not invariant:
        outputs = REPEATED.forward(x, residual, weight, bias, eps)
        if outputs is not None:
            return outputs
        key = REPEATED.forward_key(x, residual, weight, bias, eps)
    y = contiguous_like(x)
    s = torch.empty_like(y) if residual is not None else x
    if x.numel() == 0:
        return y, s
    x2d = view_2d(x)
    residual2d = x2d if residual is None else view_2d(residual)
    rows, columns = x2d.shape
    variant = KernelVariant(
        x_dtype=x.dtype,
        weight_dtype=weight.dtype,
        vec_width=max_vec_width(columns, x2d, residual2d),
        centred=bias is not None,
        residual=residual is not None,
        dropout=dropout is not None,
    )
    smem = _loop_smem(rows, x.device)
    # y stands for s too: both are new tensors, which begin at multiples of 16 bytes.
    is_plain = invariant or variant.has_aligned_rows
    peel = 0 if is_plain else peel_of(columns, y.view(-1, columns), x2d, residual2d)
    if peel:
        peeled = replace(variant, peel=peel, vec_width=16 // x.element_size())
        choice = config or choose_forward(columns, peeled, smem)
        if isinstance(choice, WarpConfig | BlockConfig | LongConfig):
            variant, config = peeled, choice
    config = config or choose_forward(columns, variant, smem)
    clusters = 0
    if isinstance(config, LongConfig):
        clusters = min(rows, _active_clusters(variant, config, columns, x.device))
        if not clusters:  # not every device has 16 SMs in a group for the longest rows' clusters
            variant = replace(variant, peel=0, vec_width=max_vec_width(columns, x2d, residual2d))
            config = choose_forward(columns, variant, 0)
    w = _aligned(weight)  # a copy is cheap beside the rows, and every kernel may use its widest loads
    # A missing tensor is replaced by another one: the kernel never reads it, and no null pointer is passed.
    tensors = (x2d, residual2d, w, w if bias is None else _aligned(bias), y, s)
    tail = (columns, x2d.stride(0), residual2d.stride(0), float(eps))
    source = forward_source(variant, config)
    if isinstance(config, WarpConfig):
        blocks = min(-(-rows * config.lanes // config.threads), 2**31 - 1)  # the kernel loops if it has fewer
        launch = launch_and_prepare(source["norm_warp"], blocks, config.threads, *tensors, rows, *tail)
    elif isinstance(config, BlockConfig):
        blocks = -(-rows // config.rows) * config.cluster
        kernel, sizes = source["norm_block"], (blocks, config.threads)
        launch = launch_and_prepare(kernel, *sizes, *tensors, rows, *tail, *(dropout or ()))
    elif isinstance(config, LongConfig):
        cycle, smem = _cycle(variant, columns, x2d.stride(0)), config.dynamic_smem(columns, variant)
        kernel, sizes = source[config.kernel], (clusters * config.cluster, config.block_threads)
        launch = launch_and_prepare(kernel, *sizes, *tensors, rows, *tail, cycle, shared=smem)
    elif isinstance(config, RowLoopConfig):
        # No fewer clusters than are resident at once, and none with more rows than `config.rows`: the start
        # of a late cluster is then hidden by others.
        clusters = max(_resident_clusters(config, num_sms(x.device)), -(-rows // config.rows))
        blocks = min(rows, clusters) * config.cluster
        smem = config.dynamic_smem(variant)
        kernel, sizes = source[config.kernel], (blocks, config.threads)
        launch = launch_and_prepare(kernel, *sizes, *tensors, rows, *tail, shared=smem)
    else:
        launch = launch_and_prepare(source["norm_multi_pass"], rows, config.threads, *tensors, *tail)
    REPEATED.store_forward(key, launch)
    return y, s


def _persistent(
    rows: int, columns: int, variant: KernelVariant, device: torch.device, invariant: bool = False
) -> BackwardConfig | None:
    """Return the configuration of the persistent backward, or None if the multi-pass kernels must run.

    ``invariant``: the configuration for many rows, however many there are.
    """
    # No more teams in a block than an SM has rows: with few rows, larger teams have fewer idle warps.
    rows_per_sm = rows // num_sms(device)
    max_teams = min(MAX_TEAMS, 1 << max(0, rows_per_sm.bit_length() - 1))  # a power of two
    if invariant:
        max_teams = MAX_TEAMS
    config = choose_backward(columns, variant, _loop_smem(rows, device), max_teams)
    # Not every device has 16 SMs in a group for the longest rows' clusters.
    if (
        config
        and config.cluster > PORTABLE_CLUSTER
        and not _active_clusters(variant, config, columns, device)
    ):
        return None
    return config


def launch_backward(
    grad: torch.Tensor,
    grad_s: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool,
    config: BackwardConfig | None = None,
    dropout: tuple[int, int] | None = None,
    invariant: bool = False,
    shares: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx, dresidual, dweight, dbias); ``x`` is the normalised tensor, which is s with a residual.

    With ``grad_s``, the gradient of s, dresidual is a copy of dx in memory of its own; otherwise, and if it
    ``shares`` that memory, it is dx. dbias is dweight unless ``centred``. With ``dropout``, as in the
    forward, dx is dropout's gradient of dresidual; only the persistent kernel takes it. ``invariant``: the
    number of rows does not decide how the gradient of a row is computed.
    """
    key, rows_launch = None, None
    if config is None and dropout is None and not invariant:
        key = REPEATED.backward_key(grad, grad_s, x, weight, eps, centred, shares)
        gradients = REPEATED.backward(key, grad, grad_s, x, weight, centred, shares)
        if gradients is not None:
            return gradients
    dx = contiguous_like(x)
    dr = torch.empty_like(dx) if grad_s is not None and not shares else dx
    dw = contiguous_like(weight)
    db = torch.empty_like(dw) if centred else dw
    if x.numel() == 0:
        return dx, dr, dw.zero_(), db.zero_()
    dx2d = view_2d(dx)
    rows, columns = dx2d.shape
    grad2d = view_2d(grad)
    inputs: tuple[torch.Tensor, ...] = (grad2d, grad2d if grad_s is None else view_2d(grad_s), view_2d(x))
    variant = KernelVariant(
        x_dtype=x.dtype,
        weight_dtype=weight.dtype,
        vec_width=1,
        centred=centred,
        residual=grad_s is not None,
        dropout=dropout is not None,
    )
    inputs, variant, config = _lay_out(dx2d, inputs, variant, config, invariant)
    grad2d, grad_s2d, x2d = inputs
    strides = (grad2d.stride(0), grad_s2d.stride(0), x2d.stride(0))
    tensors = (*inputs, _aligned(weight), dx, dr)
    plain_source = multi_pass_backward_source(replace(variant, dropout=False, peel=0))
    if config:
        shared = config.dynamic_smem(columns, variant)
        kernel = backward_source(variant, config)[config.kernel]
        clusters = min(-(-rows // config.teams), _active_clusters(variant, config, columns, x.device))
        cycle = _cycle(variant, columns, *strides)
        parts, tail = clusters, (*(dropout or ()),)
        if isinstance(config, LongConfig):  # a part for each kind of rows that a cluster has
            parts, tail = clusters + min(cycle, rows) - 1, (cycle, *tail)
        elif variant.peel:  # all rows of a team are to begin equally
            step = cycle // gcd(cycle, config.rows_per_block)
            parts = clusters = max(1, clusters // step) * step
        partials = _float32((1 + centred) * parts * columns, x.device)
        rows_launch = launch_and_prepare(
            kernel, clusters * config.cluster, config.block_threads, *tensors, partials, rows, columns,
            *strides, float(eps), *tail, shared=shared,
        )  # fmt: skip
    else:
        statistics = _float32(3 * rows, x.device)
        plain_source["norm_backward_rows"](
            rows, ROW_THREADS, *tensors, statistics, columns, *strides, float(eps)
        )
        blocks = -(-columns // ROW_THREADS)
        # About 8 blocks an SM, at least 16 rows each; 65535 is the limit of a grid's second dimension.
        parts = min(-(-rows // 16), max(1, 8 * num_sms(x.device) // blocks), 65535)
        partials = _float32((1 + centred) * parts * columns, x.device)
        plain_source["norm_backward_columns"](
            (blocks, parts), ROW_THREADS, grad2d, x2d, statistics, partials, rows, columns,
            strides[0], strides[2],
        )  # fmt: skip
    sum_launch = _sum_partials(plain_source, partials, dw, db, parts, columns)
    REPEATED.store_backward(key, rows_launch, sum_launch, partials)
    return dx, dr, dw, db


def _sum_partials(
    source: CudaSource, partials: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, parts: int, columns: int
) -> Any:
    """Add up the partial rows, (2 or 1, ``parts``, ``columns``), to dw and, if it is another tensor, db."""
    name, block_columns, threads = "norm_sum_partials", 32, SUM_THREADS
    if parts <= FEW_PARTS and columns >= MANY_COLUMNS:
        name, block_columns, threads = "norm_sum_few_partials", COLUMN_THREADS, COLUMN_THREADS
    grid = (-(-columns // block_columns), 1 if db is dw else 2)
    return launch_and_prepare(source[name], grid, threads, partials, dw, db, parts, columns)


def _lay_out(
    dx2d: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    variant: KernelVariant,
    config: BackwardConfig | None,
    invariant: bool,
) -> tuple[tuple[torch.Tensor, ...], KernelVariant, BackwardConfig | None]:
    """Return the backward's inputs, the variant with its vector width, and ``config`` or the chosen one.

    The inputs are copied to multiples of 16 bytes if their rows begin elsewhere than those of dx and no
    configuration takes such rows. A copy reads and writes a tensor once; the multi-pass kernels would read it
    twice more, by single elements.
    """
    rows, columns = dx2d.shape
    variant = replace(variant, vec_width=max_vec_width(columns, *inputs))
    # dx stands for dr too: both are new tensors, which begin at multiples of 16 bytes.
    peel = 0 if invariant or variant.has_aligned_rows else peel_of(columns, dx2d, *inputs)
    if peel:
        peeled = replace(variant, peel=peel, vec_width=16 // dx2d.element_size())
        if choice := config or _persistent(rows, columns, peeled, dx2d.device):
            return inputs, peeled, choice
    if peel == SHIFTED:
        copies = {id(t): aligned_rows(t) for t in inputs}
        return _lay_out(dx2d, tuple(copies[id(t)] for t in inputs), variant, config, invariant)
    return inputs, variant, config or _persistent(rows, columns, variant, dx2d.device, invariant)


def _float32(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def _dropout_variant(weight: torch.Tensor, *tensors: torch.Tensor) -> KernelVariant | None:
    """Return the variant of the norm kernels with fused dropout, or None if they do not take these rows.

    They take contiguous rows of a multiple of 16 bytes: the position of an element in memory then tells its
    random word. Other rows, and rows above 64 KiB, take two kernels: in bf16 10 bytes an element instead of
    8 forward, and 14 instead of 10 backward.
    """
    first = tensors[0]
    if not first.numel() or not all(t.is_contiguous() for t in tensors):
        return None
    columns = first.shape[-1]
    vec_width = max_vec_width(columns, *(t.view(-1, columns) for t in tensors))
    variant = _fused_dropout_variant(first.dtype, weight.dtype, vec_width)
    return variant if variant.has_aligned_rows else None


def _fused_dropout_variant(x_dtype: torch.dtype, weight_dtype: torch.dtype, vec_width: int) -> KernelVariant:
    return KernelVariant(
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        vec_width=vec_width,
        centred=True,
        residual=True,
        dropout=True,
    )


def dropout_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s), by one kernel if it takes the rows, else by two."""
    variant = None if drops_all(p) else _dropout_variant(weight, x, residual)
    config = choose_forward(x.shape[-1], variant, 0) if variant else None
    if isinstance(config, BlockConfig):
        dropout = (seed, pack_threshold_and_scale(p))
        return launch_forward(x, residual, weight, bias, eps, config, dropout)
    s = contiguous_like(x)
    if drops_all(p):
        # Everything is dropped (p rounds to 1): the kernels' scale 1 / (1 - p) would be infinite.
        s.copy_(residual)
    else:
        tensors = (x.contiguous(), residual.contiguous(), s)
        DROPOUT_KERNELS.launch("dropout_add", tensors, seed, pack_threshold_and_scale(p))
    y, _ = launch_forward(s, None, weight, bias, eps)
    return y, s


def dropout_backward(
    grad: torch.Tensor,
    grad_s: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Return (dx, dresidual, dweight, dbias), by the persistent kernel if it takes the rows."""
    # The multi-pass kernels have no dropout: those rows take one more elementwise kernel.
    variant = None if drops_all(p) else _dropout_variant(weight, grad, grad_s, s)
    if variant:
        columns = s.shape[-1]
        config = _persistent(s.numel() // columns, columns, variant, s.device)
        if config:
            dropout = (seed, pack_threshold_and_scale(p))
            return launch_backward(grad, grad_s, s, weight, eps, True, config, dropout)
    dx, dr, dw, db = launch_backward(grad, grad_s, s, weight, eps, centred=True)
    if drops_all(p):
        dx.zero_()
    else:
        DROPOUT_KERNELS.launch("dropout_back", (dr, dx), seed, pack_threshold_and_scale(p))
    return dx, dr, dw, db


def supports(case: Case, device: str) -> Support:
    shape = case.inputs[0].shape
    if shape and shape[-1] >= 2**31 - 2**20:
        return no("rows of 2^31 elements and more are not for these kernels; use impl='torch'")
    return YES


def supports_dropout(case: Case, device: str) -> Support:
    if case.inputs[0].shape[-1:] == (1,):
        return no("a row of one column: its backward drifts by 1.15 times what is allowed")
    return supports(case, device)


def _aot_kernels(norm: spec.NormVariant) -> tuple[CudaSource, ...]:
    """Return what ships for rows of 1024, 4096 and 16384 in bf16 (forward also 65536), and 4096 in fp32.

    Rows of 320 columns and rows of odd length ship too, all in bf16.
    """
    sources = []
    for dtype, columns in (
        (torch.bfloat16, 4096),
        (torch.bfloat16, 16384),
        (torch.bfloat16, 1024),
        (torch.float32, 4096),
    ):
        variant = KernelVariant(
            x_dtype=dtype,
            weight_dtype=dtype,
            vec_width=16 // dtype.itemsize,
            centred=norm.centred,
            residual=norm.residual,
        )
        sources.append(forward_source(variant, choose_forward(columns, variant, SM90_SMEM)))
        persistent = choose_backward(columns, variant, SM90_SMEM, 16)
        assert persistent is not None
        sources.append(backward_source(variant, persistent))
    long = replace(variant, x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, vec_width=8)
    sources += [forward_source(long, choose_forward(65536, long, smem)) for smem in (SM90_SMEM, 0)]
    sources.append(forward_source(long, choose_forward(320, long, 0)))
    if config := choose_backward(320, long, 0, 16):
        sources.append(backward_source(long, config))
    for columns in PEELED_COLUMNS:
        for peel in (ALIGNED_ALIKE, SHIFTED):
            peeled = replace(long, peel=peel)
            sources.append(forward_source(peeled, choose_forward(columns, peeled, SM90_SMEM)))
            if config := choose_backward(columns, peeled, SM90_SMEM, 16):
                sources.append(backward_source(peeled, config))
    return (*dict.fromkeys(sources), multi_pass_backward_source(variant))


def _dropout_aot_kernels() -> tuple[CudaSource, ...]:
    """Return what ships for rows of 768, 1024 and 4096 in bf16, 1024 in fp32, and the separate kernels."""
    sources = []
    shapes = (*((torch.bfloat16, columns) for columns in (768, 1024, 4096)), (torch.float32, 1024))
    for dtype, columns in shapes:
        variant = _fused_dropout_variant(dtype, dtype, 16 // dtype.itemsize)
        sources.append(forward_source(variant, choose_forward(columns, variant, 0)))
        persistent = choose_backward(columns, variant, SM90_SMEM, 16)
        assert persistent is not None
        sources.append(backward_source(variant, persistent))
    return (*sources, *DROPOUT_KERNELS.aot_kernels)


def _implementation(norm: spec.NormVariant) -> Implementation:
    def forward(*inputs: torch.Tensor, eps: float) -> Any:
        y, s = launch_forward(*norm.unpack_inputs(inputs), eps)
        return (y, s) if norm.residual else y

    def backward(*tensors: torch.Tensor, eps: float, shares: bool = False) -> tuple[torch.Tensor, ...]:
        gradients = launch_backward(*norm.unpack_backward(tensors), eps, norm.centred, shares=shares)
        return norm.select_gradients(*gradients)

    def forward_invariant(*inputs: torch.Tensor, eps: float) -> Any:
        x, residual, weight, bias = norm.unpack_inputs(inputs)
        _refuse_too_many_rows(x)
        rows = (aligned_rows(x), aligned_rows(residual))
        y, s = launch_forward(*rows, weight, bias, eps, invariant=True)
        return (y, s) if norm.residual else y

    def backward_invariant(
        *tensors: torch.Tensor, eps: float, shares: bool = False
    ) -> tuple[torch.Tensor, ...]:
        grad, grad_s, x, weight = norm.unpack_backward(tensors)
        _refuse_too_many_rows(x)
        rows = (aligned_rows(grad), aligned_rows(grad_s), aligned_rows(x))
        gradients = launch_backward(*rows, weight, eps, norm.centred, shares=shares, invariant=True)
        return norm.select_gradients(*gradients)

    if norm.dropout:
        idea = "the norm's kernels with dropout of x fused in; 16 bytes a thread"
    else:
        idea = "rows read once, 16 bytes at a time, by blocks or clusters; persistent backward"
    implementation = Implementation(
        operator=norm.name,
        backend="cuda",
        forward=dropout_forward if norm.dropout else forward,
        backward=dropout_backward if norm.dropout else norm.add_shared(backward),
        supports=supports_dropout if norm.dropout else supports,
        aot_kernels=_dropout_aot_kernels() if norm.dropout else _aot_kernels(norm),
        idea=idea,
    )
    # Dropout keeps an element by its position in the batch: no row of it is invariant.
    if norm.dropout:
        return implementation
    return with_invariant(
        implementation, forward=forward_invariant, backward=norm.add_shared(backward_invariant)
    )


def _refuse_too_many_rows(x: torch.Tensor) -> None:
    """Raise :class:`WeftError` for rows that other kernels take, which add up a row in another order."""
    rows = x.numel() // max(x.shape[-1], 1)
    if rows >= MAX_LOOP_ROWS:
        raise WeftError("batch invariance of a norm", expected=f"fewer than {MAX_LOOP_ROWS} rows", got=rows)


LAYER_NORM = _implementation(spec.LAYER_NORM_VARIANT)
RMS_NORM = _implementation(spec.RMS_NORM_VARIANT)
ADD_LAYER_NORM = _implementation(spec.ADD_LAYER_NORM_VARIANT)
ADD_RMS_NORM = _implementation(spec.ADD_RMS_NORM_VARIANT)
DROPOUT_ADD_LAYER_NORM = _implementation(spec.DROPOUT_VARIANT)
