"""Attention on q, k and v as one product gives them, side by side; so their gradients are written.

    qkv (B, T, (H + 2 Hkv) D)  ->  out (B, T, H D),  backward: one gradient laid out as qkv is

Splitting first costs a pass: three gradients in three places have to be joined to that of the
product, 2 x (H + 2 Hkv) D elements a token read and written. Outputs of one ``torch.library``
operator may not share memory, so that three parts of one buffer cannot be the answer of
``weft::attention_backward``: ``weft::attention_packed_backward`` gives the buffer itself.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from weft.core import WeftError, registry
from weft.ops._shared import dispatch, validate
from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import (
    TRACED,
    backward_of,
    call,
    define,
    library,
    refuse_unsupported,
    resolve,
)
from weft.ops.attention.arguments import completed
from weft.ops.attention.cases import DTYPES
from weft.ops.attention.spec import check_arguments

SCALARS = "bool causal, float? scale, float dropout_p, int seed, bool padded"
PARAMS = ("causal", "scale", "dropout_p", "seed", "padded")
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def parts(qkv: torch.Tensor, heads: int, kv_heads: int) -> Three:
    """Views of q (B, H, T, D), k and v (B, Hkv, T, D)."""
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _joined(out: torch.Tensor) -> torch.Tensor:
    """(B, T, H D): a view of an answer that lies as its queries do."""
    return out.transpose(1, 2).flatten(2)


@cache
def _writes_in_place(impl: str) -> bool:
    """Whether a backward takes ``into``, the memory for its gradients."""
    return "into" in inspect.signature(backward_of("attention", impl)).parameters


def _forward(
    qkv: torch.Tensor, lengths: torch.Tensor, heads: int, kv_heads: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    params, impl = dict(zip(PARAMS, rest, strict=False)), rest[-1]
    inputs = (*parts(qkv, heads, kv_heads), lengths)
    refuse_unsupported("attention", impl, inputs, params)
    out, lse = registry.implementation("attention", impl).forward(*inputs, **params)
    return _joined(out).contiguous(), lse


def _fake(
    qkv: torch.Tensor, lengths: torch.Tensor, heads: int, kv_heads: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    b, t, wide = qkv.shape
    out = qkv.new_empty((b, t, wide // (heads + 2 * kv_heads) * heads))
    return out, qkv.new_empty((b, heads, t), dtype=torch.float32)


def _gradient(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: int,
    kv_heads: int,
    *rest: Any,
) -> torch.Tensor:
    params, impl = dict(zip(PARAMS, rest, strict=False)), rest[-1]
    run = backward_of("attention", impl)
    given, answer = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (grad, out))
    saved = (given, *parts(qkv, heads, kv_heads), lengths, answer, lse)
    whole = qkv.new_empty(qkv.shape)
    into = parts(whole, heads, kv_heads)
    if _writes_in_place(impl):
        run(*saved, into=into, **params)
    else:
        for to, one in zip(into, run(*saved, **params), strict=True):
            to.copy_(one)
    return whole


def _fake_gradient(grad: torch.Tensor, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    qkv, lengths, *ctx.others = inputs
    ctx.save_for_backward(qkv, lengths, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    run = torch.ops.weft.attention_packed_backward
    found = run(grad, *ctx.saved_tensors, *ctx.others)
    return (found, None, *([None] * len(ctx.others)))


_SIZES = f"int heads, int kv_heads, {SCALARS}, str impl"
define(
    "attention_packed",
    f"(Tensor qkv, Tensor key_lengths, {_SIZES}) -> (Tensor, Tensor)",
    _forward,
    _fake,
)
define(
    "attention_packed_backward",
    f"(Tensor grad, Tensor qkv, Tensor key_lengths, Tensor out, Tensor lse, {_SIZES}) -> Tensor",
    _gradient,
    _fake_gradient,
)
torch.library.register_autograd(
    "weft::attention_packed", _differentiate, setup_context=_setup_context, lib=library
)


def attention_packed(
    qkv: torch.Tensor,
    heads: int,
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    key_lengths: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Self attention of q, k and v that lie side by side, as one product gives them.

    The same numbers as ``attention`` on the three parts; kernels of ours (``triton``, ``cuda``)
    write the three gradients where that of ``qkv`` has them, so that nothing is joined after.

    Args:
        qkv: (B, T, (H + 2 Hkv) D), float32, float16 or bfloat16, CPU or CUDA, any strides: in each
            row the heads of q, those of k, those of v.
        heads: H. kv_heads: Hkv, of which H is a multiple; None is H.
        causal, scale, dropout_p, seed, key_lengths, impl: as for ``attention``.

    Returns:
        (B, T, H D) of the dtype of ``qkv``, contiguous where a kernel of ours computes it.

    Raises:
        WeftError: a width that the heads do not divide, and what ``attention`` raises.
    """
    (qkv,) = lowered(qkv)
    few = heads if kv_heads is None else kv_heads
    lengths, impl = completed(qkv, key_lengths, dropout_p, impl)
    numbers = {"causal": bool(causal), "scale": scale, "dropout_p": dropout_p, "seed": seed}
    params = {**numbers, "padded": key_lengths is not None}

    def kernel() -> str | None:
        """Whose kernel it is; None where plain torch code, which autograd sees through."""
        _check(qkv, heads, few)
        three = parts(qkv, heads, few)
        check_arguments(*three, key_lengths, **numbers)
        chosen = impl or dispatch.choose("attention", (*three, lengths), params)
        return None if resolve("attention", chosen) in TRACED else chosen

    if torch.compiler.is_compiling():
        whose = kernel()
    else:
        kind = ("attention_packed", impl, heads, few)
        (whose,) = dispatch.recalled(kind, (qkv, lengths), params, lambda: (kernel(),))
    if whose is None:
        found = call("attention", (*parts(qkv, heads, few), lengths), params, impl)
        return _joined(found[0])
    run = torch.ops.weft.attention_packed
    return run(qkv, lengths, heads, few, *params.values(), whose)[0]  # type: ignore[no-any-return]


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
