"""C++ programs compiled to libraries by g++, each once in a run.

The workers of a run share the libraries and a precompiled header of the standard headers that the emulators
include, whose parsing takes a third to a half of the time of a small program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

COMPILER = shutil.which("g++")
# The same for all programs, since a precompiled header fits only the options that it was compiled with.
# Kernels read one type's bytes as another's, and their sums may not depend on fused operations of this CPU.
OPTIONS = ["-std=c++20", "-O1", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
OPTIONS += ["-fno-strict-aliasing", "-ffp-contract=off"]
HELPERS = Path(__file__).parent
QUOTED = re.compile(r'^\s*#\s*include "([^"]+)"', re.M)
STANDARD = re.compile(r"^#include <[\w.]+>$", re.M)


def compile_library(text: str, include: Sequence[Path] = (), options: Sequence[str] = ()) -> Path:
    """Return a shared library of a program; ``include`` are the folders of its headers.

    The library's name is a hash of the text, of all headers that it includes and of the options.
    """
    assert COMPILER is not None
    used = [text, *_headers(text, include), *OPTIONS, *options]
    folder = _folder()
    library = folder / f"{hashlib.sha256(repr(used).encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    standard = _standard(folder)
    own = f"{library.stem}-{os.getpid()}"  # another worker may compile the same program
    source, output = folder / f"{own}.cpp", folder / f"{own}.partial"
    source.write_text(f'#include "{standard}"\n{text}')
    command = [COMPILER, *OPTIONS, "-shared", *options, *(f"-I{path}" for path in include)]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    output.replace(library)
    return library


def _folder() -> Path:
    """Return the folder of this run's libraries, which conftest.py shares between the workers."""
    return Path(os.environ["WEFT_TEST_LIBRARIES"])


def _headers(text: str, include: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each header that a program includes, also through other headers."""
    waiting = [(name, Path()) for name in QUOTED.findall(text)]
    seen: set[Path] = set()
    while waiting:
        name, beside = waiting.pop()
        path = next((p.resolve() for f in (beside, *include) if (p := f / name).is_file()), None)
        if path is not None and path not in seen:  # g++ names a header that is missing
            seen.add(path)
            content = path.read_text()
            yield content
            waiting += [(inner, path.parent) for inner in QUOTED.findall(content)]


def _standard(folder: Path) -> Path:
    """Return a header with the emulators' standard headers; the first call in a run compiles it."""
    header = folder / "standard.hpp"
    compiled = folder / "standard.hpp.gch"
    if compiled.exists():
        return header
    with (folder / "standard.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            texts = [path.read_text() for path in HELPERS.glob("*_emulator.hpp")]
            texts.append((HELPERS / "cuda_types.hpp").read_text())
            header.write_text("\n".join(sorted({line for t in texts for line in STANDARD.findall(t)})))
            partial = folder / "standard.partial"
            command = [str(COMPILER), *OPTIONS, "-x", "c++-header", str(header), "-o", str(partial)]
            subprocess.run(command, check=True)
            partial.replace(compiled)
    return header
