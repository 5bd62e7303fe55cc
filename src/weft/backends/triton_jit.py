"""Triton: run on a GPU, interpreted where there is none, compiled for any target anywhere.

Whether kernels are interpreted is decided when triton is first imported: see environment.py.
Import ``triton`` and ``tl`` from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

__all__ = ["INTERPRETED", "TritonSpecimen", "compile_specimen", "tl", "triton"]


@dataclass(frozen=True, kw_only=True)
class TritonSpecimen:
    """One kernel as a GPU user would get it compiled: enough to compile it with no GPU.

    ``signature`` maps every argument to its type (``*bf16``, ``i32``, ``fp32``) or, for a
    constexpr, to its value. Pointers count as 16-byte aligned, unless their type ends in ``:1``; an
    integer is taken as divisible by 16 where its type ends in ``:16``, as Triton specialises at
    launch. ``max_arch``: the last that has the kernel's instructions; None: any later one has.
    """

    label: str
    kernel: Any
    signature: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    min_arch: int = 80
    max_arch: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def compile_specimen(specimen: TritonSpecimen, arch: int) -> Any:
    """Compile for ``sm_<arch>``; returns Triton's CompiledKernel (``.asm`` holds ptx, cubin, sass).

    Raises RuntimeError in a process that interprets kernels: use a fresh one with
    TRITON_INTERPRET=0.
    """
    if INTERPRETED:
        raise RuntimeError("this process interprets Triton kernels; set TRITON_INTERPRET=0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, (name, kind) in enumerate(specimen.signature.items()):
        if not isinstance(kind, str):
            signature[name] = "constexpr"
            constants[name] = kind
            continue
        signature[name] = kind.removesuffix(":16").removesuffix(":1")
        if (kind.startswith("*") and not kind.endswith(":1")) or kind.endswith(":16"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    if specimen.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(specimen.kernel, signature, constants, attributes)
    else:
        source = ASTSource(specimen.kernel, signature, constants, attributes)
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages, **specimen.extra}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
