"""Attention in CUDA C++, on tensor cores through ``mma.sync``: forward and backward for half types.

See attention_forward.cu, attention_queries.cu and attention_keys.cu for the kernels. Rows of a head
are read and written where they lie, if each stands on 16 bytes; else they are copied first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.backends.nvrtc import CudaSource
from weft.core import YES, Case, Implementation, Support, no
from weft.ops._shared.philox import scale as kept_scale
from weft.ops._shared.philox import threshold
from weft.ops.attention.cuda_configs import KINDS, Config, configure, shared_bytes
from weft.ops.attention.layout import Three, gradients, like, no_gradients, nothing

LOG2E = 1.4426950408889634
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
LARGEST_STRIDE = 1 << 24  # of a row, in elements: 128 of them are below 2^31


@cache
def source(kind: str, dtype: torch.dtype, d: int, dropout: bool, config: Config) -> CudaSource:
    """The program of one kernel (``forward``, ``queries``, ``keys``) for heads of ``d``."""
    defines = {
        "WEFT_T": TYPES[dtype],
        "HEAD": d,
        "WARPS": config.warps,
        "MT": config.mt,
        "STEP": config.step,
        "BLOCKS": config.blocks,
        "SPLIT": config.split,
        "DROPOUT": int(dropout),
    }
    parts = [kind, str(dtype).removeprefix("torch."), str(d), f"{config.own}x{config.step}"]
    return CudaSource(
        file=Path(__file__).with_name(f"attention_{kind}.cu"),
        kernels=(f"attention_{kind}",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label="-".join([*parts, *["dropout"] * dropout]),
    )


@cache
def _room(kind: str) -> float:
    """Bytes of shared memory that a block may have; no limit where nothing is launched (meta)."""
    known = machine.query("cuda").shared_per_block_optin if kind == "cuda" else None
    return known or float("inf")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only where a row does not stand on 16 bytes with its columns side by side, or
    rows are 2^24 elements apart."""
    strides = x.stride()
    good = strides[3] == 1 and x.data_ptr() % 16 == 0 and strides[2] < LARGEST_STRIDE
    if good and all(s % 8 == 0 for s in strides[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of each tensor those of batches, heads and rows, in elements."""
    return [s for x in tensors for s in x.stride()[:3]]


def _chance(dropout_p: float, seed: int) -> tuple[int, int, float]:
    """The seed, the threshold and what the kept are multiplied by."""
    return (seed, threshold(dropout_p), kept_scale(dropout_p)) if dropout_p else (0, 0, 1.0)


def _launch(
    kind: str, config: Config, d: int, x: torch.Tensor, dropout: bool, grid: Any, *arguments: Any
) -> None:
    kernel = source(kind, x.dtype, d, dropout, config)[f"attention_{kind}"]
    kernel(grid, config.threads, *arguments, shared=shared_bytes(kind, config, d))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_lengths: torch.Tensor, **params: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dropout = bool(params.get("dropout_p"))
    config = configure("forward", q.shape[3], dropout, _room(q.device.type))
    return forward_with(config, q, k, v, key_lengths, **params)


def forward_with(
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward by one configuration."""
    if q.numel() == 0 or k.numel() == 0:
        return nothing(q)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out = like(q)
    (b, h, tq, d), (few, tk) = q.shape, k.shape[1:3]
    lse = torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
    factor = d**-0.5 if scale is None else float(scale)
    tensors = (q, k, v, key_lengths.contiguous() if padded else 0, out, lse)
    sizes = (h, h // few, tq, tk, *_strides(q, k, v, out))
    numbers = (factor * LOG2E, int(causal), *_chance(dropout_p, seed))
    grid = (-(-tq // config.own), h, b)
    _launch("forward", config, d, q, dropout_p > 0, grid, *tensors, *sizes, *numbers)
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    into: Three | None = None,
    **params: Any,
) -> Three:
    size = (q.shape[3], bool(params.get("dropout_p")), _room(q.device.type))
    configs = (configure("queries", *size), configure("keys", *size))
    saved = (grad, q, k, v, key_lengths, out, lse)
    return backward_with(configs, *saved, into=into, **params)


def backward_with(
    configs: tuple[Config, Config],
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
    into: Three | None = None,
) -> Three:
    """The backward by one configuration for the queries' kernel and one for the keys'.

    ``into``: memory for dq, dk and dv, by any strides whose rows the kernels take.
    """
    if q.numel() == 0 or k.numel() == 0:
        return no_gradients(q, k, v, into)
    q, k, v, grad, out = (_aligned(x) for x in (q, k, v, grad, out))
    dq, dk, dv = gradients(q, k, v, into)
    (b, h, tq, d), (few, tk) = q.shape, k.shape[1:3]
    one, two = configs
    most = max(one.own, two.step)
    whole = -(-tq // most) * most
    rows = torch.empty((b, h, 2, whole), dtype=torch.float32, device=q.device)
    lengths = key_lengths.contiguous() if padded else 0
    factor = d**-0.5 if scale is None else float(scale)
    sizes = (h, h // few, tq, tk, whole, *_strides(q, k, v, grad))
    numbers = (factor * LOG2E, factor, int(causal), *_chance(dropout_p, seed))
    dropout = dropout_p > 0

    tensors: tuple[Any, ...] = (q, k, v, grad, out, lengths, lse.contiguous(), rows, dq)
    grid = (whole // one.own, h, b)
    more = _strides(out, dq)
    _launch("queries", one, d, q, dropout, grid, *tensors, *sizes, *more, *numbers)
    tensors = (q, k, v, grad, lengths, rows, dk, dv)
    grid = (-(-tk // two.own) * two.split, few, b)
    more = _strides(dk, dv)
    _launch("keys", two, d, q, dropout, grid, *tensors, *sizes, *more, *numbers)
    return dq, dk, dv


def supports(case: Case, device: str) -> Support:
    (b, h, tq, _), tk = case.inputs[0].shape, case.inputs[1].shape[2]
    if case.dtype == "float32":
        return no("tensor cores multiply float16 and bfloat16 here; use impl='triton' for float32")
    if max(b, h) > 65535:
        return no("a grid has 65535 batches and heads at most; split the batch")
    if max(tq, tk) >= 2**31 - 2**10:
        return no("queries and keys are counted in 32 bits; split the sequence")
    return YES


IMPLEMENTATION = Implementation(
    operator="attention",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=tuple(
        source(kind, torch.bfloat16, d, False, configure(kind, d, False, float("inf")))
        for d in (64, 128)
        for kind in KINDS
    ),
    idea="flash by mma.sync: weights stay in registers, asynchronous copies ahead",
)
