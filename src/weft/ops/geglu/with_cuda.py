"""GEGLU in CUDA C++: one fused pass each way; see geglu.cu and _shared/gated.cuh."""

from __future__ import annotations

from pathlib import Path

from weft.ops._shared.gated_cuda import implementation

IMPLEMENTATION = implementation("geglu", Path(__file__).with_name("geglu.cu"))
