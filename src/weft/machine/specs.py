"""Published specifications of NVIDIA GPUs, from ``gpu_specs.json``, and the bounds that follow from them.

Each row names its public document. Rates are dense: where a vendor's document has only the figure with 2:4
sparsity, half of it stands here. They hold at the boost clock and with fp32 accumulation. ``fp64`` is the
matrix units' where they compute fp64. A figure on which the vendor's documents disagree is a range, and one
that we are not sure of is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.cost import Cost
from weft.core.errors import WeftError
from weft.core.json_files import read_json
from weft.core.operator import unknown_name

FILE = Path(__file__).with_name("gpu_specs.json")
RATES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
# Bytes of an element that is multiplied at a rate; tf32 factors are stored as fp32.
ITEM_BYTES = {
    "fp64": 8.0,
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
}
MAKERS = ("nvidia", "geforce", "tesla", "gpu")  # words of a name that distinguish no GPU


@dataclass(frozen=True, kw_only=True)
class Document:
    """The vendor's public document that a row is from."""

    title: str
    year: int
    url: str

    def __str__(self) -> str:
        return f"{self.title} ({self.year})"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """Shortest possible time of a case in seconds, and its terms; ``limit`` names the larger one.

    ``by_flops`` is None for a case that is no matrix work.
    """

    seconds: float
    by_bytes: float
    by_flops: float | None

    @property
    def limit(self) -> str:
        return "FLOPs" if self.by_flops is not None and self.by_flops > self.by_bytes else "bytes"


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A row of the table. ``bandwidth_gbps`` has the lowest and the highest published figure, mostly equal.

    ``boost_mhz`` is the clock of the vector units' rates; ``matrix_mhz``, where it differs, that of the
    matrix units below fp64. ``gbit_per_pin`` is the data rate of a memory pin. None means unknown.
    """

    key: str
    name: str
    driver: str
    arch: str
    document: Document
    tflops: dict[str, float]
    bandwidth_gbps: tuple[float, float]
    sm_count: int | None = None
    boost_mhz: int | None = None
    matrix_mhz: int | None = None
    l2_mib: int | None = None
    smem_kib: int | None = None
    memory_gb: int | None = None
    memory: str = ""
    bus_bits: int | None = None
    gbit_per_pin: float | None = None
    tdp_w: int | None = None
    note: str = ""

    @property
    def bandwidth(self) -> float:
        """Highest published memory bandwidth, in bytes per second: no bound from it is too strict."""
        return self.bandwidth_gbps[1] * 1e9

    @property
    def bandwidth_is_disputed(self) -> bool:
        return self.bandwidth_gbps[0] != self.bandwidth_gbps[1]

    def rate(self, name: str) -> float | None:
        """Return a dense rate in FLOP/s; None if the GPU has none of this name, or it is unknown."""
        return self.tflops[name] * 1e12 if name in self.tflops else None

    def ridge(self, name: str) -> float | None:
        """Return the FLOPs a byte from which on the rate, and not the memory, bounds the time."""
        rate = self.rate(name)
        return None if rate is None else rate / self.bandwidth

    def smallest_square(self, name: str) -> int | None:
        """Return the least n for which the product of two n x n matrices can be compute-bound.

        2 n^3 FLOPs over 3 n^2 elements: n is 1.5 times the bytes of an element times the ridge.
        """
        ridge = self.ridge(name)
        return None if ridge is None else -int(-1.5 * ITEM_BYTES[name] * ridge // 1)

    def roof(self, cost: Cost, *, cached_bytes: float = 0.0) -> Roof | None:
        """Return the shortest possible time of ``cost``; None if the GPU's rate is unknown.

        ``cached_bytes`` of its bytes need not come from memory.
        """
        by_bytes = max(0.0, cost.nbytes - cached_bytes) / self.bandwidth
        if cost.rate is None:
            return Roof(seconds=by_bytes, by_bytes=by_bytes, by_flops=None)
        rate = self.rate(cost.rate)
        if rate is None:
            return None
        by_flops = cost.flops / rate
        return Roof(seconds=max(by_bytes, by_flops), by_bytes=by_bytes, by_flops=by_flops)

    def to_json(self) -> dict[str, Any]:
        """Return plain data. ``copy_gbps`` is the document's bandwidth, read and written bytes together."""
        names = (
            *("key", "arch", "sm_count", "boost_mhz", "matrix_mhz", "l2_mib", "smem_kib", "memory_gb"),
            *("memory", "bus_bits", "gbit_per_pin", "tdp_w", "note"),
        )
        return {
            "name": self.name,
            **{name: getattr(self, name) for name in names},
            "copy_gbps": self.bandwidth_gbps[1],
            "copy_gbps_low": self.bandwidth_gbps[0],
            "tflops": dict(self.tflops),
            "ridge": {name: self.ridge(name) for name in self.tflops},
            "smallest_square": {name: self.smallest_square(name) for name in self.tflops},
            "document": str(self.document),
            "url": self.document.url,
        }


@cache
def all_specs() -> tuple[GpuSpec, ...]:
    """Return every GPU of the table, oldest architecture first."""
    data = read_json(FILE)
    documents = {key: Document(**fields) for key, fields in data["documents"].items()}
    return tuple(_spec(row, documents) for row in data["gpus"])


def _spec(row: dict[str, Any], documents: dict[str, Document]) -> GpuSpec:
    bandwidth = row["bandwidth_gbps"]
    low, high = bandwidth if isinstance(bandwidth, list) else (bandwidth, bandwidth)
    changed = {"document": documents[row["document"]], "bandwidth_gbps": (float(low), float(high))}
    return GpuSpec(**(row | changed))


def _words(name: str) -> list[str]:
    """Split a name into lower-case words: ``A100-SXM4-80GB`` is a100, sxm, 80gb."""
    text = re.sub(r"(\d+) ?gi?b\b", r"\1gb", name.lower())
    text = re.sub(r"\brtx ?(\d{4})", r"rtx \1", text)
    words = re.findall(r"[a-z0-9]+", re.sub(r"\bsxm\d\b", "sxm", text))
    return [w for w in words if w not in MAKERS]


def matching(name: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs that a name may mean: ``A100`` has four variants, ``A100 SXM 80GB`` is one.

    Without an exact name, each word of ``name`` must be one of the GPU's.
    """
    words = set(_words(name))
    # A memory size or a form alone names no GPU.
    if not any(re.search(r"[a-z]\d|^\d{4}$", word) for word in words):
        return ()
    return tuple(spec for spec in all_specs() if words <= set(_words(spec.name)))


def find(name: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs that a name may mean. Raise :class:`WeftError` with the nearest names for none."""
    driver_name = re.sub(r"^NVIDIA ", "", name.strip())
    specs = tuple(
        spec
        for spec in all_specs()
        if spec.key == name.strip().lower() or re.fullmatch(spec.driver, driver_name)
    )
    specs = specs[:1] or matching(name)
    if not specs:
        if not isinstance(name, str) or not name.strip():
            raise WeftError("the name of a GPU", expected="a name such as a100-sxm-80gb", got=repr(name))
        raise unknown_name("GPU", name.lower(), [spec.key for spec in all_specs()], listed_by="weft hardware")
    return specs


def one(name: str) -> GpuSpec:
    """Return the GPU with this key. Raise :class:`WeftError` for none or for several variants."""
    specs = find(name)
    if len(specs) > 1:
        keys = ", ".join(spec.key for spec in specs)
        raise WeftError("one GPU", expected=f"one of {keys}", got=name)
    return specs[0]
