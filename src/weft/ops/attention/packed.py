"""Attention on q, k and v packed side by side in one tensor, as one linear product returns them.

    qkv (B, T, (H + 2 Hkv) D)  ->  out (B, T, H D); the gradient has the layout of qkv

Attention on three views of qkv would return three gradients, which autograd concatenates: a pass that
reads and writes 2 x (H + 2 Hkv) D elements of each token. Here the kernels write the gradients as
three views of one buffer. Outputs of one ``torch.library`` operator may not share memory, so
``weft::attention_packed_backward`` returns the buffer.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from weft.core import WeftError, registry
from weft.dispatch import choice as dispatch
from weft.dispatch import invariance
from weft.dispatch.autocast import lowered
from weft.dispatch.invariance import wants
from weft.dispatch.operator import (
    TRACED,
    Schema,
    backward_of,
    call,
    refuse_unsupported,
    register,
    resolve,
)
from weft.dispatch.plan_cache import memoized
from weft.ops._common import validate
from weft.ops.attention.biased import refuse_terms
from weft.ops.attention.cases import DTYPES
from weft.ops.attention.layout import Three
from weft.ops.attention.spec import PARAMS, SCALARS, check_arguments, lengths_and_impl, parameters
from weft.ops.attention.with_torch import can_be_sdpa, sdpa


def split_qkv(qkv: torch.Tensor, heads: int, kv_heads: int) -> Three:
    """Return views of q (B, H, T, D), k and v (B, Hkv, T, D)."""
    x_BHTD = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = x_BHTD.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _merge_heads(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Return (B, T, H D): a view if the tokens' heads are side by side in memory."""
    return x_BHTD.transpose(1, 2).flatten(2)


@cache
def _accepts_gradient_buffer(impl: str) -> bool:
    """True if the backward of ``impl`` has the parameter ``into``, the memory for its gradients."""
    return "into" in inspect.signature(backward_of("attention", impl)).parameters


def _forward(
    impl: str, qkv: torch.Tensor, lengths: torch.Tensor, heads: int, kv_heads: int, **params: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = (*split_qkv(qkv, heads, kv_heads), lengths)
    refuse_unsupported("attention", impl, inputs, params)
    out, lse = registry.implementation("attention", impl).forward(*inputs, **params)
    return _merge_heads(out).contiguous(), lse


def _fake(
    qkv: torch.Tensor, lengths: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    b, t, width = qkv.shape
    out = qkv.new_empty((b, t, width // (heads + 2 * kv_heads) * heads))
    return out, qkv.new_empty((b, heads, t), dtype=torch.float32)


def _backward(
    impl: str,
    grad: torch.Tensor,
    qkv: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: int,
    kv_heads: int,
    **params: Any,
) -> tuple[torch.Tensor]:
    run = backward_of("attention", impl)
    grad_BHTD, out_BHTD = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (grad, out))
    saved = (grad_BHTD, *split_qkv(qkv, heads, kv_heads), lengths, out_BHTD, lse)
    dqkv = qkv.new_empty(qkv.shape)
    views = split_qkv(dqkv, heads, kv_heads)
    if _accepts_gradient_buffer(impl):
        run(*saved, into=views, **params)
    else:
        for view, gradient in zip(views, run(*saved, **params), strict=True):
            view.copy_(gradient)
    return (dqkv,)


register(
    "attention_packed",
    Schema(
        inputs=f"Tensor qkv, Tensor key_lengths, int heads, int kv_heads, {SCALARS}",
        saved=f"Tensor qkv, Tensor key_lengths, Tensor out, Tensor lse, int heads, int kv_heads, {SCALARS}",
        params=PARAMS,
        outputs=2,
        differentiable_outputs=1,
        differentiable=("qkv",),
        fake=_fake,
        fake_backward=lambda grad, qkv, *saved: (qkv.new_empty(qkv.shape),),
        forward=_forward,
        backward=_backward,
        save=lambda inputs, output: (*inputs[:2], *output, *inputs[2:]),
    ),
)


def attention_packed(
    qkv: torch.Tensor,
    heads: int,
    *,
    kv_heads: int | None = None,
    causal: bool | str = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    key_lengths: torch.Tensor | None = None,
    sinks: None = None,
    alibi_slopes: None = None,
    bias: None = None,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Self-attention on q, k and v packed side by side in one tensor.

    Returns the same numbers as ``attention`` on the three parts. The ``triton`` and ``cuda`` kernels write
    the three gradients directly into the gradient of ``qkv``, so that nothing is concatenated afterwards.

    Args:
        qkv: (B, T, (H + 2 Hkv) D), float32, float16 or bfloat16, CPU or CUDA, any strides. A row holds
            the heads of q, then those of k, then those of v.
        heads: H. kv_heads: Hkv, which divides H; None is H.
        causal, window, softcap, scale, dropout_p, seed, key_lengths, impl, batch_invariant: as for
            ``attention``. Packed calls have no sinks, ALiBi and bias: a tensor is refused.

    Returns:
        (B, T, H D) of the dtype of ``qkv``; contiguous if a kernel of Weft computes it.

    Raises:
        WeftError: the heads do not divide the width; and the errors of ``attention``.
    """
    invariant = wants("attention_packed", batch_invariant)
    refuse_terms("attention_packed", sinks=sinks, alibi_slopes=alibi_slopes, bias=bias)
    (qkv,) = lowered(qkv)
    num_kv_heads = heads if kv_heads is None else kv_heads
    params = parameters(causal, window, softcap, scale, dropout_p, seed, key_lengths is not None)
    lengths, impl = lengths_and_impl(qkv, key_lengths, params, impl, invariant)

    def choose_kernel() -> tuple[str, bool]:
        """Return the implementation, and whether it has kernels: autograd traces plain torch code."""
        _check(qkv, heads, num_kv_heads)
        q, k, v = split_qkv(qkv, heads, num_kv_heads)
        check_arguments(q, k, v, key_lengths, **params)
        inputs, chosen = (q, k, v, lengths), impl
        if invariant and torch.compiler.is_compiling():
            chosen = invariance.choose_traced("attention", q.device.type, impl)
        elif invariant:
            chosen = invariance.choose("attention", inputs, params, impl)
        chosen = chosen or dispatch.choose("attention", inputs, params)
        return chosen, resolve("attention", chosen) not in TRACED

    if torch.compiler.is_compiling():
        chosen, has_kernels = choose_kernel()
    else:
        key = ("attention_packed", impl, heads, num_kv_heads, invariant)
        chosen, has_kernels = memoized(key, (qkv, lengths), params, choose_kernel)
    if not has_kernels:
        q, k, v = split_qkv(qkv, heads, num_kv_heads)
        if chosen == "torch" and not invariant and can_be_sdpa(q, k, params):
            return _merge_heads(sdpa(q, k, v, params["causal"], scale))
        out, _ = call("attention", (q, k, v, lengths), params, impl, batch_invariant=invariant)
        return _merge_heads(out)
    run = torch.ops.weft.attention_packed
    return run(qkv, lengths, heads, num_kv_heads, *params.values(), chosen)[0]  # type: ignore[no-any-return]


def _check(qkv: Any, heads: Any, kv_heads: Any) -> None:
    validate.tensor("attention_packed", "qkv", qkv, DTYPES, dims=range(3, 4))
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if type(count) is not int or count < 1:
            raise WeftError(f"attention_packed: {name}", expected="1 or more", got=repr(count))
    if qkv.shape[2] % (heads + 2 * kv_heads):
        raise WeftError(
            "attention_packed: the width of qkv",
            expected=f"a multiple of its {heads} + 2 x {kv_heads} heads",
            got=qkv.shape[2],
        )
