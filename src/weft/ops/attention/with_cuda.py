"""Attention in CUDA C++ on tensor cores: forward and backward for float16 and bfloat16.

On Hopper the forward without dropout is attention_wgmma.py's, and the backward for heads of up to 128
attention_wgmma_backward.py's. The others multiply by ``mma.sync``: attention_forward.cu,
attention_backward_queries.cu and attention_backward_keys.cu. A window, a mask at the bottom right and capped
scores are computed on Hopper alone, for heads of up to 128 and without dropout. All read and write rows of a
head by the tensors' strides if every row is 16-byte aligned; other tensors are copied first.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft import machine
from weft.backends.nvrtc import CudaSource
from weft.core import YES, Case, Implementation, Support, WeftError, no
from weft.core.implementation import with_invariant
from weft.machine.device_limits import has_wgmma, smem_per_block
from weft.ops._common.hopper import tensor_map
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops._common.philox import keep_scale, threshold
from weft.ops.attention import attention_wgmma, attention_wgmma_backward
from weft.ops.attention.cuda_configs import KINDS, Config, configure, shared_bytes
from weft.ops.attention.layout import Three, allocate_gradients, empty_output, like, zero_gradients
from weft.ops.attention.spec import AttentionOptions

LOG2E = 1.4426950408889634
FILES = {"forward": "forward", "queries": "backward_queries", "keys": "backward_keys"}
MAX_ROW_STRIDE = 1 << 24  # elements; row times stride then fits 31 bits for a tile's 128 rows


class HeadTensor(Structure):
    """A (B, H, T, D) tensor with adjacent columns; the strides are in elements."""

    _fields_ = (
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
    )


TENSORS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
POINTERS = ("lengths", "lse", "row_terms")
INTEGERS = ("heads", "group", "tq", "tk", "padded_tq", "causal", "seed", "threshold")
FLOATS = ("scale_log2", "scale", "rescale")


class AttentionArgs(Structure):
    """Arguments of one launch, as attention_tiles.cuh declares them; a field that is not given is 0."""

    _fields_ = (
        *((name, HeadTensor) for name in TENSORS),
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in INTEGERS),
        *((name, c_float) for name in FLOATS),
    )

    def bind(self, **tensors: Tensor | None) -> None:
        """Store the addresses and strides of tensors by field name; None leaves a null pointer."""
        for name, x in tensors.items():
            if x is not None:
                setattr(
                    self, name, HeadTensor(x.data_ptr(), *x.stride()[:3]) if name in TENSORS else x.data_ptr()
                )


def common_arguments(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: AttentionOptions
) -> AttentionArgs:
    """Return the arguments that all three kernels share."""
    factor = options.factor(q.shape[3])
    args = AttentionArgs(
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        tq=q.shape[2],
        tk=k.shape[2],
        causal=options.causal,
        scale_log2=factor * LOG2E,
        scale=factor,
        rescale=1.0,
    )
    # Without dropout the kernels are compiled without it, and the three fields stay 0, 0 and 1.
    if p := options.dropout_p:
        args.seed, args.threshold, args.rescale = options.seed, threshold(p), keep_scale(p)
    args.bind(q=q, k=k, v=v, lengths=lengths)
    return args


@cache
def source(kind: str, dtype: torch.dtype, d: int, dropout: bool, config: Config) -> CudaSource:
    """Return the program of one kernel (``forward``, ``queries``, ``keys``) for head size ``d``."""
    defines = {
        "WEFT_T": CUDA_TYPES[dtype],
        "HEAD": d,
        "WARPS": config.warps,
        "MT": config.mt,
        "STEP": config.step,
        "BLOCKS": config.blocks,
        "SPLIT": config.split,
        "DROPOUT": int(dropout),
    }
    parts = [kind, dtype_name(dtype), str(d), f"{config.own}x{config.step}"]
    return CudaSource(
        file=Path(__file__).with_name(f"attention_{FILES[kind]}.cu"),
        kernels=(f"attention_{kind}",),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        label="-".join([*parts, *["dropout"] * dropout]),
    )


def _aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if its columns are not adjacent, a row is not 16-byte aligned or
    rows are 2^24 elements or more apart."""
    strides = x.stride()
    # cp.async copies 16 bytes from 16-byte addresses.
    usable = strides[3] == 1 and x.data_ptr() % 16 == 0 and strides[2] < MAX_ROW_STRIDE
    if usable and all(s % 8 == 0 for s in strides[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launch(kind: str, config: Config, q: Tensor, dropout: bool, grid: Any, args: AttentionArgs) -> None:
    kernel = source(kind, q.dtype, q.shape[3], dropout, config)[f"attention_{kind}"]
    kernel(grid, config.threads, args, shared=shared_bytes(kind, config, q.shape[3]))


def _needs_wgmma(options: AttentionOptions) -> bool:
    """True for a window, a mask at the bottom right, and capped scores."""
    return options.mask.is_band or options.softcap is not None


def _for_copy_engine(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return tensors that the kernels by wgmma read, copied where they are stored otherwise."""
    aligned = [_aligned(x) for x in tensors]
    return [x if tensor_map.fits_heads(x) else x.contiguous() for x in aligned]


def _prepare(tensors: tuple[Tensor, ...], options: AttentionOptions) -> list[Tensor]:
    """Return aligned tensors; also contiguous ones where no other kernel takes what wgmma's do not read."""
    return _for_copy_engine(tensors) if _needs_wgmma(options) else [_aligned(x) for x in tensors]


def _refuse_without_wgmma(options: AttentionOptions) -> None:
    """Raise :class:`WeftError` for options that the kernels by mma.sync would ignore."""
    if _needs_wgmma(options):
        raise WeftError(
            "attention: impl='cuda' with a window, a mask at the bottom right or a softcap",
            expected="compute capability 9.0 and tensors that its copy engine reads",
            got="another device, or sizes beyond its limits",
            hint="use impl='triton'",
        )


def forward(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    if has_wgmma(q.device):
        options = AttentionOptions(**params)
        aligned_q, aligned_k, aligned_v = _prepare((q, k, v), options)
        if attention_wgmma.supports(aligned_q, aligned_k, aligned_v, options):
            lengths = key_lengths.contiguous() if options.padded else None
            return attention_wgmma.forward(aligned_q, aligned_k, aligned_v, lengths, options)
    dropout = bool(params.get("dropout_p"))
    config = configure("forward", q.shape[3], dropout, smem_per_block(q.device))
    return forward_with(config, q, k, v, key_lengths, **params)


def forward_with(
    config: Config, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Compute the forward with one configuration."""
    options = AttentionOptions(**params)
    if q.numel() == 0 or k.numel() == 0:
        return empty_output(q)
    _refuse_without_wgmma(options)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    # The operator's schema has a tensor in any case; without `padded` it is a placeholder and is not read.
    lengths = key_lengths.contiguous() if options.padded else None
    b, h, tq, _ = q.shape
    out, lse = like(q), torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
    args = common_arguments(q, k, v, lengths, options)
    args.bind(out=out, lse=lse)
    _launch("forward", config, q, options.dropout_p > 0, (-(-tq // config.own), h, b), args)
    return out, lse


def backward(grad: Tensor, *saved: Tensor, into: Three | None = None, **params: Any) -> Three:
    q = saved[0]
    if has_wgmma(q.device) and q.numel() and saved[1].numel():
        options = AttentionOptions(**params)
        q, k, v, key_lengths, out, lse = saved
        q, k, v, aligned_grad, out = _prepare((q, k, v, grad, out), options)
        gradients = allocate_gradients(q, k, v, into)
        if attention_wgmma_backward.supports((q, k, v, aligned_grad, out, *gradients), options):
            lengths = key_lengths.contiguous() if options.padded else None
            inputs = (q, k, v, lengths, out, lse.contiguous())
            return attention_wgmma_backward.backward(aligned_grad, inputs, options, gradients)
    size = (q.shape[3], bool(params.get("dropout_p")), smem_per_block(q.device))
    configs = (configure("queries", *size), configure("keys", *size))
    return backward_with(configs, grad, *saved, into=into, **params)


def forward_invariant(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Compute the forward by wgmma however the tensors are stored; why it is batch invariant:
    attention_wgmma.forward_invariant."""
    if q.numel() == 0 or k.numel() == 0:
        return empty_output(q)
    options = AttentionOptions(**params)
    q, k, v = _for_copy_engine((q, k, v))
    if not attention_wgmma.supports(q, k, v, options):
        raise WeftError("attention: batch invariance", expected="fewer than 2^36 queries", got=q.shape)
    lengths = key_lengths.contiguous() if options.padded else None
    return attention_wgmma.forward_invariant(q, k, v, lengths, options)


def backward_invariant(
    grad: Tensor, *saved: Tensor, into: Three | None = None, **params: Any
) -> tuple[Tensor, ...]:
    """Compute the backward by the head size's own kernels however the tensors are stored.

    They compute a head of a batch by itself, in tiles that the head size decides, and add parts of dq in the
    order of the tiles of keys.
    """
    q, k, v, key_lengths, out, lse = saved
    if q.numel() and k.numel():
        q, k, v, grad, out = _for_copy_engine((q, k, v, grad, out))
        if into is not None and not all(map(tensor_map.fits_heads, into)):
            gradients = backward_invariant(grad, q, k, v, key_lengths, out, lse, **params)
            for memory, gradient in zip(into, gradients, strict=True):
                memory.copy_(gradient)
            return into
    return backward(grad, q, k, v, key_lengths, out, lse, into=into, **params)


def backward_with(
    configs: tuple[Config, Config],
    grad: Tensor,
    *saved: Tensor,
    into: Three | None = None,
    **params: Any,
) -> Three:
    """Compute the backward with one configuration for the queries' kernel and one for the keys'.

    ``into`` is memory for dq, dk and dv, with any strides whose rows the kernels can write.
    """
    q, k, v, key_lengths, out, lse = saved
    options = AttentionOptions(**params)
    if q.numel() == 0 or k.numel() == 0:
        return zero_gradients(q, k, v, into)
    _refuse_without_wgmma(options)
    q, k, v, grad, out = (_aligned(x) for x in (q, k, v, grad, out))
    lengths, lse = key_lengths.contiguous() if options.padded else None, lse.contiguous()
    dq, dk, dv = allocate_gradients(q, k, v, into)
    (b, h, tq, _), (kv_heads, tk) = q.shape, k.shape[1:3]
    for_queries, for_keys = configs
    # The queries' kernel writes whole blocks of row terms, and the keys' kernel reads whole tiles of them.
    multiple = max(for_queries.own, for_keys.step)
    padded_tq = -(-tq // multiple) * multiple
    # Uninitialised: the queries' kernel writes every element, the padding included.
    row_terms = torch.empty((b, h, 2, padded_tq), dtype=torch.float32, device=q.device)
    args = common_arguments(q, k, v, lengths, options)
    args.bind(grad=grad, out=out, dq=dq, dk=dk, dv=dv, lse=lse, row_terms=row_terms)
    args.padded_tq = padded_tq
    dropout = options.dropout_p > 0
    _launch("queries", for_queries, q, dropout, (padded_tq // for_queries.own, h, b), args)
    grid = (-(-tk // for_keys.own) * for_keys.split, kv_heads, b)
    # On the same stream, after the kernel that wrote row_terms.
    _launch("keys", for_keys, q, dropout, grid, args)
    return dq, dk, dv


def supports(case: Case, device: str) -> Support:
    (b, h, tq, _), tk = case.inputs[0].shape, case.inputs[1].shape[2]
    if case.dtype == "float32":
        return no("tensor cores multiply float16 and bfloat16 here; use impl='triton' for float32")
    if max(b, h) > 65535:
        return no("a grid has 65535 batches and heads at most; split the batch")
    if max(tq, tk) >= 2**31 - 2**10:
        return no("queries and keys are counted in 32 bits; split the sequence")
    return _supports_options(case, AttentionOptions.of(case), device)


def _supports_options(case: Case, options: AttentionOptions, device: str) -> Support:
    if options.terms:
        return no(f"these kernels have no {options.terms}; use impl='triton'")
    if not _needs_wgmma(options):
        return YES
    extra = "a window, a mask at the bottom right or a softcap"
    if options.dropout_p:
        return no(f"the kernels by wgmma have {extra}, but no dropout; use impl='triton'")
    if case.inputs[0].shape[3] > attention_wgmma_backward.MAX_HEAD_SIZE:
        return no(f"heads above 128 have no backward with {extra}; use impl='triton'")
    if device == "cuda" and machine.has_gpu() and not has_wgmma(torch.device(device)):
        return no(f"only the kernels by wgmma, for compute capability 9.0, have {extra}; use impl='triton'")
    return YES


def supports_invariant(case: Case, device: str) -> Support:
    """Return yes for half types on Hopper, without dropout and terms of the scores."""
    options, most = AttentionOptions.of(case), attention_wgmma_backward.MAX_HEAD_SIZE
    # Reasons of its own: other implementations, which supports() names, have no such variant.
    if options.dropout_p:
        return no("dropout drops a weight by its position in the batch")
    if case.dtype == "float32":
        return no("batch-invariant attention takes float16 and bfloat16; convert the inputs")
    if options.terms:
        return no(f"batch-invariant attention has no {options.terms}")
    if _needs_wgmma(options) and case.inputs[0].shape[3] > most:
        extra = "a window, a mask at the bottom right or a softcap"
        return no(f"batch-invariant attention with {extra} takes heads of up to {most}")
    answer = supports(case, device)
    if answer and device == "cuda" and machine.has_gpu() and not has_wgmma(torch.device(device)):
        return no("batch-invariant attention needs wgmma, compute capability 9.0")
    return answer


_IMPLEMENTATION = Implementation(
    operator="attention",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    aot_kernels=(
        *(
            source(kind, torch.bfloat16, d, False, configure(kind, d, False, float("inf")))
            for d in (64, 128)
            for kind in KINDS
        ),
        *attention_wgmma.aot_kernels(),
        *attention_wgmma_backward.aot_kernels(),
    ),
    idea="flash by wgmma and the copy engine on Hopper, else by mma.sync; weights stay in registers",
)

IMPLEMENTATION = with_invariant(
    _IMPLEMENTATION,
    forward=forward_invariant,
    backward=backward_invariant,
    supports=supports_invariant,
)
