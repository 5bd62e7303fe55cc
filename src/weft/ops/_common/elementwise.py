"""Launcher of elementwise CUDA kernels: ``NAME_wide`` for 16-byte aligned tensors, ``NAME_any`` for any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, dtype_name

THREADS = 128


class ElementwiseKernels:
    """The elementwise kernels of one ``.cu`` file that includes elementwise.cuh, compiled for each dtype.

    ``launch("swiglu_forward", tensors, *scalars)`` takes dense tensors of one size, inputs first, then
    outputs. It launches ``swiglu_forward_wide`` if every tensor is 16-byte aligned, else
    ``swiglu_forward_any``.
    """

    def __init__(self, file: Path, *kernels: str) -> None:
        self.sources = {
            dtype: CudaSource(
                file=file,
                kernels=tuple(f"{kernel}_{variant}" for variant in ("wide", "any") for kernel in kernels),
                defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(THREADS))),
                label=f"{file.stem}-{dtype_name(dtype)}",
            )
            for dtype in FLOAT_DTYPES
        }

    @property
    def aot_kernels(self) -> tuple[CudaSource, ...]:
        return tuple(self.sources.values())

    def launch(
        self, kernel: str, tensors: tuple[torch.Tensor, ...], *scalars: Any, wide: bool = True
    ) -> None:
        """Launch one kernel; ``wide=False`` forbids the 16-byte variant."""
        first = tensors[0]
        n = first.numel()
        if n == 0:
            return
        per_block, variant = THREADS, "any"
        if wide and all(t.data_ptr() % 16 == 0 for t in tensors):
            per_block, variant = THREADS * 16 // first.element_size(), "wide"
        source = self.sources[first.dtype]
        source[f"{kernel}_{variant}"](-(-n // per_block), THREADS, *tensors, n, *scalars)
