"""Attention in Triton, forward and backward, with no memory that grows with Tq Tk.

What is a tensor descriptor where the device has the copy engine is a pointer elsewhere, and where
strides do not suit it. See forward.py, backward.py and backward_keys.py for the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import INTERPRETED, triton
from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.ops._shared.philox import halves, limit
from weft.ops._shared.philox import scale as kept_scale
from weft.ops.attention.backward import attention_backward_queries
from weft.ops.attention.backward_keys import attention_backward_keys
from weft.ops.attention.configs import Config, configure
from weft.ops.attention.forward import attention_forward
from weft.ops.attention.layout import Three, gradients, like, no_gradients, nothing, rowwise
from weft.ops.attention.specimens import SPECIMENS

LOG2E = 1.4426950408889634


def padded_size(d: int) -> int:
    """The head size as kernels take it: a power of two that a product can have."""
    return max(16, 1 << (d - 1).bit_length())


@cache
def copies_tiles(device: torch.device) -> bool:
    """Whether the device has the copy engine, and 227 KiB of shared memory a block."""
    if INTERPRETED or device.type == "cpu":
        return False
    held = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    newest = torch.cuda.get_device_capability(device) >= (9, 0)
    return bool(newest and held["max_shared_mem"] >= 227 * 1024)


def _regular(x: torch.Tensor) -> bool:
    """16-byte alignment of every row, and no two rows in one place."""
    size = x.element_size()
    strides = x.stride()[:3]
    return (
        x.data_ptr() % 16 == 0
        and all(s > 0 and s * size % 16 == 0 for s in strides)
        and 0 not in x.shape
    )


def _sources(wide: bool, padded_d: int, *pairs: tuple[torch.Tensor, int]) -> tuple[bool, list[Any]]:
    """Descriptors of tensors in tiles of so many rows, if all can have one; else the tensors."""
    if not wide or pairs[0][0].element_size() == 4 or not all(_regular(x) for x, _ in pairs):
        return False, [x for x, _ in pairs]
    from triton.tools.tensor_descriptor import TensorDescriptor

    return True, [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded_d])
        for x, rows in pairs
    ]


def _numbers(rows: torch.Tensor, most: int) -> Any:
    """A descriptor of lines of float32 by so many; a line is a multiple of 16 of them."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, most])


def _flags(
    q: torch.Tensor, causal: bool, padded: bool, dropout_p: float, tma: bool
) -> dict[str, Any]:
    d = q.shape[3]
    return {
        "D": d,
        "DP": padded_size(d),
        "CAUSAL": causal,
        "PADDED": padded,
        "DROPOUT": dropout_p > 0.0,
        "TMA": tma,
    }


def _launch(config: Config) -> dict[str, int]:
    return {
        "BM": config.bm,
        "BN": config.bn,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _chance(dropout_p: float, seed: int) -> tuple[int, int, int, float]:
    """The seed's halves, the threshold and what the kept are multiplied by."""
    if not dropout_p:
        return 0, 0, 0, 1.0
    return *halves(seed), limit(dropout_p), kept_scale(dropout_p)


def forward(
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
    size = (padded_size(q.shape[3]), q.element_size(), copies_tiles(q.device))
    config = configure("forward", *size)
    flags: Any = {"causal": causal, "dropout_p": dropout_p, "seed": seed, "padded": padded}
    return forward_with(config, q, k, v, key_lengths, scale=scale, **flags)


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
    q, k, v = rowwise(q), rowwise(k), rowwise(v)
    out = like(q)
    b, h, tq, d = q.shape
    lse = torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
    factor = d**-0.5 if scale is None else scale
    pairs = ((q, config.bm), (k, config.bn), (v, config.bn))
    tma, sources = _sources(copies_tiles(q.device), padded_size(d), *pairs)
    attention_forward[(triton.cdiv(tq, config.bm), h, b)](
        *sources,
        key_lengths,
        out,
        lse,
        h,
        h // k.shape[1],
        tq,
        k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        factor * LOG2E,
        *_chance(dropout_p, seed),
        **_flags(q, causal, padded, dropout_p, tma),
        **_launch(config),
    )
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
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
    into: Three | None = None,
) -> Three:
    size = (padded_size(q.shape[3]), q.element_size(), copies_tiles(q.device))
    configs = (configure("queries", *size), configure("keys", *size))
    saved = (grad, q, k, v, key_lengths, out, lse)
    flags: Any = {"causal": causal, "dropout_p": dropout_p, "seed": seed, "padded": padded}
    return backward_with(configs, *saved, scale=scale, into=into, **flags)


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
    q, k, v, grad, out = (rowwise(x) for x in (q, k, v, grad, out))
    if not _regular(grad):  # expanded, mostly: a sum's gradient
        grad = grad.contiguous()
    dq, dk, dv = gradients(q, k, v, into)
    (b, h, tq, d), (few, tk) = q.shape, k.shape[1:3]
    one, two = configs
    most = max(one.bm, two.bm)
    whole = triton.cdiv(tq, most) * most
    rows = torch.empty((2 * b * h, whole), dtype=torch.float32, device=q.device)
    factor = d**-0.5 if scale is None else scale
    sizes = (h, h // few, tq, tk, whole, *_strides(q, k, v, grad))
    numbers = (factor * LOG2E, factor, *_chance(dropout_p, seed))
    wide, dp = copies_tiles(q.device), padded_size(d)

    pairs = ((q, one.bm), (k, one.bn), (v, one.bn), (grad, one.bm))
    tma, sources = _sources(wide, dp, *pairs)
    sources += [out, key_lengths, lse.contiguous(), rows, dq]
    flags = _flags(q, causal, padded, dropout_p, tma) | _launch(one)
    attention_backward_queries[(whole // one.bm, h, b)](
        *sources, *sizes, *_strides(out, dq), *numbers, **flags
    )
    pairs = ((q, two.bm), (k, two.bn), (v, two.bn), (grad, two.bm))
    tma, sources = _sources(wide, dp, *pairs)
    sources += [key_lengths, _numbers(rows, two.bm) if tma else rows, dk, dv]
    flags = _flags(q, causal, padded, dropout_p, tma) | _launch(two)
    attention_backward_keys[(triton.cdiv(tk, two.bn), few, b)](
        *sources, *sizes, *_strides(dk, dv), *numbers, **flags
    )
    return dq, dk, dv


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of each tensor those of batches, heads and rows, in elements."""
    return [s for x in tensors for s in x.stride()[:3]]


def supports(case: Case, device: str) -> Support:
    b, h = case.inputs[0].shape[:2]
    if max(b, h) > 65535:
        return no("a grid has 65535 batches and heads at most; split the batch")
    return YES


IMPLEMENTATION = Implementation(
    operator="attention",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=SPECIMENS,
    idea="flash: no score written, masks only on the diagonal, tiles by the copy engine",
)
