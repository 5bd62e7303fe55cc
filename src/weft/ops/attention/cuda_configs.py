"""Configurations of attention's CUDA kernels by kernel and head size, and the candidates for tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Config:
    """A block has ``warps`` warps with 16 ``mt`` rows each (queries, or keys) and streams ``step`` rows of
    the other kind at a time.

    ``blocks`` is the number of resident blocks of an SM, which bounds the registers of a thread. With
    ``split`` 2, two blocks share the columns of dk and dv.
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
        """Rows whose results a block computes."""
        return 16 * self.mt * self.warps


def _c(warps: int, mt: int, step: int, blocks: int, split: int = 1) -> Config:
    return Config(warps=warps, mt=mt, step=step, blocks=blocks, split=split)


KINDS = ("forward", "queries", "keys")
# By kernel, then by the largest head size.
SHIPPED = {
    "forward": {64: _c(4, 1, 64, 4), 128: _c(4, 2, 64, 2), 256: _c(4, 1, 32, 2)},
    "queries": {64: _c(4, 2, 64, 2), 128: _c(4, 2, 32, 2), 256: _c(4, 1, 32, 1)},
    "keys": {64: _c(4, 2, 32, 2), 128: _c(4, 1, 64, 2), 256: _c(4, 1, 32, 1, 2)},
}


def columns(d: int) -> int:
    """Return the width of a tile's rows in shared memory."""
    return -(-d // 32) * 32


def shared_bytes(kind: str, config: Config, d: int) -> int:
    """Return a block's shared memory in bytes: its own rows, and two tiles of the rows that it streams."""
    row = 2 * columns(d)
    own, tile = config.own * row, config.step * row
    if kind == "forward":
        return own + 4 * tile
    if kind == "queries":
        return 2 * own + 4 * tile + 8 * config.own
    return 2 * own + 4 * tile + 16 * config.step


def configure(kind: str, d: int, dropout: bool, smem_per_block: float) -> Config:
    """Return the shipped configuration of a kernel of ``KINDS``.

    It has fewer warps if a block needs more than ``smem_per_block`` bytes, and smaller steps with
    ``dropout``, whose random numbers take registers.
    """
    config = next(c for most, c in SHIPPED[kind].items() if d <= most)
    if dropout and config.mt == 2:
        config = replace(config, step=32)
    while config.warps > 1 and shared_bytes(kind, config, d) > smem_per_block:
        config = replace(config, warps=config.warps // 2)
    return config


def candidates(kind: str, d: int) -> list[Config]:
    """Return the configurations worth timing for a head size, the shipped one first; none spills (sm_90).

    A warp of 32 rows (``mt`` 2) uses each fragment of the streamed rows for two products, and reads half as
    much shared memory. A warp of 16 rows has half the accumulators, so that twice as many warps are resident
    and hide each other's latency. On an H200 the forward for heads of 64 is faster with 16 rows (0.223 ms
    against 0.235 at 32 x 12 x 1024), and the keys' backward for heads of 128 with two blocks of 64 keys
    instead of one of 128 (3.04 ms against 3.13 for the whole backward at 4 x 16 x 4096); docs/log.md has
    both. Eight warps of 32 rows are one block, which reads the streamed rows half as often from the L2.
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
