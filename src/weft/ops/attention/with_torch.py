"""Attention by PyTorch: scaled_dot_product_attention (SDPA), and the kernels behind it, each by name.

A public call that ``torch`` computes needs no log-sum-exp: it is SDPA itself (:func:`sdpa_call`), with its
own gradient. The operator returns a log-sum-exp, which SDPA drops: its implementations call the kernels
directly, and ``torch`` asks which one SDPA would choose. All but ``efficient`` read grouped heads as they
are, while ``efficient`` takes them repeated. It writes (B, T, H, D), which the operator copies to be
contiguous. SDPA's unfused path has no log-sum-exp, which is then computed apart.

``torch`` computes a window and a mask at the bottom right by kernels that add a mask of Tq x Tk elements; a
bias and ALiBi are added to that mask, in the dtype of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.dispatch import choice
from weft.dispatch.operator import plan
from weft.ops.attention.layout import empty_output
from weft.ops.attention.mask import Mask
from weft.ops.attention.spec import AttentionOptions
from weft.ops.attention.terms import Terms

# The bindings in ``torch`` itself are C++, where those of ``torch.ops.aten`` begin in Python.
Output = tuple[Tensor, Tensor]
HALVES = (torch.float16, torch.bfloat16)
UNFUSED, FLASH, CUDNN = 0, 1, 3  # SDPBackend's numbers
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by vmap and other transforms of torch.func
MAX_BIAS = 1 << 26  # elements of a mask that is worth its memory
MAX_GRID = 65535  # batches, and heads, of one launch: second and third size of the fused kernels' grids


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
    return out.contiguous(), _log_sum_exp(q, k, bias, scale)


@torch.no_grad()
def _log_sum_exp(q: Tensor, k: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Return the log-sum-exp of all scores, which take memory, in float32."""
    scores = q.float() @ _repeated(q, k, k)[0].float().transpose(-1, -2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.logsumexp(scores * factor + bias.float(), -1)


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
    """Call the kernel that SDPA would choose; see :func:`_stores_scores` for its unfused path."""
    if q.is_cpu:
        return _cpu(q, k, v, causal, scale)
    if torch.compiler.is_compiling():  # the choice is an integer that a trace cannot hold
        square = not causal or q.shape[2] == k.shape[2]
        return (_flash if square and q.dtype in HALVES else _efficient)(q, k, v, causal, scale)
    backend = _choice(q, k, v, causal, scale)
    if backend == UNFUSED and _stores_scores(q, k):
        return _with_scores(q, k, v, causal, scale)
    out, lse = _in_pieces(KERNELS.get(backend, _efficient), q, k, v, causal, scale)
    return out, lse


def _with_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Output:
    """Call SDPA, which takes its unfused path for these tensors."""
    bias = _bias(q, k, Mask(causal=causal), Terms())
    return _sdpa(q, k, v, causal, scale).contiguous(), _log_sum_exp(q, k, bias, scale)


def _choice(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> int:
    """Return the number of the backend that SDPA chooses."""
    grouped = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(  # type: ignore[attr-defined, no-any-return]
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )


def _stores_scores(q: Tensor, k: Tensor) -> bool:
    """True if SDPA's unfused path is taken where SDPA chooses it: products, and a softmax in between.

    Rule: the smaller of Tq and Tk is at most 2 D. The scores then take no more memory than twice the queries
    or the repeated keys, and tiles of the fused kernel would be partly empty. Beyond that ``efficient`` takes
    less memory and less time: at 512 queries of 64 columns in float32 less than half of it on an H200
    (results/nvidia-h200/audit-2026-11-28b-seed40.json and -seed41.json).
    """
    return min(q.shape[2], k.shape[2]) <= 2 * q.shape[3]


def _in_pieces(call: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Return the results of ``call(q, k, v, *rest)``, which begin with batches and heads.

    It is called for parts whose batches and heads fit a grid: PyTorch's fused kernels raise beyond it.
    """
    (b, h), kv_heads = q.shape[:2], k.shape[1]
    if max(b, h) <= MAX_GRID:
        return call(q, k, v, *rest)
    if b > MAX_GRID:
        dim, parts = 0, [x.split(MAX_GRID) for x in (q, k, v)]
    elif kv_heads == 1:
        queries = q.split(MAX_GRID, 1)
        dim, parts = 1, [queries, (k,) * len(queries), (v,) * len(queries)]
    else:
        count = max(1, MAX_GRID * kv_heads // h)  # heads of keys in a part
        dim, parts = 1, [q.split(count * (h // kv_heads), 1), k.split(count, 1), v.split(count, 1)]
    results = [_in_pieces(call, *part, *rest) for part in zip(*parts, strict=True)]
    return tuple(torch.cat(tensors, dim) for tensors in zip(*results, strict=True))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    # A branch: with symbolic sizes the comparison is no bool, which SDPA asks for.
    options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    call = torch._C._nn.scaled_dot_product_attention  # type: ignore[attr-defined]
    return call(q, k, v, None, 0.0, causal, scale=scale, **options)  # type: ignore[no-any-return]


def _efficient_output(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Return what ``efficient`` writes, (B, T, H, D) in memory; its log-sum-exp is for the gradient alone."""
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    k, v = _repeated(q, k, v)
    out, *_ = torch._scaled_dot_product_efficient_attention(
        q, k, v, None, needs_lse, 0.0, causal, scale=scale
    )
    return out


def _aligned(x: Tensor) -> Tensor:
    """Return ``x`` with every row 16-byte aligned, copied if needed: the kernels read 16 bytes at a time, and
    on other rows some raise and some fault."""
    if x.stride(3) != 1:
        x = x.contiguous()
    if x.is_cpu:
        return x
    size = x.element_size()
    is_aligned = not any(step * size % 16 for step in x.stride()[:3]) and _begins_aligned(x)
    return x if is_aligned else x.clone()


def _begins_aligned(x: Tensor) -> bool:
    """True if ``x`` begins at a multiple of 16 bytes, or has no memory yet: in a trace, or under vmap."""
    if torch.compiler.is_compiling() or _is_wrapped(x):
        return True
    return x.data_ptr() % 16 == 0


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


def can_be_sdpa(q: Tensor, k: Tensor, params: dict[str, Any]) -> bool:
    """True if :func:`sdpa` computes what ``torch`` returns for these options and sizes."""
    if params["window"] is not None or params["softcap"] is not None or params["alignment"]:
        return False
    # What is no number has no truth, and is refused by the check.
    dropout_p = params["dropout_p"]
    if params["padded"] or not isinstance(dropout_p, int | float) or dropout_p:
        return False
    return q.numel() > 0 and k.numel() > 0


def is_by_sdpa(
    inputs: tuple[Any, ...], params: dict[str, Any], impl: str | None, check: Callable[[], None]
) -> bool:
    """True if a call of the public function is :func:`sdpa`, by ``impl`` or by the choice of dispatch.

    Arguments and errors are those of the operator's call, which computes everything else.
    """
    if impl is not None and impl != "torch":
        return False
    if torch.compiler.is_compiling():
        check()
        is_by_torch = (impl or choice.choose("attention", inputs, params)) == "torch"
    else:
        is_by_torch = plan("attention", inputs, params, impl, check).impl == "torch"
    return is_by_torch and can_be_sdpa(inputs[0], inputs[1], params)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Return the output of a call that ``torch`` computes and that needs no log-sum-exp.

    Sizes are 1 or more. The output has the strides that PyTorch's kernel gives it. It is SDPA's, but for two
    cases: of its unfused path only what :func:`_stores_scores` takes, and more batches or heads than a grid
    holds are computed in pieces, except by the unfused path, whose kernels have no such limit.
    """
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    own = _instead_of_sdpa(q, k, v, causal, scale)
    return _sdpa(q, k, v, causal, scale) if own is None else own(q, k, v, causal, scale)


def _instead_of_sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Callable[..., Tensor] | None:
    """Return the function of ``(q, k, v, causal, scale)`` that is called instead of SDPA itself, or None."""
    fits = max(q.shape[:2]) <= MAX_GRID
    if not q.is_cuda or (fits and _stores_scores(q, k)):  # whatever SDPA chooses
        return None
    # Neither a trace nor vmap has the choice, which is an integer: grouped heads in float32 are unfused.
    if torch.compiler.is_compiling() or _is_wrapped(q):
        is_unfused = q.dtype == torch.float32 and q.shape[1] != k.shape[1]
    else:
        is_unfused = _choice(q, k, v, causal, scale) == UNFUSED
    if is_unfused and _stores_scores(q, k):
        return None
    call = _efficient_output if is_unfused else _sdpa
    if not fits:
        return lambda *arguments: _in_pieces(lambda *piece: (call(*piece),), *arguments)[0]
    return call if is_unfused else None


def repeated_sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor | None] | None:
    """Return :func:`sdpa` for calls that come again, or None for sizes of 0 and for rows that it copies.

    The function returns None for tensors that begin between multiples of 16 bytes: strides do not tell that.
    """
    if not q.numel() or not k.numel() or any(_aligned(x) is not x for x in (q, k, v)):
        return None
    own = _instead_of_sdpa(q, k, v, causal, scale)
    grouped, call = q.shape[1] != k.shape[1], torch._C._nn.scaled_dot_product_attention
    if not q.is_cuda:
        return lambda q, k, v: call(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if own is not None:
            return own(q, k, v, causal, scale)
        return call(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)

    return function


def _exceeds_grid(case: Case, device: str) -> bool:
    return device == "cuda" and max(case.inputs[0].shape[:2]) > MAX_GRID


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
    if (mask.is_band or terms) and _exceeds_grid(case, device):
        return no(f"torch's kernels with a mask take {MAX_GRID} batches and heads at most; split the batch")
    if (mask.is_band or terms) and tq * tk > MAX_BIAS:
        return no("torch's kernels read a mask of Tq x Tk elements, here over 2^26; use impl='triton'")
    return YES


def _supports_without_band(case: Case, device: str) -> Support:
    options = AttentionOptions.of(case)
    if options.mask.is_band or options.terms:
        return no("called by name without a mask of Tq x Tk elements; use impl='torch' or impl='triton'")
    if _exceeds_grid(case, device):
        return no(f"a grid has {MAX_GRID} batches and heads at most; use impl='torch', which takes parts")
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
