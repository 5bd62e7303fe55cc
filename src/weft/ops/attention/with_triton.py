"""Attention in Triton, forward and backward, with no memory that grows with Tq Tk.

On a device with the tensor memory accelerator (TMA) and for tensors whose strides it takes, kernels read
tiles through tensor descriptors; otherwise through pointers. The kernels are in triton_forward.py and
triton_backward.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, triton
from weft.core import Case, Implementation, Support, no
from weft.core.support import YES
from weft.machine.device_limits import has_tma
from weft.ops._common.philox import keep_scale, seed_words, threshold_int32
from weft.ops.attention.layout import Three, allocate_gradients, empty_output, like, rowwise, zero_gradients
from weft.ops.attention.spec import AttentionOptions
from weft.ops.attention.terms import Terms
from weft.ops.attention.triton_backward import (
    WRITTEN,
    attention_backward_keys,
    attention_backward_queries,
)
from weft.ops.attention.triton_configs import NARROW, SINGLE, WIDE, Config, configure, wide_config
from weft.ops.attention.triton_forward import attention_forward
from weft.ops.attention.triton_terms import BiasGradient, term_arguments
from weft.ops.attention.triton_tiles import BY_FOURS, BY_ONES

LOG2E = 1.4426950408889634
KERNELS = {
    "forward": attention_forward,
    "queries": attention_backward_queries,
    "keys": attention_backward_keys,
}


def padded_size(d: int) -> int:
    """Return the head size rounded up to a power of two that ``tl.dot`` accepts."""
    return max(16, 1 << (d - 1).bit_length())


def _has_tma(device: torch.device) -> bool:
    """True if kernels may use tensor descriptors and 227 KiB of shared memory; the interpreter may not."""
    return not INTERPRETED and has_tma(device)


def _configure(kind: str, q: Tensor, params: Mapping[str, Any]) -> Config:
    has_bias = "bias" in params.get("terms", "")
    return configure(kind, padded_size(q.shape[3]), q.element_size(), _has_tma(q.device), has_bias)


def _fits_descriptor(x: Tensor) -> bool:
    """True if every row is 16-byte aligned and no stride is 0 (expanded): a descriptor takes the tensor."""
    size = x.element_size()
    strides = x.stride()[:3]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in strides) and 0 not in x.shape


def common_arguments(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, terms: Terms
) -> dict[str, Any]:
    """Return the kernel arguments, by name, that all three kernels share."""
    d, dropout_p = q.shape[3], options.dropout_p
    mask = options.mask
    low, high = seed_words(options.seed) if dropout_p else (0, 0)
    return {
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "tq": q.shape[2],
        "tk": k.shape[2],
        **strides(q=q, k=k, v=v),
        **term_arguments(terms, q, k),
        "scale": options.outer_factor(d) * LOG2E,
        "factor": options.factor(d),
        "inner": options.inner_factor(d),
        "window": mask.window_of(q.shape[2], k.shape[2]),
        "low": low,
        "high": high,
        "threshold": threshold_int32(dropout_p) if dropout_p else 0,
        "rescale": keep_scale(dropout_p) if dropout_p else 1.0,
        "D": d,
        "DP": padded_size(d),
        "CAUSAL": mask.causal,
        "BOTTOM_RIGHT": mask.bottom_right,
        "WINDOW": mask.window is not None,
        "SOFTCAP": options.softcap is not None,
        "PADDED": options.padded,
        # Rows of keys that are whole blocks of four random words share them.
        "DROPOUT": (BY_FOURS if k.shape[2] % 4 == 0 else BY_ONES).value if dropout_p else 0,
    }


def strides(**tensors: Tensor) -> dict[str, int]:
    """Return each tensor's strides of batches, heads and rows, as ``q_batch``, ``q_head``, ``q_row``."""
    return {
        f"{name}_{dimension}": stride
        for name, x in tensors.items()
        for dimension, stride in zip(("batch", "head", "row"), x.stride()[:3], strict=True)
    }


def _sources(config: Config, row_terms: Tensor | None = None, **tensors: Tensor) -> dict[str, Any]:
    """Return the ``..._source`` arguments: tensor descriptors if all tensors can have one, else the tensors.

    ``q`` and ``grad`` are read in tiles of ``bm`` rows, ``k`` and ``v`` in tiles of ``bn``. The keys' kernel
    also reads ``row_terms`` (lines, length), whose lines are a multiple of 16 floats.
    """
    first = next(iter(tensors.values()))
    tma = _has_tma(first.device) and first.element_size() < 4 and all(map(_fits_descriptor, tensors.values()))
    sources: dict[str, Any] = dict(tensors)
    if row_terms is not None:
        sources["rows"] = row_terms
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        for name, x in sources.items():
            rows = config.bn if name in ("k", "v") else config.bm
            block = [1, rows] if name == "rows" else [1, 1, rows, padded_size(x.shape[3])]
            sources[name] = TensorDescriptor(x, list(x.shape), list(x.stride()), block)
    return {f"{name}_source": source for name, source in sources.items()} | {"TMA": tma}


def _launch(kind: str, config: Config, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    kernel = KERNELS[kind]
    arguments |= {"BM": config.bm, "BN": config.bn}
    by_name = {name: arguments[name] for name in kernel.arg_names}
    kernel[grid](**by_name, num_warps=config.warps, num_stages=config.stages)


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    return forward_with(_configure("forward", q, params), q, k, v, key_lengths, *extras, **params)


def forward_with(
    config: Config, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Compute the forward with one configuration."""
    options = AttentionOptions(**params)
    terms = Terms.of(extras, options.terms)
    if q.numel() == 0 or k.numel() == 0:
        out, lse = empty_output(q)
        return out, lse if terms.sinks is None else lse.copy_(terms.sinks[:, None].expand_as(lse))
    q, k, v = rowwise(q), rowwise(k), rowwise(v)
    b, h, tq, _ = q.shape
    out, lse = like(q), torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
    arguments = common_arguments(q, k, v, options, terms)
    arguments |= {"lengths": key_lengths, "out_ptr": out, "lse_ptr": lse, **strides(out=out)}
    arguments |= _sources(config, q=q, k=k, v=v)
    _launch("forward", config, (triton.cdiv(tq, config.bm), h, b), arguments)
    return out, lse


def backward(grad: Tensor, *saved: Tensor, into: Three | None = None, **params: Any) -> tuple[Tensor, ...]:
    q = saved[0]
    configs = (_configure("queries", q, params), _configure("keys", q, params))
    return backward_with(configs, grad, *saved, into=into, **params)


def backward_with(
    configs: tuple[Config, Config],
    grad: Tensor,
    *saved: Tensor,
    into: Three | None = None,
    bias_gradient: bool = True,
    **params: Any,
) -> tuple[Tensor, ...]:
    """Compute the backward with one configuration for the queries' kernel and one for the keys'.

    ``into`` is memory for dq, dk and dv, with any strides whose rows the kernels can write. The gradients of
    sinks and bias follow those three in calls that have them; that of a bias is not computed without
    ``bias_gradient``, and its memory is then uninitialised.
    """
    q, k, v, key_lengths, *extras, out, lse = saved
    options = AttentionOptions(**params)
    terms = Terms.of(tuple(extras), options.terms)
    if q.numel() == 0 or k.numel() == 0:
        zeros = (torch.zeros_like(x) for x in (terms.sinks, terms.bias) if x is not None)
        return *zero_gradients(q, k, v, into), *zeros
    q, k, v, grad, out = (rowwise(x) for x in (q, k, v, grad, out))
    if not _fits_descriptor(grad):  # usually expanded: the gradient of a sum
        grad = grad.contiguous()
    dq, dk, dv = allocate_gradients(q, k, v, into)
    (b, h, tq, _), (kv_heads, tk) = q.shape, k.shape[1:3]
    for_queries, for_keys = configs
    # The queries' kernel writes whole tiles of row terms, and the keys' kernel reads whole tiles of them.
    multiple = max(for_queries.bm, for_keys.bm)
    tq_padded = triton.cdiv(tq, multiple) * multiple
    row_terms = torch.empty((2 * b * h, tq_padded), dtype=torch.float32, device=q.device)
    programs = tq_padded // for_queries.bm
    dsinks = torch.empty((b, h, programs), dtype=torch.float32, device=q.device)
    bias = terms.bias if bias_gradient else None
    dbias = BiasGradient() if bias is None else BiasGradient.of(bias, q, k, programs)
    arguments = common_arguments(q, k, v, options, terms)
    arguments |= {"dsinks_ptr": dsinks, "first_batch": 0, **dbias.arguments(q)}
    arguments |= {"out_ptr": out, "lengths": key_lengths, "lse_ptr": lse.contiguous(), "rows_ptr": row_terms}
    arguments |= {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "tq_padded": tq_padded}
    arguments |= strides(grad=grad, out=out, dq=dq, dk=dk, dv=dv)
    tensors = {"q": q, "k": k, "v": v, "grad": grad}
    arguments_of_queries = arguments | _sources(for_queries, **tensors)
    batches = dbias.batches_a_launch or b
    for first_batch in range(0, b, batches):
        arguments_of_queries["first_batch"] = first_batch
        _launch("queries", for_queries, (programs, h, batches), arguments_of_queries)
    grid = (triton.cdiv(tk, for_keys.bn), kv_heads, b)
    _launch("keys", for_keys, grid, arguments | _sources(for_keys, row_terms, **tensors))
    gradients = [dq, dk, dv]
    if terms.sinks is not None:
        gradients.append(dsinks.sum((0, 2)).to(terms.sinks.dtype))
    if terms.bias is not None:
        gradients.append(dbias.result(terms.bias))
    return tuple(gradients)


def supports(case: Case, device: str) -> Support:
    b, h = case.inputs[0].shape[:2]
    if max(b, h) > 65535:
        return no("a grid has 65535 batches and heads at most; split the batch")
    return YES


def aot_kernel(
    kind: str, config: Config, dtype: str, d: int, *, tma: bool = False, options: tuple[str, ...] = ()
) -> TritonAotKernel:
    """Describe one causal kernel for contiguous tensors whose lengths are multiples of 16.

    ``options`` are names of the kernels' switches that are on.
    """
    kernel = KERNELS[kind]
    constants: dict[str, Any] = dict.fromkeys(
        ("BOTTOM_RIGHT", "WINDOW", "SOFTCAP", "PADDED", "DROPOUT", "SINKS", "ALIBI", "BIAS"), False
    )
    # The queries' kernel writes the gradient of a bias; its columns are adjacent.
    constants |= {"DBIAS": WRITTEN.value if "BIAS" in options else 0, "bias_column": 1}
    constants |= {"CAUSAL": True, "TMA": tma, **dict.fromkeys(options, True)}
    constants |= {"D": d, "DP": padded_size(d), "BM": config.bm, "BN": config.bn}
    floats = ("scale", "factor", "inner", "rescale")
    # Integers that 16 need not divide.
    unaligned = (
        *("low", "high", "threshold", "window", "heads", "group"),
        *("slopes_batch", "first_batch"),
    )
    singles = ("lse_ptr", "rows_ptr", "sinks_ptr", "slopes_ptr", "dsinks_ptr")
    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = constants[name]
        elif name == "rows_source":
            signature[name] = f"tensordesc<fp32[1, {config.bm}]>" if tma else "*fp32"
        elif name.endswith("_source"):
            rows = config.bm if name in ("q_source", "grad_source") else config.bn
            descriptor = f"tensordesc<{dtype}[1, 1, {rows}, {constants['DP']}]>"
            signature[name] = descriptor if tma else f"*{dtype}"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in singles else f"*{dtype}"
        elif name == "lengths":
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in floats else "i32" if name in unaligned else "i32:16"
    parts = [kind, dtype, str(d), f"{config.bm}x{config.bn}x{config.stages}", *map(str.lower, options)]
    return TritonAotKernel(
        label="-".join([*parts, "descriptors" if tma else "pointers"]),
        kernel=kernel,
        signature=signature,
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=90 if tma else 80,
    )


IMPLEMENTATION = Implementation(
    operator="attention",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=supports,
    aot_kernels=(
        *(aot_kernel(kind, WIDE[kind][d], "bf16", d, tma=True) for kind in KERNELS for d in (64, 128)),
        *(
            aot_kernel(kind, WIDE[kind][128], "bf16", 128, tma=True, options=options)
            for kind in KERNELS
            for options in (("WINDOW", "BOTTOM_RIGHT"), ("SOFTCAP",))
        ),
        *(
            aot_kernel(kind, wide_config(kind, d, "BIAS" in options), "bf16", d, tma=True, options=options)
            for kind in KERNELS
            for d, options in ((64, ("SINKS", "WINDOW")), (128, ("ALIBI",)), (128, ("BIAS",)))
        ),
        *(aot_kernel(kind, NARROW[kind][128], "bf16", 128) for kind in KERNELS),
        *(aot_kernel(kind, SINGLE[kind][64], "fp32", 64) for kind in KERNELS),
    ),
    idea="flash: no score written, masks only on the diagonal, tiles by the copy engine",
)
