"""Kinds of cases, by the faults that they can expose: odd sizes, empty tensors, strides, hard values.

The selftest can leave a kind out (``--without strides``), which shows the mutants that only its cases
catch.
"""

from __future__ import annotations

import math

from weft.core import FORWARD, Case, Operator
from weft.core.cases import ITEMSIZE

KINDS = {
    "sizes": "a last dimension that is no multiple of eight: tiles and 16-byte accesses end short",
    "empties": "a dimension of size 0, or no dimension",
    "strides": "a layout other than contiguous",
    "values": "values other than normal: large, rising, offset, special",
    "huge": "more than 2^31 elements in an input or in the output",
}


def kinds(case: Case, operator: Operator) -> frozenset[str]:
    """Return the kinds of a case; none for plain sizes and values."""
    shapes = [i.shape for i in case.inputs]
    written = operator.cost(case, FORWARD).written / ITEMSIZE[case.dtype]
    shown = {
        "sizes": any(s and s[-1] % 8 for s in shapes),
        "empties": any(not s or 0 in s for s in shapes),
        "strides": any(i.layout != "contiguous" for i in case.inputs),
        "values": any(i.values != "normal" for i in case.inputs),
        "huge": max(written, *(math.prod(s) for s in shapes)) > 2**31,
    }
    return frozenset(kind for kind, is_shown in shown.items() if is_shown)
