"""relu, add and matmul in CUDA: the compiled library and its registration in PyTorch.

The library is, in this order: one that is already loaded (by `load` or `load_inline` of
build_methods.py), the one that TILES_LIBRARY names, the one in this folder (pip installs it here).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def _library() -> Path:
    path = os.environ.get("TILES_LIBRARY")
    candidates = [Path(path)] if path else sorted(Path(__file__).parent.glob("_C*.so"))
    if not candidates or not candidates[0].is_file():
        problem = f"{path} does not exist" if path else "tiles has not been compiled"
        raise ImportError(
            f"{problem}: pip install --no-build-isolation . in the project's folder, or build it with "
            "CMake and name the library in TILES_LIBRARY"
        )
    return candidates[0]


if not hasattr(torch.ops.tiles, "matmul"):
    torch.ops.load_library(_library())

# After the loading, since the module registers functions for operators that must exist by then.
from .operators import add, matmul, relu  # noqa: E402

__all__ = ["add", "matmul", "relu"]
