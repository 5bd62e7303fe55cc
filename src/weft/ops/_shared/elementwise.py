"""Launching elementwise CUDA kernels: ``NAME_wide`` for aligned tensors, ``NAME_any`` for any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.backends.nvrtc import CudaSource

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
THREADS = 128


def contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """Room for an answer of ``x``'s shape and dtype in row-major order."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Walk:
    """The elementwise kernels of one ``.cu`` file, which includes elementwise.cuh.

    ``run("swiglu_forward", tensors, *scalars)`` launches over dense tensors of one size, inputs
    first, as ``swiglu_forward_wide`` where all lie on 16 bytes (and ``wide`` is not False), else as
    ``swiglu_forward_any``. ``more`` are kernels launched otherwise.
    """

    def __init__(self, file: Path, *kernels: str, more: tuple[str, ...] = ()) -> None:
        both = more + tuple(f"{kernel}_{way}" for way in ("wide", "any") for kernel in kernels)
        self.sources = {
            dtype: CudaSource(
                file=file,
                kernels=both,
                defines=(("WEFT_T", name), ("THREADS", str(THREADS))),
                label=f"{file.stem}-{str(dtype).removeprefix('torch.')}",
            )
            for dtype, name in TYPES.items()
        }

    @property
    def specimens(self) -> tuple[CudaSource, ...]:
        return tuple(self.sources.values())

    def run(
        self, kernel: str, tensors: tuple[torch.Tensor, ...], *scalars: Any, wide: bool = True
    ) -> None:
        first = tensors[0]
        n = first.numel()
        if n == 0:
            return
        program, per_block, way = self.sources[first.dtype], THREADS, "any"
        if wide and all(t.data_ptr() % 16 == 0 for t in tensors):
            per_block, way = THREADS * 16 // first.element_size(), "wide"
        program[f"{kernel}_{way}"](-(-n // per_block), THREADS, *tensors, n, *scalars)
