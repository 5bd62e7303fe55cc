"""GEGLU in Triton: one fused pass each way; see _shared/gated_triton.py."""

from __future__ import annotations

from weft.ops._shared.elementwise_triton import gelu
from weft.ops._shared.gated_triton import implementation

IMPLEMENTATION = implementation("geglu", gelu)
