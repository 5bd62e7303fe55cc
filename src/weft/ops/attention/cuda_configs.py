"""Tiles of attention's CUDA kernels: those shipped, by kernel and head size."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Config:
    """A block is ``warps`` warps with 16 ``mt`` rows each (queries, or keys), and walks ``step``
    of the others at a time.

    ``blocks`` is how many a multiprocessor is meant to hold, which bounds the registers; where
    ``split`` is 2, two blocks share the columns of an answer.
    """

    warps: int
    mt: int
    step: int
    blocks: int
    split: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def own(self) -> int:
        """The rows that a block owns."""
        return 16 * self.mt * self.warps


def _c(warps: int, mt: int, step: int, blocks: int, split: int = 1) -> Config:
    return Config(warps=warps, mt=mt, step=step, blocks=blocks, split=split)


KINDS = ("forward", "queries", "keys")
# By kind, then up to which head size.
SHIPPED = {
    "forward": {64: _c(4, 1, 64, 4), 128: _c(4, 2, 64, 2), 256: _c(4, 1, 32, 2)},
    "queries": {64: _c(4, 2, 64, 2), 128: _c(4, 2, 32, 2), 256: _c(4, 1, 32, 1)},
    "keys": {64: _c(4, 2, 32, 2), 128: _c(4, 1, 64, 2), 256: _c(4, 1, 32, 1, 2)},
}


def columns(d: int) -> int:
    """The head size as tiles in shared memory have it."""
    return -(-d // 32) * 32


def shared_bytes(kind: str, config: Config, d: int) -> int:
    """What a block takes of shared memory: the rows it owns, and two tiles of those it walks."""
    row = 2 * columns(d)
    own, walked = config.own * row, config.step * row
    if kind == "forward":
        return own + 4 * walked
    if kind == "queries":
        return 2 * own + 4 * walked + 8 * config.own
    return 2 * own + 4 * walked + 16 * config.step


def configure(kind: str, d: int, dropout: bool, room: float) -> Config:
    """The shipped configuration of a kernel of ``KINDS``, with fewer warps where a block has not
    the ``room`` (bytes of shared memory), and smaller steps beside ``dropout``'s random numbers."""
    config = next(c for most, c in SHIPPED[kind].items() if d <= most)
    if dropout and config.mt == 2:
        config = replace(config, step=32)
    while config.warps > 1 and shared_bytes(kind, config, d) > room:
        config = replace(config, warps=config.warps // 2)
    return config


def candidates(kind: str, d: int) -> list[Config]:
    """The configurations worth timing for a head size, the shipped one first; none spills (sm_90).

    A warp of 32 rows (``mt`` 2) reads each fragment of the walked rows for two products, and so
    half as much of shared memory; one of 16 has half the sums, and twice as many run beside it to
    hide what each waits for. On an H200 that is worth more to the forward of heads of 64 (0.223 ms
    for 0.235 at 32 x 12 x 1024), and to the keys' backward of heads of 128 two blocks of 64 keys
    are worth more than one of 128 (3.04 ms for 3.13 in all at 4 x 16 x 4096). Eight warps of 32
    rows are one block that reads the walked rows half as often from the L2.
    """
    shipped = next(c for most, c in SHIPPED[kind].items() if d <= most)
    others = {
        ("forward", True): [_c(4, 2, 64, 2), _c(8, 1, 64, 2), _c(4, 1, 128, 3), _c(4, 1, 32, 4)],
        ("forward", False): [_c(8, 2, 32, 1), _c(8, 2, 64, 1)],
        ("queries", True): [_c(4, 1, 64, 3), _c(4, 1, 64, 4), _c(4, 1, 32, 4), _c(4, 2, 32, 2)],
        ("queries", False): [_c(4, 1, 64, 2), _c(8, 2, 32, 1)],
        ("keys", True): [_c(4, 1, 64, 2), _c(4, 1, 32, 3), _c(8, 2, 32, 1)],
        ("keys", False): [_c(8, 1, 64, 1), _c(4, 1, 32, 2)],
    }
    return [shipped, *(others[kind, d <= 64] if d <= 128 else ())]
