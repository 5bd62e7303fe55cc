"""Attention for decoding in CUDA C++: keys by asynchronous copies, products by mma.sync.

See attention_decode.cu. Both kernels are launched for the capacity of the cache, because the host never
reads the lengths: blocks beyond a length end at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import YES, Case, Implementation, Support, no
from weft.core.implementation import with_invariant
from weft.machine.device_limits import smem_per_block
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.prepared import are_repeatable
from weft.ops.attention_decode.launches import DecodeLaunches
from weft.ops.attention_decode.spec import SPLIT, capacity, factor_of
from weft.ops.attention_decode.with_eager import has_no_keys

LOG2E = 1.4426950408889634
STEP = 16  # keys of one step of a warp: pages have whole steps
MAX_GRID = 65535
LAUNCHES = DecodeLaunches()


@dataclass(frozen=True, kw_only=True)
class Config:
    """``warps`` of a block with ``stages`` stages of 16 keys each; a block has 16 ``mt`` rows of queries."""

    warps: int = 4
    stages: int = 3
    mt: int = 1

    def smem_bytes(self, d: int) -> int:
        """Return the dynamic shared memory of a block for head size ``d``."""
        columns, rows = -(-d // 32) * 32, 16 * self.mt
        stages = self.warps * self.stages * 2 * STEP * columns * 2
        return max(stages, self.warps * rows * (columns + 8) * 4 + 8 * rows * (self.warps + 1))


def configure(d: int, rows: int, smem: float) -> Config:
    """Return the configuration for head size ``d`` and ``rows`` packed queries, with ``smem`` bytes a block.

    It depends on neither the batch nor the lengths: with the places of the splits, it decides the order in
    which a row is added up. A lane has MT D / 2 weighted values in registers, of which 128 fit.
    """
    # With four tiles of rows the kernel spills at D = 64, and with two at D above 128.
    mt = 2 if rows > 16 and d <= 128 else 1
    options = (Config(mt=mt), Config(mt=mt, stages=2), Config(mt=mt, stages=2, warps=2))
    return next((c for c in options if c.smem_bytes(d) <= smem), options[-1])


@cache
def source(dtype: torch.dtype, d: int, paged: bool, config: Config) -> CudaSource:
    """Return the program of both kernels for one dtype and head size."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "HEAD": d,
        "WARPS": config.warps,
        "MT": config.mt,
        "STAGES": config.stages,
        "SPLIT": SPLIT,
        "PAGED": int(paged),
        "OVERLAP": 1,
    }
    tile = f"{config.warps}x{config.stages}x{16 * config.mt}"
    return CudaSource(
        file=Path(__file__).with_name("attention_decode.cu"),
        kernels=("decode_split", "decode_merge"),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label="-".join([dtype_name(dtype), str(d), tile, *["paged"] * paged]),
    )


def aligned_rows(x: Tensor) -> Tensor:
    """Return a cache with adjacent columns and 16-byte aligned rows; copy it only if it has others."""
    strides = x.stride()
    if strides[3] == 1 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in strides[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
) -> Tensor:
    inputs = (q, k, v, lengths, block_table)
    key = LAUNCHES.key(inputs, scale, paged)
    repeated = LAUNCHES.repeat(key, inputs)
    if repeated is not None:
        return repeated
    if has_no_keys(q, k, block_table, paged):
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    config = configure(q.shape[3], q.shape[1] * q.shape[2] // k.shape[1], smem_per_block(q.device))
    return forward_with(config, q, k, v, lengths, block_table, scale=scale, paged=paged, key=key)


def forward_with(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
    key: Hashable = None,
) -> Tensor:
    """Compute the forward with one configuration; ``key`` stores the launches for calls like this one."""
    # Lanes read two elements of q at a time.
    if q.stride(3) != 1 or q.data_ptr() % 4 or any(s % 2 for s in q.stride()[:3]):
        q = q.clone(memory_format=torch.contiguous_format)
    repeatable = are_repeatable(q, k, v, lengths, block_table)
    k, v = aligned_rows(k), aligned_rows(v)
    lengths, block_table = lengths.contiguous(), block_table.contiguous()
    (b, t, h, d), kv_heads, most = q.shape, k.shape[1], capacity(k, block_table, paged)
    rows, splits = t * h // kv_heads, -(-most // SPLIT)
    out = torch.empty((b, t, h, d), dtype=q.dtype, device=q.device)
    size = b * kv_heads * splits * rows * (d + 2) if splits > 1 else 0
    partials = torch.empty(size, dtype=torch.float32, device=q.device)
    program = source(q.dtype, d, paged, config)
    sizes = (t, kv_heads, h // kv_heads, most)
    split = launch_and_prepare(
        program["decode_split"],
        (splits, kv_heads * -(-rows // (16 * config.mt)), b),
        32 * config.warps,
        *(q, k, v, lengths, block_table, out, partials),
        *sizes,
        *(k.shape[0], k.shape[2], block_table.shape[1]),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        factor_of(scale, d) * LOG2E,
        shared=config.smem_bytes(d),
    )
    merge = None
    if splits > 1:
        merge = launch_and_prepare(
            program["decode_merge"],
            b * t * h,
            -(-d // 32) * 32,
            *(partials, lengths, out),
            *(*sizes, splits),
            overlap=True,
        )
    if repeatable:
        LAUNCHES.store(key, split, merge, size, splits)
    return out


def supports(case: Case, device: str) -> Support:
    (b, t, h, _), k = case.inputs[0].shape, case.inputs[1].shape
    if case.dtype == "float32":
        return no("tensor cores multiply float16 and bfloat16 here; use impl='triton' for float32")
    if case.params.get("paged") and k[2] % STEP:
        return no(f"pages have whole steps of {STEP} keys here; use impl='triton' for other page sizes")
    if b > MAX_GRID or t * h > MAX_GRID:
        return no(f"a grid has {MAX_GRID} sequences and rows at most; split the batch")
    return YES


def _aot_kernels() -> tuple[CudaSource, ...]:
    """Return the programs of common head sizes, each with one token, and one for several rows."""
    bf16, half = torch.bfloat16, torch.float16
    sources = [
        source(bf16, d, paged, configure(d, 4, float("inf"))) for d in (64, 128) for paged in (False, True)
    ]
    sources += [source(half, 256, False, configure(256, 4, float("inf")))]
    sources += [source(bf16, d, True, configure(d, 64, float("inf"))) for d in (64, 96, 128)]
    return tuple(sources)


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="attention_decode",
        backend="cuda",
        forward=forward,
        supports=supports,
        directions=("forward",),
        aot_kernels=_aot_kernels(),
        idea="512 keys a block, a ring of stages in each warp, mma.sync; partial results merged in order",
    )
)
