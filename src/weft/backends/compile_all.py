"""Compile every kernel of every operator for the given targets, without a GPU.

    python -m weft.backends.compile_all --arch sm_80 --arch sm_90 --arch sm_100

Exits 1 and names each kernel that does not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

# Set before triton or numba is imported: this process compiles kernels and does not interpret them.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["NUMBA_ENABLE_CUDASIM"] = "0"

from weft.backends.aot import suits
from weft.core import Implementation, registry

ARCHS = ("sm_80", "sm_90", "sm_100")


def aot_kernels(backends: tuple[str, ...]) -> Iterator[tuple[Implementation, Any]]:
    """Yield every kernel in the registry that can be compiled ahead of time, with its implementation."""
    for name in registry.operator_names():
        for implementation in registry.implementations(name):
            if implementation.backend in backends:
                yield from ((implementation, s) for s in implementation.aot_kernels)


def compile_one(implementation: Implementation, aot_kernel: Any, arch: int) -> None:
    """Compile one kernel for ``sm_<arch>``. The toolchain's own exceptions pass through."""
    if implementation.backend == "triton":
        from weft.backends import triton_jit

        triton_jit.compile_aot_kernel(aot_kernel, arch)
    elif implementation.backend == "cuda":
        # wgmma and setmaxnreg exist for sm_90a, not for sm_90.
        # Instructions of one chip alone are only in that chip's "a" target.
        aot_kernel.compile(f"sm_{arch}{'a' if aot_kernel.min_arch == arch >= 90 else ''}")
    else:
        from weft.backends import numba_jit

        numba_jit.compile_aot_kernel(aot_kernel, arch)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", help=f"target, repeatable; default {ARCHS}")
    parser.add_argument("--backend", action="append", choices=("triton", "cuda", "numba"))
    options = parser.parse_args(arguments)
    archs = [int(a.removeprefix("sm_")) for a in options.arch or ARCHS]
    failed = compiled = 0
    started = time.perf_counter()
    for implementation, aot_kernel in aot_kernels(tuple(options.backend or ("triton", "cuda", "numba"))):
        for arch in archs:
            if not suits(aot_kernel, arch):
                continue
            label = f"{implementation.operator} {implementation.name} {aot_kernel.label} sm_{arch}"
            try:
                compile_one(implementation, aot_kernel, arch)
                compiled += 1
            except Exception as error:  # noqa: BLE001 - each toolchain has its own exceptions
                failed += 1
                print(f"FAILED {label}: {type(error).__name__}: {error}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"{compiled} kernels compiled, {failed} failed, {seconds:.1f} s")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
