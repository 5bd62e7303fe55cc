"""Readers of the names of matrix products and convolutions from cuBLAS, CUTLASS and cuDNN.

Sources: CUTLASS's own generator of names (``KernelName``, ``extended_name``); the enumerations of
``cublasLt.h`` (a tile is M x N, ``64x4`` is a block of K by stages, a cluster is x by y by z); the
entry points that cuBLASLt exports by type (``cublasLtTSTMatmul``); and names with
their tensors in public traces. A part that only a guess would explain is left in ``unread``.
"""

from __future__ import annotations

import re
from typing import Any

from weft.workbench.kernels.fields import (
    INSTRUCTIONS,
    LETTERS,
    SHORT,
    TYPE,
    TYPES,
    arch,
    arguments,
    integer,
    numbers,
    types,
)

Fields = dict[str, Any]

# nvjet's letters, A and B first: t is bfloat16 (tst: seen with bfloat16 tensors), q is e4m3.
_NVJET = {
    "s": "fp32",
    "d": "fp64",
    "h": "fp16",
    "t": "bf16",
    "b": "int8",
    "i": "int32",
    "q": "e4m3",
}
_OPS = r"relu|gelu|bias|drelu|dgelu|silu|aux"
# CUTLASS's schedules; its epi_tma, which says how the result is stored, is left out.
_SCHEDULES = ("warpspecialized", "pingpong", "cooperative", "streamk", "1sm", "2sm")
_EDGES = {"n", "t"}


def nvjet(name: str) -> Fields | None:
    """``nvjet_[sm90_]tst_128x256_64x4_1x2_h_bz_coopA_NNT``: types, tile, K x stages, cluster."""
    match = re.search(
        r"\bnvjet_(?:sm(\d+[a-z]?)_)?([a-z]{3}|[a-z]{5})(_tf32|_mma)?"
        r"_(\d+x\d+(?:x\d+)?)(?:_(\d+)x(\d+)_(\d+x\d+)(?=_|f_|f?$))?(\w*)",
        name,
    )
    if match is None:
        return {"what": "gemm"} if re.search(r"\bnvjet_", name) else None
    sm, letters, kind, tile, k, stages, cluster, rest = match.groups()
    flags = [f for f in rest.split("_") if f]
    # The first two letters are the layouts of A and B. The others have no public meaning and stay unread.
    edges = flags.pop() if flags and re.fullmatch(r"[NT]{3,4}", flags[-1]) else ""
    known = [f for f in flags if f in ("splitK", "2cta", "bias", "relu", "gelu")]
    ops = tuple(f for f in known if f not in ("splitK", "2cta"))
    size = (*(numbers(tile) or ()), *([int(k)] if k else []))
    return {
        "what": "gemm",
        "arch": arch(sm),
        "tile": size,
        "stages": int(stages) if stages else None,
        "cluster": numbers(cluster),
        "layout": edges[:2].lower() or None,
        "split_k": True if "splitK" in known else None,
        "ops": ops or None,
        "schedule": ("2cta",) if "2cta" in known else None,
        "unread": (*(f for f in flags if f not in known), *([f"..{edges[2:]}"] if edges else [])),
        **_nvjet_types(letters, tf32=kind == "_tf32"),
    }


def _nvjet_types(letters: str, *, tf32: bool) -> Fields:
    """Three letters are A and B, the sums, the result; five are A, B, C, the sums, the result."""
    read = letters[:1] if len(letters) == 3 else letters[:2]
    operands = tuple(_NVJET[x] for x in read if x in _NVJET)
    sums, result = (_NVJET.get(x) for x in letters[-2:])
    whole = len(operands) == len(read)
    return {
        "operands": (("tf32",) if tf32 else _pair(operands)) if whole else None,
        "accumulates": sums,
        "result": result,
    }


def _pair(operands: tuple[str, ...]) -> tuple[str, ...]:
    return operands[:1] if len(set(operands)) == 1 else operands


def cutlass2(name: str) -> Fields | None:
    """``cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8``.

    The type before the product's letter is the result's, where it is not the sums'; the one behind
    it is the operands'. With neither, all are of the letter's type.
    """
    match = re.search(
        r"\bcutlass_(?:(\d+)_)?(?:wmma_)?(?:tensorop|simt)_(?:([a-z]+\d+)_)?"
        r"([shdi])(\d*)(tf32|f16|bf16)?(gemm|fprop|dgrad|wgrad)((?:_[a-z]\w*?)??)"
        r"_(\d+x\d+)_(\d+)x(\d+)_([a-z]+)(?:_align(\d+))?",
        name,
    )
    if match is None:
        return None
    sm, result, letter, shape, inner, what, middle, tile, k, stages, edges, align = match.groups()
    words = [w for w in middle.split("_") if w]
    sums = LETTERS[letter]
    operand = next((SHORT[w] for w in words if w in SHORT), None) or SHORT.get(inner or "") or sums
    product = what == "gemm"
    return {
        "what": _conv(what) or what,
        "arch": arch(sm),
        "tile": (*(numbers(tile) or ()), int(k)),
        "stages": int(stages),
        "operands": (operand,),
        "accumulates": sums,
        "result": SHORT.get(result) if result else sums,
        "layout": edges if not product or set(edges) <= _EDGES else None,
        "instruction": INSTRUCTIONS.get(shape),
        "vector": int(align) if align else None,
        "ops": tuple(w for w in words if re.fullmatch(_OPS, w)) or None,
        "unread": tuple(w for w in words if w not in SHORT and not re.fullmatch(_OPS, w)),
    }


def cutlass3(name: str) -> Fields | None:
    """``cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_1x1x1_0_tnn...``:
    A, B, sums, C, result, tile, cluster, stages (0 is left to the compiler), layouts of A, B, C."""
    match = re.search(
        r"\bcutlass3x_sm(\d+a?)_(?:tensorop|simt)_[a-z]?(\d+x\d+x\d+)?gemm_([a-z]+\d+)_([a-z]+\d+)"
        r"_([a-z]+\d+)_(?:void|[a-z]+\d+)_([a-z]+\d+)_(\d+x\d+x\d+)_(\d+x\d+x\d+)_(\d+)_([nt]{2,3})"
        r"(?:_align(\d+))?(\w*)",
        name,
    )
    if match is None:
        return None
    sm, shape, a, b, sums, result, tile, cluster, stages, edges, align, rest = match.groups()
    words = [w for w in rest.replace("stream_k", "streamk").split("_") if w]
    ops = tuple(w for w in words if re.fullmatch(_OPS, w))
    schedule = tuple(w for w in words if w in _SCHEDULES)
    operands = tuple(SHORT[x] for x in (a, b) if x in SHORT)
    return {
        "what": "gemm",
        "arch": arch(sm),
        "tile": numbers(tile),
        "cluster": numbers(cluster),
        "stages": int(stages) or None,
        "operands": _pair(operands) if len(operands) == 2 else None,
        "accumulates": SHORT.get(sums),
        "result": SHORT.get(result),
        "layout": edges[:2],
        "instruction": numbers(shape),
        "vector": int(align) if align else None,
        "ops": ops or None,
        "schedule": schedule or None,
        "unread": tuple(w for w in words if w not in (*ops, *schedule, "epi", "tma")),
    }


def cutlass_types(name: str) -> Fields | None:
    """``cutlass::device_kernel<...<MainloopSm90...<stages, cluster, ...>, tile, A, ...>>``."""
    main = re.search(r"\bMainloopSm(\d+)\w*<(?:\(int\))?(\d+), *cute::tuple<" + _cute(3, "c"), name[:6000])
    if main is None:
        return None
    sm, stages, *cluster = main.groups()
    after = name[main.end() : main.end() + 2000]
    tile = re.search(r">, *cute::tuple<" + _cute(3, "t") + r" *>, *([\w:]+)", after)
    unit = re.search(r"\bMMA_(\d+x\d+x\d+)_([FS]\d+)", after)
    return {
        "what": "gemm",
        "arch": arch(sm),
        "stages": int(stages),
        "cluster": tuple(int(c) for c in cluster),
        "tile": tuple(int(t) for t in tile.groups()[:3]) if tile else None,
        "operands": (TYPES[tile[4]],) if tile and tile[4] in TYPES else None,
        "instruction": numbers(unit[1]) if unit else None,
        "accumulates": SHORT.get(unit[2].lower()) if unit else None,
    }


def _cute(count: int, name: str) -> str:
    one = r"cute::(?:C<(?:\(int\))?|_)(?P<{}{}>\d+)>?"
    return ", *".join(one.format(name, i) for i in range(count))


def generation(name: str) -> Fields | None:
    """``ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn``, ``volta_sgemm_128x64_tn``,
    and cuDNN's ``volta_scudnn_128x64_relu_interior_nn_v1``."""
    match = re.search(
        r"\b(maxwell|volta|turing|ampere)_(?:([a-z]+\d+)_)?([shdi])(\d*)(gemm|cudnn)"
        r"(?:_([a-z]+\d+))?_(\d+x\d+)((?:_\w+)?)",
        name,
    )
    if match is None:
        return None
    generation_name, result, letter, shape, what, operand, tile, rest = match.groups()
    words = [w for w in rest.split("_") if w and w != "kernel"]
    staged = re.search(r"_stages_(\d+)x(\d+)", rest)
    wide = re.search(r"_ldg(\d+)", rest)
    edges = next((w for w in reversed(words) if re.fullmatch(r"[nt]{2}", w)), None)
    read = {edges, "stages", "splitK", *(staged[0].split("_") if staged else ())}
    read |= {wide[0][1:]} if wide else set()
    ops = tuple(w for w in words if re.fullmatch(_OPS, w))
    return {
        "what": "conv" if what == "cudnn" else "gemm",
        "arch": generation_name,
        "tile": (*(numbers(tile) or ()), *([int(staged[1])] if staged else [])),
        "stages": int(staged[2]) if staged else None,
        "operands": (SHORT.get(operand or "") or LETTERS[letter],),
        "accumulates": LETTERS[letter],
        "result": SHORT.get(result or "") or LETTERS[letter],
        "layout": edges,
        "split_k": True if "splitK" in words else None,
        "instruction": INSTRUCTIONS.get(shape),
        "vector": int(wide[1]) if wide else None,
        "ops": ops or None,
        "unread": tuple(w for w in words if w not in read and w not in ops),
    }


def xmma(name: str) -> Fields | None:
    """``sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_...``: what
    is read and written, what is multiplied and summed, the epilogue's type, the layouts."""
    match = re.search(
        r"\bsm(\d+)_xmma_(gemm|[fd]prop|[dw]grad)(?:_implicit_gemm)?((?:_[a-z]+)*?)"
        rf"_((?:{TYPE}){{2}})_((?:{TYPE}){{2}})_{TYPE}_([a-z]+_[a-z]+)(_\w+)",
        name,
    )
    if match is None:
        return None
    sm, what, extra, outer, inner, edges, rest = match.groups()
    stored, computed = types(outer) or (), types(inner) or ()
    word = dict(re.findall(r"_(tilesize|stage|cgasize|tensor)(\d+(?:x\d+)*)", rest))
    product = what == "gemm"
    return {
        "what": _conv(what) or what,
        "arch": arch(sm),
        "tile": numbers(word.get("tilesize")),
        "stages": integer(word.get("stage", "")),
        "cluster": numbers(word.get("cgasize")),
        "instruction": numbers(word.get("tensor")),
        "operands": computed[:1] if len(computed) == 2 else None,
        "accumulates": computed[1] if len(computed) == 2 else None,
        "result": stored[1] if len(stored) == 2 else None,
        "layout": edges.split("_")[0] if product else edges,
        "split_k": True if "split_k" in rest else None,
        "ops": tuple(w for w in extra.split("_") if re.fullmatch(_OPS, w)) or None,
        "unread": tuple(re.findall(r"warp(?:group)?size[\dx]+|gmmastage\d+|segment_k_\w+?(?=_)", rest)),
    }


def _conv(what: str) -> str | None:
    return {"fprop": "conv", "dgrad": "conv backward", "wgrad": "conv backward"}.get(what)


def blas(name: str) -> Fields | None:
    """cuBLAS's plain templates: gemv, dot, ``splitKreduce_kernel``, ``gemmSN_TN_kernel``."""
    if re.search(r"\bsplitKreduce_kernel\b", name):
        return {"what": "reduce", "split_k": True}
    if match := re.search(r"\bgemmSN_([NT]{2})_kernel", name):
        return {"what": "gemm", "layout": match[1].lower()}
    if re.search(r"\bgemv\w*|\binternal::gemvx::", name):
        operands = [TYPES[a] for a in arguments(name, r"gemv\w*") if a in TYPES][2:]
        is_read = "gemv2T_kernel_val" in name and operands
        return {"what": "gemv", "operands": (operands[0],) if is_read else None}
    if re.search(r"\bdot_kernel\b|\breduce_1Block_kernel\b", name):
        return {"what": "reduce"}
    return None


FAMILIES = (nvjet, cutlass3, cutlass2, xmma, generation, cutlass_types, blas)
