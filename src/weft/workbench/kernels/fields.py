"""``Kernel``: the facts that a kernel's name states, and abbreviations that libraries share.

Nothing here is a guess. A part that no public source explains goes to ``unread`` unchanged, and a fact that
the name does not state is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Numbers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Facts stated by a kernel's name.

    ``library``    origin as in :func:`weft.workbench.kernels.names.origin`, or nccl, or flash-attn;
                   ``unknown`` for a name without a known mark
    ``what``       gemm, gemv, conv, attention, softmax, norm, reduce, scan, sort, select,
                   elementwise, index, random, copy, fill, layout or a collective, followed by
                   `` backward`` if the name states it
    ``arch``       target, ``sm_90``, or a generation (``ampere``)
    ``tile``       tile of one block: M, N and, if stated, K; for attention rows of Q, rows of K
    ``cluster``    blocks of a thread block cluster: x, y and, if stated, z
    ``operands``   types that are multiplied or read; one entry if both are equal. A float32 product
                   in TF32 has ``tf32``
    ``accumulates``, ``result``   type of the sums, and of the output
    ``layout``     of A and B, ``n`` or ``t`` each, as the library defines it: cuBLAS's matrices are
                   column-major, so its A is the B of a product of row-major tensors
    ``stages``     stages of the pipeline through shared memory
    ``split_k``    True if K is split between blocks
    ``instruction`` M, N, K of the tensor core's instruction
    ``vector``     elements that a thread moves at once, or the alignment that it requires
    ``head``       head size of an attention kernel
    ``ops``        computation: operators fused by the compiler, an epilogue, a functor
    ``schedule``   division of work within a block: ``warpspecialized``, ``pingpong``, ``stream_k``;
                   ``2cta`` if the tensor cores of two blocks work together
    ``policy``     CUB's tuning policy: ``Policy900`` is for compute capability 9.0 and above
    ``unread``     parts of the name whose meaning is not public
    """

    name: str
    short: str
    library: str
    what: str | None = None
    arch: str | None = None
    tile: Numbers | None = None
    cluster: Numbers | None = None
    operands: tuple[str, ...] | None = None
    accumulates: str | None = None
    result: str | None = None
    layout: str | None = None
    stages: int | None = None
    split_k: bool | None = None
    instruction: Numbers | None = None
    vector: int | None = None
    head: int | None = None
    ops: tuple[str, ...] | None = None
    schedule: tuple[str, ...] | None = None
    policy: str | None = None
    unread: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the facts that the name states as plain data, for JSON and tables."""
        fields = {k: v for k, v in vars(self).items() if v not in (None, ()) and k != "name"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def summary(self) -> str:
        """Return the facts in one line for a table cell: ``gemm, sm_90, 128x256x64``."""
        parts = [self.what, self.arch, _size(self.tile), self._types(), self.layout]
        parts += [f"{self.stages} stage{'s' * (self.stages > 1)}"] if self.stages else []
        parts += [f"cluster {_size(self.cluster)}"] if self.cluster else []
        parts += [f"mma {_size(self.instruction)}"] if self.instruction else []
        parts += ["split-K"] if self.split_k else []
        parts += [f"by {self.vector}"] if self.vector else []
        parts += [f"head {self.head}"] if self.head else []
        parts += ["+".join(self.ops)] if self.ops else []
        parts += [*(self.schedule or ()), self.policy]
        return ", ".join(p for p in parts if p)

    def _types(self) -> str | None:
        read = "x".join(self.operands) if self.operands else None
        sums = f"({self.accumulates})" if self.accumulates else ""
        if not (read or sums or self.result):
            return None
        return f"{read or '?'}{sums}" + (f"->{self.result}" if self.result else "")


def _size(numbers: Numbers | None) -> str | None:
    return "x".join(map(str, numbers)) if numbers else None


# C++'s types, and how libraries abbreviate them.
TYPES = {
    "float": "fp32", "double": "fp64", "c10::Half": "fp16", "__half": "fp16", "half": "fp16",
    "cutlass::half_t": "fp16", "c10::BFloat16": "bf16", "__nv_bfloat16": "bf16",
    "cutlass::bfloat16_t": "bf16", "cutlass::tfloat32_t": "tf32", "cutlass::float_e4m3_t": "e4m3",
    "cutlass::float_e5m2_t": "e5m2", "c10::Float8_e4m3fn": "e4m3", "c10::Float8_e5m2": "e5m2",
    "int": "int32", "long": "int64", "unsigned int": "uint32", "unsigned long": "uint64",
    "long long": "int64", "unsigned long long": "uint64", "short": "int16", "signed char": "int8",
    "unsigned char": "uint8", "bool": "bool",
}  # fmt: skip
SHORT = {
    "f16": "fp16", "fp16": "fp16", "f32": "fp32", "fp32": "fp32", "f64": "fp64", "bf16": "bf16",
    "tf32": "tf32", "e4m3": "e4m3", "e5m2": "e5m2", "s8": "int8", "u8": "uint8", "s4": "int4",
    "s32": "int32", "i8": "int8", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64",
}  # fmt: skip
TYPE = r"(?:bf16|tf32|f16|f32|f64|e4m3|e5m2|[siu](?:8|32))"
# BLAS's first letters: sgemm, dgemm, hgemm; i where whole numbers are added up.
LETTERS = {"s": "fp32", "d": "fp64", "h": "fp16", "i": "int32"}
# M, N and K of the instruction, written without separators: s16816gemm.
INSTRUCTIONS = {
    "884": (8, 8, 4), "1684": (16, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16),
    "16832": (16, 8, 32), "16864": (16, 8, 64), "161616": (16, 16, 16), "8816": (8, 8, 16),
    "32816": (32, 8, 16), "83216": (8, 32, 16),
}  # fmt: skip


def arch(number: str | None) -> str | None:
    return f"sm_{number}" if number else None


def numbers(text: str | None) -> Numbers | None:
    """Return ``128x64`` as (128, 64), and None for None."""
    return tuple(int(n) for n in text.split("x")) if text else None


def types(text: str) -> tuple[str, ...] | None:
    """Return the types in ``bf16bf16`` or ``i8f32``; None if any is unknown."""
    parts = re.findall(TYPE, text)
    return tuple(SHORT[p] for p in parts) if parts and "".join(parts) == text else None


def arguments(name: str, template: str) -> list[str]:
    """Return a template's arguments, split at the outermost commas: a and b<c, d> for ``f<a, b<c, d>>``.

    Casts that some tools write, ``(int)4``, are removed. A truncated name gives the arguments it has.
    """
    start = re.search(rf"\b{template}<", name)
    if start is None:
        return []
    complete: list[str] = []
    current: list[str] = []
    depth = 0
    for letter in name[start.end() : start.end() + 4000]:
        if letter in "<([{":
            depth += 1
        elif letter in ">)]}":
            depth -= 1
            # The bracket that closes the template itself.
            if depth < 0:
                break
        if letter == "," and not depth:
            complete.append("".join(current))
            current = []
        else:
            current.append(letter)
    return [
        re.sub(r"^\((?:int|bool|unsigned \w+)\)(?=\w)", "", a.strip()) for a in (*complete, "".join(current))
    ]


def integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None
