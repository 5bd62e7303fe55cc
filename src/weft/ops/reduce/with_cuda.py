"""Reductions in CUDA C++, which read the input once at 64 bytes in flight for each thread; see reduce.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, FORWARD, Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name
from weft.ops.reduce.spec import ARGUMENT_OPS, OPS, backward, extents, kept_shape
from weft.ops.reduce.strided import Strided, strided

NUMBERS = {op: number for number, op in enumerate((*OPS[:2], "amax", "amin", "logsumexp", *ARGUMENT_OPS))}
PARTIAL_BYTES = {"logsumexp": 8, "argmax": 16, "argmin": 16}  # of a partial result; 4 for the others
EMPTY = {"sum": 0.0, "mean": torch.nan, "logsumexp": -torch.inf}
MANY_RESULTS = 8192  # from which a thread merges the parts of one: neighbours read neighbouring parts
MAX_PART = 1 << 30  # elements along n in a part
MAX_LANES_BYTES = 1 << 14  # of rows that have a warp each, if rows are many


@dataclass(frozen=True)
class Config:
    """Threads of a block, bytes in flight for each, and when an input is cut into parts.

    Parts are made until there are ``blocks`` blocks for each SM, of at least ``part_bytes`` bytes each.
    ``warps`` are those on each SM that many short rows fill.
    """

    threads: int = 256
    thread_bytes: int = 64
    blocks: int = 16
    part_bytes: int = 1 << 16
    warps: int = 32


SHIPPED = Config()


@cache
def source(op: str, dtype: torch.dtype, vec_width: int, config: Config = SHIPPED) -> CudaSource:
    """Return the program of an operation for one dtype and the elements of a vector of columns."""
    numbers = {
        "OP": NUMBERS[op],
        "VEC_WIDTH": vec_width,
        "THREADS": config.threads,
        "THREAD_BYTES": config.thread_bytes,
    }
    return CudaSource(
        file=Path(__file__).with_name("reduce.cu"),
        kernels=("reduce_rows", "reduce_parts", "reduce_columns", "merge_parts"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(n)) for name, n in numbers.items())),
        label=f"{op}-{dtype_name(dtype)}-{vec_width}",
    )


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def column_vec_width(form: Strided) -> int:
    """Return the elements of a vector of columns: at most 16 bytes, and a divisor of sizes and strides."""
    size = form.x.element_size()
    alignment = 16 | form.x.data_ptr() | form.inner * size
    alignment |= form.n_stride * size if form.n > 1 else 0
    alignment |= form.outer_stride * size if form.outer > 1 else 0
    return (alignment & -alignment) // size


def column_shape(form: Strided, vec_width: int, config: Config) -> tuple[int, int]:
    """Return the vectors of columns and the rows of a block's threads, powers of two.

    Rows are no more than have elements at once; what is left goes to columns, and then to outer indices. A
    narrower block is taken where a tile of columns would be less than four fifths full.
    """
    vectors = form.inner // vec_width
    in_flight = min(16, config.thread_bytes // (vec_width * form.x.element_size()))
    least_width = min(32, _power_of_two(vectors))
    height = min(_power_of_two(-(-form.n // in_flight)), config.threads // least_width)
    width = min(_power_of_two(vectors), config.threads // height)
    while width > 8 and vectors / (-(-vectors // width) * width) < 0.8:
        width //= 2
    return width, min(_power_of_two(-(-form.n // in_flight)), config.threads // width)


def parts_of(
    n: int, blocks: int, element_bytes: int, device: torch.device, config: Config
) -> tuple[int, int]:
    """Return the parts that n is cut into, and the elements of a part.

    ``blocks`` are there without parts; ``element_bytes`` are a block's for each element along n.
    """
    enough = -(-config.blocks * num_sms(device, interpreted=2) // blocks)
    parts = max(1, min(enough, n * element_bytes // config.part_bytes), -(-n // MAX_PART))
    part_n = -(-n // parts)
    return -(-n // part_n), part_n


def _merge(
    y: torch.Tensor, partials: torch.Tensor, op: str, form: Strided, parts: int, config: Config
) -> None:
    program = source(op, form.x.dtype, 16 // form.x.element_size(), config)
    results = form.results
    lanes = 1 if results >= MANY_RESULTS else min(32, _power_of_two(parts))
    blocks = -(-results // (config.threads // lanes))
    strides = (parts, 1) if form.by_rows else (1, results)
    program["merge_parts"](blocks, config.threads, partials, y, results, form.n, parts, *strides, lanes)


def _partials(op: str, results: int, parts: int, device: torch.device) -> torch.Tensor:
    """Allocate partial results; none if there is one part."""
    count = results * parts if parts > 1 else 0
    return torch.empty(count * PARTIAL_BYTES.get(op, 4), dtype=torch.uint8, device=device)


def by_rows(y: torch.Tensor, form: Strided, op: str, config: Config = SHIPPED) -> None:
    """Reduce rows of adjacent elements."""
    x, rows, n = form.x, form.results, form.n
    program = source(op, x.dtype, 16 // x.element_size(), config)
    row_bytes = n * x.element_size()
    is_many = rows >= config.warps * num_sms(x.device, interpreted=2)
    if row_bytes <= 32 * config.thread_bytes or (is_many and row_bytes <= MAX_LANES_BYTES):
        # Two lanes read the 32 bytes that the memory moves at once; shorter rows have one.
        lanes = max(_power_of_two(-(-row_bytes // config.thread_bytes)), min(2, row_bytes // 16))
        lanes = min(32, lanes)
        blocks = -(-rows // (config.threads // lanes))
        program["reduce_rows"](blocks, config.threads, x, y, rows, n, form.outer_stride, lanes)
        return
    parts, part_n = parts_of(n, rows, x.element_size(), x.device, config)
    partials = _partials(op, rows, parts, x.device)
    arguments = (x, y, partials, n, form.outer_stride, parts, part_n)
    program["reduce_parts"](rows * parts, config.threads, *arguments)
    if parts > 1:
        _merge(y, partials, op, form, parts, config)


def by_columns(y: torch.Tensor, form: Strided, op: str, config: Config = SHIPPED) -> None:
    """Reduce columns: adjacent elements belong to adjacent results."""
    x = form.x
    vec_width = column_vec_width(form)
    width, height = column_shape(form, vec_width, config)
    outers = config.threads // (width * height)
    blocks = -(-form.outer // outers) * -(-form.inner // (width * vec_width))
    row_bytes = width * vec_width * x.element_size()
    parts, part_n = parts_of(form.n, blocks, row_bytes, x.device, config)
    partials = _partials(op, form.results, parts, x.device)
    source(op, x.dtype, vec_width, config)["reduce_columns"](
        blocks * parts,
        config.threads,
        *(x, y, partials),
        *(form.outer, form.n, form.inner, form.outer_stride, form.n_stride, parts, part_n, width, height),
    )
    if parts > 1:
        _merge(y, partials, op, form, parts, config)


def run(x: torch.Tensor, op: str, first: int, last: int, config: Config = SHIPPED) -> torch.Tensor:
    """Compute a reduction with one configuration."""
    dtype = torch.int64 if op in ARGUMENT_OPS else x.dtype
    y = torch.empty(kept_shape(x.shape, first, last), dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    if extents(x.shape, first, last)[1] == 0:
        return y.fill_(EMPTY[op])
    form = strided(x, first, last)
    (by_rows if form.by_rows else by_columns)(y, form, op, config)
    return y


def forward(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    return run(x, op, first, last)


def _wide(op: str, *dtypes: torch.dtype) -> tuple[CudaSource, ...]:
    return tuple(source(op, dtype, 16 // dtype.itemsize) for dtype in dtypes)


REDUCE = Implementation(
    operator="reduce",
    backend="cuda",
    forward=forward,
    backward=backward,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=(
        *_wide("sum", *FLOAT_DTYPES),
        *(p for op in ("amax", "logsumexp") for p in _wide(op, torch.float32, torch.bfloat16)),
        source("sum", torch.bfloat16, 1),
        source("logsumexp", torch.float32, 1),
    ),
    idea="16-byte vectors along rows or across columns, 64 bytes in flight; a second pass over few results",
)
ARGREDUCE = Implementation(
    operator="argreduce",
    backend="cuda",
    forward=forward,
    directions=(FORWARD,),
    aot_kernels=(
        *_wide("argmax", torch.float32, torch.bfloat16, torch.int32),
        *_wide("argmin", torch.float16),
    ),
    idea="as reduce; a partial result is an element and its index",
)
