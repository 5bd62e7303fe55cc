"""Host code of wgmma.cu: products with an epilogue by Hopper's tensor cores and copy engine.

One family of kernels serves the operators ``matmul``, ``linear``, ``linear_gelu`` and ``linear_residual``.
The copy engine takes only rows that begin at multiples of 16 bytes: other operands of half types are copied
first (align.py), and other rows of the product are stored element by element. float32 operands are multiplied
as tf32, after a transposition where they are contiguous across K (transpose.cu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.prepared import LaunchCache, are_repeatable
from weft.ops._common.products import align, transpose
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops._common.products.wgmma_model import (
    CANDIDATES,
    CHOSEN_FROM,
    K_STEP_BYTES,
    L2_BYTES,
    LAUNCH_US,
    LEAST_GAIN,
    LEAST_STEPS,
    MAX_SPLITS,
    MMA_FLOP_PER_NS,
    MMA_LEAST_TILES,
    MMA_SMALL_BLOCKS,
    MMA_SMALL_TILE,
    MMA_TILE,
    WITH_K_PARTS,
    Config,
    Epilogue,
    estimated_us,
    spills,
)

ARCH = 90  # wgmma exists on sm_90a alone
DTYPES = (torch.bfloat16, torch.float16)
STORED_ROWS = 64  # of a box of c
SUM_THREADS, SUM_ROWS, SUM_COLUMNS = 128, 64, 32  # of a block of the second kernel, and of its part of c


class MatmulArguments(ctypes.Structure):
    """``MatmulArguments`` of wgmma.cu."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("c", TensorMap),
        ("extra", TensorMap),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("partials", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("c_elements", ctypes.c_void_p),
        ("extra_elements", ctypes.c_void_p),
        ("row_values", ctypes.c_void_p),
        ("condition", ctypes.c_void_p),
        ("phase", ctypes.c_int),
        ("farthest", ctypes.c_float),
        ("whole_tiles", ctypes.c_int),
        ("extra_pitch", ctypes.c_longlong),
        ("padding", ctypes.c_int * 8),  # the structure is aligned to 64 bytes
    )


class SumArguments(ctypes.Structure):
    """``MatmulSumArguments`` of wgmma.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partials", "c", "extra", "bias", "row_values")),
        ("extra_pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("row_tiles", "column_tiles", "whole_tiles", "splits")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
    )


class EndArguments(NamedTuple):
    """Arguments of the epilogues after RESIDUAL (wgmma_fused.py): memory, and where c is.

    ``memory`` takes column sums, sums of rows or lower bytes. With ``condition`` the kernel does nothing if
    that number is 0, or with ``farthest`` writes it. ``phase`` is ADDS and ROUNDS of wgmma.cu.
    """

    c: torch.Tensor | None = None  # (M, N), rows at multiples of 16 bytes; None: a new matrix
    memory: torch.Tensor | None = None
    row_values: torch.Tensor | None = None  # (M,) float32
    condition: torch.Tensor | None = None  # one int32
    phase: int = 0
    farthest: float = 0.0


# Epilogues of a sequence of launches, each of which may begin before the one before has ended.
CHAINED = frozenset({Epilogue.EXPONENTIAL, Epilogue.ROW_SCALE, Epilogue.ACCUMULATE})
NO_END = EndArguments()
OVERLAP = True  # a launch may begin before the kernel before it has ended; it waits before it reads


@cache
def source(
    dtype: torch.dtype,
    config: Config,
    a_is_k_major: bool,
    b_is_k_major: bool,
    is_split: bool = False,
    epilogue: Epilogue = Epilogue.PLAIN,
    any_c: bool = False,
) -> CudaSource:
    """Return the program of a configuration for operands that are contiguous along K or across it.

    ``is_split``: for a K that is divided among blocks. ``any_c``: for rows of c that begin anywhere.
    """
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "BN": config.columns,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
        "SHARE_A": int(config.share_a),
        "PINGPONG": int(config.pingpong),
        "TILE_BAND": config.band,
        "CONSUMER_GROUPS": config.groups,
        "SPLIT": int(is_split),
        "K_PARTS": config.k_parts,
        "A_MN": int(not a_is_k_major),
        "B_MN": int(not b_is_k_major),
        "EPILOGUE": int(epilogue),
        "ANY_C": int(any_c),
    }
    majors = f"{'k' if a_is_k_major else 'm'}{'k' if b_is_k_major else 'n'}"
    return CudaSource(
        file=Path(__file__).with_name("wgmma.cu"),
        kernels=("matmul_wgmma", "matmul_wgmma_sum") if is_split else ("matmul_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{config.label}-{majors}"
        + "-split" * is_split
        + (f"-{epilogue.name.lower()}" if epilogue else "")
        + "-any" * any_c,
        min_arch=ARCH,
        max_arch=ARCH,
    )


class Plan(NamedTuple):
    """Treatment of operands: whether the kernels take them, and which are transposed or aligned by a copy.

    ``any_c``: rows of the product do not begin at multiples of 16 bytes.
    """

    is_supported: bool
    transpose_a: bool
    transpose_b: bool
    align_a: bool = False
    align_b: bool = False
    any_c: bool = False

    @property
    def copies(self) -> bool:
        return self.transpose_a or self.transpose_b or self.align_a or self.align_b


# By what a plan depends on: a call's time on the host counts, and it needs its plan twice.
_PLANS: dict[tuple[Any, ...], Plan] = {}
MAX_PLANS = 4096
_REPEATED = LaunchCache()  # RepeatedProduct by kind of call


def plan(a: torch.Tensor, b: torch.Tensor) -> Plan:
    """Return the treatment of a (M, K) and b (K, N), in any storage."""
    key = (a.dtype, a.shape, a.stride(), a.data_ptr() % 16, b.shape, b.stride(), b.data_ptr() % 16)
    operands = _PLANS.get(key)
    if operands is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        operands = _PLANS[key] = _new_plan(a, b)
    return operands


def _new_plan(a: torch.Tensor, b: torch.Tensor) -> Plan:
    """Return the plan of a product.

    Half types are taken in every order of storage and alignment, tf32 along K alone, with aligned rows of c.
    The rows of a copy begin at multiples of 16 bytes, whatever those of the operand do.
    """
    is_tf32 = a.dtype == torch.float32
    transpose_a, transpose_b = is_tf32 and not is_k_major(a, 1), is_tf32 and not is_k_major(b, 0)
    a_fits = a.stride(0) == 1 if transpose_a else tensor_map.fits(a)
    b_fits = b.stride(1) == 1 if transpose_b else tensor_map.fits(b)
    c_fits = b.shape[1] * b.element_size() % 16 == 0
    align_a, align_b = (not is_tf32 and not fits and can_align(x) for x, fits in ((a, a_fits), (b, b_fits)))
    is_supported = 0 not in (*a.shape, *b.shape) and (a_fits or align_a) and (b_fits or align_b)
    return Plan(
        is_supported=is_supported and (c_fits or not is_tf32),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        align_a=align_a,
        align_b=align_b,
        any_c=not c_fits,
    )


def can_align(x: torch.Tensor) -> bool:
    """Return True if align.py can copy the matrix ``x``: one dimension is contiguous."""
    inner = tensor_map.contiguous_dimension(x)
    return (x.stride(inner) == 1 or x.shape[inner] == 1) and max(x.shape) < tensor_map.MAX_EXTENT


def is_k_major(x: torch.Tensor, k_dimension: int) -> bool:
    """Return True if the operand is contiguous along K."""
    return tensor_map.contiguous_dimension(x) == k_dimension


def supports(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> bool:
    """Return True if the kernels take a (M, K) @ b (K, N): half types, or float32 with ``tf32``.

    There are elements to multiply, and each operand is contiguous along one dimension. With tf32, rows of the
    product, and of operands that are not transposed, begin at multiples of 16 bytes: a copy by TMA that
    begins between them is an illegal instruction on an H200, and a store writes whole 16 bytes.
    """
    has_arithmetic = a.dtype in DTYPES or (a.dtype == torch.float32 and precision == "tf32")
    return has_arithmetic and plan(a, b).is_supported


def choose(
    a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue = Epilogue.PLAIN, *, may_split: bool = True
) -> tuple[Config, int]:
    """Return the configuration and number of parts of K that cost least by :func:`estimated_us`.

    Without ``may_split`` K is one part.
    """
    size = a.shape[0], b.shape[1], a.shape[1]
    return _choose(*size, num_sms(a.device), _l2_bytes(a.device), epilogue, may_split, a.element_size())


@cache
def _l2_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache; of a device of the model's record where there is no GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else L2_BYTES


@lru_cache(maxsize=4096)
def _choose(
    m: int, n: int, k: int, sms: int, l2: int, epilogue: Epilogue, may_split: bool, itemsize: int
) -> tuple[Config, int]:
    most = max(1, min(MAX_SPLITS, -(-k * itemsize // K_STEP_BYTES) // LEAST_STEPS)) if may_split else 1
    configs = tuple(c for c in CHOSEN_FROM if not spills(c, epilogue))
    options = [(c, splits) for splits in range(1, most + 1) for c in configs]
    options += [(c, 1) for c in WITH_K_PARTS if c.k_parts <= most]

    def cost(option: tuple[Config, int]) -> float:
        us = estimated_us(m, n, k, *option, sms, epilogue, itemsize=itemsize, l2_bytes=l2)
        return us * (LEAST_GAIN if option[1] > 1 or option[0].k_parts > 1 else 1.0)

    return min(options, key=cost)


def chosen_source(a: torch.Tensor, b: torch.Tensor) -> CudaSource:
    """Return the program that :func:`forward` launches for these operands."""
    (config, splits), operands = choose(a, b), plan(a, b)
    return source(
        a.dtype,
        config,
        operands.transpose_a or is_k_major(a, 1),
        operands.transpose_b or is_k_major(b, 0),
        splits > 1,
        any_c=operands.any_c,
    )


def is_faster_than_mma(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if a product is expected to be faster here than by ``mma.sync``, which copies no operand.

    Half types always are: products of few rows, which might not be, have a kernel of their own (skinny.py).
    """
    if a.dtype != torch.float32:
        return True
    (m, k), n, sms = a.shape, b.shape[1], num_sms(a.device)
    operands = plan(a, b)
    us = estimated_us(m, n, k, *choose(a, b), sms, itemsize=4)
    us += transpose.estimated_us(a.nbytes) if operands.transpose_a else 0.0
    us += transpose.estimated_us(b.nbytes) if operands.transpose_b else 0.0
    return us < _mma_us(m, n, k, sms)


def _mma_us(m: int, n: int, k: int, sms: int) -> float:
    """Return the time in microseconds that a tf32 product by ``mma.sync`` is expected to take."""
    tile, blocks = MMA_TILE, 1
    if -(-m // tile) * -(-n // tile) < MMA_LEAST_TILES:
        tile, blocks = MMA_SMALL_TILE, MMA_SMALL_BLOCKS
    tiles = -(-m // tile) * -(-n // tile)
    on_an_sm = -(-tiles // sms)  # one after the other, or up to `blocks` at the same rate together
    at_once = min(blocks, on_an_sm)
    waves = -(-on_an_sm // at_once)
    return LAUNCH_US + waves * at_once * 2 * tile * tile * k / MMA_FLOP_PER_NS * 1e-3


def forward_with(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    splits: int = 1,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)) by one configuration and so many parts of K; see :func:`forward`.

    The tiles that do not fill all SMs are divided into these parts. The same arguments give the same bits on
    devices with as many SMs: partial sums are added in the order of K.
    """
    return multiply(config, a, b, splits, epilogue, bias, residual, plan(a, b))


def multiply(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    splits: int,
    epilogue: Epilogue,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    operands: Plan,
    end: EndArguments = NO_END,
    key: Hashable = None,
) -> Any:
    """Launch a product by one configuration; the arguments are those of :func:`forward_with`.

    With ``key``, of the kind of call, its launch is kept for :func:`forward`, if only addresses may change.
    """
    if operands.transpose_a:
        a = transpose.with_other_dimension_contiguous(a)
    if operands.transpose_b:
        b = transpose.with_other_dimension_contiguous(b)
    a = align.with_aligned_rows(a) if operands.align_a else a
    b = align.with_aligned_rows(b) if operands.align_b else b
    any_c = operands.any_c and end.c is None
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    k_steps = -(-k * a.element_size() // K_STEP_BYTES)
    c = a.new_empty(m, n) if end.c is None else end.c
    extra = _extra(c, epilogue, residual, any_c)
    bias = None if bias is None else _padded(bias) if any_c else _aligned(bias)
    majors = is_k_major(a, 1), is_k_major(b, 0)
    a_blocks, b_blocks = config.blocks
    row_tiles, column_tiles = -(-m // (config.rows * b_blocks)), -(-n // (config.columns * a_blocks))
    k_step = K_STEP_BYTES // a.element_size()
    a_rows = config.rows // a_blocks if majors[0] else k_step
    b_rows = config.columns // b_blocks if majors[1] else k_step
    tiles, divides_k = row_tiles * column_tiles, config.k_parts > 1  # each tile in a cluster of its own
    by_elements = any_c or divides_k  # c is stored, not through the copy engine
    maps_extra = not divides_k and not (any_c and epilogue == Epilogue.GELU_PRE)
    splits = 1 if divides_k else min(splits, k_steps)
    program = source(a.dtype, config, *majors, splits > 1, epilogue, any_c)
    at_once = tiles if divides_k else max_clusters(program["matmul_wgmma"], config, a.device)
    divided = tiles % at_once if splits > 1 else 0
    if not divided:
        splits, program = 1, source(a.dtype, config, *majors, False, epilogue, any_c)
    partials = end.memory
    if partials is None:
        sums = divided * splits * config.cluster * config.rows * config.columns if splits > 1 else 0
        partials = torch.empty(sums, dtype=torch.float32, device=a.device)
    arguments = MatmulArguments(
        a=tensor_map.encode(a, a_rows),
        b=tensor_map.encode(b, b_rows),
        c=TensorMap() if by_elements else tensor_map.encode(c, STORED_ROWS),
        extra=tensor_map.encode(extra, STORED_ROWS) if extra is not None and maps_extra else TensorMap(),
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        k_steps=k_steps,
        splits=splits,
        partials=partials.data_ptr(),
        rows=m,
        columns=n,
        bias=_address(bias),
        c_elements=c.data_ptr() if by_elements else 0,
        extra_elements=_address(extra) if by_elements else 0,
        row_values=_address(end.row_values),
        condition=_address(end.condition),
        phase=end.phase,
        farthest=end.farthest,
        whole_tiles=tiles - divided,
        extra_pitch=extra.stride(0) if extra is not None and divides_k else 0,
    )
    kernel = program["matmul_wgmma"]
    clusters = min(tiles + divided * (splits - 1), at_once)
    blocks, overlap = clusters * config.cluster, OVERLAP or epilogue in CHAINED
    kernel(blocks, config.threads, arguments, shared=config.smem_bytes, overlap=overlap)
    if key is not None and splits == 1 and not (operands.copies or any_c) and isinstance(kernel, Kernel):
        launch = kernel.prepare_structure(blocks, config.threads, shared=config.smem_bytes, overlap=overlap)
        boxes = {"a": (a, a_rows), "b": (b, b_rows)}
        _REPEATED.store(key, _repeated(launch, arguments, boxes, c, extra, by_elements, bias))
    if splits > 1:
        _add_partials(program["matmul_wgmma_sum"], config, arguments, c, extra)
    return (c, extra) if epilogue == Epilogue.GELU_PRE else c


def _repeated(
    launch: Callable[[int], None],
    arguments: ctypes.Structure,
    boxes: Mapping[str, tuple[torch.Tensor, int]],
    c: torch.Tensor,
    extra: torch.Tensor | None,
    by_elements: bool,
    bias: torch.Tensor | None,
) -> RepeatedProduct:
    """Return a launch with other addresses.

    ``boxes`` has each operand, by its field, and a box's rows. c and the second matrix are mapped as well,
    unless they are stored ``by_elements``.
    """
    results = {"c": c} if extra is None else {"c": c, "extra": extra}
    maps = {name: tensor_map.encoder(x, rows) for name, (x, rows) in boxes.items()}
    fields = [f"{name}_elements" for name in results] if by_elements else []
    if not by_elements:
        maps |= {name: tensor_map.encoder(x, STORED_ROWS) for name, x in results.items()}
    return RepeatedProduct(launch, arguments, maps, [*fields, "bias"] if bias is not None else fields)


def _add_partials(
    kernel: Any, config: Config, product: MatmulArguments, c: torch.Tensor, extra: torch.Tensor | None
) -> None:
    """Launch the sum of the parts of the divided tiles, with the epilogue; ``extra`` is its second matrix."""
    names = ("partials", "bias", "row_values", "row_tiles", "column_tiles", "whole_tiles", "splits")
    addends = SumArguments(
        c=c.data_ptr(),
        extra=_address(extra),
        extra_pitch=0 if extra is None else extra.stride(0),
        **{name: getattr(product, name) for name in (*names, "rows", "columns")},
    )
    divided = product.row_tiles * product.column_tiles - product.whole_tiles
    blocks = divided * config.cluster * (config.rows // SUM_ROWS) * (config.columns // SUM_COLUMNS)
    kernel(blocks, SUM_THREADS, addends, overlap=True)


def _extra(
    c: torch.Tensor, epilogue: Epilogue, residual: torch.Tensor | None, any_c: bool
) -> torch.Tensor | None:
    """Return the second matrix of an epilogue: an output for the pre-activation, or the residual.

    Rows of a residual begin at multiples of 16 bytes.
    """
    if epilogue == Epilogue.GELU_PRE:
        return torch.empty_like(c)
    if residual is None:
        return None
    return align.with_aligned_rows(residual.contiguous()) if any_c else _aligned(residual)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _padded(bias: torch.Tensor) -> torch.Tensor:
    """Return a copy of a bias to whose end zeros are added, up to a multiple of 16 bytes."""
    length = align.padded(bias.shape[0], bias.element_size())
    return torch.nn.functional.pad(bias, (0, length - bias.shape[0]))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a contiguous copy at a multiple of 16 bytes."""
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def max_clusters(kernel: Any, config: Config, device: torch.device) -> int:
    """Return how many clusters run at once on the device; without clusters, how many blocks.

    Each block takes a fixed share of the tiles: clusters beyond this number would start when the others
    have ended, and double the time.
    """
    at_most = num_sms(device) * config.blocks_per_sm // config.cluster
    if config.cluster == 1 or not isinstance(kernel, Kernel):
        return at_most
    return _max_clusters(kernel, config) or at_most


@cache
def _max_clusters(kernel: Kernel, config: Config) -> int:
    return kernel.max_active_clusters(config.threads, shared=config.smem_bytes, cluster=config.cluster)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    may_split: bool = True,
) -> Any:
    """Return epilogue(a (M, K) @ b (K, N)), (M, N); see :func:`supports`.

    ``bias`` (N,) belongs to each epilogue but PLAIN, ``residual`` (M, N) to RESIDUAL. GELU_PRE returns
    ``(y, pre)``. Without ``may_split`` each element is one sum over K, whatever the number of rows.
    """
    key = (a.dtype, a.shape, a.stride(), b.shape, b.stride(), epilogue, may_split, a.get_device())
    repeated = _REPEATED.get(key)
    if repeated is not None and are_repeatable(bias, residual):
        a_at, b_at = a.data_ptr(), b.data_ptr()
        if not (a_at | b_at) & 15:
            c = a.new_empty((a.shape[0], b.shape[1]))
            extra = torch.empty_like(c) if epilogue == Epilogue.GELU_PRE else residual
            more = [x.data_ptr() for x in (extra, bias) if x is not None]
            repeated(a_at, b_at, c.data_ptr(), *more)
            return (c, extra) if epilogue == Epilogue.GELU_PRE else c
    operands = plan(a, b)
    config, splits = choose(a, b, epilogue, may_split=may_split)
    return multiply(config, a, b, splits, epilogue, bias, residual, operands, key=key)


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the forward's program of each width, both products of a backward, and one with a divided K.

    They are followed by the widest programs of tf32, and the transposition that these may need.
    """
    sources = []
    widest = next(c for c in CANDIDATES if c.cluster == 1)  # which most products get
    for dtype in DTYPES:
        sources += [source(dtype, config, True, False) for config in (*CANDIDATES, *WITH_K_PARTS)]
        sources += [source(dtype, widest, *majors) for majors in ((True, True), (False, False))]
        # A gradient of weights: few tiles, and K is the number of tokens.
        sources += [source(dtype, widest, False, False, True)]
        sources += [source(dtype, widest, True, False, any_c=True), align.source(dtype)]
    tf32 = [source(torch.float32, widest, True, True, is_split) for is_split in (False, True)]
    return (*sources, *tf32, transpose.source(torch.float32))


def aot_kernels_of(epilogue: Epilogue) -> tuple[CudaSource, ...]:
    """Return programs with an epilogue, for a linear layer's storage order, and one with a divided K."""
    widest = next(c for c in CANDIDATES if c.cluster == 1)
    sources = [source(dtype, c, True, True, False, epilogue) for dtype in DTYPES for c in CANDIDATES]
    sources += [source(dtype, widest, True, True, True, epilogue) for dtype in DTYPES]
    return tuple(sources)
