"""Triton: runs on a GPU, is interpreted without one, and compiles for any target anywhere.

The first import of triton decides whether kernels are interpreted: see environment.py.
Import ``triton`` and ``tl`` from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    # The interpreter computes with numpy. Edge cases with infinities, NaN and large magnitudes overflow
    # there on purpose, as they do silently on a GPU, and the check judges the results.
    warnings.filterwarnings(
        "ignore",
        message="(overflow|underflow|invalid value|divide by zero) encountered",
        category=RuntimeWarning,
        module=r"triton\.runtime\.interpreter",
    )

__all__ = ["INTERPRETED", "TritonAotKernel", "compile_aot_kernel", "tl", "triton"]


@dataclass(frozen=True, kw_only=True)
class TritonAotKernel:
    """A kernel with everything needed to compile it without a GPU, as a launch would compile it.

    ``signature`` maps every argument to its type (``*bf16``, ``i32``, ``fp32``) or, for a constexpr, to its
    value. A pointer counts as 16-byte aligned unless its type ends in ``:1``. An integer counts as divisible
    by 16 if its type ends in ``:16``, which Triton specialises at launch. ``max_arch`` is the last
    architecture with the kernel's instructions; None means that later ones have them too.
    """

    label: str
    kernel: Any
    signature: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    min_arch: int = 80
    max_arch: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def compile_aot_kernel(aot_kernel: TritonAotKernel, arch: int) -> Any:
    """Compile for ``sm_<arch>``; returns Triton's CompiledKernel (``.asm`` holds ptx, cubin, sass).

    Raises RuntimeError in a process that interprets kernels: use a fresh one with
    TRITON_INTERPRET=0.
    """
    if INTERPRETED:
        raise RuntimeError("this process interprets Triton kernels; set TRITON_INTERPRET=0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, (name, kind) in enumerate(aot_kernel.signature.items()):
        if not isinstance(kind, str):
            signature[name] = "constexpr"
            constants[name] = kind
            continue
        signature[name] = kind.removesuffix(":16").removesuffix(":1")
        if (kind.startswith("*") and not kind.endswith(":1")) or kind.endswith(":16"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    if aot_kernel.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(aot_kernel.kernel, signature, constants, attributes)
    else:
        source = ASTSource(aot_kernel.kernel, signature, constants, attributes)
    options = {"num_warps": aot_kernel.num_warps, "num_stages": aot_kernel.num_stages, **aot_kernel.extra}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
