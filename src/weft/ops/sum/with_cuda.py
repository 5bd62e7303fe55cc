"""The sum in CUDA C++, the ladder's last step: many loads in flight, one launch; see sum.cu.

The block that finishes last adds up the blocks' sums. A ticket, a counter in the module's own memory, tells
it that it is the last. Calls that may run at the same time use different tickets (see :func:`_ticket`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import CUDA_TYPES, dense, dtype_name
from weft.ops.sum.spec import spread

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
KERNELS = ("sum_once", "sum_tiles", "sum_partials")
TICKETS = 4096  # as in sum.cu
STREAMS = 1024  # counters for streams; the others are for calls captured into graphs
HINTS = {"plain": 0, "past L1": 1, "past L1, first out of L2": 2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration: ``unroll`` 16-byte loads in flight for each of ``threads`` threads.

    ``blocks`` is the number of blocks on each SM, which stride over the tensor. None launches as many blocks
    as there are groups of ``tiles`` tiles and leaves their distribution to the hardware.
    """

    threads: int = 256
    unroll: int = 4
    blocks: int | None = 4
    tiles: int = 4
    hint: str = "past L1"

    def source(self, dtype: torch.dtype) -> CudaSource:
        """Return the program for one dtype."""
        return _source(self.threads, self.unroll, self.min_blocks, HINTS[self.hint], dtype)

    @property
    def min_blocks(self) -> int:
        """Number of blocks that must fit on an SM, which bounds the registers."""
        return self.blocks or min(2048 // self.threads, self.max_threads_per_sm // self.threads)

    @property
    def max_threads_per_sm(self) -> int:
        """Number of threads that the 65536 registers of an SM allow: each needs 24, and 8 for each vector."""
        return 65536 // (24 + 8 * self.unroll)

    def grid(self, elements: int, itemsize: int, device: torch.device) -> int:
        """Return the number of blocks for a tensor: at least one, at most the number of full tiles."""
        full = elements // (self.threads * self.unroll * (16 // itemsize))
        if self.blocks is None:
            return max(1, -(-full // self.tiles))
        return max(1, min(full, self.blocks * num_sms(device)))


CONFIG = Config()
CANDIDATES = tuple(
    config
    for threads in (256, 512, 1024)
    for unroll in (2, 4, 8)
    for blocks, tiles in ((1, 1), (2, 1), (4, 1), (8, 1), (None, 1), (None, 4), (None, 16))
    for hint in HINTS
    for config in [Config(threads=threads, unroll=unroll, blocks=blocks, tiles=tiles, hint=hint)]
    if threads * (blocks or 1) <= config.max_threads_per_sm
)


@cache
def _source(threads: int, unroll: int, min_blocks: int, hint: int, dtype: torch.dtype) -> CudaSource:
    numbers = (("THREADS", threads), ("UNROLL", unroll), ("RESIDENT", min_blocks), ("HINT", hint))
    return CudaSource(
        file=Path(__file__).with_name("sum.cu"),
        kernels=KERNELS,
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=dtype_name(dtype),
    )


_streams: dict[tuple[int | None, int], int] = {}
_for_streams, _for_captures = count(0), count(STREAMS)


def _ticket(device: torch.device) -> int | None:
    """Return the index of a ticket counter that no other call in flight uses; None if all are taken.

    Calls on one stream run one after another and share a counter. A captured call may be replayed on any
    stream, beside any other call, so that it gets a counter of its own for good.
    """
    if torch.cuda.is_current_stream_capturing():
        # The counter never runs backwards: a graph may be replayed at any later time.
        ticket = next(_for_captures)
    else:
        key = (device.index, torch.cuda.current_stream(device).cuda_stream)
        cached_ticket = _streams.get(key)
        ticket = _streams.setdefault(key, next(_for_streams)) if cached_ticket is None else cached_ticket
        return ticket if ticket < STREAMS else None
    return ticket if ticket < TICKETS else None


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """Compute the sum with one launch configuration."""
    x = dense(x)
    n = x.numel()
    source = config.source(x.dtype)
    blocks = config.grid(n, x.element_size(), x.device)
    partials = torch.empty(blocks, dtype=torch.float64, device=x.device)
    y = torch.empty((), dtype=x.dtype, device=x.device)
    ticket = _ticket(x.device)
    # Slower by a launch, but correct with any number of streams and captured graphs.
    if ticket is None:
        source["sum_tiles"](blocks, config.threads, x, partials, n)
        source["sum_partials"](1, config.threads, partials, y, blocks)
    else:
        source["sum_once"](blocks, config.threads, x, y, partials, n, ticket)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(CONFIG, x)


IMPLEMENTATION = Implementation(
    operator="sum",
    backend="cuda",
    forward=forward,
    backward=spread,
    aot_kernels=tuple(CONFIG.source(dtype) for dtype in DTYPES),
    idea="four vectors in flight, one launch: the last block ends it",
)
