"""Attention's backward by Hopper's tensor cores (wgmma, sm_90a): attention_wgmma_backward.cu.

float16 and bfloat16, heads of up to 128, no dropout. The same inputs give the same bits: parts of dq are
added in a fixed order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.backends.nvrtc import CudaSource
from weft.machine.device_limits import num_sms
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops.attention.attention_wgmma import ARCH, DTYPES, PLAIN, VARIANTS, Variant, mask_fields
from weft.ops.attention.layout import Three
from weft.ops.attention.spec import AttentionOptions

MAX_HEAD_SIZE = 128
KEYS, ROWS, STAGES = 128, 64, 2  # keys of a block; rows of a box that is stored; buffers of what is streamed
THREADS = 384
# What blocks of the heads that are computed side by side read and add to: half of the L2 cache.
SECTION_BYTES = 24 << 20
# A tile of keys that starts so many steps behind the one before it of the same head waits for no part of dq.
# Waits add up over the tiles of a head: with few tiles fewer steps are best.
STEPS_BEHIND, FEW_TILES = 3.0, 4
FIELDS_OF_STRIDES = ctypes.c_longlong * 3


class Arguments(ctypes.Structure):
    """``WgmmaBackwardArgs`` of attention_wgmma_backward.cu."""

    _fields_ = (
        *((name, TensorMap) for name in ("q", "k", "v", "grad", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("terms", "dq_sums", "counters", "taken", "lengths")),
        *(
            (name, ctypes.c_int)
            for name in (
                *("heads", "group", "tq", "tk", "causal", "key_tiles", "query_tiles"),
                *("kv_heads", "section"),
            )
        ),
        ("dq", ctypes.c_void_p),
        ("dq_strides", FIELDS_OF_STRIDES),
        ("scale_log2", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
        ("bottom_right", ctypes.c_int),
        ("cap_scale", ctypes.c_float),
        ("padding", ctypes.c_int * 15),  # the structure is aligned to 64 bytes
    )


class TermsArguments(ctypes.Structure):
    """``TermsArgs`` of attention_wgmma_backward.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out_strides", FIELDS_OF_STRIDES),
        ("grad_strides", FIELDS_OF_STRIDES),
        ("lse", ctypes.c_void_p),
        ("terms", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("heads", "tq", "query_tiles")),
    )


def step_queries(d: int, variant: Variant) -> int:
    """Return the number of queries of a step: what the registers hold beside the sums of dk and dv.

    A window or a cap takes some registers more: with 128 queries they would be spilled.
    """
    return 128 if d <= 64 and variant == PLAIN else 64


def section_heads(heads: int, key_tiles: int, steps: float, head_bytes: int, sms: int) -> int:
    """Return the number of heads of keys that are computed side by side, of ``heads``.

    ``steps``: of a tile of keys, on average. Enough heads for STEPS_BEHIND, and for two tiles for each SM,
    which balance the last section; or as many more as fit in the L2 cache.
    """
    behind = STEPS_BEHIND * (1 - FEW_TILES / max(key_tiles, FEW_TILES))
    least = max(behind * sms / steps, 2 * sms / key_tiles, SECTION_BYTES / head_bytes, 1)
    sections = max(1, int(heads / least))
    return -(-heads // sections)


def smem_bytes(d: int, variant: Variant = PLAIN) -> int:
    """Return the shared memory of a block of the products' kernel."""
    boxes, queries = -(-d // 64), step_queries(d, variant)
    # k and v; queries and gradients with their terms, ds, and dq's sums in float32.
    streamed = 2 * boxes * queries * 128 + 1024 + KEYS * queries * 2 + boxes * queries * 256
    # Barriers of what is streamed, and of k and v; the index of their tile.
    return 2 * boxes * KEYS * 128 + STAGES * (streamed + 3 * 16) + 24 + 8


@cache
def source(dtype: torch.dtype, d: int, variant: Variant = PLAIN) -> CudaSource:
    """Return the program for heads of size ``d``."""
    numbers = {"HEAD": d, "QUERIES": step_queries(d, variant), **variant.defines}
    return CudaSource(
        file=Path(__file__).with_name("attention_wgmma_backward.cu"),
        kernels=("attention_wgmma_terms", "attention_wgmma_backward"),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in numbers.items())),
        label=f"wgmma-backward-{dtype_name(dtype)}-{d}{variant.label}",
        min_arch=ARCH,
        max_arch=ARCH,
    )


def supports(tensors: tuple[Tensor, ...], options: AttentionOptions) -> bool:
    """Return True if the kernels take q, k, v, grad and out, and the memory for dq, dk and dv, as stored."""
    q, k = tensors[:2]
    queries = step_queries(q.shape[3], Variant.of(options))
    tiles = max(q.shape[1] * -(-q.shape[2] // queries), k.shape[1] * -(-k.shape[2] // KEYS))
    return (
        q.dtype in DTYPES
        and q.shape[3] <= MAX_HEAD_SIZE
        and options.dropout_p == 0
        and 0 not in (*q.shape, *k.shape)
        and all(map(tensor_map.fits_heads, tensors))
        and q.shape[0] * tiles < 1 << 30
    )


def backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    options: AttentionOptions,
    gradients: Three,
) -> Three:
    """Write dq, dk and dv to the memory ``gradients`` and return it; see :func:`supports`.

    ``saved``: q, k, v, the visible keys of each batch or None, out, the log-sum-exp (B, H, Tq), contiguous.
    """
    q, k, v, lengths, out, lse = saved
    b, h, tq, d = q.shape
    kv_heads, tk = k.shape[1:3]
    dq, dk, dv = gradients
    variant = Variant.of(options)
    queries = step_queries(d, variant)
    query_tiles, key_tiles = -(-tq // queries), -(-tk // KEYS)
    terms, sums = (
        torch.empty((b, h, query_tiles, count), dtype=torch.float32, device=q.device)
        for count in (2 * queries, queries * -(-d // 64) * 64)
    )
    counters = torch.zeros(b * h * query_tiles + 1, dtype=torch.int32, device=q.device)
    program = source(q.dtype, d, variant)
    rows = 32 if d <= 64 else 16  # of a block of 256 threads, each of which has eight elements
    program["attention_wgmma_terms"](
        b * h * query_tiles * (queries // rows),
        256,
        TermsArguments(
            out=out.data_ptr(),
            grad=grad.data_ptr(),
            out_strides=FIELDS_OF_STRIDES(*out.stride()[:3]),
            grad_strides=FIELDS_OF_STRIDES(*grad.stride()[:3]),
            lse=lse.data_ptr(),
            terms=terms.data_ptr(),
            heads=h,
            tq=tq,
            query_tiles=query_tiles,
        ),
    )
    # q and grad, and dq in float32, of the queries that share a head of keys.
    head_bytes = h // kv_heads * tq * d * (2 * q.element_size() + 4)
    steps = h // kv_heads * query_tiles * (0.5 if options.causal else 1.0)
    sms = num_sms(q.device)
    boxes = {"q": queries, "k": KEYS, "v": KEYS, "grad": queries, "dk": ROWS, "dv": ROWS}
    tensors = {"q": q, "k": k, "v": v, "grad": grad, "dk": dk, "dv": dv}
    pointer = 0 if lengths is None else lengths.data_ptr()
    arguments = Arguments(
        terms=terms.data_ptr(),
        dq_sums=sums.data_ptr(),
        counters=counters.data_ptr(),
        taken=counters[-1:].data_ptr(),
        lengths=pointer,
        heads=h,
        group=h // kv_heads,
        tq=tq,
        tk=tk,
        key_tiles=key_tiles,
        query_tiles=query_tiles,
        kv_heads=kv_heads * b,
        section=section_heads(kv_heads * b, key_tiles, steps, head_bytes, sms),
        dq=dq.data_ptr(),
        dq_strides=FIELDS_OF_STRIDES(*dq.stride()[:3]),
        scale=options.factor(d),
        **mask_fields(options, tq, tk, d),
        **{name: tensor_map.encode_heads(x, boxes[name]) for name, x in tensors.items()},
    )
    kernel = program["attention_wgmma_backward"]
    blocks = min(sms, key_tiles * kv_heads * b)
    kernel(blocks, THREADS, arguments, shared=smem_bytes(d, variant))
    return dq, dk, dv


def aot_kernels() -> tuple[CudaSource, ...]:
    """Return the programs of the usual head sizes, and in bfloat16 each variant."""
    variants = [source(DTYPES[0], d, variant) for d in (64, 128) for variant in VARIANTS]
    return (*(source(dtype, d) for dtype in DTYPES for d in (64, 128)), *variants)
