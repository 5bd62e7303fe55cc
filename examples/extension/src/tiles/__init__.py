"""relu, add and matmul in CUDA: the compiled library, and what PyTorch has to know of it.

The library is, in this order: one that is loaded already (ways.py's `load` and `load_inline` do),
the one that TILES_LIBRARY names, the one that lies in this folder (pip puts it there).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def _library() -> Path:
    named = os.environ.get("TILES_LIBRARY")
    found = [Path(named)] if named else sorted(Path(__file__).parent.glob("_C*.so"))
    if not found or not found[0].is_file():
        what = f"{named} is not there" if named else "tiles has not been compiled"
        raise ImportError(
            f"{what}: pip install --no-build-isolation . in the project's folder, or build it with "
            "CMake and name the library in TILES_LIBRARY"
        )
    return found[0]


if not hasattr(torch.ops.tiles, "matmul"):
    torch.ops.load_library(_library())

# Below the loading: what is registered there belongs to operators that must exist by then.
from .operators import add, matmul, relu  # noqa: E402

__all__ = ["add", "matmul", "relu"]
