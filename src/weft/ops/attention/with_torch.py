"""Attention by the library: the kernels behind scaled_dot_product_attention, each by name.

Called below that function, since they return the log-sum-exp that it drops. ``torch`` asks for the
one that it would choose. ``efficient`` takes as many heads of keys as of queries, so that grouped
ones are repeated for it, and writes (B, T, H, D), which is copied to be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.ops.attention.layout import nothing, rowwise

Answer = tuple[torch.Tensor, torch.Tensor]
aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
FLASH, CUDNN = 1, 3  # SDPBackend's numbers


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _on_a_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> Answer:
    k, v = _repeated(q, k, v)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.contiguous(), lse.contiguous()


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> Answer:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> Answer:
    k, v = _repeated(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out.contiguous(), lse[..., : q.shape[2]].contiguous()  # its rows are padded to 32


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> Answer:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


def _chosen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> Answer:
    """What the library would choose; where it would materialise, efficient on repeated heads."""
    if q.device.type == "cpu":
        return _on_a_cpu(q, k, v, causal, scale)
    if torch.compiler.is_compiling():  # the choice is an integer that a trace cannot hold
        square = not causal or q.shape[2] == k.shape[2]
        return (_flash if square and q.dtype in HALVES else _efficient)(q, k, v, causal, scale)
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(  # type: ignore[attr-defined]
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return {FLASH: _flash, CUDNN: _cudnn}.get(choice, _efficient)(q, k, v, causal, scale)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """With every row on 16 bytes, copied only if not: the kernels read rows 16 bytes at a time, and
    where they start elsewhere some raise and some fault."""
    x = rowwise(x)
    if x.device.type == "cpu":
        return x
    steps = (n * x.element_size() % 16 for n in x.stride()[:-1])
    return x.clone() if x.data_ptr() % 16 or any(steps) else x


def _forward(kernel: Callable[..., Answer]) -> Callable[..., Answer]:
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_lengths: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        **rest: Any,
    ) -> Answer:
        if q.numel() == 0 or k.numel() == 0:
            out, lse = nothing(q)
            return out + 0 * (q.sum() + k.sum() + v.sum()), lse  # tied to all three, by zeros
        return kernel(_aligned(q), _aligned(k), _aligned(v), causal, scale)

    return forward


def _supports(case: Case, device: str) -> Support:
    if case.params.get("padded"):
        return no("the library's fused kernels take no lengths of keys; use impl='triton'")
    if case.params.get("dropout_p"):
        return no("the library's dropout has random numbers of its own; use impl='triton'")
    return YES


def _supports_by_name(name: str, most: int) -> Callable[[Case, str], Support]:
    """What flash and cuDNN take."""

    def supports(case: Case, device: str) -> Support:
        q, k = case.inputs[0].shape, case.inputs[1].shape
        if case.dtype == "float32":
            return no(f"{name} takes float16 and bfloat16; use impl='torch'")
        if case.params.get("causal") and q[2] != k[2]:
            return no(f"{name} in the library has no causal mask of unequal lengths")
        if q[3] > most:
            return no(f"{name} in the library takes heads of up to {most}; use impl='torch'")
        return _supports(case, device)

    return supports


def _implementation(
    name: str, kernel: Callable[..., Answer], idea: str, supports: Callable[[Case, str], Support]
) -> Implementation:
    return Implementation(
        operator="attention",
        name=name,
        backend="torch",
        forward=_forward(kernel),
        supports=supports,
        idea=idea,
        deterministic=False,  # the backwards of all of them add to dq in any order
        devices=("cpu", "cuda") if name == "torch" else ("cuda",),
    )


IMPLEMENTATION = _implementation("torch", _chosen, "what SDPA chooses", _supports)
FLASH_ATTENTION = _implementation(
    "torch/flash", _flash, "SDPA's FlashAttention 2", _supports_by_name("flash", 256)
)
CUDNN_ATTENTION = _implementation(
    "torch/cudnn", _cudnn, "SDPA's cuDNN", _supports_by_name("cuDNN", 128)
)
EFFICIENT = _implementation(
    "torch/efficient", _efficient, "SDPA's memory-efficient (CUTLASS)", _supports
)
