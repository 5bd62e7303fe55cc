"""Attention's forward by Hopper's tensor cores (wgmma, sm_90a), float16 and bfloat16: attention_wgmma.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops.attention.layout import like
from weft.ops.attention.spec import AttentionOptions

ARCH = 90  # wgmma exists on sm_90a alone
DTYPES = (torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634
GROUP_THREADS, ROWS = 128, 64  # threads and queries of a warp group
# Keys and values of heads that are computed side by side: half of the L2 cache, whose other half has what
# the blocks read beside them.
SECTION_BYTES = 24 << 20
# Figures of this file, in TFLOP/s: attention-slots-2026-11-28.json of results/nvidia-h200, and for sizes that
# nobody tuned attention-chosen-2026-11-28.txt.
# A third group is worth it unless its larger tile has so many more rows past the last query: 1024 and 512
# queries, 1.125 times as many, are faster with three groups (336 and 310; 320 and 301), and 197, 1.5 times,
# with two (124 and 145).
MOST_PADDING = 1.2
# A smaller tile of keys is worth it where so many fewer keys are computed: of 197 keys 224, not 256 (155 and
# 145).
LEAST_SAVING = 1.05


class Arguments(ctypes.Structure):
    """``WgmmaAttentionArgs`` of attention_wgmma.cu."""

    _fields_ = (
        ("q", TensorMap),
        ("k", TensorMap),
        ("v", TensorMap),
        ("out", TensorMap),
        ("lse", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("batches", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("tq", ctypes.c_int),
        ("tk", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("section", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("window", ctypes.c_int),
        ("bottom_right", ctypes.c_int),
        ("cap_scale", ctypes.c_float),
        ("padding", ctypes.c_int * 14),  # the structure is aligned to 64 bytes
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A block has ``groups`` warp groups of 64 queries each, and reads ``keys`` keys at a time.

    With ``out_in_q`` the outputs are staged in the shared memory of the queries. It makes room for larger
    tiles of keys, but the next queries are then loaded only after the outputs are stored.

    ``stages`` tiles of keys, and as many of values, are in shared memory. With two ``query_slots`` the next
    tile of queries and its first keys are loaded before the groups have finished this one. With a
    ``narrow_end`` a group that sees at most half of its last tile of keys computes that half alone. With
    ``pingpong`` the groups issue their products in turns (FlashAttention-3's name). The bits of the results
    depend on ``keys`` alone.
    """

    keys: int
    groups: int
    out_in_q: bool = False
    query_slots: int = 1
    stages: int = 2
    pingpong: bool = True
    narrow_end: bool = False

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return ROWS * self.groups

    @property
    def label(self) -> str:
        parts = {
            "-shared": self.out_in_q,
            f"-slots{self.query_slots}": self.query_slots > 1,
            f"-stages{self.stages}": self.stages > 2,
            "-narrow": self.narrow_end,
            "-free": not self.pingpong,
        }
        return f"{self.rows}x{self.keys}" + "".join(part for part, is_set in parts.items() if is_set)

    @property
    def for_softcap(self) -> Config:
        """This configuration for capped scores, with the same bits.

        A cap takes two more operations of the exponentials' unit for each score: the groups take turns, since
        exponentials weigh more than products then. Half a tile at the end spills registers in one program.
        """
        return replace(self, narrow_end=False, pingpong=True)

    def computed_keys(self, tk: int) -> int:
        """Keys that a group computes of ``tk`` visible ones."""
        whole, rest = divmod(tk, self.keys)
        half = self.keys // 32 * 16
        return whole * self.keys + (rest > 0) * (half if self.narrow_end and rest <= half else self.keys)

    def smem_bytes(self, d: int) -> int:
        row_bytes = -(-d // 64) * 128
        tiles = self.rows * (self.query_slots + (not self.out_in_q)) + 2 * self.stages * self.keys
        # Full and empty barriers of keys, values and queries; the tile of each slot; the barrier of a tail.
        query_tiles = self.groups * self.query_slots
        return tiles * row_bytes + 16 * (2 * self.stages + query_tiles) + 8 * query_tiles + 8


# By the largest head size: the configurations that `choose` takes.
CANDIDATES = {
    # 1024 keys, causal: 336; with one slot and two stages 301; cuDNN 324. 512 keys without a mask: 320, with
    # or without a narrow end; with one slot and two stages 307; cuDNN 313.
    64: (
        Config(keys=128, groups=3, query_slots=2, stages=3, narrow_end=True),
        Config(keys=128, groups=2, query_slots=2, stages=3, narrow_end=True),
        Config(keys=112, groups=2, query_slots=2, stages=3),
    ),
    # 1024 keys of heads of 80, causal: 309; not in turns 303. 2304 keys of heads of 96 without a mask: 477;
    # not in turns 466; 128x160 464.
    96: (Config(keys=128, groups=2, query_slots=2, narrow_end=True),),
    # Causal, 4096 keys: 558, in turns 553, with one slot 554. 8192 keys: 607, 128x160 608. Without a mask,
    # 5600 keys: 605, 128x160 621.
    128: (
        Config(keys=128, groups=2, query_slots=2, pingpong=False),
        Config(keys=160, groups=2),
    ),
    192: (Config(keys=96, groups=2, out_in_q=True),),
    256: (Config(keys=80, groups=2, out_in_q=True),),
}
# Batch-invariant calls up to heads of 128 keep the program whose bits were compared on a GPU.
INVARIANT = Config(keys=128, groups=2)


def candidates(d: int) -> tuple[Config, ...]:
    """Return the configurations for a head size."""
    return next(configs for most, configs in CANDIDATES.items() if d <= most)


def choose(d: int, tq: int, tk: int, causal: bool, softcap: bool = False) -> Config:
    """Return the configuration of a call.

    It does not depend on the numbers of batches and heads: another number of keys in a tile would give other
    bits. A causal mask cuts tiles of 128 keys evenly, and hides less of them than of larger ones.
    """
    first, *others = candidates(d)
    config = first
    if d <= 64:
        second, third = others
        rows = [-(-tq // config.rows) * config.rows for config in (first, second)]
        if rows[0] > MOST_PADDING * rows[1]:
            saves_keys = second.computed_keys(tk) >= LEAST_SAVING * third.computed_keys(tk)
            config = third if saves_keys and not causal else second
    elif others and not causal:
        config = others[0]
    return config.for_softcap if softcap else config


def choose_invariant(d: int) -> Config:
    """Return the configuration of batch-invariant calls: the head size alone decides."""
    return INVARIANT if d <= 128 else candidates(d)[0]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Switches of a program: ``band`` for a window or a causal mask at the bottom right, ``softcap``."""

    band: bool = False
    softcap: bool = False

    @staticmethod
    def of(options: AttentionOptions) -> Variant:
        return Variant(band=options.mask.is_band, softcap=options.softcap is not None)

    @property
    def defines(self) -> dict[str, int]:
        return {"BAND": int(self.band), "SOFTCAP": int(self.softcap)}

    @property
    def label(self) -> str:
        return "-band" * self.band + "-softcap" * self.softcap


PLAIN = Variant()
VARIANTS = (Variant(band=True), Variant(softcap=True), Variant(band=True, softcap=True))


def mask_fields(options: AttentionOptions, tq: int, tk: int, d: int) -> dict[str, float]:
    """Return the fields of a kernel's arguments for the mask and the cap, by name."""
    mask = options.mask
    return {
        "causal": mask.causal,
        "window": mask.window_of(tq, tk),
        "bottom_right": mask.bottom_right,
        "scale_log2": options.outer_factor(d) * LOG2E,
        "cap_scale": 2 * options.inner_factor(d) * LOG2E,
    }


@cache
def source(dtype: torch.dtype, d: int, config: Config, variant: Variant = PLAIN) -> CudaSource:
    """Return the program of a configuration for heads of size ``d``."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "HEAD": d,
        "KEYS": config.keys,
        "GROUPS": config.groups,
        "OUT_IN_Q": int(config.out_in_q),
        "QUERY_SLOTS": config.query_slots,
        "STAGES": config.stages,
        "PINGPONG": int(config.pingpong),
        "NARROW_END": int(config.narrow_end),
        **variant.defines,
    }
    return CudaSource(
        file=Path(__file__).with_name("attention_wgmma.cu"),
        kernels=("attention_wgmma",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label=f"wgmma-{dtype_name(dtype)}-{d}-{config.label}{variant.label}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


def supports(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Return True if the kernel takes q (B, H, Tq, D), k and v (B, Hkv, Tk, D) as they are stored.

    Dropout is left to the mma.sync kernel: random numbers would take the registers that hold scores and
    outputs here. So are expanded tensors, which the copy engine does not read.
    """
    return (
        q.dtype in DTYPES
        and options.dropout_p == 0
        and 0 not in (*q.shape, *k.shape)
        and all(map(tensor_map.fits_heads, (q, k, v)))
        # Tiles are counted in 32 bits, also after each block has looked for one more.
        and q.shape[0] * q.shape[1] * -(-q.shape[2] // ROWS) < 1 << 30
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Tq, D) and the log-sum-exp (B, H, Tq) in float32; see :func:`supports`.

    ``lengths`` (B,) int32, contiguous: the visible keys of each batch, None: all.
    """
    config = choose(q.shape[3], q.shape[2], k.shape[2], options.causal, options.softcap is not None)
    return forward_with(config, q, k, v, lengths, options)


def forward_invariant(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`forward` does; the bits of a query depend on it and on the keys it sees alone.

    One program computes all causal calls of a head size and dtype, of any lengths and alignment, and another
    one the calls without a causal mask. In a program the tiles of keys begin at multiples of ``config.keys``
    from key 0, and a query's tiles come in rising order, whichever block, group and row computes it. A tile
    whose keys a query does not see, before, between or behind the others, leaves its sums as they are:

    - its scores are -inf, so that the maximum does not rise, and ``shrink`` is 1 (or, before the first key,
      sums of 0 are multiplied by 0);
    - its weights are 2^-inf = 0: the total and the outputs get terms of 0. Values must be finite for it;
    - other rows of the warp may be rescaled in it, this one is then multiplied by 1.

    Rows of a product do not mix. That the tensor cores add up each of their 64 rows in the same order, and
    terms of 0 without a change, is compared on a GPU by tests/ops/test_attention_wgmma.py. The numbers of
    blocks, batches and heads enter no sum.
    """
    variant = replace(Variant.of(options), band=options.causal)
    return forward_with(choose_invariant(q.shape[3]), q, k, v, lengths, options, variant)


def forward_with(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    options: AttentionOptions,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the forward with one configuration. ``variant`` None: the program of the options."""
    b, h, tq, d = q.shape
    kv_heads, tk = k.shape[1:3]
    out, lse = like(q), torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
    row_tiles = -(-tq // config.rows)
    tiles = b * h * row_tiles
    blocks = min(num_sms(q.device), tiles)
    # Where tiles have different numbers of keys, blocks take the next one as they need it.
    is_uneven = (options.causal or lengths is not None) and tiles > blocks
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if is_uneven else None
    group = h // kv_heads
    kv_heads_at_once = max(1, SECTION_BYTES // (2 * tk * d * q.element_size()))
    arguments = Arguments(
        q=tensor_map.encode_heads(q, ROWS),
        k=tensor_map.encode_heads(k, config.keys),
        v=tensor_map.encode_heads(v, config.keys),
        out=tensor_map.encode_heads(out, ROWS),
        lse=lse.data_ptr(),
        lengths=0 if lengths is None else lengths.data_ptr(),
        counter=0 if counter is None else counter.data_ptr(),
        batches=b,
        heads=h,
        group=group,
        tq=tq,
        tk=tk,
        row_tiles=row_tiles,
        section=min(b * h, kv_heads_at_once * group),
        **mask_fields(options, tq, tk, d),
    )
    kernel = source(q.dtype, d, config, variant or Variant.of(options))["attention_wgmma"]
    kernel(blocks, config.threads, arguments, shared=config.smem_bytes(d))
    return out, lse


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the programs of the usual head sizes: with and without a causal mask, short and long queries;
    and in bfloat16 each variant, and those of batch-invariant calls."""
    calls = [(d, t, causal) for d in (64, 128, 256) for t in (197, 4096) for causal in (True, False)]
    pairs = dict.fromkeys((d, choose(d, t, t, causal)) for d, t, causal in calls)
    variants = [
        source(DTYPES[0], d, choose(d, 4096, 4096, True, v.softcap), v) for d in (64, 128) for v in VARIANTS
    ]
    variants += [source(DTYPES[0], d, choose_invariant(d), VARIANTS[0]) for d in (64, 128, 256)]
    plain = (source(dtype, d, config) for dtype in DTYPES for d, config in pairs)
    return tuple(dict.fromkeys((*plain, *variants)))
