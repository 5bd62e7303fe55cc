"""The four build methods: each is a function from an empty folder to the library built there.

`python build_methods.py cmake build/cmake` builds with one of them and prints the library's path.
`load` and `load_inline` compile while a program runs and load the library too; afterwards
`import tiles` finds its operators. README.md says when to choose which.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import toolchain

HERE = Path(__file__).resolve().parent
BINDING, KERNELS = HERE / "csrc" / "binding.cpp", HERE / "csrc" / "tiles.cu"
sys.path.append(str(HERE / "src"))  # so that `import tiles` works after load()


def load(folder: Path) -> Path:
    """Compile the source files just in time; recompile only when they change."""
    options = _just_in_time(folder)
    from torch.utils import cpp_extension

    sources = [str(BINDING), str(KERNELS)]
    return Path(cpp_extension.load("tiles", sources, **options))


def load_inline(folder: Path) -> Path:
    """Compile from strings, as a notebook would; here they are read from the same files."""
    options = _just_in_time(folder)
    from torch.utils import cpp_extension

    return Path(
        cpp_extension.load_inline(
            "tiles",
            BINDING.read_text(),
            KERNELS.read_text(),
            no_implicit_headers=True,  # else torch/extension.h is included: a minute more
            **options,
        )
    )


def _just_in_time(folder: Path) -> dict[str, object]:
    toolchain.need("ninja")
    toolkit = toolchain.prepare()
    from torch.utils import cpp_extension

    folder.mkdir(parents=True, exist_ok=True)
    # --as-needed comes before the libraries that PyTorch adds, so that only those in use are linked.
    link = ["-Wl,--as-needed", f"-L{toolchain.cuda_libraries(toolkit)}", *_placeholder_libraries(folder)]
    link += [f"-L{path}" for path in cpp_extension.library_paths()]
    return {
        "extra_cflags": toolchain.CXX_FLAGS,
        "extra_cuda_cflags": toolchain.NVCC_FLAGS,
        "extra_ldflags": [*link, *(f"-l{name}" for name in toolchain.LIBRARIES)],
        "build_directory": str(folder),
        "is_python_module": False,  # operators of torch.ops, not a Python module
    }


def _placeholder_libraries(folder: Path) -> list[str]:
    """Create empty libc10_cuda and libtorch_cuda beside a CPU build of PyTorch; return the linker option.

    PyTorch always links these two. A CPU build has neither: the empty ones satisfy the linker, which
    then leaves them out.
    """
    import torch

    if torch.version.cuda is not None:
        return []
    for name in ("c10_cuda", "torch_cuda"):
        out = ["-o", str(folder / f"lib{name}.so")]
        subprocess.run(["c++", "-shared", "-x", "c", "/dev/null", *out], check=True)
    return [f"-L{folder}"]


def pip(folder: Path) -> Path:
    """Run `pip install .` from a copy into a separate folder; nothing else changes."""
    toolchain.cuda_libraries(toolchain.cuda_home())  # reports a missing toolkit in one line, before pip does
    site, copy = folder / "site", folder / "source"
    ignored = shutil.ignore_patterns("build", "dist", ".*", "__pycache__", "*.egg-info", "*.so")
    shutil.copytree(HERE, copy, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "--target", str(site), str(copy)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (library,) = (site / "tiles").glob("_C*.so")
    return library


def cmake(folder: Path) -> Path:
    """Build with CMake, for torch.ops.load_library or for a larger C++ project."""
    toolchain.need("cmake")
    toolkit = toolchain.cuda_home()
    configure = ["cmake", "-S", str(HERE), "-B", str(folder)]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    configure += [
        f"-DPython3_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"-DCMAKE_CUDA_ARCHITECTURES={toolchain.for_cmake(toolchain.architectures())}",
    ]
    subprocess.run(configure, check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=sys.stderr)
    return folder / "libtiles.so"


METHODS: dict[str, Callable[[Path], Path]] = {
    "load": load,
    "load_inline": load_inline,
    "pip": pip,
    "cmake": cmake,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build with one of the four methods.")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("folder", type=Path, help="output folder; a new one for a build from nothing")
    parser.add_argument("--json", action="store_true", help="print JSON, with the build's seconds")
    options = parser.parse_args()
    # Query the GPUs and import PyTorch first, so that only the build is timed.
    os.environ["TORCH_CUDA_ARCH_LIST"] = " ".join(toolchain.architectures())
    if options.method.startswith("load"):
        import torch.utils.cpp_extension  # noqa: F401
    begin = time.perf_counter()
    try:
        library = METHODS[options.method](options.folder.resolve())
    except (toolchain.Missing, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    seconds = time.perf_counter() - begin
    print(json.dumps({"library": str(library), "seconds": seconds}) if options.json else library)


if __name__ == "__main__":
    main()
