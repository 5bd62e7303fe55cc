"""Which implementation of dropout runs where none is named.

No table says so: the library's own dropout has other bits, so that there is nothing to fall back to
but eager's two hundred calls.
"""

from __future__ import annotations

import torch

from weft.backends.support import backend_support
from weft.ops._shared.dispatch import settled_while_tracing


def shipped(x: torch.Tensor) -> str:
    """``cuda`` on a GPU, ``triton`` where its packages are missing, ``eager`` on a CPU."""
    return _on_a_gpu() if x.is_cuda else "eager"


@settled_while_tracing
def _on_a_gpu() -> str:
    return "cuda" if backend_support("cuda", "cuda") else "triton"
