"""2:4 sparsity by the library: torch.topk and scatter, and cuSPARSELt for the product."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.core import YES, Case, Implementation, Support, no
from weft.ops.sparse24 import pattern
from weft.ops.sparse24.pattern import GROUP, NONZEROS
from weft.ops.sparse24.spec import linear_backward

ROWS_IN, COLUMNS_IN = 32, 64  # multiples that to_sparse_semi_structured asks for in 16-bit types
BATCH_IN = 8


def prune(w: Tensor) -> tuple[Tensor, Tensor]:
    # The place below the key makes keys distinct: topk leaves the order of equal elements open.
    keys = pattern.groups(pattern.magnitudes(w)) * GROUP + torch.arange(GROUP - 1, -1, -1, device=w.device)
    places = torch.topk(keys, NONZEROS, -1).indices.sort(-1).values
    values = pattern.groups(w).gather(-1, places)
    return values.reshape(w.shape[0], w.shape[1] // NONZEROS), pattern.pack(places)


def semi_structured(values: Tensor, metadata: Tensor) -> Tensor:
    """Return the weight in the library's own format; ``torch.nn.functional.linear`` takes it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*SparseSemiStructuredTensor", category=UserWarning)
        dense = pattern.expand(values, metadata)
        return torch.sparse.to_sparse_semi_structured(dense)  # type: ignore[no-any-return]


def linear(x: Tensor, values: Tensor, metadata: Tensor, bias: Tensor) -> Tensor:
    """Compute the product by the library. The conversion to its format is part of every call."""
    weight = semi_structured(values, metadata)
    x2d = x.reshape(-1, x.shape[-1]).contiguous()
    return F.linear(x2d, weight, bias).reshape(*x.shape[:-1], values.shape[0]).contiguous()


def _supports(case: Case, device: str) -> Support:
    if device != "cuda":
        return no("torch's semi-structured products run on a GPU alone; use impl='eager'")
    if case.dtype == "float32":
        return no("the library's 2:4 products of float32 keep one of two; use impl='eager'")
    if not torch.backends.cusparselt.is_available():
        return no("this PyTorch has no cuSPARSELt; use impl='eager' or 'cuda'")
    x, values = case.inputs[:2]
    n, k = values.shape[0], x.shape[-1]
    rows = x.numel // k if k else 0
    if n == 0 or k == 0 or rows == 0 or n % ROWS_IN or k % COLUMNS_IN or rows % BATCH_IN:
        sizes = f"multiples of {BATCH_IN} rows, {ROWS_IN} outputs and {COLUMNS_IN} inputs"
        return no(f"the library takes {sizes}; use impl='eager'")
    return YES


PRUNE_2_4 = Implementation(
    operator="prune_2_4", backend="torch", forward=prune, idea="torch.topk of magnitudes that hold the place"
)
EXPAND_2_4 = Implementation(
    operator="expand_2_4", backend="torch", forward=pattern.expand, idea="scatter into zeros"
)
SPARSE_LINEAR = Implementation(
    operator="sparse_linear",
    backend="torch",
    name="torch/cusparselt",
    forward=linear,
    backward=linear_backward,
    supports=_supports,
    idea="torch.sparse.to_sparse_semi_structured in each call, then cuSPARSELt",
)
