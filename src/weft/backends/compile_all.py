"""Compile every kernel of every operator for the targets named, with no GPU.

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

# Before any triton or numba: this process compiles kernels, it does not interpret them.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["NUMBA_ENABLE_CUDASIM"] = "0"

from weft.backends.take_apart import suits
from weft.core import Implementation, registry

ARCHS = ("sm_80", "sm_90", "sm_100")


def specimens(backends: tuple[str, ...]) -> Iterator[tuple[Implementation, Any]]:
    """Every compilable kernel in the registry, with the implementation it belongs to."""
    for name in registry.operator_names():
        for implementation in registry.implementations(name):
            if implementation.backend in backends:
                yield from ((implementation, s) for s in implementation.specimens)


def compile_one(implementation: Implementation, specimen: Any, arch: int) -> None:
    """Compile one specimen for ``sm_<arch>``; raises what its toolchain raises."""
    if implementation.backend == "triton":
        from weft.backends import triton_jit

        triton_jit.compile_specimen(specimen, arch)
    elif implementation.backend == "cuda":
        # Where a kernel uses one chip's own instructions, only that chip's "a" target has them.
        specimen.compile(f"sm_{arch}{'a' if specimen.min_arch == arch >= 90 else ''}")
    else:
        from weft.backends import numba_jit

        numba_jit.compile_specimen(specimen, arch)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", help=f"target, repeatable; default {ARCHS}")
    parser.add_argument("--backend", action="append", choices=("triton", "cuda", "numba"))
    options = parser.parse_args(arguments)
    archs = [int(a.removeprefix("sm_")) for a in options.arch or ARCHS]
    failed = compiled = 0
    started = time.perf_counter()
    for implementation, specimen in specimens(
        tuple(options.backend or ("triton", "cuda", "numba"))
    ):
        for arch in archs:
            if not suits(specimen, arch):
                continue
            label = f"{implementation.operator} {implementation.name} {specimen.label} sm_{arch}"
            try:
                compile_one(implementation, specimen, arch)
                compiled += 1
            except Exception as error:  # noqa: BLE001 - each toolchain raises its own kind; all are shown
                failed += 1
                print(f"FAILED {label}: {type(error).__name__}: {error}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"{compiled} kernels compiled, {failed} failed, {seconds:.1f} s")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
