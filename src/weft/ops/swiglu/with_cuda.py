"""SwiGLU in CUDA C++: one fused pass each way; see swiglu.cu and _shared/gated.cuh."""

from __future__ import annotations

from pathlib import Path

from weft.ops._shared.gated_cuda import implementation

IMPLEMENTATION = implementation("swiglu", Path(__file__).with_name("swiglu.cu"))
