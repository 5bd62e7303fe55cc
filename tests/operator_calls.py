"""Each public operator called as a user would: arguments that are small, whole and float32.

One entry an operator: a function that gives the call's positional arguments, and its keywords.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import randn

Call = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


CALLS: dict[str, Call] = {
    "gelu": lambda: ((randn(5, 33),), {}),
    "softmax": lambda: ((randn(5, 33),), {}),
    "sum": lambda: ((randn(5, 33),), {}),
    "matmul": lambda: ((randn(5, 33), randn(33, 7)), {}),
    "relu": lambda: ((randn(5, 33),), {}),
    "swiglu": lambda: ((randn(5, 33), randn(5, 33)), {}),
    "geglu": lambda: ((randn(5, 33), randn(5, 33)), {}),
    "bias_gelu": lambda: ((randn(5, 33), randn(33)), {}),
    "dropout": lambda: ((randn(5, 33),), {"p": 0.25, "seed": 7}),
    "layer_norm": lambda: ((randn(5, 33), randn(33), randn(33)), {}),
    "rms_norm": lambda: ((randn(5, 33), randn(33)), {}),
    "add_layer_norm": lambda: ((randn(5, 33), randn(5, 33), randn(33), randn(33)), {}),
    "add_rms_norm": lambda: ((randn(5, 33), randn(5, 33), randn(33)), {}),
    "dropout_add_layer_norm": lambda: (
        (randn(5, 33), randn(5, 33), randn(33), randn(33)),
        {"p": 0.25, "seed": 7},
    ),
    "cross_entropy": lambda: ((randn(5, 33), _ids(5, below=33)), {}),
    "linear_cross_entropy": lambda: ((randn(5, 16), randn(33, 16), _ids(5, below=33)), {}),
    "embedding": lambda: ((_ids(2, 5, below=11), randn(11, 16), randn(7, 16)), {}),
    "rope": lambda: ((randn(1, 2, 5, 16), randn(5, 8), randn(5, 8)), {}),
    "linear": lambda: ((randn(5, 16), randn(24, 16), randn(24)), {}),
    "linear_gelu": lambda: ((randn(5, 16), randn(24, 16), randn(24)), {}),
    "linear_residual": lambda: ((randn(5, 16), randn(24, 16), randn(24), randn(5, 24)), {}),
    "attention": lambda: (
        (randn(1, 4, 9, 16), randn(1, 2, 9, 16), randn(1, 2, 9, 16)),
        {"causal": True},
    ),
}
