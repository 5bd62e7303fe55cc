"""Cases: the named points to run an operator at, with shapes, dtypes, layouts and values as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.core.errors import WeftError, check_name

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
# Floating-point dtypes that only store: kernels widen them before they compute, and torch generates,
# compares and sorts none of them.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

LAYOUTS = {
    "contiguous": "rows one after another",
    "transposed": "the last two dimensions stored the other way round",
    "sliced": "every second element of a row that is twice as long",
    "expanded": "one row, repeated with stride 0",
    "shifted": "contiguous, but one element past a 16-byte boundary",
}
VALUES = {
    "normal": "standard normal",
    "large": "normal, scaled by 1e4",
    "offset": "1e4 plus normal, of at least four steps of the dtype there",
    "rising": "rising from -50 to 50 along the last dimension, plus normal",
    "falling": "falling from 50 to -50 along the last dimension, plus normal",
    "equal": "one value everywhere (another for each seed)",
    "ones": "1 everywhere",
    "sweep": "evenly spaced over [-60, 60], with jitter",
    "tiny": "normal, scaled by 1e-4",
    "outliers": "normal, with one value in a thousand scaled by 100",
    "special": "normal, with NaN, +Inf, -Inf and signed zeros planted",
    "neginf": "normal, with -Inf planted, as a mask does",
    "nan": "normal, with NaN planted, which no infinity beside it can hide",
}
TAGS = frozenset({"check", "bench", "edge"})


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor argument of a case: shape, dtype (named as in torch), layout and distribution of values."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    values: str = "normal"

    def __post_init__(self) -> None:
        for what, got, known in (
            ("dtype", self.dtype, ITEMSIZE),
            ("layout", self.layout, LAYOUTS),
            ("values", self.values, VALUES),
        ):
            if got not in known:
                raise WeftError(f"input {self.name!r}: {what}", expected=", ".join(known), got=got)

    @property
    def numel(self) -> int:
        """Number of elements; each repeat of an expanded row counts."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that must be read: an expanded row counts once."""
        # A row with stride 0 is read from memory once, and then from the caches.
        stored = self.shape[-1:] if self.layout == "expanded" else self.shape
        return math.prod(stored) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named point to run an operator at.

    ``tags`` are ``check`` (small, for every machine), ``edge`` (empty inputs, strides, special values; also
    checked) and ``bench`` (worth timing). ``devices`` limits a case to the devices it makes sense for: a
    gigabyte softmax is no case for a laptop's CPU. ``params`` are the operator's scalar arguments.
    ``draw(seed, device)`` generates the inputs' values if the operator has a generator of its own.
    """

    name: str
    inputs: tuple[Input, ...]
    params: Mapping[str, object] = field(default_factory=dict)
    tags: frozenset[str] = frozenset({"check"})
    devices: tuple[str, ...] = ("cpu", "cuda")
    draw: Callable[[int, str], Sequence[Any]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name("case", self.name)
        unknown = set(self.tags) - TAGS
        if unknown or not self.tags:
            raise WeftError(f"case {self.name!r}: tags", expected=sorted(TAGS), got=sorted(unknown))
        # Read-only: a case is a constant that many checks share. object.__setattr__ since the dataclass is
        # frozen.
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    @property
    def dtype(self) -> str:
        """Dtype of the first input, which names the case's precision."""
        return self.inputs[0].dtype

    @property
    def layouts(self) -> frozenset[str]:
        return frozenset(i.layout for i in self.inputs)

    # Without params, whose mapping has no hash; the name tells cases with other params apart.
    def __hash__(self) -> int:
        return hash((self.name, self.inputs))


def case(
    *inputs: Input,
    tags: str | tuple[str, ...] = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    name: str | None = None,
    **params: object,
) -> Case:
    """Make a case named after its contents, e.g. ``bf16-32768x1024`` or ``fp32-7x13-sliced``."""
    # The name is the key of records and tables: it must not change for an existing case.
    parts = [SHORT.get(inputs[0].dtype, inputs[0].dtype)]
    parts.append("-".join("x".join(map(str, i.shape)) or "scalar" for i in inputs))
    parts += [i.layout for i in inputs if i.layout != "contiguous"]
    parts += [i.values for i in inputs if i.values != "normal"]
    parts += [str(v) for v in params.values()]
    return Case(
        name=name or "-".join(parts),
        inputs=inputs,
        params=params,
        tags=frozenset((tags,) if isinstance(tags, str) else tags),
        devices=devices,
    )


def is_tuned(name: str) -> bool:
    """Return True for the name of a case that ``weft tune`` makes: an operator's with other sizes."""
    return "@" in name or "/" in name
