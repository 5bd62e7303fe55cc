"""Configurations of the wgmma product (wgmma.py), and a model of the time that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ROWS, K_STEP_BYTES = 128, 128  # of a block: rows of c, bytes of K in a stage
BLOCK_BYTES = 64 * 128  # 64 rows of 128 bytes
GROUPS = 2  # warp groups that compute a tile of 128 rows


class Epilogue(IntEnum):
    """Function of the float32 sums that is rounded and stored, as in epilogue.cuh."""

    PLAIN = 0
    BIAS = 1  # + bias
    GELU = 2  # gelu(sums + bias), tanh form
    GELU_PRE = 3  # the same, and its input as a second output
    RESIDUAL = 4  # + bias + residual
    SLOPE = 5  # times GELU's slope at a second matrix; the column sums are a second output
    EXPONENTIAL = 6  # exp(sums - a number of the row), with the largest sum and the total of a tile's rows
    ROW_SCALE = 7  # times a number of the row
    ACCUMULATE = 8  # + the sums of earlier calls, in 24 bits


@dataclass(frozen=True, kw_only=True)
class Config:
    """``rows`` and ``columns`` of c in a tile, ``stages`` of the pipeline, and blocks in a ``cluster``.

    Each 64 rows have a warp group; with 64 rows two blocks run on an SM. ``rows`` is 64, 128 or 192.
    The blocks of a cluster share tiles of b, or with ``share_a`` tiles of a. With ``pingpong`` the two warp
    groups that multiply take tiles alternately; otherwise they share each tile. Tiles are taken in bands of
    ``band`` rows of tiles (of a cluster), column by column.
    With ``k_parts`` so many blocks of a cluster compute one tile, each a part of K; those of the same part
    share tiles.
    """

    columns: int
    stages: int
    cluster: int = 1
    share_a: bool = False
    pingpong: bool = False
    band: int = 8
    rows: int = ROWS
    k_parts: int = 1

    @property
    def groups(self) -> int:
        """Warp groups that multiply."""
        return self.rows // 64

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (1 + self.groups)

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.groups == 1 else 1

    @property
    def smem_bytes(self) -> int:
        # Stages, two boxes of c for each group, and barriers: of the stages, and two for each group. The sums
        # of parts of K take the place of the stages.
        boxes = 2 * BLOCK_BYTES if self.k_parts == 1 else 0
        return self.stages * ((self.rows + self.columns) * 128 + 16) + self.groups * (boxes + 16)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of a cluster that share a tile of a, and those that share a tile of b."""
        sharers = self.cluster // self.k_parts
        return (sharers, 1) if self.share_a else (1, sharers)

    @property
    def label(self) -> str:
        """Tile, stages, and cluster, with what differs from a plain cooperative kernel."""
        shared = "a" * self.share_a + f"k{self.k_parts}" * (self.k_parts > 1)
        band = f"-band{self.band}" * (self.band != Config.band)
        name = f"{self.rows}x{self.columns}x{self.stages}-{self.cluster}{shared}"
        return name + "-pingpong" * self.pingpong + band


# Constants of estimated_us, fitted to product-configurations-2026-11-28.ndjson, products-2026-11-28.txt and
# product-choices-2026-11-28.txt of results/nvidia-h200.
LAUNCH_US = 1.48
FLOP_PER_CYCLE = 4096  # of an SM's tensor cores
CLOCK_GHZ = (1.92, 1.33)  # with no SM at work, and with all: power limits the clock
# Of a tile's steps, by its rows and columns.
FACTORS = {
    64: {128: 1.09, 64: 1.02},
    128: {256: 0.999, 192: 0.943, 128: 0.962, 64: 1.16},
    192: {192: 0.972, 128: 1.038},
}
# From the L2 cache to each SM, with all at work, on the device of the record: its L2 and its SMs.
L2_BYTES_PER_NS, L2_BYTES, NUM_SMS = 140.0, 60 << 20, 132
L2_PORT_BYTES_PER_NS = 235.0  # to one SM, however few are at work
LATENCY_NS = 1097  # from the request of a stage to its data: a step takes at least this, over the stages
CLUSTER_FACTOR = 1.021
# At the power limit bytes from the L2 cache cost clock. Calls of a millisecond reach it when they repeat:
# for seconds 8192^3 takes 1.64 ms on an H200 with 256 columns in clusters of two, and 1.71 to 1.77 ms with
# 1.33 to 1.67 times the bytes; in short graphs, as in the records, all take as long.
L2_POWER, LONG_L2_POWER, LONG_CALL_US = 0.12, 0.2, 1000.0
# Of a tile of 128 x 256: storing it, with the filling of the pipeline; GELU; a second output or a residual.
STORE_US, GELU_US, EXTRA_US = 1.227, 0.457, 4.54
# Those with an operation of the special-function unit, and those that read or write a second matrix. GELU,
# GELU_PRE and RESIDUAL are in products-2026-11-28.txt; the others are expected to take as long.
SPECIAL_FUNCTION = (Epilogue.GELU, Epilogue.GELU_PRE, Epilogue.SLOPE, Epilogue.EXPONENTIAL)
SECOND_MATRIX = (Epilogue.GELU_PRE, Epilogue.RESIDUAL, Epilogue.SLOPE, Epilogue.ACCUMULATE)
SUM_LAUNCH_US, PARTIAL_BYTES_PER_US = 2.43, 4.54e6
MAX_SPLITS, LEAST_STEPS = 12, 4  # parts of K, and steps of 128 bytes in each
LEAST_GAIN = 1.02  # of parts of K, as the model expects it: its error is larger
# Of tf32 by mma.sync, which the product takes where it is faster: the rate of one SM in the record of 8192^3
# (README.md of matmul), and its tiles.
MMA_FLOP_PER_NS, MMA_TILE, MMA_SMALL_TILE, MMA_SMALL_BLOCKS, MMA_LEAST_TILES = 1454, 128, 64, 3, 32
CANDIDATES = (
    Config(columns=256, stages=4, cluster=2),
    Config(columns=256, stages=4),
    Config(columns=192, stages=4),
    Config(columns=128, stages=6),
    Config(columns=64, stages=8),
    Config(columns=128, stages=6, cluster=2),
    Config(columns=64, stages=8, cluster=2, share_a=True),
    Config(columns=128, stages=6, pingpong=True),
    Config(columns=128, stages=6, cluster=2, pingpong=True),
    Config(columns=192, stages=4, pingpong=True),
    Config(columns=128, stages=4, rows=64),
    Config(columns=64, stages=5, rows=64),
    Config(columns=192, stages=3, rows=192),
    Config(columns=128, stages=4, rows=192),
)
# Tiles beside each other that share a were nowhere the fastest.
CHOSEN_FROM = tuple(c for c in CANDIDATES if not c.share_a)
# For few tiles and a long K: those of 26 that gain most in the record.
WITH_K_PARTS = (
    Config(columns=192, stages=5, cluster=2, k_parts=2),
    Config(columns=192, stages=5, cluster=4, k_parts=4),
    Config(columns=128, stages=7, cluster=2, k_parts=2),
    Config(columns=128, stages=7, cluster=6, k_parts=3),
    Config(columns=128, stages=7, cluster=8, k_parts=4),
    Config(columns=192, stages=4, rows=192, cluster=2, k_parts=2),
)
# Between the blocks of a cluster, to and from each at the same time; and the two signals of an exchange, with
# the store of a share.
CLUSTER_BYTES_PER_NS, EXCHANGE_US = 26.0, 0.99
# Clusters that run at once on 132 SMs, by their blocks: of a processing cluster's 16 or 18 SMs some remain.
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}


def spills(config: Config, epilogue: Epilogue) -> bool:
    """Return True if a kernel with this epilogue needs more registers than it has."""
    if epilogue == Epilogue.EXPONENTIAL:  # a thread of a block of 64 or 192 rows has fewer registers
        return config.columns > (128 if config.pingpong else {64: 64, 128: 192, 192: 128}[config.rows])
    return epilogue == Epilogue.SLOPE and config.pingpong and config.columns > 128


def estimated_us(
    m: int,
    n: int,
    k: int,
    config: Config,
    splits: int,
    sms: int,
    epilogue: Epilogue = Epilogue.PLAIN,
    *,
    itemsize: int = 2,
    l2_bytes: int = L2_BYTES,
) -> float:
    """Return the time in microseconds that a model gives for a product on ``sms`` SMs.

    An SM computes one tile of ``rows`` x ``columns`` at a time; the tiles that are left behind the last
    whole wave are divided into ``splits`` parts of K. The model is a launch, and for each wave the steps of
    128 bytes along K and the tile's epilogue, which nothing overlaps; with ``pingpong`` all but the last one
    are hidden behind the other group's steps, if those are longer. A step takes the longest of three times:
    that of the tensor cores, at a clock that falls with the SMs at work; that of its bytes from the L2 cache,
    of which a cluster reads the shared operand once; and the latency of a stage over the number of stages.
    The cache's rate grows with its size, ``l2_bytes``, and so with its slices. With all SMs at work the power
    limit adds to a wave by its bytes. Parts of K are written and read once in float32, and added by a second
    launch; those of ``k_parts`` are exchanged within a cluster.

    The constants minimize what the choice loses to the fastest configuration, and the error of the model: in
    a record of 260 products of models, each by about 25 configurations in bfloat16, and in 28 large products
    and epilogues, which weigh four times as much. ``LONG_L2_POWER`` and the factor of 256 columns were set by
    hand after that, for calls of milliseconds. In the 260 the choice takes 1.4 % longer than the fastest one
    on average, and at most 16 %. With other constants, which were fitted to two thirds, it took 1.5 % longer
    in the other third. tf32
    (``itemsize`` 4) is expected to take as long for a step, which has half as many elements, and it stores
    twice the bytes.
    """
    a_blocks, b_blocks = config.blocks
    tiles = -(-m // (config.rows * b_blocks)) * -(-n // (config.columns * a_blocks))  # of a cluster
    on_sms = clusters_at_once(config, sms)  # of clusters, with one block an SM
    at_once = on_sms * config.blocks_per_sm
    k_steps = -(-k * itemsize // K_STEP_BYTES)
    l2_share = l2_bytes / L2_BYTES * NUM_SMS / sms
    end_us = STORE_US * itemsize / 2 + GELU_US * (epilogue in SPECIAL_FUNCTION)
    end_us += EXTRA_US * (epilogue in SECOND_MATRIX)
    end_us *= config.columns / 256
    if config.k_parts > 1:
        steps = -(-k_steps // config.k_parts)
        steps_us = steps * _step_ns(config, min(1.0, tiles * config.cluster / sms), l2_share) * 1e-3
        sent = 4 * config.rows * config.columns * (config.k_parts - 1) / config.k_parts
        end_us = (end_us - STORE_US * config.columns / 256) / config.k_parts + EXCHANGE_US
        waves = -(-tiles // at_once)
        waves_us = waves * (steps_us + sent / CLUSTER_BYTES_PER_NS * 1e-3 + end_us)
        return LAUNCH_US + waves_us * (_power_factor(config, waves_us) if waves > 1 else 1.0)
    if config.pingpong:
        end_us *= GROUPS  # of one group, which has the whole tile
    whole, rest = divmod(tiles, at_once)

    def wave_us(steps: int, at_work: float, blocks: int) -> float:
        steps_us = steps * _step_ns(config, at_work, l2_share, blocks) * 1e-3
        end = blocks * end_us
        return max(steps_us, (steps_us + end) / GROUPS) if config.pingpong else steps_us + end

    us = LAUNCH_US + end_us * config.pingpong
    if whole:
        waves_us = whole * wave_us(k_steps, 1.0, config.blocks_per_sm)
        us += waves_us * _power_factor(config, waves_us)
    if rest:
        units = rest * splits
        blocks = min(config.blocks_per_sm, -(-units // on_sms))
        waves = -(-units // at_once)
        us += waves * wave_us(-(-k_steps // splits), min(1.0, units * config.cluster / sms), blocks)
    if rest and splits > 1:
        partial_bytes = 4 * units * config.cluster * min(config.rows, m) * config.columns
        us += SUM_LAUNCH_US + 2 * partial_bytes / PARTIAL_BYTES_PER_US
    return us


def clusters_at_once(config: Config, sms: int) -> int:
    """Return how many clusters run at once on ``sms`` SMs, with one block on each."""
    return max(1, CLUSTERS_AT_ONCE[config.cluster] * sms // NUM_SMS)


def _power_factor(config: Config, us: float) -> float:
    """Return the factor of a wave with all SMs at work, by its bytes from the L2 cache for each product."""
    a_blocks, b_blocks = config.blocks
    bytes_share = (config.rows / a_blocks + config.columns / b_blocks) / (config.rows * config.columns)
    l2_power = LONG_L2_POWER if us > LONG_CALL_US else L2_POWER
    return 1 + l2_power * (128 * bytes_share - 1)  # 1 for 256 columns in clusters of two


def _step_ns(config: Config, at_work: float, l2_share: float, blocks: int = 1) -> float:
    """Return the nanoseconds of a step of 128 bytes along K in each of an SM's ``blocks``.

    ``at_work``: the share of the SMs with blocks.
    """
    a_blocks, b_blocks = config.blocks
    clock = CLOCK_GHZ[0] + (CLOCK_GHZ[1] - CLOCK_GHZ[0]) * at_work
    factor = FACTORS[config.rows][config.columns]
    tensor_ns = factor * config.rows * config.columns * K_STEP_BYTES / FLOP_PER_CYCLE / clock
    l2_rate = min(L2_PORT_BYTES_PER_NS, L2_BYTES_PER_NS * l2_share / at_work)
    l2_ns = (config.rows / a_blocks + config.columns / b_blocks) * K_STEP_BYTES / l2_rate
    busy_ns = max(tensor_ns, l2_ns) * (CLUSTER_FACTOR if a_blocks * b_blocks > 1 else 1.0)
    return max(blocks * busy_ns, LATENCY_NS / config.stages)
