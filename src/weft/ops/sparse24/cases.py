"""Cases of 2:4 sparsity, and the generators of values with metadata that fits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.core import Case, Input
from weft.core.cases import SHORT
from weft.ops.sparse24 import pattern

DTYPES = ("float32", "float16", "bfloat16")
HALVES = DTYPES[1:]
GPU = ("cuda",)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)
LAYOUTS = ("transposed", "sliced", "expanded", "shifted")


def floats(spec: Input, generator: torch.Generator, device: str) -> Tensor:
    """Return normal values of an input's shape and dtype, with special ones planted if it has them."""
    dtype = getattr(torch, spec.dtype)
    x = torch.randn(spec.shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    if spec.values == "special" and x.numel():
        count = max(1, x.numel() // 40)
        for value in SPECIAL:
            places = torch.randint(x.numel(), (count,), generator=generator, device=device)
            x.view(-1)[places] = value
    return x


def _random_metadata(rows: int, columns: int, generator: torch.Generator, device: str) -> Tensor:
    """Return metadata of random places: each of the six pairs is as likely."""
    pairs = torch.combinations(torch.arange(pattern.GROUP, device=device), pattern.NONZEROS)
    shape = (rows, columns // pattern.GROUP)
    return pattern.pack(pairs[torch.randint(len(pairs), shape, generator=generator, device=device)])


def draw_pair(case: Case, seed: int, device: str) -> Sequence[Tensor]:
    """Generate values and metadata."""
    generator = torch.Generator(device).manual_seed(seed)
    values = floats(case.inputs[0], generator, device)
    rows, half = values.shape
    return values, _random_metadata(rows, 2 * half, generator, device)


def draw_linear(case: Case, seed: int, device: str) -> Sequence[Tensor]:
    """Generate x, values, metadata and a bias."""
    generator = torch.Generator(device).manual_seed(seed)
    x, values, bias = (floats(case.inputs[i], generator, device) for i in (0, 1, 3))
    rows, half = values.shape
    return x, values, _random_metadata(rows, 2 * half, generator, device), bias


def _weight_case(
    rows: int,
    columns: int,
    dtype: str = "bfloat16",
    *,
    layout: str = "contiguous",
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    words = [SHORT[dtype], f"{rows}x{columns}"]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    w = Input(name="w", shape=(rows, columns), dtype=dtype, layout=layout, values=values)
    return Case(name="-".join(words), inputs=(w,), tags=frozenset({tags}), devices=devices)


def prune_cases() -> tuple[Case, ...]:
    return (
        *(_weight_case(5, 24, d) for d in DTYPES),
        # Whole blocks of metadata, and every kind of rest: of a word, a block of columns and one of rows.
        *(_weight_case(128, 128, d) for d in HALVES),
        _weight_case(131, 148, "float16"),
        _weight_case(17, 60),
        *(_weight_case(33, 80, d, values=v) for d, v in zip(HALVES, ("equal", "rising"), strict=True)),
        *(_weight_case(*s, tags="edge") for s in ((0, 8), (3, 0), (1, 4))),
        *(_weight_case(36, 72, "float16", layout=layout, tags="edge") for layout in LAYOUTS),
        *(_weight_case(40, 68, d, values="special", tags="edge") for d in DTYPES),
        _weight_case(1000, 1016, tags="edge", devices=GPU),
        _weight_case(8192, 8192, tags="bench", devices=GPU),
        _weight_case(3072, 768, tags="bench", devices=GPU),
        _weight_case(1024, 1024, tags="bench", devices=("cpu",)),
    )


def transposable_cases() -> tuple[Case, ...]:
    return (
        *(_weight_case(8, 24, d) for d in DTYPES),
        _weight_case(128, 64, "float16"),
        _weight_case(132, 148),
        *(_weight_case(32, 80, d, values=v) for d, v in zip(HALVES, ("equal", "rising"), strict=True)),
        *(_weight_case(*s, tags="edge") for s in ((0, 8), (4, 0), (4, 4))),
        *(_weight_case(36, 72, "float16", layout=layout, tags="edge") for layout in LAYOUTS),
        *(_weight_case(40, 68, d, values="special", tags="edge") for d in DTYPES),
        _weight_case(1000, 1016, tags="edge", devices=GPU),
        _weight_case(8192, 8192, tags="bench", devices=GPU),
        _weight_case(1024, 1024, tags="bench", devices=("cpu",)),
    )


def _metadata_input(rows: int, columns: int) -> Input:
    return Input(name="metadata", shape=pattern.metadata_shape(rows, columns), dtype="int32")


def _pair_case(rows: int, columns: int, dtype: str = "bfloat16", **options: Any) -> Case:
    """Return a case of values and metadata, named like that of their matrix; ``options`` are its own."""
    of_matrix = _weight_case(rows, columns, dtype, **options)
    values = replace(of_matrix.inputs[0], name="values", shape=(rows, columns // 2))
    return replace(of_matrix, inputs=(values, _metadata_input(rows, columns)))


def expand_cases() -> tuple[Case, ...]:
    return (
        *(_pair_case(5, 24, d) for d in DTYPES),
        *(_pair_case(128, 128, d) for d in HALVES),
        _pair_case(131, 148, "float16"),
        _pair_case(17, 60),
        *(_pair_case(*s, tags="edge") for s in ((0, 8), (3, 0), (1, 4))),
        # A case's own generator makes no expanded inputs.
        *(_pair_case(36, 72, "float16", layout=v, tags="edge") for v in LAYOUTS if v != "expanded"),
        *(_pair_case(40, 68, d, values="special", tags="edge") for d in DTYPES),
        _pair_case(1000, 1016, tags="edge", devices=GPU),
        _pair_case(8192, 8192, tags="bench", devices=GPU),
        _pair_case(1024, 1024, tags="bench", devices=("cpu",)),
    )


def linear_case(
    rows: int | tuple[int, ...],
    n: int,
    k: int,
    dtype: str = "bfloat16",
    *,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by dtype and M x N x K; ``layouts`` are those of x and of the values.

    Special numbers are among the values alone: at an infinity in x, a place that was pruned gives NaN in a
    dense product, and nothing in a sparse one.
    """
    lead = rows if isinstance(rows, tuple) else (rows,)
    words = [SHORT[dtype], "x".join(map(str, (*lead, n, k)))]
    words += ["-".join(layouts)] if layouts != ("contiguous", "contiguous") else []
    words += [values] if values != "normal" else []
    inputs: tuple[Any, ...] = (
        Input(name="x", shape=(*lead, k), dtype=dtype, layout=layouts[0]),
        Input(name="values", shape=(n, k // 2), dtype=dtype, layout=layouts[1], values=values),
        _metadata_input(n, k),
        Input(name="bias", shape=(n,), dtype=dtype),
    )
    return Case(name="-".join(words), inputs=inputs, tags=frozenset({tags}), devices=devices)


def linear_cases() -> tuple[Case, ...]:
    gpu_bench: dict[str, Any] = {"tags": "bench", "devices": GPU}
    return (
        *(linear_case(5, 16, 48, d) for d in DTYPES),
        *(linear_case(35, 72, 144, d) for d in HALVES),
        linear_case((2, 17), 40, 80, "float16"),
        linear_case(19, 33, 20, "float16"),
        linear_case(300, 136, 272, devices=GPU),
        linear_case(1000, 1016, 1040, "float16", devices=GPU),
        linear_case(2100, 1160, 208, devices=GPU),
        *(linear_case(*s, tags="edge") for s in ((0, 8, 16), (5, 0, 16), (5, 8, 0), (1, 8, 16))),
        linear_case(40, 24, 16, "float16", layouts=("transposed", "sliced"), tags="edge"),
        linear_case(40, 24, 32, "float16", layouts=("shifted", "shifted"), tags="edge"),
        linear_case(19, 40, 32, "float16", values="special", tags="edge"),
        linear_case(8192, 8192, 8192, **gpu_bench),
        linear_case(16384, 3072, 768, **gpu_bench),
        linear_case(16384, 768, 3072, **gpu_bench),
        linear_case(512, 512, 512, tags="bench", devices=("cpu",)),
    )
