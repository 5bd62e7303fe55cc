"""Loop nests of the study in C: programs.c compiled by the system's compiler, and its functions as calls."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core import WeftError
from weft.lab.loops.variants import Variant

SOURCE = Path(__file__).with_name("programs.c")
COMPILERS = ("gcc", "clang", "cc")
# Scalar code unless the source has vectors, and no unrolling but the source's own: the compiler must not
# apply one transformation while the study measures another. No fused multiply-add, which numba does not use
# either. gcc and clang both take these options.
FLAGS = (
    *("-O2", "-march=native", "-ffp-contract=off"),
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-unroll-loops"),
)
LIBRARY_FLAGS = ("-std=c11", "-fPIC", "-shared", "-pthread")
COMPILE_SECONDS = 120.0


class NoCompiler(RuntimeError):
    """Raised where programs.c cannot be compiled; the message is the reason that a user reads."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """Compiled programs.c, with the compiler's name and version and the options that matter to its code."""

    path: Path
    compiler: str
    version: str
    flags: tuple[str, ...] = FLAGS

    def call(
        self, variant: Variant, arrays: Sequence[NDArray[np.float32]], shape: Sequence[int], threads: int
    ) -> Callable[[], None]:
        """Return a call of a variant on contiguous arrays, in the order of its arguments in C."""
        function = getattr(ctypes.CDLL(str(self.path)), variant.function)
        function.restype = None
        # Converted once, so that a timed call converts nothing. These pointers keep their arrays alive.
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
        numbers = [ctypes.c_int64(number) for number in (*shape, threads)]

        def call() -> None:
            function(*pointers, *numbers)

        return call


def find_compiler() -> list[str]:
    """Return the command of ``CC``, or of the first compiler on the path; raise :class:`NoCompiler`."""
    named = os.environ.get("CC", "").strip()
    if named:
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise WeftError("CC", expected="the command of a C compiler", got=named) from error
        if shutil.which(command[0]) is None:
            raise NoCompiler(f"no C compiler: CC names {command[0]}, which is not on the path")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NoCompiler(f"no C compiler: install {COMPILERS[0]} or {COMPILERS[1]}, or set CC")


def build(folder: Path, source: Path | None = None) -> Library:
    """Compile programs.c (or ``source``) into ``folder``; raise :class:`NoCompiler` if it cannot be."""
    command = find_compiler()
    path = folder / "programs.so"
    arguments = [*command, *FLAGS, *LIBRARY_FLAGS, "-o", str(path), str(source or SOURCE)]
    output = _run(arguments)
    if output.returncode:
        lines = output.stderr.splitlines()
        first = next((line for line in lines if "error" in line), f"exit {output.returncode}")
        raise NoCompiler(f"{command[0]} failed: {first}")
    version = _run([*command, "--version"]).stdout.splitlines()
    return Library(path=path, compiler=Path(command[0]).name, version=version[0] if version else "unknown")


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{arguments[0]} failed: {error}") from error
