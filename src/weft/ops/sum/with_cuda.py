"""The sum in CUDA C++, the ladder's last step: many loads in flight, one launch; see sum.cu.

The block that finishes last adds up the blocks' sums. It knows that it is the last by a ticket, a
counter in the module's own memory; calls that may run at one time hold different ones (see
:func:`_slot`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.layout import dense
from weft.ops.sum.spec import spread

TYPES = {
    torch.float32: "float",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
    torch.float16: "__half",
}
KERNELS = ("sum_once", "sum_tiles", "sum_partials")
TICKETS = 4096  # as in sum.cu
STREAMS = 1024  # tickets kept for streams; the others are for calls captured into graphs
HINTS = {"plain": 0, "past L1": 1, "past L1, first out of L2": 2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is launched: ``unroll`` 16-byte loads in flight for each of ``threads``.

    ``blocks`` is how many share the work on each multiprocessor, striding over it; None gives each
    block ``tiles`` tiles and lets the hardware deal the blocks out.
    """

    threads: int = 256
    unroll: int = 4
    blocks: int | None = 4
    tiles: int = 4
    hint: str = "past L1"

    def source(self, dtype: torch.dtype) -> CudaSource:
        """The program for one dtype."""
        return _source(self.threads, self.unroll, self.resident, HINTS[self.hint], dtype)

    @property
    def resident(self) -> int:
        """Blocks that must fit on a multiprocessor at once: where dealt out, all that do."""
        return self.blocks or min(2048 // self.threads, self.room // self.threads)

    @property
    def room(self) -> int:
        """Threads that a multiprocessor's 65536 registers hold: a thread needs 24 + 8 a vector."""
        return 65536 // (24 + 8 * self.unroll)

    def grid(self, elements: int, itemsize: int, device: torch.device) -> int:
        """Blocks for a tensor: at least one, and no more than there are full tiles."""
        full = elements // (self.threads * self.unroll * (16 // itemsize))
        if self.blocks is None:
            return max(1, -(-full // self.tiles))
        return max(1, min(full, self.blocks * _units(device)))


CONFIG = Config()
CANDIDATES = tuple(
    config
    for threads in (256, 512, 1024)
    for unroll in (2, 4, 8)
    for blocks, tiles in ((1, 1), (2, 1), (4, 1), (8, 1), (None, 1), (None, 4), (None, 16))
    for hint in HINTS
    for config in [Config(threads=threads, unroll=unroll, blocks=blocks, tiles=tiles, hint=hint)]
    if threads * (blocks or 1) <= config.room
)


@cache
def _source(threads: int, unroll: int, resident: int, hint: int, dtype: torch.dtype) -> CudaSource:
    numbers = (("THREADS", threads), ("UNROLL", unroll), ("RESIDENT", resident), ("HINT", hint))
    return CudaSource(
        file=Path(__file__).with_name("sum.cu"),
        kernels=KERNELS,
        defines=(("WEFT_T", TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=str(dtype).removeprefix("torch."),
    )


@cache
def _units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_streams: dict[tuple[int | None, int], int] = {}
_for_streams, _for_captures = count(0), count(STREAMS)


def _slot(device: torch.device) -> int | None:
    """A ticket that no other call in flight holds; None where none is left.

    Calls on one stream run one after another and share theirs. A captured call is replayed on any
    stream, beside anything, so it gets one that is never given again.
    """
    if torch.cuda.is_current_stream_capturing():
        slot = next(_for_captures)
    else:
        key = (device.index, torch.cuda.current_stream(device).cuda_stream)
        found = _streams.get(key)
        slot = _streams.setdefault(key, next(_for_streams)) if found is None else found
        return slot if slot < STREAMS else None
    return slot if slot < TICKETS else None


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The sum under a given launch configuration (for tuning)."""
    x = dense(x)
    n = x.numel()
    source = config.source(x.dtype)
    blocks = config.grid(n, x.element_size(), x.device)
    partials = torch.empty(blocks, dtype=torch.float64, device=x.device)
    y = torch.empty((), dtype=x.dtype, device=x.device)
    slot = _slot(x.device)
    if slot is None:
        source["sum_tiles"](blocks, config.threads, x, partials, n)
        source["sum_partials"](1, config.threads, partials, y, blocks)
    else:
        source["sum_once"](blocks, config.threads, x, y, partials, n, slot)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(CONFIG, x)


IMPLEMENTATION = Implementation(
    operator="sum",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=spread,
    specimens=tuple(CONFIG.source(dtype) for dtype in TYPES),
    idea="four vectors in flight, one launch: the last block ends it",
)
