"""CUDA graph captures that give their memory back when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def graph_capture(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, pool: Any = None, error_mode: str = "global"
) -> Iterator[None]:
    """Capture what the body launches on ``stream`` into ``graph``, as ``torch.cuda.graph`` does.

    ``pool`` is the memory pool of another graph to share, or None for a new one. Raises whatever the body
    raises, and ``RuntimeError`` for operations that a capture forbids.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield
    except BaseException:
        _release_failed_capture(pool)
        raise


def _release_failed_capture(pool: Any) -> None:
    """Undo what a capture leaves behind in torch where ``capture_end`` raised (torch 2.11, pytorch#180395).

    The allocator would take the capture for one that is still underway: it frees no cached memory until the
    process ends, and a later call runs out of memory. The default generator would refuse every random
    number outside a capture.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # the allocator knows already: nothing was left
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # the same numbers, and no capture
