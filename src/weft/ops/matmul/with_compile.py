"""torch.compile of the library's call. (Compiling ``eager`` would compile a sum of M N K products.)"""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._common.cublas import call_at_precision
from weft.ops.matmul.spec import backward_by
from weft.ops.matmul.with_torch import IMPLEMENTATION as LIBRARY
from weft.ops.matmul.with_torch import traced


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


_compiled_product = compiled(replace(LIBRARY, forward=product)).forward


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return call_at_precision(_compiled_product, a, precision, a, b)  # type: ignore[no-any-return]


forward.compiles = traced  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="matmul",
    backend="compile",
    forward=forward,
    backward=backward_by(forward),  # with other strides: compiled once for each
    supports=LIBRARY.supports,
    idea="torch.compile of torch.mm",
)
