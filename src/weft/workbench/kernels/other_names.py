"""Readers of the names of all other kernels: PyTorch's own, its compiler's, CUB's, attention, cuDNN's
helpers, copies and collectives.

Sources: the templates' declarations in PyTorch (``Loops.cuh``, ``Reduce.cuh``, ``SoftMax.cu``), in
FlashAttention (``kernel_traits.h``) and in CUB; the compiler's own rule for names (the kinds
``poi``, ``red``, ``per``; then ``fused`` and the operators, sorted).
"""

from __future__ import annotations

import re
from typing import Any

from weft.workbench.kernels.fields import SHORT, TYPES, arch, arguments, integer

Fields = dict[str, Any]

_KINDS = {"poi": "elementwise", "red": "reduce", "per": "reduce", "for": "elementwise"}
# ATen's operators as the compiler writes them. A name with any other word in it is not split:
# the border between two operators would be a guess.
_ATEN_WORDS = """
_log_softmax _log_softmax_backward_data _native_batch_norm_legit _scaled_dot_product_attention
_softmax _softmax_backward_data _to_copy _unsafe_index _unsafe_view abs add add_ addmm alias all
amax amin any arange argmax argmin as_strided bitwise_and bitwise_not bitwise_or bmm cat ceil
clamp clone constant_pad_nd convolution copy copy_ cos cumsum detach div div_ embedding
embedding_dense_backward empty eq erf exp expand fill flip floor full full_like gather ge gelu
gelu_backward gt hardswish hardtanh index index_put index_select isinf isnan le leaky_relu
lift_fresh linalg_vector_norm log log1p logical_and logical_not logical_or logsumexp lt
masked_fill max max_pool2d_with_indices maximum mean min minimum mm mul mul_ native_batch_norm
native_dropout native_dropout_backward native_group_norm native_layer_norm
native_layer_norm_backward ne neg new_zeros nll_loss_backward nll_loss_forward ones_like permute
pow prod rand reciprocal relu remainder repeat roll rsqrt rsub scalar_tensor scatter scatter_add
select select_backward sigmoid sigmoid_backward sign silu silu_backward sin slice slice_backward
softplus sort split split_with_sizes sqrt squeeze stack std sub sum t tanh tanh_backward
threshold_backward topk transpose tril triu unbind unfold unsqueeze upsample_nearest2d var
var_mean view where zeros zeros_like
"""
_ATEN = frozenset(_ATEN_WORDS.split())
_LONGEST = max(map(len, _ATEN))


def inductor(name: str) -> Fields | None:
    """``triton_poi_fused_add_gelu_0``: pointwise, what it fuses, and its number in the program."""
    match = re.search(r"\btriton_(poi|red|per|for|tem|spl|unk|mix)_(?:fused_)?(\w*?)_?(\d+)$", name)
    if match:
        kind, words, _ = match.groups()
        return {"what": _KINDS.get(kind), "ops": operators(words) if words else None}
    if match := re.search(r"\btriton_(?:mm|bmm|addmm)_\d+$", name):
        return {"what": "gemm"}
    match = re.search(r"\bcpp_fused_(\w*?)_?(\d+)$", name)
    return {"ops": operators(match[1]) if match[1] else None} if match else None


def operators(words: str) -> tuple[str, ...]:
    """Split ``_softmax_add`` into (_softmax, add); return one word if any part is no known operator."""
    names, at = [], 0
    while at < len(words):
        # The longest operator first: gelu_backward begins with gelu.
        ends = (e for e in range(min(at + _LONGEST, len(words)), at, -1))
        last = next((e for e in ends if words[at:e] in _ATEN and words[e : e + 1] in ("", "_")), 0)
        if not last:
            return (words,)
        names.append(words[at:last])
        at = last + 1
    return tuple(names)


def attention(name: str) -> Fields | None:
    """FlashAttention in PyTorch's build and its own, memory-efficient attention, cuDNN's."""
    if match := re.search(r"\b(?:\w+_)?flash_(fwd|bwd)\w*_kernel\b", name):
        args = arguments(name, rf"Flash_{match[1]}_kernel_traits")
        sizes = [integer(a) for a in args[:3]]
        whole = len(sizes) == 3 and None not in sizes
        kind = next((TYPES[a] for a in args if a in TYPES and a != "bool"), None)
        return {
            "what": _ward(match[1] == "bwd"),
            "head": sizes[0] if whole else None,
            "tile": tuple(sizes[1:]) if whole else None,
            "operands": (kind,) if kind else None,
            "split_k": True if "splitkv" in name else None,
        }
    if match := re.search(r"\bFlashAttn(Fwd|Bwd)(Sm(\d+))?", name):
        return {"what": _ward(match[1] == "Bwd"), "arch": arch(match[3])}
    if match := re.search(
        r"\bfmha_cutlass([FB])_([a-z]+\d+)_(?:not)?aligned_(\d+)x(\d+)(?:_k(\d+))?\w*?_sm(\d+)",
        name,
    ):
        direction, kind, rows, columns, _, sm = match.groups()
        return {
            "what": _ward(direction == "B"),
            "arch": arch(sm),
            "tile": (int(rows), int(columns)),
            "operands": (SHORT[kind],) if kind in SHORT else None,
        }
    if match := re.search(r"\bcudnn_generated_\w*?sdpa_sm(\d+)_\w*?([fb])prop_?(\w*)", name):
        return {
            "what": _ward(match[2] == "b"),
            "arch": arch(match[1]),
            "unread": tuple(re.findall(r"knob_\d+|\d+(?:x\d+)+|w?g?mma_f16", match[3])),
        }
    return None


def _ward(backward: bool) -> str:
    return "attention backward" if backward else "attention"


def softmax(name: str) -> Fields | None:
    """``cunn_SoftMaxForward<vector, type, sums, result, ...>`` and ``softmax_warp_forward<type,
    result, sums, log2 of the row, ...>``."""
    if match := re.search(r"\bcunn_SoftMax(Forward|Backward)\w*", name):
        args = arguments(name, re.escape(match[0]))
        kinds = [TYPES.get(a) for a in args[1:4]]
        vector = integer(args[0]) if args else None
    elif match := re.search(r"\bsoftmax_warp_(forward|backward)", name):
        kinds = [TYPES.get(a) for a in arguments(name, match[0])[:3]]
        # Here the result comes before the sums.
        kinds, vector = ([kinds[0], kinds[2], kinds[1]] if len(kinds) == 3 else []), None
    else:
        return None
    whole = len(kinds) == 3 and None not in kinds
    backward = " backward" if match[1].lower() == "backward" else ""
    kind, sums, result = kinds if whole else (None, None, None)
    return {
        "what": "softmax" + backward,
        "vector": vector,
        "operands": (kind,) if kind else None,
        "accumulates": sums,
        "result": result,
    }


# The first pattern that matches gives the kernel's operation.
_ATEN_KINDS = (
    ("copy", r"direct_copy_kernel|\w*_copy_kernel_cuda|CatArrayBatchedCopy|loops::copy"),
    ("fill", r"FillFunctor"),
    ("norm", r"layer_norm|batch_norm|group_norm|LayerNorm|GammaBeta|rms_norm|RowwiseMoments"),
    ("random", r"distribution_elementwise|fused_dropout|random_from"),
    ("index", r"index_elementwise|index(?:Select|Func|_put)|gather|scatter|embedding"),
    ("sort", r"\w*[sS]ort|topk|TopK"),
    ("reduce", r"\breduce_kernel|nll_loss\w*reduce"),
    ("scan", r"tensor_kernel_scan"),
    ("elementwise", r"elementwise_kernel|multi_tensor_apply|CUDALoops|triu_tril"),
)
_FUNCTOR = re.compile(
    r"\b(?:CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(\w+?)(?:CUDAKernelImpl|KernelImpl|_kernel_cuda"
    r"|_kernel_impl|Functor|_functor|Ops)\b)"
)
_LOOP = re.compile(r"\)::\{lambda\(int\)")
# Functors that only carry another one, which names the operation.
_CARRIERS = {"B", "A", "U", "Binary", "BUnary", "AUnary", "Unary", "gpu", "index", "Tensor"}


def aten(name: str) -> Fields | None:
    """PyTorch's element by element, reductions, norms: what they apply, to which type, how wide."""
    if re.search(r"\bat::(?:native|cuda)\b", name) is None:
        return None
    what = next((w for w, pattern in _ATEN_KINDS if re.search(pattern, name)), None)
    args = arguments(name, "vectorized_elementwise_kernel")
    vector = integer(args[0]) if args else None
    if reduced := arguments(name, "ReduceOp"):
        return _reduction(what, reduced, vector, _ops(name))
    # The last lambda of an int, in the kernel itself, is only the loop over places.
    kind = re.findall(r"lambda\(([\w: ]+?)(?:, [\w: ,]+)?\)", _LOOP.sub("", name))
    kind = kind or re.findall(r"Functor\w*<([\w: ]+?)(?=[,>])", name)
    if what == "norm":
        kind = arguments(name, r"\w*layer_norm\w*")[:1]
    known = [TYPES[k.strip()] for k in kind if k.strip() in TYPES]
    return {
        "what": what,
        "vector": vector,
        "operands": (known[0],) if known else None,
        "ops": _ops(name),
    }


def _ops(name: str) -> tuple[str, ...] | None:
    functors = [a or b for a, b in _FUNCTOR.findall(name)]
    named = [f.lower().removesuffix("_") for f in functors if f not in _CARRIERS]
    return tuple(dict.fromkeys(n for n in named if n)) or None


def _reduction(what: str | None, args: list[str], vector: int | None, ops: tuple[str, ...] | None) -> Fields:
    """``ReduceOp<type, operation, index, result, values a thread, vector>``."""
    result = TYPES.get(args[3]) if len(args) > 3 else None
    return {
        "what": what,
        "operands": (TYPES[args[0]],) if args[0] in TYPES else None,
        "result": result,
        "vector": integer(args[5]) if len(args) > 5 else vector,
        "ops": ops,
    }


_CUB = (
    ("sort", r"Sort"),  # a radix sort's histograms and sums are its own
    ("reduce", r"Reduce(?!ByKey)|Histogram"),
    ("scan", r"Scan"),
    ("select", r"Select|Compact|Partition|Unique|RunLengthEncode"),
    ("elementwise", r"transform_kernel|for_each|parallel_for|static_kernel|DeviceTransform"),
)


def cub(name: str) -> Fields | None:
    """``cub::DeviceReduceKernel<policy_hub<float, ...>::Policy900, float*, ...>``."""
    match = re.search(r"\b(?:cub|thrust)::.*?\b((?:Device\w*|\w*transform\w*)_?[kK]ernel)\b", name)
    if match is None:
        return {} if re.search(r"\b(?:cub|thrust)::", name) else None
    what = next((w for w, pattern in _CUB if re.search(pattern, match[1])), None)
    policy = re.search(r"::(Policy\d+)(?![\d.])", name)  # a name cut short ends in dots
    args = arguments(name, r"(?:policy_hub|Device\w+Policy)")
    kind = TYPES.get(args[0]) if args else None
    # A reduction's policy is made for sums, places and operation; older ones named the input first.
    sums = (what == "reduce" and len(args) == 3) or "DeviceScanPolicy<" in name
    return {
        "what": what,
        "policy": policy[1] if policy else None,
        "operands": (kind,) if kind and not sums else None,
        "accumulates": kind if sums else None,
        "ops": (match[1],),
    }


def cudnn(name: str) -> Fields | None:
    """cuDNN's own templates: its convolutions with no tensor cores, its changes of layout."""
    if match := re.search(r"\b(?:im|ex)plicit_convolve_sgemm|\bprecomputed_convolve_sgemm", name):
        args = arguments(name, match[0])
        return {
            "what": "conv",
            "operands": (TYPES[args[0]],) if args[:1] and args[0] in TYPES else None,
        }
    if match := re.search(r"\b(nchw|nhwc)To(Nchw|Nhwc)Kernel", name):
        args = arguments(name, match[0])
        kinds = [TYPES.get(a) for a in args[:2]]
        return {
            "what": "layout",
            "layout": f"{match[1]}->{match[2].lower()}",
            "operands": (kinds[0],) if kinds and kinds[0] else None,
            "result": kinds[1] if len(kinds) == 2 else None,
        }
    if match := re.search(r"\b(bn_(?:fw|bw))\w*", name):
        return {"what": "norm backward" if match[1] == "bn_bw" else "norm"}
    if re.search(r"\bcudnn::\w*winograd|\b(?:dgrad|wgrad)\w*_engine", name):
        return {"what": "conv backward" if re.search(r"[dwWD]grad", name) else "conv"}
    return None


def copy_or_fill(name: str) -> Fields | None:
    """The driver's own copies and fills, as a profiler or Nsight names them."""
    if match := re.search(r"^\[?(?:CUDA )?[mM]em(cpy|set)\b *(\w+(?:-to-\w+)?)?", name):
        direction = match[2] if match[1] == "cpy" else None
        return {"what": "copy" if match[1] == "cpy" else "fill", "ops": (direction,) if direction else None}
    return None


def nccl(name: str) -> Fields | None:
    """``ncclDevKernel_AllReduce_Sum_bf16_RING_LL``: collective, operation, type, algorithm."""
    match = re.search(r"^ncclDev(?:ice)?Kernel_(\w+?)_(?:(\w+?)_([a-z]+\d+)_)?([A-Z]+_\w+)", name)
    if match is None:
        return {} if name.startswith(("ncclKernel", "ncclDevKernel")) else None
    collective, operation, kind, algorithm = match.groups()
    return {
        "what": collective.lower(),
        "operands": (SHORT[kind],) if kind in SHORT else None,
        "ops": tuple(w for w in (operation, algorithm) if w),
    }


# PyTorch's own, its copies of CUB and of FlashAttention among them.
TORCH = (attention, softmax, cub, aten)
