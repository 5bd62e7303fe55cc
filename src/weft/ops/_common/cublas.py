"""Calls of cuBLAS held to the operators' precision contract for the length of one call.

By default PyTorch lets a product of half types that cuBLAS splits along K add its parts in the half
type: a second rounding, and a weaker yardstick. float32 products take the precision that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REDUCED_PRECISION_SWITCH = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


def call_at_precision(function: Callable[..., Any], x: torch.Tensor, precision: str, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, with cuBLAS held to ``precision`` for ``x``'s dtype.

    ``precision`` is ``ieee`` or ``tf32`` for float32; half types are always summed in float32. The
    process-wide switch is restored afterwards, and left alone if it has the right value already:
    setting it costs host time, and other threads read it.
    """
    if not x.is_cuda:
        return function(*arguments)
    switches = torch.backends.cuda.matmul
    name = REDUCED_PRECISION_SWITCH.get(x.dtype, "fp32_precision")
    value = precision if name == "fp32_precision" else False
    previous = getattr(switches, name)
    if previous == value:
        return function(*arguments)
    setattr(switches, name, value)
    try:
        return function(*arguments)
    finally:
        setattr(switches, name, previous)
