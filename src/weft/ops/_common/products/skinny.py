"""Host code of skinny.cu: products of few rows, which take as long as reading the weight once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, dtype_name

DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 64
COLUMNS, K_STEP, THREADS = 128, 64, 128  # of a block: columns of y, elements of K in a stage
PRODUCTS = 2  # of 16 columns each, of a warp: the second kernel has so many threads for each of the first
PARTIALS = COLUMNS * 8  # partial sums for 8 rows of y
BLOCKS_PER_SM = 2
# A block takes at least so many stages of w, and a group of columns is shared by at most so many blocks.
LEAST_UNITS, MOST_SHARERS = 2, 32


@dataclass(frozen=True, kw_only=True)
class Config:
    """``tokens``: rows of x that a program takes; ``stages`` of the ring."""

    tokens: int
    stages: int

    @property
    def smem_bytes(self) -> int:
        return self.stages * 128 * (self.tokens + COLUMNS)


# Stages as they fit with two blocks on an SM of sm_90, and one on sm_86.
CONFIGS = (Config(tokens=16, stages=5), Config(tokens=32, stages=4), Config(tokens=64, stages=4))


@cache
def source(dtype: torch.dtype, config: Config, x_mode: int, w_mode: int) -> CudaSource:
    """Return the program of a configuration for operands in these storage orders (operand_tile.cuh)."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "TOKENS": config.tokens,
        "STAGES": config.stages,
        "X_MODE": x_mode,
        "W_MODE": w_mode,
    }
    return CudaSource(
        file=Path(__file__).with_name("skinny.cu"),
        kernels=("matmul_skinny", "matmul_skinny_sum"),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"skinny-{dtype_name(dtype)}-{config.tokens}x{config.stages}-{x_mode}{w_mode}",
    )


def storage_mode(x: torch.Tensor, k_stride: int, stride: int) -> int:
    """Return how the kernels by mma.sync read an operand: ``Mode`` of operand_tile.cuh."""
    aligned = x.data_ptr() % 16 == 0
    by_k = k_stride == 1 and aligned and stride * x.element_size() % 16 == 0
    across = stride == 1 and aligned and k_stride * x.element_size() % 16 == 0
    return 0 if by_k else 1 if across else 2 if k_stride <= stride else 3


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if x (M, K) @ w (K, N) has half types, at least one product, and at most MAX_ROWS rows."""
    return x.dtype in DTYPES and x.shape[0] <= MAX_ROWS and 0 not in (*x.shape, *w.shape)


def num_blocks(n: int, k: int, sms: int) -> int:
    """Return the number of blocks for a weight (K, N); the number of rows has no influence."""
    groups, steps = -(-n // COLUMNS), -(-k // K_STEP)
    return max(1, min(sms * BLOCKS_PER_SM, groups * steps // LEAST_UNITS, groups * MOST_SHARERS))


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x (M, K) @ w (K, N), plus ``bias`` (N,) if there is one; see :func:`supports`.

    A row's bits depend on the row, the weight, the bias, and the device alone.
    """
    (m, k), n = x.shape, w.shape[1]
    config = next(c for c in CONFIGS if m <= c.tokens)
    groups, row_groups = -(-n // COLUMNS), -(-m // 8)
    blocks = num_blocks(n, k, num_sms(x.device))
    y = x.new_empty(m, n)
    # Every group of columns is one block's if the groups divide evenly: then there are no partial sums.
    slots = 0 if groups % blocks == 0 else blocks + groups
    partials = torch.empty(slots * row_groups * PARTIALS, dtype=torch.float32, device=x.device)
    x_mode = storage_mode(x, x.stride(1), x.stride(0))
    w_mode = storage_mode(w, w.stride(0), w.stride(1))
    program = source(x.dtype, config, x_mode, w_mode)
    bias_or_null = 0 if bias is None else bias
    strides = (*x.stride(), *w.stride())
    program["matmul_skinny"](
        blocks, THREADS, x, w, bias_or_null, y, partials, m, n, k, *strides, shared=config.smem_bytes
    )
    if slots:
        program["matmul_skinny_sum"](
            (groups, row_groups, 1),
            PRODUCTS * THREADS,
            partials,
            bias_or_null,
            y,
            m,
            n,
            k,
            blocks,
            overlap=True,
        )
    return y


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the programs of both orders of the weight, and those of any strides."""
    sources = []
    for dtype in DTYPES:
        sources += [source(dtype, config, 0, w_mode) for config in CONFIGS for w_mode in (0, 1)]
        sources += [source(dtype, CONFIGS[0], 2, w_mode) for w_mode in (2, 3)]
    return tuple(sources)
