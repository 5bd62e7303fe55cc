"""How cross entropy's rows are laid on threads in CUDA C++; see cross_entropy.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One block a row, of ``threads``, each with ``unroll`` accesses of 16 bytes under way."""

    threads: int
    unroll: int = 2


@cache
def configure(columns: int, dtype: torch.dtype) -> Config:
    """The configuration for rows of ``columns``: some accesses a thread, 256 threads at most."""
    accesses = columns * dtype.itemsize // 16
    return Config(threads=next((t for t in (32, 64, 128) if accesses <= 4 * t), 256))


@cache
def configure_fused(columns: int, dtype: torch.dtype) -> Config:
    """The configuration for rows that are read and then written: a long one has a block of 1024
    threads, so that few rows are in flight and those wait in the L2 (or shared memory)."""
    accesses = columns * dtype.itemsize // 16
    return Config(threads=next((t for t in (32, 64, 128, 256, 512) if accesses <= 4 * t), 1024))


def candidates() -> list[Config]:
    """The configurations worth timing for rows of a vocabulary."""
    return [Config(threads=t, unroll=u) for t in (128, 256, 512, 1024) for u in (1, 2, 4)]


@cache
def source(
    file: Path,
    kernels: tuple[str, ...],
    dtype: torch.dtype,
    config: Config,
    smooth: bool,
    min_arch: int = 80,
) -> CudaSource:
    """``file`` compiled for one element type and configuration, with label smoothing or without."""
    kind = str(dtype).removeprefix("torch.")
    return CudaSource(
        file=file,
        kernels=kernels,
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("THREADS", str(config.threads)),
            ("UNROLL", str(config.unroll)),
            ("SMOOTH", str(int(smooth))),
        ),
        label=f"{file.stem}-{kind}-{config.threads}x{config.unroll}{'-smooth' * smooth}",
        min_arch=min_arch,
    )
