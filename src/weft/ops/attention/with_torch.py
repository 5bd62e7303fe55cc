"""Attention by PyTorch: the kernels behind scaled_dot_product_attention, each by name.

They are called directly, because they return the log-sum-exp that the function drops. ``torch`` asks which
one the function would choose. All but ``efficient`` read grouped heads as they are, while ``efficient`` takes
them repeated. It writes (B, T, H, D), which is copied to be contiguous. ``torch`` computes a window and a
mask at the bottom right by kernels that add a mask of Tq x Tk elements; a bias and ALiBi are added to that
mask, in the dtype of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.ops.attention.layout import empty_output
from weft.ops.attention.mask import Mask
from weft.ops.attention.spec import AttentionOptions
from weft.ops.attention.terms import Terms

# The bindings in ``torch`` itself are C++, where those of ``torch.ops.aten`` begin in Python.
Output = tuple[Tensor, Tensor]
HALVES = (torch.float16, torch.bfloat16)
UNFUSED, FLASH, CUDNN = 0, 1, 3  # SDPBackend's numbers
MAX_BIAS = 1 << 26  # elements of a mask that is worth its memory


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _bias(q: Tensor, k: Tensor, mask: Mask, terms: Terms) -> Tensor:
    """Return what is added to the scores, (1 or B, 1 or H, Tq, Tk): the terms, 0 without any, and -inf where
    a query does not see a key."""
    tq, tk = q.shape[2], k.shape[2]
    hidden = mask.hidden(tq, tk, q.device)
    bias = torch.zeros((1, 1, tq, tk), dtype=q.dtype, device=q.device)
    added = terms.added(tq, tk, mask.shift(tq, tk))
    if added is None:
        return bias if hidden is None else bias.masked_fill_(hidden, -math.inf)
    # The terms of slopes (H,) are (H, Tq, Tk).
    added = added.to(q.dtype).expand(*added.shape[:-2], tq, tk)
    added = added if hidden is None else added.masked_fill(hidden, -math.inf)
    return added if added.dim() == 4 else added[None]


def _with_terms(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, terms: Terms) -> Output:
    """Compute a bias or ALiBi. Rows of a bias that hide every key are computed without it, and cleared:
    the kernels give them NaN."""
    bias = _bias(q, k, mask, terms)
    if terms.bias is None:
        return _masked(q, k, v, bias, scale)
    is_empty = (bias.detach() == -math.inf).all(-1, keepdim=True)
    out, lse = _masked(q, k, v, bias.masked_fill(is_empty, 0.0), scale)
    return out.masked_fill(is_empty, 0.0), lse.masked_fill(is_empty[..., 0], -math.inf)


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Output:
    """Call a kernel that adds a mask of Tq x Tk elements."""
    if q.is_cpu and bias.requires_grad:
        return _unfused(q, k, v, bias, scale)
    if q.is_cpu:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        return out.contiguous(), lse.contiguous()
    k, v = _repeated(q, k, v)
    # The kernel reads rows of a mask that start 16 elements apart, or a multiple of it.
    if keys := bias.shape[-1] % 16:
        bias = torch.nn.functional.pad(bias, (0, 16 - keys))[..., : bias.shape[-1]]
    bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    out, lse, *_ = torch._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out.contiguous(), lse[..., : q.shape[2]].contiguous()


def _unfused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Output:
    """Compute a bias whose gradient is wanted on a CPU: the fused kernel there has none for it.

    SDPA then takes products and a softmax, which return no log-sum-exp; it is computed apart.
    """
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped
    )
    with torch.no_grad():
        scores = (q @ _repeated(q, k, v)[0].transpose(-1, -2)).float()
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        lse = torch.logsumexp(scores * factor + bias.float(), -1)
    return out.contiguous(), lse


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.contiguous(), lse.contiguous()


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    out, lse, *_ = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    k, v = _repeated(q, k, v)
    out, lse, *_ = torch._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out.contiguous(), lse[..., : q.shape[2]].contiguous()  # its rows are padded to 32


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


KERNELS = {FLASH: _flash, CUDNN: _cudnn}


def _default(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    """Call the kernel that PyTorch would choose; instead of its unfused fallback, ``efficient``."""
    if q.is_cpu:
        return _cpu(q, k, v, causal, scale)
    if torch.compiler.is_compiling():  # the choice is an integer that a trace cannot hold
        square = not causal or q.shape[2] == k.shape[2]
        return (_flash if square and q.dtype in HALVES else _efficient)(q, k, v, causal, scale)
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(  # type: ignore[attr-defined]
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return KERNELS.get(choice, _efficient)(q, k, v, causal, scale)


def _aligned(x: Tensor) -> Tensor:
    """Return ``x`` with every row 16-byte aligned, copied if needed: the kernels read 16 bytes at a time, and
    on other rows some raise and some fault."""
    batch, head, row, column = x.stride()
    if column != 1:
        x = x.contiguous()
        batch, head, row, _ = x.stride()
    if x.is_cpu:
        return x
    size = x.element_size()
    is_aligned = not (x.data_ptr() % 16 or batch * size % 16 or head * size % 16 or row * size % 16)
    return x if is_aligned else x.clone()


def _forward(kernel: Callable[..., Output]) -> Callable[..., Output]:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
    ) -> Output:
        if q.numel() == 0 or k.numel() == 0:
            out, lse = empty_output(q)
            # It depends on all tensors, so that each gets a gradient of 0.
            nothing = sum((x[:0].sum().to(q.dtype) for x in extras), start=q.sum() + k.sum() + v.sum())
            return out + 0 * nothing, lse
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        options = AttentionOptions(**params)
        if options.terms:
            return _with_terms(q, k, v, options.mask, options.scale, Terms.of(extras, options.terms))
        if options.mask.is_band:
            return _masked(q, k, v, _bias(q, k, options.mask, Terms()), options.scale)
        return kernel(q, k, v, options.causal, options.scale)

    return forward


def library_call(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Callable[..., Tensor] | None:
    """Return the library's function of tensors like these, or None if ``torch`` calls it otherwise.

    It is for calls without a log-sum-exp, on a GPU: the same kernels, for less of the host's time. Rows must
    be aligned as strides tell; where a tensor begins is up to the caller. In float32 the function takes
    another kernel than ``torch``, with other bits and strides.
    """
    if not q.is_cuda or q.dtype == torch.float32 or not q.numel() or not k.numel():
        return None
    if any(x.stride(3) != 1 or any(s * x.element_size() % 16 for s in x.stride()[:3]) for x in (q, k, v)):
        return None
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(  # type: ignore[attr-defined]
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    # Products and a softmax take memory for each score: for few queries no more than repeated keys take.
    if choice == UNFUSED and not (grouped and q.shape[2] <= 2 * q.shape[3]):
        return None
    call = torch._C._nn.scaled_dot_product_attention
    return partial(call, is_causal=causal, scale=scale, enable_gqa=grouped)


def _supports(case: Case, device: str) -> Support:
    if case.params.get("padded"):
        return no("torch's fused kernels take no key lengths; use impl='triton'")
    if case.params.get("dropout_p"):
        return no("torch's dropout has its own random numbers; use impl='triton'")
    if case.params.get("softcap"):
        return no("torch's fused kernels have no cap of the scores; use impl='triton'")
    terms = AttentionOptions.of(case).terms
    if "sinks" in terms:
        return no("torch's fused kernels have no sinks; use impl='triton'")
    if "alibi_slopes" in terms and case.dtype != "float32":
        return no(f"torch's kernels would round ALiBi's terms to {case.dtype}; use impl='triton'")
    if "bias" in terms and case.inputs[-1].dtype != case.dtype:
        return no(f"torch's kernels would round the bias to {case.dtype}; use impl='triton'")
    mask, tq, tk = AttentionOptions.of(case).mask, case.inputs[0].shape[2], case.inputs[1].shape[2]
    if (mask.is_band or terms) and mask.leaves_queries_without_keys(tq, tk):
        return no("torch's kernels with a mask give NaN to a query without keys; use impl='triton'")
    if (mask.is_band or terms) and tq * tk > MAX_BIAS:
        return no("torch's kernels read a mask of Tq x Tk elements, here over 2^26; use impl='triton'")
    return YES


def _supports_without_band(case: Case, device: str) -> Support:
    options = AttentionOptions.of(case)
    if options.mask.is_band or options.terms:
        return no("called by name without a mask of Tq x Tk elements; use impl='torch' or impl='triton'")
    return _supports(case, device)


def _supports_by_name(name: str, max_head_size: int) -> Callable[[Case, str], Support]:
    def supports(case: Case, device: str) -> Support:
        q, k = case.inputs[0].shape, case.inputs[1].shape
        if case.dtype == "float32":
            return no(f"{name} takes float16 and bfloat16; use impl='torch'")
        if case.params.get("causal") and q[2] != k[2]:
            return no(f"{name} in torch has no causal mask for unequal lengths")
        if q[3] > max_head_size:
            return no(f"{name} in torch takes heads of up to {max_head_size}; use impl='torch'")
        return _supports_without_band(case, device)

    return supports


def _implementation(
    name: str, kernel: Callable[..., Output], idea: str, supports: Callable[[Case, str], Support]
) -> Implementation:
    return Implementation(
        operator="attention",
        name=name,
        backend="torch",
        forward=_forward(kernel),
        supports=supports,
        idea=idea,
        deterministic=False,  # all their backwards add to dq in any order
        devices=("cpu", "cuda") if name == "torch" else ("cuda",),
    )


IMPLEMENTATION = _implementation("torch", _default, "what SDPA chooses", _supports)
FLASH_ATTENTION = _implementation(
    "torch/flash", _flash, "SDPA's FlashAttention 2", _supports_by_name("flash", 256)
)
CUDNN_ATTENTION = _implementation("torch/cudnn", _cudnn, "SDPA's cuDNN", _supports_by_name("cuDNN", 128))
EFFICIENT = _implementation(
    "torch/efficient", _efficient, "SDPA's memory-efficient (CUTLASS)", _supports_without_band
)
